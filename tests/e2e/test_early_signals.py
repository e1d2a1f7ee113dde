"""SIGTERM and Ctrl-C before anything is served: while models are loaded, proved and measured."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

STAGES = {
    "loading": "function: 'waiting_import:call', trust: true, calibration_s: 0",
    "in native code": "function: 'native_import:call', trust: true, calibration_s: 0",
    "proving": "function: 'endless:call'",
    "measuring": "function: 'endless:call', trust: true",
}
SERVERS = {"in process": "in_process: true", "with a worker": "workers: [{count: 1}]"}


def by_turns(names: str, *rows: tuple[str, ...]) -> pytest.MarkDecorator:
    """Each row with one of the two signals, neighbours with different ones: one handler obeys both."""
    signals = itertools.cycle((signal.SIGTERM, signal.SIGINT))
    cases = [(*row, number) for row, number in zip(rows, signals, strict=False)]
    return pytest.mark.parametrize(
        f"{names}, number", cases, ids=["-".join(map(_name, case)) for case in cases]
    )


def _name(value: str | signal.Signals) -> str:
    return value.name if isinstance(value, signal.Signals) else value


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ended a process before is measured no more; here each test ends one."""
    monkeypatch.setenv("SHAPESTREAM_COST_CACHE", str(tmp_path / "costs"))
    monkeypatch.setenv("SHAPESTREAM_PROBE_CACHE", str(tmp_path / "probe"))


def yaml(stage: str, how: str = "workers: []") -> str:
    """A model that is never ready."""
    return (
        "    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock}\n"
        f"    models:\n      - {{name: m, {STAGES[stage]},\n"
        '         inputs: {a: {shape: "batch:1..8, n:1..64", element_type: f32}},\n'
        '         outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}}\n'
        f"    {how}\n"
    )


def began(folder: Path) -> list[int]:
    """The processes that are in the middle of it."""
    return [int(path.name.removeprefix("began-")) for path in folder.glob("began-*")]


def alive(pid: int) -> bool:
    """Whether there is such a process; a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends_cleanly(workplace: Any, command: Any, number: int, status: int) -> None:
    """By that status, without a traceback, and with every process that it had started."""
    pids = until("the stage", lambda: began(workplace.folder))
    command.workers()
    command.send(number)
    assert status == command.wait(), command.log.read_text()
    assert "Traceback" not in command.log.read_text()
    until("the end of all processes", lambda: not any(map(alive, pids)) and command.family_is_gone())


@by_turns(
    "stage, how",
    *[(stage, "in process") for stage in STAGES],
    ("proving", "with a worker"),
    ("loading", "with a worker"),
)
def test_a_server_that_does_not_serve_yet_ends_with_status_0(
    workplace: Any, stage: str, how: str, number: int
) -> None:
    """It has nothing to finish. Its workers, and the processes that try models, end with it."""
    before = set(Path("/tmp").glob("shapestream-*"))
    served = workplace.try_serve(yaml(stage, SERVERS[how]))
    ends_cleanly(workplace, served, number, 0)
    assert not (workplace.folder / "s.sock").exists()
    # Another server's may come and go meanwhile; ours would be named in the log.
    log = served.log.read_text()
    assert [] == [path for path in set(Path("/tmp").glob("shapestream-*")) - before if str(path) in log]


@by_turns("stage", *[(stage,) for stage in STAGES])
def test_a_worker_that_is_not_ready_ends_with_status_0(workplace: Any, stage: str, number: int) -> None:
    """Started by hand."""
    worker = workplace.start("worker", str(workplace.write(yaml(stage))))
    ends_cleanly(workplace, worker, number, 0)


@by_turns("stage", ("loading",), ("proving",))
def test_check_that_is_interrupted_says_so_and_ends_with_status_1(
    workplace: Any, stage: str, number: int
) -> None:
    """One line, no report."""
    check = workplace.start("check", str(workplace.write(yaml(stage))))
    ends_cleanly(workplace, check, number, 1)
    assert "interrupted\n" == check.log.read_text()


def test_costs_that_are_being_measured_are_interrupted(workplace: Any) -> None:
    """`models --costs` compiles and measures, too."""
    costs = workplace.start("models", "--costs", str(workplace.write(yaml("measuring"))))
    ends_cleanly(workplace, costs, signal.SIGINT, 1)
    assert costs.log.read_text().endswith("\ninterrupted\n")


def test_a_reload_that_comes_before_the_server_is_there_waits_for_it(workplace: Any) -> None:
    """SIGHUP while the models of its own process are loaded: the server comes up, and says that nothing is restarted."""
    served = workplace.try_serve(
        yaml("loading", "in_process: true").replace("waiting_import:call", "slow_import:call")
    )
    until("the stage", lambda: began(workplace.folder))
    served.send(signal.SIGHUP)
    (workplace.folder / "go").touch()
    served.wait_for("no worker is restarted")
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(workplace: Any) -> None:
    """From the first moment that the program has handlers of its own."""
    config = workplace.write(yaml("loading"))
    command = workplace.start("check", str(config))
    # Its handlers are there: until then a signal meets Python itself.
    until("handlers", lambda: handles(command.pid, signal.SIGINT, signal.SIGTERM))
    command.send(signal.SIGINT)
    assert 1 == command.wait()
    assert "interrupted\n" == command.log.read_text()


def handles(pid: int, *numbers: int) -> bool:
    """Whether that process has handlers of its own for these signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return all(caught >> (number - 1) & 1 for number in numbers)

"""The supervisor's shell on real, tiny processes: started, restarted, given up and never left behind."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing
from tests.e2e.conftest import alive

from shapestream.serving.worker_port import LastState
from shapestream_workers.supervisor.processes import GaveUp, SupervisedProcesses
from shapestream_workers.supervisor.replacements import RestartPolicy

pytestmark = pytest.mark.e2e

PATIENT = RestartPolicy(backoff_initial_s=0.0, max_crashes=1000)
HASTY = RestartPolicy(backoff_initial_s=0.0, backoff_max_s=0.0, max_crashes=3, window_s=1000.0)
PATIENCE_S = 120.0


def python(code: str) -> list[str]:
    """A process that runs `code`, isolated so that it starts at once."""
    return [sys.executable, "-I", "-S", "-c", code]


# Says that it is ready, and lives until its stdin ends or it is told to.
SOUND = python("import os; os.write(1, b'ready\\n'); os.read(0, 1)")
# Ignores SIGTERM.
STUBBORN = python(
    "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'ready\\n'); os.read(0, 1); os.read(0, 1)"
)


@asynccontextmanager
async def supervised(commands: dict[str, list[str]]) -> AsyncIterator[SupervisedProcesses]:
    """Processes of these commands that have said that they are ready; at the end all have ended, asked to or not."""
    processes = SupervisedProcesses(commands, PATIENT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(processes.run)
        await until(lambda: len(processes.ready) == len(commands))
        yield processes
        processes.stop(PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    """Polls real processes, within reason."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nothing announces what a process does
            await trio.sleep(0.01)


def test_a_killed_process_is_replaced_by_another() -> None:
    """The name stays, the pid changes, the neighbour is left alone."""

    async def main() -> None:
        async with supervised({"a": SOUND, "b": SOUND}) as processes:
            before = dict(processes.pids)
            os.kill(before["a"], 9)
            await until(lambda: processes.pids.get("a", before["a"]) != before["a"])
            assert before["b"] == processes.pids["b"]

    trio.run(main)


def test_a_restart_ends_where_a_new_process_neither_comes_up_nor_ends(tmp_path: Path) -> None:
    """It names that process; the old one serves on. Once the new one is ended, the next one takes the old one's place."""
    code = (
        f"import os\nmarks = {str(tmp_path)!r}\nopen(os.path.join(marks, str(os.getpid())), 'w').close()\n"
        "if len(os.listdir(marks)) != 2: os.write(1, b'ready\\n')\n"
        "os.read(0, 1)"
    )

    async def main() -> None:
        processes = SupervisedProcesses({"a": python(code)}, replace(PATIENT, window_s=1.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(processes.run)
            await until(lambda: processes.ready == {"a"})
            with trio.fail_after(PATIENCE_S):
                restarted = await processes.restart()
            assert restarted is not None
            assert ((), {}, {}) == (restarted.replaced, restarted.kept, restarted.given_up)
            assert ["a+1 is not ready after 1 s; end it to try again"] == [*restarted.starting.values()]
            assert {"a"} == processes.ready
            os.kill(processes.pids["a+1"], 9)
            await until(lambda: processes.ready == {"a+1"})
            processes.stop(PATIENCE_S)

    trio.run(main)


def test_a_restart_ends_where_its_time_is_over_while_no_process_runs() -> None:
    """The new one has died, and would start again later: nothing else happens that could end the restart."""
    dying = python("import os; os._exit(1)")
    policy = replace(PATIENT, backoff_initial_s=1000.0, backoff_max_s=1000.0)

    async def main() -> None:
        processes = SupervisedProcesses({"a": SOUND}, policy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(processes.run)
            await until(lambda: processes.ready == {"a"})
            with trio.fail_after(PATIENCE_S):
                restarted = await processes.restart({"a": dying}, start_s=1.0)
            assert restarted is not None
            assert {"a": "it was not ready within 1 s (server.reload_s)"} == restarted.kept
            assert {"a"} == processes.ready
            processes.stop(PATIENCE_S)

    trio.run(main)


def test_each_start_has_a_name_that_the_process_and_its_supervisor_know(tmp_path: Path) -> None:
    """Also one that takes another's place, on request or for its memory, and one after a death."""
    code = (
        "import os\nname = os.environ['SHAPESTREAM_WORKER_NAME']\n"
        f"open(os.path.join({str(tmp_path)!r}, name), 'w').write(str(os.getpid()))\n"
        "os.write(1, b'ready\\n' + (b'replace\\n' if name.startswith('grows-') else b'')); os.read(0, 1)"
    )
    ends: list[str] = []

    async def ended(role: str, worker: str, died: bool) -> LastState:
        ends.append(worker)
        assert processes.owns(worker)
        return LastState()

    processes = SupervisedProcesses({role: python(code) for role in ("grows", "stays")}, PATIENT, ended=ended)

    def pid_of(worker: str) -> int:
        return int((tmp_path / worker).read_text())

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(processes.run)
            await until(lambda: len(ends) == 1)  # of `grows`, for its memory
            await until(lambda: len(processes.ready) == 2)
            restarted = await processes.restart()
            assert restarted is not None
            assert (["grows", "stays"], 3) == (sorted(restarted.replaced), len(ends))
            await until(lambda: len(processes.ready) == 2)
            victim = next(filter(processes.owns, os.listdir(tmp_path)))
            processes.kill(victim, "it hangs")
            await until(lambda: len(ends) == 4)
            assert victim == ends[-1]
            assert not processes.owns(victim)
            await until(lambda: len(processes.ready) == 2)
            processes.stop(PATIENCE_S)

    trio.run(main)
    assert sorted(os.listdir(tmp_path)) == sorted(ends)
    assert 6 == len(set(ends)) == len(set(map(pid_of, ends)))


def test_a_supervisor_with_nothing_to_do_sleeps() -> None:
    """While its workers live, no task of it is runnable (it once woke itself, for ever)."""

    async def main() -> None:
        async with supervised({"a": SOUND}):
            with trio.fail_after(PATIENCE_S):
                await trio.testing.wait_all_tasks_blocked(cushion=0.05)

    trio.run(main)


def test_stop_lets_processes_end_by_themselves() -> None:
    """SIGTERM ends them, `run` returns, nobody is left."""

    async def main() -> None:
        async with supervised({"a": SOUND, "b": SOUND}) as processes:
            pids = list(processes.pids.values())
        assert {} == processes.pids
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert "<Supervisor 2 stopped>" == repr(processes)

    trio.run(main)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_process_that_ignores_the_request_is_killed(at_once: bool) -> None:
    """After the grace, or at once when nothing is waited for."""

    async def main() -> None:
        async with supervised({"a": STUBBORN}) as processes:
            if at_once:
                processes.stop(math.inf)
                processes.stop_now()
            else:
                processes.stop(0.05)
        assert {} == processes.pids

    trio.run(main)


def test_cancelling_leaves_no_process_behind() -> None:
    """However the server's tasks end, its workers end first."""

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with supervised({"a": STUBBORN, "b": SOUND}) as processes:
                pids = list(processes.pids.values())
                scope.cancel()
                await trio.sleep_forever()
        assert not any(psutil.pid_exists(pid) for pid in pids)

    trio.run(main)


def test_a_process_that_never_comes_up_is_given_up() -> None:
    """After three crashes in a row nobody is left to serve, and `run` says so."""

    async def main() -> None:
        processes = SupervisedProcesses({"a": python("raise SystemExit(5)")}, HASTY)
        with trio.fail_after(PATIENCE_S), pytest.raises(GaveUp, match="it ended 3 times") as caught:
            await processes.run()
        assert not caught.value.configuration

    trio.run(main)


def test_a_configuration_that_cannot_be_used_ends_all_at_the_first_start() -> None:
    """Status 3 of one worker stops the others too: better no server than one that lacks a model."""

    async def main() -> None:
        processes = SupervisedProcesses({"a": python("raise SystemExit(3)"), "b": SOUND}, PATIENT)
        with trio.fail_after(PATIENCE_S), pytest.raises(GaveUp, match="worker a") as caught:
            await processes.run()
        assert caught.value.configuration
        assert {} == processes.pids

    trio.run(main)


def test_a_configuration_that_breaks_later_costs_one_worker_only(tmp_path: Path) -> None:
    """A worker that had been ready and then finds its model gone is given up; the others go on."""
    marker = tmp_path / "second"
    code = (
        f"import os, sys\nif os.path.exists({str(marker)!r}): sys.exit(3)\n"
        f"open({str(marker)!r}, 'w').close(); os.write(1, b'ready\\n'); os.read(0, 1)"
    )

    async def main() -> None:
        async with supervised({"a": python(code), "b": SOUND}) as processes:
            os.kill(processes.pids["a"], 9)
            await until(lambda: "1 given up" in repr(processes))
            assert ["b"] == list(processes.pids)

    trio.run(main)


def test_what_a_process_says_of_its_configuration_is_the_reason_why_another_goes_on(tmp_path: Path) -> None:
    """Also where it ends in the same moment, and where the line is longer than any problem."""
    marker = tmp_path / "second"
    code = (
        f"import os, sys\nif os.path.exists({str(marker)!r}):\n"
        "    os.write(1, b'problem x.yaml:1:2: no\\n' + 10000 * b'x'); sys.exit(3)\n"
        f"open({str(marker)!r}, 'w').close(); os.write(1, b'ready\\n'); os.read(0, 1)"
    )

    async def main() -> None:
        async with supervised({"a": python(code)}) as processes:
            restarted = await processes.restart()
            assert restarted is not None
            assert {"a": "its configuration cannot be used: x.yaml:1:2: no"} == restarted.kept

    trio.run(main)


def test_a_command_that_cannot_be_started_is_given_up_like_a_crash() -> None:
    """No traceback, no endless loop."""

    async def main() -> None:
        processes = SupervisedProcesses({"a": ["/nonexistent/program"]}, HASTY)
        with trio.fail_after(PATIENCE_S), pytest.raises(GaveUp):
            await processes.run()

    trio.run(main)


@pytest.mark.parametrize("busy", ["threading.Event().wait(120)", "re.match('(a+)+$', 'a' * 60 + 'b')"])
def test_a_process_whose_parent_is_killed_ends_by_itself(busy: str) -> None:
    """`end_with_parent`, in a grandchild that ignores SIGTERM; also in a call that never ends and holds the interpreter."""
    child = (
        "import re, signal, sys, threading\n"
        "from shapestream_engine.machine import end_with_parent\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "end_with_parent()\n"
        "print('up', flush=True)\n"
        f"{busy}\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )

    async def main() -> None:
        process = await trio.lowlevel.open_process([sys.executable, "-c", parent], stdin=-1, stdout=-1)
        assert process.stdout is not None
        assert process.stdin is not None
        async with process.stdin, process.stdout:
            with trio.fail_after(PATIENCE_S):
                pid = int(await process.stdout.receive_some(64))
            process.kill()
            await process.wait()
            try:
                await until(lambda: not alive(pid))
            finally:
                if alive(pid):
                    os.kill(pid, 9)

    trio.run(main)

"""A short answer run on each engine, and whether its checks can fail at all. `make answers` has the long one."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest
from tests.e2e.answers.__main__ import main
from tests.e2e.answers.run import FILES, Outcome, Settings, run, table
from tests.e2e.answers.tally import DEFECTS, Count
from tests.e2e.conftest import PATIENCE_S, ROOT, until

pytestmark = pytest.mark.e2e

SEED = 10
"""With it three of the first four clients are killed."""


def outcome_of(
    engine: str, requests: int, *, defect: str | None = None, patience_s: float = 120.0
) -> Outcome:
    """A run on a server that starts quickly."""
    return run(
        Settings(
            engine=engine, requests=requests, seed=SEED, trust=True, defect=defect, patience_s=patience_s
        )
    )


@pytest.mark.parametrize(
    "engine",
    [
        engine if engine == "openvino" else pytest.param(engine, marks=pytest.mark.thorough)
        for engine in FILES
    ],
)
def test_every_answer_is_right_beside_what_is_withdrawn_late_or_killed(engine: str) -> None:
    """Nothing is wrong, lost, doubled or refused, though requests of each kind ended early."""
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    outcome = outcome_of(engine, 400)
    words = "\n".join([table([outcome]), *outcome.problems, *outcome.notes])
    assert [] == outcome.problems, words
    assert dict.fromkeys(DEFECTS, 0) == {defect: outcome.counts[defect] for defect in DEFECTS}, words
    assert min(outcome.counts[count] for count in (Count.ANSWERED, Count.WITHDRAWN, Count.EXPIRED)) > 0, words
    assert outcome.killed > 0


def test_one_wrong_weight_ends_the_command_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """One number of one model's 48 layers differs by 1: some answers are wrong, and the table says so."""
    arguments = ["--engine", "onnxruntime", "--requests", "100", "--trust", "--seed", str(SEED)]
    assert 1 == main([*arguments, "--defect", "weight"])
    heads, figures = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    shown = dict(zip(heads, figures, strict=True))
    assert 0 < int(shown["wrong"]) < int(shown["answered"])


@pytest.mark.parametrize(
    ("defect", "count"),
    [
        pytest.param("size", Count.MODEL_ERROR, marks=pytest.mark.thorough),
        pytest.param("send-one-twice", Count.DUPLICATED, marks=pytest.mark.thorough),
        ("drop-a-reply", Count.LOST),
    ],
)
def test_each_defect_is_counted(defect: str, count: Count) -> None:
    """A model that fails at some sizes, or a server that repeats or drops replies."""
    outcome = outcome_of("onnxruntime", 100, defect=defect, patience_s=5.0)
    assert outcome.failed
    assert outcome.counts[count] > 0, outcome.notes


def _is_client(process: psutil.Process) -> bool:
    try:
        return "tests.e2e.answers.client" in process.cmdline()
    except psutil.NoSuchProcess:  # or a zombie: clients are killed and replaced all the time
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_run_that_is_interrupted_leaves_no_process_behind(number: int) -> None:
    """Server, workers and clients end with it, and it ends with a status that is not 0."""
    command = [sys.executable, "-m", "tests.e2e.answers", "--trust", "--engine", "onnxruntime"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        family = psutil.Process(run.pid)
        until("a client", lambda: any(map(_is_client, family.children())))
        processes = family.children(recursive=True)
        run.send_signal(number)
        assert 0 != run.wait(PATIENCE_S)
    until("the end of all", lambda: not any(one.is_running() for one in processes))

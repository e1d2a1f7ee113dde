"""Trials of several models: which goes first, how many at a time, what is told of them, and what waits for them."""

from __future__ import annotations

import fcntl
import io
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from shapestream.loading.trials import (
    MOST_AT_ONCE,
    Measuring,
    News,
    TrialNews,
    cheapest_first,
    side_by_side,
    trials_at_once,
)
from shapestream.settings import ModelSettings
from shapestream_engine.errors import EngineError
from shapestream_engine.probe import Watch
from shapestream_workers.printing import told_news


def models_of(folder: Path, **sizes: int) -> list[ModelSettings]:
    """Models with files of so many bytes."""
    found = []
    for name, size in sizes.items():
        path = folder / f"{name}.onnx"
        path.write_bytes(bytes(size))
        found.append(ModelSettings(name=name, path=str(path)))
    return found


def unheard(news: News) -> None:
    """Fail: no trial here takes so long that it is told."""
    raise AssertionError(news)


def test_functions_and_small_files_are_tried_first(tmp_path: Path) -> None:
    """Files that cannot be read are told at once; equal ones keep their order."""
    models = models_of(tmp_path, large=900, small=10, alike=10)
    models += [
        ModelSettings(name="missing", path=str(tmp_path / "none.onnx")),
        ModelSettings(name="function", function="a:b"),
    ]
    names = [model.name for model in cheapest_first(models)]
    assert ["missing", "function", "small", "alike", "large"] == names


@pytest.mark.parametrize(
    ("threads", "models", "expected"), [(1, 9, 1), (2, 9, 2), (64, 9, MOST_AT_ONCE), (64, 2, 2), (4, 0, 1)]
)
def test_trials_at_a_time_follow_the_cpus(threads: int, models: int, expected: int) -> None:
    """One needs a CPU at least, and a third of them to end within its budget."""
    assert expected == trials_at_once(threads, [1000] * models, 1 << 30)


@pytest.mark.parametrize(("largest", "expected"), [(1 << 26, 3), (1 << 27, 2), (1 << 28, 1), (1 << 40, 1)])
def test_large_models_are_tried_one_after_the_other(largest: int, expected: int) -> None:
    """In a gigabyte two models of 128 MiB have room, each four times over; one is tried whatever its size."""
    assert expected == trials_at_once(64, [1000, largest, 1000], 1 << 30)


def test_a_trial_is_told_of_every_ten_seconds() -> None:
    """Not the first moments, nor each call; what takes how long at most is said of proofs only."""
    news = TrialNews(every_s=10.0)
    told = [
        (now, str(found))
        for now, phase, case in (
            (0.0, "", ""),
            (9.0, "compile", "compiling the model"),
            (11.0, "compile", "compiling the model"),
            (12.0, "rules", "batch 3"),
            (21.0, "rules", "batch 3"),
            (25.0, "compile", "compiling the model"),
            (30.0, "alone/0", "batch 1"),
            (32.0, "alone/0", "batch 1"),
            (43.0, "batching", "two requests, batch 2"),
        )
        if (found := news.heard("m", phase, case, now)) is not None
    ]
    assert [
        (11.0, "m: compiling, 11 s (compiling the model)"),
        (21.0, "m: looking for output rules, 9 s (batch 3); at most 120 s"),
        (32.0, "m: trying requests, 2 s (batch 1); at most 120 s"),
        (43.0, "m: trying batching, 13 s (two requests, batch 2); at most 120 s"),
    ] == told
    assert news.heard("other", "batching", "", 44.0) is None


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "file"])
def test_news_are_a_line_of_each_model_on_a_terminal_and_a_line_each_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Sizes in brackets are no markup. What a terminal showed is gone at the end."""

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    lines = [
        News(model=model, doing="trying batching", case="x [2, 3]", seconds=seconds, most_s=120.0)
        for model, seconds in (("a", 10.0), ("b", 10.0), ("a", 20.0))
    ]
    with told_news() as tell:
        for news in lines:
            tell(news)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", stream.getvalue()).split("\n")
    if is_terminal:
        assert [str(lines[2]), str(lines[1])] == [line for line in shown if line][-2:]
        assert stream.getvalue().count("\x1b[2K") >= 4  # both lines are erased, twice
    else:
        assert [*map(str, lines), ""] == shown


def test_trials_wait_side_by_side_and_work_by_turns(tmp_path: Path) -> None:
    """Each waits until another waits as well; between, no two of them work."""
    both_wait = threading.Barrier(2, timeout=60)
    at_work: list[str] = []
    together: list[int] = []

    def trial(model: ModelSettings, watch: Watch) -> str:
        for _ in range(3):
            at_work.append(model.name)
            together.append(len(at_work))
            at_work.pop()
            with watch.waiting():
                both_wait.wait()
        return model.name.upper()

    models = models_of(tmp_path, a=1, b=2, c=3, d=4)
    found = side_by_side(models, trial, threads=2, tell=unheard)
    assert {"a": "A", "b": "B", "c": "C", "d": "D"} == found
    assert [1] * 12 == together


def test_a_model_that_cannot_be_tried_keeps_no_other_from_it(tmp_path: Path) -> None:
    """Its error stands in place of its result."""

    def trial(model: ModelSettings, watch: Watch) -> str:
        if model.name == "b":
            raise EngineError("no such model")
        return model.name

    found = side_by_side(models_of(tmp_path, a=1, b=2, c=3), trial, threads=1, tell=unheard)
    assert ("a", "no such model", "c") == (found["a"], str(found["b"]), found["c"])


@pytest.mark.parametrize("place", ["first", "other"])
def test_a_fault_of_the_program_is_raised(tmp_path: Path, place: str) -> None:
    """Whichever thread it happens in; nothing is begun after it."""
    first = threading.current_thread()
    meet = threading.Barrier(2, timeout=60)

    def trial(model: ModelSettings, watch: Watch) -> None:
        with watch.waiting():
            meet.wait()
        if (threading.current_thread() is first) == (place == "first"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        side_by_side(models_of(tmp_path, a=1, b=2), trial, threads=2, tell=unheard)


def test_functions_are_tried_in_the_first_thread() -> None:
    """Importing one may install handlers of signals, which no other thread may."""
    models = [ModelSettings(name=name, function="a:b") for name in ("a", "b", "c")]
    found = side_by_side(models, lambda model, watch: threading.current_thread(), threads=4, tell=unheard)
    assert {"a", "b", "c"} == found.keys()
    assert {threading.current_thread()} == {*found.values()}


def test_costs_are_measured_when_no_worker_of_the_server_proves_or_measures(tmp_path: Path) -> None:
    """Proofs run beside each other. A server's private address names the lock; other addresses have none."""
    folder = tmp_path / "shapestream-x"
    folder.mkdir()
    measuring = Measuring.beside(f"ipc://{folder}/workers")

    def is_free(how: int) -> bool:
        lock = os.open(folder / "measuring.lock", os.O_RDWR)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    with measuring.trials(), measuring.trials():
        assert (True, False) == (is_free(fcntl.LOCK_SH), is_free(fcntl.LOCK_EX))
    with measuring.alone():
        assert (False, False) == (is_free(fcntl.LOCK_SH), is_free(fcntl.LOCK_EX))
    assert is_free(fcntl.LOCK_EX)
    before = sorted(tmp_path.rglob("*"))
    for address in ("tcp://127.0.0.1:5000", f"ipc://{tmp_path}/workers"):
        with Measuring.beside(address).trials(), Measuring.beside(address).alone():
            pass
    assert before == sorted(tmp_path.rglob("*"))

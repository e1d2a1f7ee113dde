"""Trials of several models side by side: which goes first, how many run at a time, and what is told of them meanwhile.

A trial compiles a model and asks a child process to prove it (`proof.py`); it mostly waits for that child. So there are
several threads with a trial each, and they take turns: one of them works, the others wait for their children. An engine
compiles, and a user's function is imported, by one thread at a time, as if the trials came one after the other. Functions
are tried in the first thread, because importing them may need it.

Models of small files are tried first: their calls are cheap, and a mistake in one of them is told early. Costs are measured
after the last trial of all workers of a server (`Measuring`), because a proof beside them would make them too large.

`TrialNews` decides when a line is due; the clock is its caller's.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeVar

from shapestream.known_costs import KnownCosts, private_folder, read_known_costs
from shapestream.settings import ModelSettings
from shapestream_engine.errors import EngineError
from shapestream_engine.machine import available_cpus, memory_bytes
from shapestream_engine.model_files import files_of_model
from shapestream_engine.probe import ProbeOptions, Watch
from shapestream_engine.probing.model_calls import WALL

R = TypeVar("R")

MOST_AT_ONCE = 3
"""Proofs at a time. With a third of the CPUs a proof spends its budget before it ends by the clock, after four times its
budget (`model_calls.WALL`)."""
MEMORY_PER_FILE = 4
"""Bytes of memory per byte of a model's files in its trial: this process and the child hold the weights, each twice while it
compiles them."""
NEWS_EVERY_S = 10.0
"""Seconds between two lines about one model."""
MOST_PROOF_S = WALL * ProbeOptions().budget_s
"""Seconds after which no call of a proof begins."""


def trials_at_once(threads: int | None, sizes: Sequence[int], memory: int) -> int:
    """Return the number of trials at a time in a process with so many threads; None: one per CPU.

    `sizes`: bytes of the files of each model. `memory`: bytes that the process and its children may use.
    """
    fits = memory // (MEMORY_PER_FILE * max([1, *sizes]))
    return max(1, min(threads or available_cpus(), len(sizes), fits, MOST_AT_ONCE))


def cheapest_first(models: Sequence[ModelSettings]) -> list[ModelSettings]:
    """Return the models by the bytes of their files, functions first; equal ones in their order."""
    return sorted(models, key=_bytes_of)


def _bytes_of(model: ModelSettings) -> int:
    if model.file is None:
        return 0
    with suppress(OSError, EngineError):
        return sum(path.stat().st_size for path in files_of_model(Path(model.file)))
    return 0  # the trial says what is wrong with it


# ---------------------------------------------------------------- what is told


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a trial does, for people."""

    model: str
    doing: str
    """The part of the trial: `compiling`, `trying batching`."""
    case: str
    """The call that runs."""
    seconds: float
    """Since this part began: the compilation, or the proof."""
    most_s: float | None
    """Seconds after which this part ends; None where that is not known, as of a compilation."""

    def __str__(self) -> str:
        most = "" if self.most_s is None else f"; at most {self.most_s:.0f} s"
        return f"{self.model}: {self.doing}, {self.seconds:.0f} s ({self.case}){most}"


class TrialNews:
    """Decides when something is told of a trial: every so many seconds, from its beginning on."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._began: dict[str, float] = {}
        """When the latest child began to compile, or to try requests; by model."""
        self._compiles: dict[str, bool] = {}
        self._told: dict[str, float] = {}

    def heard(self, model: str, phase: str, case: str, now: float) -> News | None:
        """Take what a child does, or the parent before the first child; return what to tell, or None."""
        compiles = not phase or phase.startswith("compile")
        if self._compiles.get(model) != compiles:
            self._compiles[model], self._began[model] = compiles, now
        if now - self._told.setdefault(model, now) < self._every_s:
            return None
        self._told[model] = now
        if compiles:
            doing = "compiling"
        elif phase.startswith("rules"):
            doing = "looking for output rules"
        else:
            # Phases with a slash are parts of the preparation.
            doing = "trying requests" if "/" in phase else f"trying {phase}"
        return News(
            model=model,
            doing=doing,
            case=case or "starting a process",
            seconds=now - self._began[model],
            most_s=None if compiles else MOST_PROOF_S,
        )


# ---------------------------------------------------------------- threads


class _Turns:
    """The right to work, of threads that mostly wait; one of them has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Work: no other thread does."""
        with self._lock:
            yield

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """Wait for a child, while another thread works."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


def side_by_side(
    models: Sequence[ModelSettings],
    trial: Callable[[ModelSettings, Watch], R],
    *,
    threads: int | None,
    tell: Callable[[News], None],
) -> Mapping[str, R | EngineError]:
    """Try the models, several at a time, and return the result of each, or the error that its trial raised.

    `threads`: those of the process that serves them. `tell` gets news of trials that take long. Any other exception of a
    trial is raised.
    """
    turns, news = _Turns(), TrialNews(NEWS_EVERY_S)
    functions = [model for model in models if model.file is None]
    files = cheapest_first([model for model in models if model.file is not None])
    results: dict[str, R | EngineError] = {}

    def watch(model: ModelSettings) -> Watch:
        def told(phase: str, case: str) -> None:
            if (found := news.heard(model.name, phase, case, monotonic())) is not None:
                tell(found)

        told("", "")
        return Watch(told=told, waiting=turns.given_away, at_once=at_once)

    def work_off(waiting: list[ModelSettings]) -> None:
        with turns.taken():
            while waiting and not beside.faults:
                model = waiting.pop(0)
                try:
                    results[model.name] = trial(model, watch(model))
                except EngineError as error:
                    results[model.name] = error

    at_once = trials_at_once(threads, [_bytes_of(model) for model in models], memory_bytes())
    beside = _Threads(at_once - 1, lambda: work_off(files))
    beside.start()
    work_off(functions)
    work_off(files)
    beside.join()
    return results


class _Threads:
    """Threads that do the same work. No pool: its threads would be waited for at the end of the process, and a signal ends
    it soon.
    """

    def __init__(self, number: int, work: Callable[[], None]) -> None:
        self._work = work
        self.faults: list[Exception] = []
        # Each in a copy of this context, which decides where log lines go.
        self._threads = [
            threading.Thread(target=copy_context().run, args=(self._run,), name=f"trial {n}", daemon=True)
            for n in range(1, number + 1)
        ]

    def start(self) -> None:
        """Begin the work."""
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as fault:  # noqa: BLE001 - raised by `join`, in the first thread
            self.faults.append(fault)

    def join(self) -> None:
        """Wait for the end of all, and raise the first fault."""
        for thread in self._threads:
            thread.join()
        if self.faults:
            raise self.faults[0]


# ---------------------------------------------------------------- costs


class Measuring:
    """Keeps costs from being measured while a worker of the same server proves a model, or measures, or has served it.

    By a lock on a file: all trials share it, a measurement has it alone. Without a file nothing is kept apart.
    """

    def __init__(
        self,
        path: Path | None,
        known: Callable[[], Sequence[KnownCosts]] = lambda: (),
        patience: float = 1.0,
    ) -> None:
        """`known` returns the costs that the server knows already, for a process that starts beside its load; `patience` is
        that of `calibrate`."""
        self._path = path
        self.known = known
        self.patience = patience

    @classmethod
    def beside(cls, address: str) -> Measuring:
        """Return that of the server whose workers connect to this address, if it is private to them."""
        folder = private_folder(address)
        if folder is None:
            return cls(None)
        return cls(folder / "measuring.lock", lambda: read_known_costs(folder))

    @contextmanager
    def trials(self) -> Iterator[None]:
        """Prove models: others may as well."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Measure: wait until nobody else proves or measures."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        if self._path is None:
            yield
            return
        try:
            lock = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield  # the server has ended; its worker soon follows
            return
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)


WITH_NOBODY = Measuring(None)
"""For a process that proves and measures by itself."""

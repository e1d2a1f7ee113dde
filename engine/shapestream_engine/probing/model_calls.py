"""The model under test, and the seconds that its calls may take.

`DirectCalls` run at the sizes given, `SlotCalls` through a slot, as in service.

A `Budget` counts seconds of work, so that other load on the machine leaves the proof as thorough: the time in which the
process ran, less the part for which its threads waited for a CPU. One busy thread counts as much as many: on a quiet machine
a second of work is a second. Engines on accelerators, and models that sleep, use no CPU. So at least a quarter of the
wall-clock time counts, and the whole proof ends within four times its budget. Some cases run beyond the budget, as
`ProbeOptions.budget_s` says, but none begins after that wall.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, process_time
from typing import TypeAlias

import numpy as np

from shapestream_engine.arrays import arrays_of
from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.compiled_model import CompiledModel, RequestPool
from shapestream_engine.errors import InferenceError
from shapestream_engine.layout import RequestShape, Tensors
from shapestream_engine.machine import available_cpus, thread_times
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner, run_batch
from shapestream_engine.tensor import Array

Announce: TypeAlias = Callable[[str, str], None]
"""Callback before each call: the phase of the proof and a description of the case, so that a crash can be attributed."""


@dataclass(slots=True, eq=False)
class ProbeRequest:
    """One request of a proof, and the results that it gets alone."""

    tensors: Tensors
    shape: RequestShape
    words: str
    """A description for people."""
    results: list[Array] = field(default_factory=list)
    """The results alone, one per output; empty until the request has run."""
    magnitude: tuple[int, int] | None = None
    """Requests of equal magnitude have values in the same range; None: the range is unknown."""
    near: frozenset[int] = frozenset()
    """Numbers of the outputs that have a threshold near this request: a nearly equal request gets another result."""
    is_beyond: bool = False
    """True if its values exceed the ordinary ones, which nobody declared: a crash on it blames no treatment."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each dimension of the signature."""
        return self.shape.sizes


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """A call that ran: its sizes, its requests, and its outputs before division."""

    sizes: tuple[int, ...]
    members: tuple[ProbeRequest, ...]
    outputs: tuple[Array, ...]


class ModelCalls(ABC):
    """Runs calls of the model under test, one after another, and announces each one."""

    def __init__(self, signature: ModelSignature, announce: Announce) -> None:
        self.signature = signature
        self._announce = announce
        self._phase = ""
        self.number = 0
        """Calls, or batches, so far."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce the calls of this block under `name`; phases nest."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def run(self, sizes: tuple[int, ...], members: Sequence[ProbeRequest], words: str) -> list[list[Array]]:
        """Return the results of each member, one array per output; raises the `EngineError` that a slot would report."""
        self._announce(self._phase, words)
        self.number += 1
        return self._run(sizes, members)

    @abstractmethod
    def _run(self, sizes: tuple[int, ...], members: Sequence[ProbeRequest]) -> list[list[Array]]: ...


class DirectCalls(ModelCalls):
    """Calls of exactly the given sizes, on one inference request.

    Requests are made for `signature`. Its strategy may be unknown to `model`.
    """

    def __init__(
        self, model: CompiledModel, signature: ModelSignature, announce: Announce, *, keep: int = 0
    ) -> None:
        super().__init__(signature, announce)
        self._keep = keep
        self.recorded: list[RecordedCall] = []
        """The first `keep` calls that ran, with copies of their outputs."""
        self.shapes: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
        """The sizes of each call that ran, and the shape of each output."""
        self._assembly = Assembly(signature)
        self._request = model.create_infer_request()

    def _run(self, sizes: tuple[int, ...], members: Sequence[ProbeRequest]) -> list[list[Array]]:
        shapes = [member.shape for member in members]
        self._assembly.gather(
            sizes, [member.tensors for member in members], shapes, self._request.input_tensors
        )
        self._request.infer()
        outputs = self._request.outputs()
        self.shapes.append((sizes, tuple(tuple(output.shape) for output in outputs)))
        if len(self.recorded) < self._keep:
            copies = tuple(np.array(output) for output in outputs)
            self.recorded.append(RecordedCall(sizes, tuple(members), copies))
        return [arrays_of(result) for result in self._assembly.split(sizes, shapes, outputs)]


class SlotCalls(ModelCalls):
    """Batches through a slot, as in service: the strategy chooses the sizes of the calls, prepared models run them."""

    def __init__(self, model: CompiledModel, announce: Announce) -> None:
        super().__init__(model.signature, announce)
        self._runner = Runner("probe", {self.signature.name: RequestPool(model, 1)})

    def _run(self, sizes: tuple[int, ...], members: Sequence[ProbeRequest]) -> list[list[Array]]:
        tensors, shapes = [member.tensors for member in members], [member.shape for member in members]
        report = run_batch(self._runner, self.signature, tensors, shapes)
        if report.outputs is None:
            raise InferenceError(report.message)
        return [arrays_of(result) for result in report.outputs if result is not None]


WALL = 4.0
"""Seconds of wall-clock time per second of the budget."""
_READ_EVERY_S = 0.05
"""Seconds between two readings of all threads' times: one takes 0.1 ms for ten threads."""


def seconds_of_work(*, cpu_s: float, wall_s: float, ran_s: float, waited_s: float) -> float:
    """Return the seconds that a process would have worked on a machine of its own.

    `cpu_s`: CPU seconds of the process, divided by its threads. `ran_s`, `waited_s`: seconds that its threads ran, and that
    they waited for a CPU, added up; 0 where the system does not tell.
    """
    busy_s = ran_s + waited_s
    share = ran_s / busy_s if busy_s > 0.0 else 0.0
    return max(cpu_s, min(wall_s, busy_s) * share, wall_s / WALL)


class Budget:
    """The seconds that a proof has spent; they begin with its construction."""

    def __init__(self, budget_s: float, threads: int | None) -> None:
        """`threads`: those of the model; None: one per CPU."""
        self.budget_s = budget_s
        self.threads = threads or available_cpus()
        self._cpu_began = process_time()
        self._wall_began = monotonic()
        self._times_began = self._times = thread_times()
        self._read_at_s = 0.0

    def spent_s(self) -> float:
        """Return the seconds of the proof so far."""
        wall_s = self.wall_s()
        if wall_s - self._read_at_s > _READ_EVERY_S:
            self._times, self._read_at_s = thread_times(), wall_s
        # Threads that ended are not told any more.
        ran, waited = (
            max(0, now - began) / 1e9 for now, began in zip(self._times, self._times_began, strict=True)
        )
        cpu_s = (process_time() - self._cpu_began) / self.threads
        return seconds_of_work(cpu_s=cpu_s, wall_s=wall_s, ran_s=ran, waited_s=waited)

    @property
    def is_over(self) -> bool:
        """Tell whether the wall-clock time is spent: then no case begins any more."""
        return self.wall_s() >= WALL * self.budget_s

    def wall_s(self) -> float:
        """Return the wall-clock seconds so far."""
        return monotonic() - self._wall_began

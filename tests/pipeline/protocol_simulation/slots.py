"""Slots of a simulated worker process: calls that take virtual time, and requests that do harm.

They keep the promises of `shapestream_engine.slot.Slot` (one batch at a time, in order; one more behind it, which can be
taken back until it begins; one report for each) without its thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import trio
from tests.pipeline.protocol_simulation.agenda import Agenda
from tests.pipeline.protocol_simulation.journal import Journal, Run
from tests.pipeline.protocol_simulation.plan import Kind
from tests.pipeline.serving.batches import report_of

from shapestream.serving.executor import Reports, SlotSource
from shapestream.serving.remote_executor import REMOTE_PREFETCH_S
from shapestream.wire.tensor_frames import from_array, to_array
from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import MAX_WAITING

__all__ = ["SimulatedSlots", "answer_of", "question_of", "uid_of"]


def question_of(uid: int, rows: int, length: int) -> np.ndarray[Any, Any]:
    """The input of one request: its number is in it."""
    return np.arange(rows * length, dtype=np.int64).reshape(rows, length) + uid * 1000


def answer_of(question: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the models make of it."""
    answer: np.ndarray[Any, Any] = question * 3 + 1
    return answer


def uid_of(tensors: Tensors) -> int:
    """Which request these are the tensors of."""
    return int(_array(tensors).flat[0]) // 1000


def _array(tensors: Tensors) -> np.ndarray[Any, Any]:
    (_, element_type, shape), buffer = tensors.layout[0], tensors.buffers[0]
    return to_array(element_type, shape, buffer)


class _Begun:
    """The batch that a slot runs."""

    def __init__(self, batch: Batch, began: float, runs: list[Run | None]) -> None:
        self.batch = batch
        self.began = began
        self.runs = runs
        """Parallel to the members; None for one that was late."""
        self.cancellable = False


class SimulatedSlots(SlotSource):
    """The slots of one process. `crash` is what poison does."""

    prefetch_s = REMOTE_PREFETCH_S
    digests: Mapping[str, str] = {}
    costs: Mapping[str, CostTable] = {}

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        journal: Journal,
        random: Random,
        *,
        models: Mapping[str, ModelSignature],
        slots: int,
        duration_s: Callable[[int], float],
        crash: Callable[[], None],
    ) -> None:
        """`duration_s` says what a call of so many rows takes now."""
        self.name = name
        self.models = models
        self.slots = slots
        self._agenda = agenda
        self._journal = journal
        self._random = random
        self._duration_s = duration_s
        self._crash = crash
        self._report: Reports = lambda reports: None
        self._running: list[_Begun | None] = [None] * slots
        self._waiting: list[deque[Batch]] = [deque() for _ in range(slots)]
        self.dead = False

    def start(self, report: Reports) -> SimulatedSlots:
        """The worker takes them."""
        self._report = report
        return self

    def start_nowait(self, batch: Batch) -> None:
        """Begins, or waits behind what runs."""
        waiting = self._waiting[batch.slot]
        assert len(waiting) + (self._running[batch.slot] is not None) <= MAX_WAITING, "more than a slot takes"
        waiting.append(batch)
        # Not at once: the real slot's thread has to wake up, and meanwhile the event loop goes on.
        self._agenda.after(0.0, lambda: self._begin(batch.slot))

    def cancel_nowait(self, batch: int) -> None:
        """Ends what waits, and what can be interrupted."""
        if self._take_back(batch, "cancelled"):
            return
        for slot, begun in enumerate(self._running):
            if begun is not None and begun.batch.batch == batch and begun.cancellable:
                self._end(slot, begun, code="cancelled")

    def recall_nowait(self, batch: int) -> None:
        """Gives back what waits."""
        self._take_back(batch, "recalled")

    def kill_nowait(self, reason: str) -> None:
        """Nobody asks this of a worker's own executor."""
        raise AssertionError(reason)

    async def aclose(self) -> None:
        """The process ends."""
        self.dead = True

    def _take_back(self, batch: int, code: str) -> bool:
        for waiting in self._waiting:
            for held in waiting:
                if held.batch == batch:
                    waiting.remove(held)
                    self._say(report_of(held, code=code, message="taken back before it began"))
                    return True
        return False

    def _begin(self, slot: int) -> None:
        if self.dead or self._running[slot] is not None or not self._waiting[slot]:
            return
        batch = self._waiting[slot].popleft()
        now = trio.current_time()
        start_before = batch.start_before or (None,) * len(batch.members)
        in_time = [at is None or at > now for at in start_before]
        living = [uid_of(member) for member, may in zip(batch.members, in_time, strict=True) if may]
        runs = [
            self._journal.run_began(uid_of(member), self.name, tuple(living)) if may else None
            for member, may in zip(batch.members, in_time, strict=True)
        ]
        begun = self._running[slot] = _Begun(batch, now, runs)
        if not living:
            self._end(slot, begun)
            return
        kinds = {self._journal.kind_of(uid) for uid in living}
        rows = sum(shape.rows for shape, may in zip(batch.shapes, in_time, strict=True) if may)
        duration_s = self._duration_s(rows)
        # A call that can be interrupted at all can be so only sometimes.
        begun.cancellable = self._random.random() < 0.3
        if Kind.POISON in kinds:
            self._agenda.after(duration_s * self._random.random(), self._die)
        elif Kind.HANGING in kinds:
            begun.cancellable = False
        elif Kind.STUCK in kinds:
            begun.cancellable = True
        else:
            code = "model_error" if Kind.BAD in kinds else None
            self._agenda.after(duration_s, lambda: self._end(slot, begun, code=code))

    def _die(self) -> None:
        if not self.dead:
            self._crash()

    def _end(self, slot: int, begun: _Begun, code: str | None = None) -> None:
        if self.dead or self._running[slot] is not begun:
            return
        self._running[slot] = None
        took_s = trio.current_time() - begun.began
        for run in begun.runs:
            if run is not None:
                self._journal.run_ended(run, code)
        if code is None:
            outputs = tuple(
                [
                    None if run is None else _answered(member)
                    for member, run in zip(begun.batch.members, begun.runs, strict=True)
                ]
            )
            self._say(report_of(begun.batch, outputs=outputs, run_s=took_s, busy_s=took_s))
        else:
            self._say(report_of(begun.batch, busy_s=took_s, code=code, message=f"simulated: {code}"))
        self._begin(slot)

    def _say(self, report: BatchReport) -> None:
        # Not at once, as in life: reports come in a turn of their own.
        self._agenda.after(0.0, lambda: None if self.dead else self._report([report]))


def _answered(member: Tensors) -> Tensors:
    element_type, shape, buffer = from_array(answer_of(_array(member)))
    return Tensors(layout=((0, element_type, shape),), buffers=(buffer,))

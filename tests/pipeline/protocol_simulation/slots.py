"""Slots of a simulated worker process: calls that take virtual time, and requests that do harm.

They keep the promises of `shapestream.serving.slot_threads` (one batch at a time, in order; what is queued lies in the
slot's line; a batch is withdrawn or begun; one report for each) without threads and sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import trio
from tests.entries import Entry, Execute, Heartbeat, Role, SlotHello
from tests.pipeline.protocol_simulation.agenda import Agenda
from tests.pipeline.protocol_simulation.journal import Journal, Run
from tests.pipeline.protocol_simulation.network import Line
from tests.pipeline.protocol_simulation.plan import Kind

from shapestream.serving import slot_threads
from shapestream.serving.slot_threads import BatchWithdrawn, News, SessionBroken, SlotIdle, SlotSession
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import codec_of, decode
from shapestream.wire.limits import WORKER_LIMITS
from shapestream.wire.tensor_frames import from_array, to_array
from shapestream_engine.batch import BatchInputs, BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature


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


class _Slot:
    """One slot."""

    def __init__(self) -> None:
        self.line: Line | None = None
        self.last = -1
        self.withdrawn: dict[int, bool] = {}
        """Numbers to skip, and whether the slot reports them."""
        self.batch: int | None = None
        """The one that runs."""
        self.interrupt: trio.Event | None = None
        """Set to end it early; None where it cannot be interrupted."""


class SimulatedSlots:
    """The slots of one process. `crash` is what poison does."""

    digests: Mapping[str, str] = {}
    tolerances: Mapping[str, Mapping[str, Any]] = {}
    engines: Mapping[str, str] = {}
    costs: Mapping[str, CostTable] = {}
    wide_costs: Mapping[str, CostTable] = {}

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
        connect: Callable[[], Line],
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
        self._connect = connect
        self._slots = [_Slot() for _ in range(slots)]
        self._session: SlotSession | None = None
        self._difference_s: float | None = None
        self.nursery: trio.Nursery
        """Where their tasks live: their process."""
        self.dead = False

    @property
    def lines(self) -> list[Line]:
        """The present connections."""
        return [slot.line for slot in self._slots if slot.line is not None]

    @property
    def occupied(self) -> bool:
        """Whether any of them runs a batch."""
        return any(slot.batch is not None for slot in self._slots)

    def listen(self) -> PeerSocket:
        """Not asked of a worker's slots."""
        raise AssertionError

    def start(self, tell: Callable[[News], None]) -> None:
        """The worker takes them."""
        # Not at once, as in life: news come in a turn of their own.
        self._tell = lambda news: self._agenda.after(0.0, lambda: None if self.dead else tell(news))

    def begin(self, session: SlotSession) -> None:
        """Each greets on a line of its own."""
        self._session = session
        for number in range(self.slots):
            self.nursery.start_soon(self._serve, number, session)

    def end(self) -> None:
        """The session is over; what can be interrupted is."""
        self._session = self._difference_s = None
        for slot in self._slots:
            if slot.interrupt is not None:
                slot.interrupt.set()

    def withdraw(self, slot: int, batch: int, code: ErrorCode) -> None:
        """Skips a batch that has not begun, or interrupts it."""
        own, session = self._slots[slot], self._session
        if session is None:
            return
        if batch > own.last and batch not in own.withdrawn:
            own.withdrawn[batch] = code is ErrorCode.CANCELLED
            if code is ErrorCode.RECALLED:
                self._tell(BatchWithdrawn(session=session.number, slot=slot, batch=batch))
        elif code is ErrorCode.CANCELLED and own.batch == batch and own.interrupt is not None:
            own.interrupt.set()

    def set_clock(self, difference_s: float) -> None:
        """How the clocks differ."""
        self._difference_s = difference_s

    async def aclose(self) -> None:
        """The process ends."""
        self.dead = True

    async def _serve(self, number: int, session: SlotSession) -> None:
        slot = self._slots[number]
        slot.last = -1
        slot.withdrawn.clear()
        line = slot.line = self._connect()
        try:
            why = await self._serve_line(slot, line, session, number)
        finally:
            line.close()
            if slot.line is line:
                slot.line = None
        if self._session is session:
            self._tell(SessionBroken(session=session.number, why=why))

    async def _serve_line(self, slot: _Slot, line: Line, session: SlotSession, number: int) -> str:
        """Serves until its session is over; returns why."""
        assert session.silence_s is not None
        if not await self._say(line, session, SlotHello(token=session.token, slot=number)):
            return "nothing is taken"
        while self._session is session:
            messages = []
            with trio.move_on_after(session.silence_s):
                messages = await line.receive()
            received_at = trio.current_time()
            if not messages:
                return "it is silent"
            for frames in messages:
                for entry in decode(frames, role=Role.WORKER, limits=WORKER_LIMITS).entries:
                    if isinstance(entry, Execute):
                        if entry.session == session.number and self._session is session:
                            report = await self._execute(slot, entry, received_at)
                            if self._session is not session:
                                self._tell(SlotIdle(slot=number))
                            elif report is not None:
                                said = slot_threads.entry_of_report(report, session=session.number)
                                if not await self._say(line, session, said):
                                    return "nothing is taken"
                    elif not isinstance(entry, Heartbeat):
                        return f"it said {type(entry).__name__}"
        return "over"

    async def _say(self, line: Line, session: SlotSession, entry: Entry) -> bool:
        assert session.silence_s is not None
        with trio.move_on_after(session.silence_s) as patience:
            await line.send(slot_threads.frames_of(entry, codec_of(Role.WORKER)))
        return not patience.cancelled_caught

    async def _execute(self, slot: _Slot, execute: Execute, received_at: float) -> BatchReport | None:
        slot.last = execute.batch
        if (reported := slot.withdrawn.pop(execute.batch, None)) is not None:
            cancelled = BatchReport(
                batch=execute.batch, outputs=None, code=ErrorCode.CANCELLED, message="simulated"
            )
            return cancelled if reported else None
        slot.batch = execute.batch
        ahead_s = slot_threads.clock_ahead_s(
            execute, received_at=received_at, difference_s=self._difference_s
        )
        try:
            return await self._run(slot, execute, ahead_s)
        finally:
            slot.batch = slot.interrupt = None

    async def _run(self, slot: _Slot, batch: BatchInputs, ahead_s: float) -> BatchReport:
        began = trio.current_time()
        start_before = batch.start_before or (None,) * len(batch.members)
        in_time = [at is None or at > began - ahead_s for at in start_before]
        living = [uid_of(member) for member, may in zip(batch.members, in_time, strict=True) if may]
        runs = [
            self._journal.run_began(uid_of(member), self.name, tuple(living)) if may else None
            for member, may in zip(batch.members, in_time, strict=True)
        ]
        code: str | None = None
        if living:
            resolve = self.models[batch.model].resolve
            rows = sum(
                resolve(member.layout).rows for member, may in zip(batch.members, in_time, strict=True) if may
            )
            code = await self._call(slot, {self._journal.kind_of(uid) for uid in living}, rows)
        for run in runs:
            if run is not None:
                self._journal.run_ended(run, code)
        took_s = trio.current_time() - began
        if code is not None:
            return BatchReport(
                batch=batch.batch,
                outputs=None,
                busy_s=took_s,
                code=ErrorCode(code),
                message=f"simulated: {code}",
            )
        return BatchReport(batch=batch.batch, outputs=_outputs(batch, runs), run_s=took_s, busy_s=took_s)

    async def _call(self, slot: _Slot, kinds: set[Kind], rows: int) -> str | None:
        """The call itself; returns why it failed."""
        duration_s = self._duration_s(rows)
        # A call that can be interrupted at all can be so only sometimes.
        cancellable = self._random.random() < 0.3
        if Kind.POISON in kinds:
            await trio.sleep(duration_s * self._random.random())
            self._crash()
            await trio.sleep_forever()
        if Kind.HANGING in kinds:
            await trio.sleep_forever()
        interrupt = trio.Event()
        if cancellable or Kind.STUCK in kinds:
            slot.interrupt = interrupt
        with trio.move_on_after(float("inf") if Kind.STUCK in kinds else duration_s):
            await interrupt.wait()
            return "cancelled"
        return "model_error" if Kind.BAD in kinds else None


def _outputs(batch: BatchInputs, runs: list[Run | None]) -> tuple[Tensors | None, ...]:
    return tuple(
        [None if run is None else _answered(member) for member, run in zip(batch.members, runs, strict=True)]
    )


def _answered(member: Tensors) -> Tensors:
    element_type, shape, buffer = from_array(answer_of(_array(member)))
    return Tensors(layout=((0, element_type, shape),), buffers=(buffer,))

"""Slots: threads with a socket each, in a worker's process or in the server's own.

A slot's thread owns an inference request of each model, and a connection of its own to the server's port. It blocks on that
socket, receives a batch, runs it, and sends the report. No event loop and no second thread takes part, so a lone request
waits for two wake-ups only: the slot's and the server's. A message may hold several batches, which run in their order;
each is reported when it has run. A message behind the running batch's stays in the socket.

The event loop of the process supervises the threads. It does three things:

- it says which *session* of the server is served (`begin`, `end`). A slot makes a new connection for each session, and
  greets there with the session's token; a report of an earlier session is dropped;
- it withdraws batches (`withdraw`). A cancelled batch is skipped from the next call on, and its slot reports it in its
  turn. A recalled batch is skipped if it has not begun, and the event loop answers at once: the batch before it may hang;
- it keeps the difference between the clocks (`set_clock`), by which the thread counts the deadlines of a batch.

A thread tells the event loop its news: that it ended, that its connection broke, that it is idle after a session's end.

What each side may touch: the event loop alone writes `_session`, `_closing` and `difference_s`, and the thread reads them.
The socket and `_batch` are the thread's own. `Runner` and `Wake` may be used from both.

Nothing here waits for a thread that hangs: `aclose` leaves it behind after `CLOSE_GRACE_S`. A thread cannot be killed;
where a hanging slot must be replaced, its process is.

A slot of the server's own process has a connection like any other, so it needs no path of its own through the server. A
message there is one frame that carries its entries as objects (`HANDOVER`). Writing them to bytes, and reading these, would
cost a lone request 12 % more CPU, and a stream of tiny ones 5 to 20 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from threading import Thread
from time import monotonic
from typing import Any, TypeAlias

import trio

from shapestream.errors import ProtocolError, RequestError, TransportError
from shapestream.telemetry.logging import PRESENT, get_logger
from shapestream.transport.interface import BlockingConnection, Message, PeerSocket, Wake
from shapestream.transport.memory import ThreadServer
from shapestream.wire.codec import BadEntry, Codec, codec_of
from shapestream.wire.messages import BatchDone, BatchFailedEntry, Entry, Execute, Heartbeat, Role, SlotHello
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.compiled_model import CompiledModel, RequestPool
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Buffer
from shapestream_engine.machine import engine_and_versions
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner

log = get_logger()

CLOSE_GRACE_S = 5.0
"""Seconds for the threads to end when they are asked to, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSession:
    """The server's session that slots serve."""

    number: int
    token: bytes
    silence_s: float | None = None
    """A server that sends nothing to a waiting slot for so many seconds is gone. None: the server is this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWithdrawn:
    """A batch had not begun when it was recalled: its slot skips it, and the control answers for it."""

    session: int
    slot: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadEnded:
    """The thread of a slot has ended without being asked to; it had begun `batch`, if any, and runs nothing more."""

    session: int | None
    slot: int
    batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotIdle:
    """A slot has ended what it ran for a session that is over."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBroken:
    """The connection of a slot is of no use any more, and so the session is not."""

    session: int
    why: str


News: TypeAlias = BatchWithdrawn | ThreadEnded | SlotIdle | SessionBroken


@dataclass(frozen=True, slots=True, kw_only=True)
class WideForms:
    """Models that are compiled for a wide slot, which has all threads of its process; the same names in both."""

    models: Mapping[str, CompiledModel]
    costs: Mapping[str, CostTable]
    """Measured costs of their calls there."""


class _HandedOver(bytes):
    """A frame without bytes, whose entries lie beside them until they are read."""

    entries: list[Entry | BadEntry] | None


def _pack(entries: Sequence[Entry]) -> list[list[Buffer]]:
    frame = _HandedOver()
    frame.entries = [*entries]
    return [[frame]]


def _read(frames: Sequence[Buffer]) -> list[Entry | BadEntry]:
    frame = frames[0]
    if type(frame) is not _HandedOver or len(frames) != 1 or frame.entries is None:
        raise ProtocolError("no message of this process")
    entries, frame.entries = frame.entries, None
    return entries


HANDOVER = Codec(pack=_pack, read=_read)
"""The codec of both ends. Each message can be read once; `ProtocolError` is raised for any other."""


class SlotThreads:
    """Slots of this process, as its event loop supervises them: the models of `models`, on `slots` threads.

    All calls but `aclose` return at once.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, CompiledModel],
        slots: int = 1,
        costs: Mapping[str, CostTable] | None = None,
        wide: WideForms | None = None,
        dial: Callable[[Wake], BlockingConnection] | None = None,
        close_s: float = CLOSE_GRACE_S,
    ) -> None:
        """`wide`: the models of one more slot, the wide one, whose number is `slots`.

        `dial` makes a slot's connection, on its thread; those of a server's own slots are made by `listen`.
        `close_s`: seconds for the threads to end when they are asked to.
        """
        self.slots = slots
        self.costs: Mapping[str, CostTable] = costs or {}
        """Measured costs of the models' calls, by model."""
        self.wide_costs: Mapping[str, CostTable] = {} if wide is None else wide.costs
        """The same of the wide slot, whose models these are; empty: there is none."""
        self.models: Mapping[str, ModelSignature] = {key: model.signature for key, model in models.items()}
        self.digests: Mapping[str, str] = {
            key: model.digest for key, model in models.items() if model.digest is not None
        }
        """The sha256 of the files that models were read from, by model; functions are left out."""
        self.tolerances: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
            key: model.tolerances for key, model in models.items() if model.tolerances
        }
        """How far two equal results of an output may lie apart (`OutputTolerance.to_dict`), by model and output."""
        self.engines: Mapping[str, str] = {
            key: engine_and_versions(model.engine) for key, model in models.items() if model.engine
        }
        """The engine of each model, with the versions of its packages; those made without `compile_model` are left out."""
        self._compiled = models
        self._wide: Mapping[str, CompiledModel] = {} if wide is None else wide.models
        self._dial = dial
        self._close_s = close_s
        self._codec = codec_of(Role.WORKER)
        self._threads: list[_SlotThread] = []
        self._left_behind = False
        """Whether a thread has not ended when it was asked to."""

    @property
    def occupied(self) -> bool:
        """Whether any of them runs a batch."""
        return any(thread.runner.begun is not None for thread in self._threads)

    def give_up_wide(self) -> None:
        """Have no wide slot. Asked before `start`."""
        self._wide, self.wide_costs = {}, {}

    def listen(self) -> tuple[PeerSocket, Codec]:
        """Return a private port that these slots dial, and its codec."""
        socket = ThreadServer()
        self._dial = socket.dial
        self._codec = HANDOVER
        return socket, self._codec

    def start(self, tell: Callable[[News], None]) -> None:
        """Start the threads, inside trio; news come by `tell`, in the event loop, never within another call."""
        assert self._dial is not None, "slots dial a server, or are dialled by `listen`"
        token = trio.lowlevel.current_trio_token()

        def hand_over(news: News) -> None:
            try:
                token.run_sync_soon(tell, news)
            except trio.RunFinishedError:
                return  # the event loop is gone, and nothing is left to supervise

        pools = {name: RequestPool(model, self.slots) for name, model in self._compiled.items()}
        for number in range(self.slots):
            self._add(Runner(str(number), pools), self.models, hand_over)
        if self._wide:
            own = {name: RequestPool(model, 1) for name, model in self._wide.items()}
            self._add(Runner("wide", own), {name: self.models[name] for name in own}, hand_over)

    def _add(
        self, runner: Runner, models: Mapping[str, ModelSignature], tell: Callable[[News], None]
    ) -> None:
        """Start the thread of the next slot."""
        assert self._dial is not None
        thread = _SlotThread(len(self._threads), runner, models, self._dial, tell, self._codec)
        self._threads.append(thread)
        thread.start()

    def begin(self, session: SlotSession) -> None:
        """Greet, each slot on a new connection, and serve this session until it ends."""
        for thread in self._threads:
            thread.serve(session)

    def end(self) -> None:
        """End the session: a call that runs goes on to its end, and its report is dropped. Forget the server's clock."""
        for thread in self._threads:
            thread.difference_s = None
            thread.serve(None)

    def withdraw(self, slot: int, batch: int, code: ErrorCode) -> None:
        """Skip a batch. `RECALLED`: only if it has not begun; the news `BatchWithdrawn` answers for it.

        `CANCELLED`: skip those of its calls that have not begun; its slot reports it in its turn.
        """
        if 0 <= slot < len(self._threads):
            self._threads[slot].withdraw(batch, code)

    def set_clock(self, difference_s: float) -> None:
        """Count deadlines by trio's clock less `difference_s`, which is the server's; threads cannot ask trio."""
        # Looked at in this order, a process that is stopped in between starts nothing late.
        difference_s += monotonic() - trio.current_time()
        for thread in self._threads:
            thread.difference_s = difference_s

    def release(self) -> None:
        """Release the devices' memory of the models, after `aclose`. Nothing is released that a thread left behind uses."""
        if not self._left_behind:
            for model in (*self._compiled.values(), *self._wide.values()):
                model.close()
        self._compiled, self._wide = {}, {}

    async def aclose(self) -> None:
        """End the threads within a bounded time, also when cancelled. One that hangs is named and left behind."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._close_s):
            await trio.to_thread.run_sync(_join, threads, abandon_on_cancel=True)
        for thread in threads:
            if (model := thread.model) is not None and thread.is_alive():
                what = f"its call has not ended within {self._close_s:g} s; it ends with the process"
                log.warning("slot left behind", slot=thread.number, model=model, what=what)
                self._left_behind = True


def _join(threads: Sequence[_SlotThread]) -> None:
    for thread in threads:
        thread.join()
        thread.wake.close()


class _SlotThread(Thread):
    """One slot. `serve`, `withdraw` and `close` are for the event loop, the rest is the thread's own."""

    def __init__(
        self,
        number: int,
        runner: Runner,
        models: Mapping[str, ModelSignature],
        dial: Callable[[Wake], BlockingConnection],
        tell: Callable[[News], None],
        codec: Codec,
    ) -> None:
        super().__init__(name=f"slot {number}", daemon=True)
        self._context = copy_context()
        self.number = number
        self.runner = runner
        self.difference_s: float | None = None
        """This process's monotonic clock less the server's."""
        self._models = models
        self._dial = dial
        self._tell = tell
        self._codec = codec
        self.wake = Wake()
        # Each of these is set by the event loop alone, and read by the thread.
        self._session: SlotSession | None = None
        self._closing = False
        self._batch: int | None = None
        """The batch that the thread works on, until its report is sent. The thread's own."""
        self.model: str | None = None
        """The model of that batch; the event loop may read it."""

    # ---------------------------------------------------------------- for the event loop

    def serve(self, session: SlotSession | None) -> None:
        """Serve this session from now on, or none."""
        self._session = session
        if session is None:
            self.runner.halt()
        self.wake.set()

    def withdraw(self, batch: int, code: ErrorCode) -> None:
        """Skip a batch, or what of it has not begun."""
        session = self._session
        if session is None:
            return
        if code is ErrorCode.CANCELLED:
            self.runner.cancel(batch)
        elif self.runner.withdraw(batch):
            # What it is queued behind may hang, so the slot cannot be waited for.
            self._tell(BatchWithdrawn(session=session.number, slot=self.number, batch=batch))

    def close(self) -> None:
        """End the thread, after the call that runs."""
        self._closing = True
        self.serve(None)

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Serve one session after the other, until closed; its log lines name the process as the event loop's do."""
        self._context.run(self._serve_all)

    def _serve_all(self) -> None:
        over: SlotSession | None = None
        try:
            while not self._closing:
                session = self._session
                if session is None or session is over:
                    self.wake.wait()
                    continue
                why = self._serve(session)
                over = session
                if why is not None and self._session is session:
                    self._tell(SessionBroken(session=session.number, why=why))
        finally:
            if not self._closing:
                self.runner.halt()  # what is withdrawn from now on is the server's to see
                served = self._session
                number = None if served is None else served.number
                self._tell(ThreadEnded(session=number, slot=self.number, batch=self._batch))

    def _serve(self, session: SlotSession) -> str | None:
        """Serve a session until it ends; returns why, if it is the connection's fault."""
        self.wake.clear()  # it told of this session, and of the end of the last one
        self.runner.restart()
        patience_s = None if session.silence_s is None else session.silence_s / 2
        try:
            connection = self._dial(self.wake)
        except TransportError as error:
            return str(error)
        with closing(connection) as socket:
            if not self._send(socket, session, SlotHello(token=session.token, slot=self.number)):
                return "the server takes nothing"
            silent = False
            while self._session is session:
                if (frames := socket.receive(patience_s)) is None:
                    if silent and self._session is session:
                        return "the server is silent"
                    # Twice: a process that was stopped finds what came meanwhile.
                    silent = patience_s is not None
                    continue
                silent = False
                received_at = monotonic()
                if (why := self._carry_out(socket, session, frames, received_at)) is not None:
                    return why
                del frames
        return None

    def _carry_out(
        self, socket: BlockingConnection, session: SlotSession, frames: Message, received_at: float
    ) -> str | None:
        """Carry out a message, of which nothing is held afterwards; returns why the connection is of no use, if so.

        What of it has not begun when its session ends is dropped.
        """
        try:
            read = self._codec.read
            entries = [*read(frames)]
        except ProtocolError as error:
            return f"the server sent what cannot be read: {error}"
        for entry in entries:
            if self._session is not session:
                break
            if isinstance(entry, Execute):
                if not self._execute(socket, session, entry, received_at):
                    return "the server takes nothing"
            elif not isinstance(entry, Heartbeat):
                return f"the server sent {type(entry).__name__} to a slot"
        return None

    def _execute(
        self, socket: BlockingConnection, session: SlotSession, execute: Execute, received_at: float
    ) -> bool:
        """Run a batch, and report it; False where the report could not be sent."""
        if execute.session != session.number:
            return True
        if PRESENT.debug:
            log.debug("batch received", batch=execute.batch, slot=execute.slot, model=execute.model,
                      sizes=execute.sizes, requests=len(execute.members))  # fmt: skip
        self._batch, self.model = execute.batch, execute.model
        report: BatchReport | None
        if execute.slot != self.number or execute.model not in self._models:
            why = f"the server asked slot {self.number} for slot {execute.slot} and model {execute.model!r}"
            report = BatchReport(batch=execute.batch, outputs=None, code=ErrorCode.INTERNAL, message=why)
        else:
            ahead_s = clock_ahead_s(execute, received_at=received_at, difference_s=self.difference_s)
            report = self.runner.run(execute, ahead_s)
        if self._session is not session:
            self._batch = self.model = None
            self._tell(SlotIdle(slot=self.number))
            return True
        sent = True
        if report is not None:
            if PRESENT.debug:
                log.debug("batch ran here", run_s=round(report.run_s, 6), reallocations=report.reallocations,
                          preparations=report.preparations, calls=report.calls, code=report.code)  # fmt: skip
            sent = self._send(socket, session, entry_of_report(report, session=session.number))
        self._batch = self.model = None
        return sent

    def _send(self, socket: BlockingConnection, session: SlotSession, entry: Entry) -> bool:
        """Send an entry; False where there was no room for it, for as long as a silent server is waited for."""
        frames = frames_of(entry, self._codec)
        while self._session is session and not socket.send(frames, session.silence_s):
            if self._session is session and session.silence_s is not None:
                return False
        return True


# -------------------------------------------------------------------- batches and reports as entries


def clock_ahead_s(execute: Execute, *, received_at: float, difference_s: float | None) -> float:
    """Return the slot's clock less that of the deadlines in `execute`: `difference_s`, which bounds what was left at
    sending.

    No member gets longer than it had when the batch was sent, counted from `received_at`, whatever the clocks say.
    `received_at` is of the slot's clock; `difference_s` is None while the difference is not known.
    """
    latest = received_at - execute.sent_us * 1e-6
    return latest if difference_s is None else min(latest, difference_s)


def frames_of(entry: Entry, codec: Codec) -> list[Buffer]:
    """Return the message of an entry that a slot sends. Results that fit no message fail their batch, and no other."""
    pack = codec.pack
    try:
        return pack([entry])[0]
    except RequestError as error:
        if not isinstance(entry, BatchDone):
            raise
        message = f"the results do not fit the protocol: {error}"
        failed = BatchFailedEntry(
            batch=entry.batch, session=entry.session, code=ErrorCode.MODEL_ERROR, message=message
        )
        return codec.pack([failed])[0]


def entry_of_report(report: BatchReport, *, session: int) -> BatchDone | BatchFailedEntry:
    """Return the entry that tells a report to the server of this session."""
    if report.code is not None or report.outputs is None:
        code = report.code or ErrorCode.INTERNAL
        return BatchFailedEntry(batch=report.batch, session=session, code=code, message=report.message)
    return BatchDone(session=session, report=report)

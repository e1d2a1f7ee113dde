"""Slots on real threads and real sockets of this process: each batch is reported once, or skipped, whatever happens."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
import trio.testing
from tests.entries import (
    BatchDone,
    BatchFailedEntry,
    Entry,
    Execute,
    Goodbye,
    Heartbeat,
    Role,
    SlotHello,
    execute_of,
)
from tests.pipeline.serving.clocks import REAL_PATIENCE_S, real_time

from shapestream.errors import ProtocolError, TransportError
from shapestream.serving.slot_threads import (
    HANDOVER,
    BatchWithdrawn,
    News,
    SessionBroken,
    SlotIdle,
    SlotSession,
    SlotThreads,
    ThreadEnded,
    entry_of_report,
    frames_of,
)
from shapestream.transport.interface import BlockingConnection, Wake
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import BlockingDealer, SocketOptions
from shapestream.wire.codec import codec_of, decode, encode
from shapestream.wire.limits import MAX_TENSORS, WORKER_LIMITS
from shapestream_engine.batch import BatchInputs, BatchReport, ErrorCode
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.slot import Runner

LONG_S = 600.0
TOKEN = b"t" * 16


def times(factor: int, before: Callable[[], object] = lambda: None) -> CompiledModel:
    """y = factor * x; refuses 13. `before` is called first."""

    def multiply(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        before()
        if 13 in x:
            raise ValueError("no thirteens")
        product: np.ndarray[Any, Any] = x * factor
        return product

    return compile_model(
        ModelSpec(
            name=f"times {factor}",
            model=multiply,
            inputs={"x": InputSpec(shape="batch:1..8", element_type="i64")},
            outputs={"y": OutputSpec(shape="batch", element_type="i64")},
        ),
        slots=2,
    )


class Fatal(BlockingDealer):
    """A connection that takes a greeting and no report: the thread that sends one dies of it."""

    greeted = False
    error: type[BaseException] = ArithmeticError

    def send(self, frames: Sequence[Any], timeout_s: float | None = None) -> bool:
        """Send the greeting, and nothing else."""
        if self.greeted:
            raise self.error
        self.greeted = True
        return super().send(frames, timeout_s)


class Exiting(Fatal):
    """The same, with the error that a thread may raise to end itself."""

    error = SystemExit


class Bench:
    """Slots, the port that they dial, what they report there, and their news."""

    def __init__(self, models: Mapping[str, CompiledModel], slots: int) -> None:
        address = f"inproc://bench-{os.urandom(8).hex()}"
        self.socket = RouterSocket(options=SocketOptions())
        self.socket.bind(address)
        self.address = address
        self.dial: Callable[[Wake], BlockingConnection] = partial(BlockingDealer, address)
        self.slots = SlotThreads(models=models, slots=slots, dial=lambda wake: self.dial(wake))
        self.reports: dict[int, BatchDone | BatchFailedEntry] = {}
        self.news: list[News] = []
        self._peers: dict[int, bytes] = {}
        self._arrival = trio.Event()
        self.slots.start(self._hear)

    def _hear(self, news: News) -> None:
        self.news.append(news)
        self._arrive()

    def _arrive(self) -> None:
        self._arrival.set()
        self._arrival = trio.Event()

    async def read(self) -> None:
        """Takes what arrives, until cancelled."""
        while True:
            for peer, frames in await self.socket.receive():
                for entry in decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS).entries:
                    if isinstance(entry, SlotHello):
                        assert entry.token == TOKEN
                        self._peers[entry.slot] = peer
                    else:
                        assert isinstance(entry, BatchDone | BatchFailedEntry)
                        assert entry.batch not in self.reports, "reported twice"
                        self.reports[entry.batch] = entry
            self._arrive()

    async def serve(self, session: int = 1, *, silence_s: float | None = None) -> None:
        """Begins a session; all slots have greeted then."""
        self._peers.clear()
        self.slots.begin(SlotSession(number=session, token=TOKEN, silence_s=silence_s))
        await self.until(lambda: len(self._peers) == self.slots.slots)

    def say(self, *entries: Entry, slot: int = 0) -> None:
        """Entries to a slot, in one message."""
        self.socket.send_nowait(self._peers[slot], encode(entries, limits=WORKER_LIMITS))

    def start(
        self,
        number: int,
        *values: int,
        slot: int = 0,
        within_s: float | None = None,
        model: str = "times 2",
        session: int = 1,
    ) -> None:
        """A batch of one request per value, of which the first may have a deadline."""
        self.say(
            self.batch(number, *values, slot=slot, within_s=within_s, model=model, session=session), slot=slot
        )

    def batch(
        self,
        number: int,
        *values: int,
        slot: int = 0,
        within_s: float | None = None,
        model: str = "times 2",
        session: int = 1,
    ) -> Execute:
        """The entry of such a batch."""
        now = trio.current_time()
        members = tuple(
            Tensors(layout=((0, "i64", (1,)),), buffers=(np.int64(value).tobytes(),)) for value in values
        )
        sizes = (len(values),)
        return execute_of(
            number,
            members,
            session=session,
            slot=slot,
            sent_us=round(now * 1e6),
            model=model,
            sizes=sizes,
            start_before=None if within_s is None else (now + within_s, *[None] * (len(values) - 1)),
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for it."""
        with trio.fail_after(REAL_PATIENCE_S):
            while not holds():
                await self._arrival.wait()

    async def wait_for(self, *batches: int) -> None:
        """Until all of them have been reported."""
        await self.until(lambda: self.reports.keys() >= set(batches))

    def values(self, batch: int) -> list[int | None]:
        """The one number of each result."""
        report = self.reports[batch]
        assert isinstance(report, BatchDone)
        return [
            None if output is None else int(np.frombuffer(bytes(output.buffers[0]), np.int64)[0])
            for output in report.report.outputs or ()
        ]

    def code(self, batch: int) -> str | None:
        """Why it failed."""
        report = self.reports[batch]
        return report.code if isinstance(report, BatchFailedEntry) else None


@asynccontextmanager
async def bench(
    slots: int = 1,
    *,
    before: Callable[[], object] = lambda: None,
    release: threading.Event | None = None,
    greeted: bool = True,
) -> AsyncIterator[Bench]:
    """Slots for the time of the block; batches wait for `release` where one is given."""

    def enter() -> None:
        before()
        if release is not None:
            release.wait(REAL_PATIENCE_S)

    models = {model.signature.name: model for model in (times(2, enter), times(3))}
    opened = Bench(models, slots)
    async with trio.open_nursery() as nursery:
        await nursery.start(opened.socket.run)
        nursery.start_soon(opened.read)
        opened.slots.set_clock(0.0)
        try:
            if greeted:
                await opened.serve()
            yield opened
        finally:
            if release is not None:
                release.set()
            await opened.slots.aclose()
            nursery.cancel_scope.cancel()
    opened.socket.close()


@real_time
async def test_every_slot_reports_each_of_its_batches_once() -> None:
    """Two slots of one compiled model, a failing batch among theirs; the slot that failed goes on."""
    async with bench(slots=2) as slots:
        slots.start(1, 1, 2, 3)
        slots.start(2, 4, 13, slot=1)
        await slots.wait_for(1, 2)
        slots.start(3, 5, slot=1)
        await slots.wait_for(3)
    assert [2, 4, 6] == slots.values(1)
    failed = slots.reports[2]
    assert isinstance(failed, BatchFailedEntry)
    assert ("model_error", 1) == (failed.code, failed.session)
    assert "no thirteens" in failed.message
    assert [10] == slots.values(3)


@real_time
async def test_one_slot_runs_several_models() -> None:
    """In the order in which their batches came."""
    async with bench() as slot:
        for number in range(1, 9):
            slot.start(number, number, model=f"times {2 + number % 2}")
        await slot.wait_for(*range(1, 9))
    assert [[number * (2 + number % 2)] for number in range(1, 9)] == [slot.values(n) for n in range(1, 9)]
    assert list(range(1, 9)) == list(slot.reports)


@real_time
async def test_what_a_slot_cannot_run_is_reported_and_nothing_else_harmed() -> None:
    """An unknown model, a layout that is not the model's, another slot's number."""
    async with bench(slots=2) as slots:
        slots.start(1, 1, model="other")
        wrong = Tensors(layout=((0, "f32", (1, 3)),), buffers=[bytes(12)])
        slots.say(execute_of(2, (wrong,), model="times 2"))
        slots.say(execute_of(3, (wrong,), slot=1, model="times 2"))
        slots.start(4, 4)
        await slots.wait_for(1, 2, 3, 4)
    assert ["internal"] * 3 == [slots.code(batch) for batch in (1, 2, 3)]
    assert [8] == slots.values(4)


@real_time
async def test_a_member_whose_time_has_passed_is_left_out_of_the_call() -> None:
    """By the slot's own clock, and only that member."""
    async with bench() as slot:
        slot.start(1, 1, 2, within_s=-1.0)
        await slot.wait_for(1)
        slot.start(2, 1, 2, within_s=LONG_S)
        await slot.wait_for(2)
    assert [None, 4] == slot.values(1)
    assert [2, 4] == slot.values(2)


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
@real_time
async def test_a_clock_that_is_wrong_gives_no_member_more_than_it_had_when_it_was_sent(
    ahead_s: float,
) -> None:
    """Whether the server's clock seems early or late: no time that was left is not exceeded."""
    async with bench() as slot:
        slot.slots.set_clock(ahead_s)
        slot.start(1, 1, 2, within_s=0.0)
        await slot.wait_for(1)
    assert [None, 4] == slot.values(1)


@real_time
async def test_a_batch_that_is_queued_is_taken_up_without_the_event_loop() -> None:
    """The slot runs the second one to its end while the loop does not turn at all."""
    entered = [threading.Event(), threading.Event()]
    seen: list[int] = []

    def enter() -> None:
        entered[len(seen)].set()
        seen.append(len(seen))

    async with bench(before=enter) as slot:
        slot.start(1, 1)
        slot.start(2, 2)
        assert entered[1].wait(REAL_PATIENCE_S), "it needed the event loop"
        assert {} == slot.reports
        await slot.wait_for(1, 2)
    assert [1, 2] == list(slot.reports), "reported in another order than they ran"
    assert ([2], [4]) == (slot.values(1), slot.values(2))


@real_time
async def test_a_bundle_comes_in_one_message_and_each_batch_is_reported_when_it_has_run() -> None:
    """One that is withdrawn is left out, one whose deadline has passed runs without it, and the others are answered."""
    release, entered = threading.Event(), threading.Event()
    async with bench(before=entered.set, release=release) as slot:
        bundle = [slot.batch(number, number) for number in (1, 2, 3)]
        slot.say(*bundle, slot.batch(4, 4, within_s=-1.0), slot.batch(5, 5, model="times 3"))
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        slot.slots.withdraw(0, 2, ErrorCode.RECALLED)
        release.set()
        await slot.wait_for(1, 3, 4, 5)
    assert [1, 3, 4, 5] == list(slot.reports)
    assert [[2], [6], [None], [15]] == [slot.values(number) for number in (1, 3, 4, 5)]
    assert [BatchWithdrawn(session=1, slot=0, batch=2)] == slot.news


@real_time
async def test_what_is_left_of_a_bundle_is_dropped_with_its_session() -> None:
    """The running batch goes on to its end; no other begins, also if another session has begun by then."""
    release, entered = threading.Event(), threading.Event()
    ran: list[int] = []
    async with bench(before=lambda: (entered.set(), ran.append(1)), release=release) as slot:
        slot.say(*[slot.batch(number, number) for number in (1, 2, 3)])
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        slot.slots.end()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(slot.serve, session=2))
            await trio.testing.wait_all_tasks_blocked()
            release.set()
        slot.start(4, 4, session=2)
        await slot.wait_for(4)
    assert ([SlotIdle(slot=0)], {4}, 2) == (slot.news, set(slot.reports), len(ran))


@real_time
async def test_a_batch_that_has_not_begun_is_recalled() -> None:
    """Also before it has arrived: its slot skips it, and the control hears so; one that has begun goes on to its report."""
    code = ErrorCode.RECALLED
    release, entered = threading.Event(), threading.Event()
    async with bench(before=entered.set, release=release) as slot:
        slot.start(1, 1)
        slot.start(2, 2)
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        slot.slots.withdraw(0, 1, ErrorCode.RECALLED)
        slot.slots.withdraw(0, 2, code)
        slot.slots.withdraw(0, 3, code)
        slot.slots.withdraw(0, 2, code)
        slot.slots.withdraw(0, 2, ErrorCode.CANCELLED)
        assert [] == slot.news, "told in the middle of a decision"
        await slot.until(lambda: len(slot.news) == 2)
        slot.start(3, 3)
        slot.start(4, 4)
        release.set()
        await slot.wait_for(1, 4)
        slot.slots.withdraw(0, 4, code)
        await trio.testing.wait_all_tasks_blocked()
    assert [BatchWithdrawn(session=1, slot=0, batch=batch) for batch in (2, 3)] == slot.news
    assert {1, 4} == set(slot.reports)
    assert ([2], [8]) == (slot.values(1), slot.values(4))


@real_time
async def test_a_batch_that_is_cancelled_before_it_began_is_reported_by_its_slot_in_its_turn() -> None:
    """Also before it has arrived, and once; the control has nothing to say, so no report can overtake another."""
    release, entered = threading.Event(), threading.Event()
    async with bench(before=entered.set, release=release) as slot:
        slot.start(1, 1)
        slot.start(2, 2)
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        for batch in (2, 2, 3):
            slot.slots.withdraw(0, batch, ErrorCode.CANCELLED)
        slot.slots.withdraw(0, 2, ErrorCode.RECALLED)
        slot.start(3, 3)
        slot.start(4, 4)
        release.set()
        await slot.wait_for(1, 2, 3, 4)
    assert [] == slot.news
    assert [1, 2, 3, 4] == list(slot.reports), "reported in another order than they were sent"
    assert ["cancelled"] * 2 == [slot.code(batch) for batch in (2, 3)]
    assert ([2], [8]) == (slot.values(1), slot.values(4))


@real_time
async def test_a_member_whose_time_passes_behind_another_batch_is_left_out() -> None:
    """Its time counts from when the batch was sent, not from when it begins."""
    release = threading.Event()
    async with bench(release=release) as slot:
        slot.start(1, 1)
        slot.start(2, 2, 3, within_s=0.001)
        late = monotonic() + 0.002
        while monotonic() < late:
            pass
        release.set()
        await slot.wait_for(1, 2)
    assert [None, 6] == slot.values(2)


@real_time
async def test_what_a_session_left_is_dropped_and_its_slot_told_to_be_idle() -> None:
    """The batch that runs is not reported, the one behind it not run; the next session's numbers begin anew."""
    release, entered = threading.Event(), threading.Event()
    ran: list[int] = []
    async with bench(before=lambda: (entered.set(), ran.append(1)), release=release) as slot:
        slot.start(7, 1)
        slot.start(8, 2)
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        slot.slots.end()
        assert slot.slots.occupied
        release.set()
        await slot.until(lambda: slot.news == [SlotIdle(slot=0)])
        assert not slot.slots.occupied
        await slot.serve(session=2)
        slot.start(1, 5, session=1)
        slot.start(2, 6, session=2)
        await slot.wait_for(2)
    assert ([12], {2}, 2) == (slot.values(2), set(slot.reports), len(ran))


@real_time
async def test_a_session_that_begins_while_the_last_one_ends_is_served(tmp_path: Path) -> None:
    """What woke the slot for the last one is no reason to call a connection broken that is being made."""
    release, entered = threading.Event(), threading.Event()
    address = f"ipc://{tmp_path}/port"
    async with bench(before=entered.set, release=release) as slot:
        slot.start(1, 1)
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        options = SocketOptions(immediate=True)
        slot.dial = partial(BlockingDealer, address, options=options)
        async with RouterSocket() as port:
            port.bind(address)
            slot.slots.end()
            slot.slots.begin(SlotSession(number=2, token=TOKEN, silence_s=LONG_S))
            release.set()
            await slot.until(lambda: len(slot.news) > 0)
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                await nursery.start(port.run)
                with trio.fail_after(REAL_PATIENCE_S):
                    ((_, frames),) = await port.receive()
                nursery.cancel_scope.cancel()
    (hello,) = decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS).entries
    assert SlotHello(token=TOKEN, slot=0) == hello
    assert [SlotIdle(slot=0)] == slot.news


@real_time
async def test_a_slot_that_waits_holds_nothing_of_its_last_batch() -> None:
    """Its inputs may be as large as the model takes, and the next batch may be hours away."""
    number = 918_273_645  # other tests may have left batches that were not collected yet
    async with bench() as slot:
        slot.start(number, 1)
        await slot.wait_for(number)
        with trio.fail_after(REAL_PATIENCE_S):
            while any(type(held) is Execute and held.batch == number for held in gc.get_objects()):
                await trio.lowlevel.checkpoint()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@real_time
async def test_a_thread_that_has_ended_gives_no_batch_back() -> None:
    """The server has taken what it had: an answer for one of them would be its second."""
    async with bench(greeted=False) as slot:
        slot.dial = partial(Fatal, slot.address)
        await slot.serve()
        slot.start(1, 1)
        await slot.until(lambda: len(slot.news) > 0)
        slot.slots.withdraw(0, 2, ErrorCode.RECALLED)
        slot.slots.withdraw(0, 3, ErrorCode.CANCELLED)
        await trio.testing.wait_all_tasks_blocked()
    assert [ThreadEnded(session=1, slot=0, batch=1)] == slot.news


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@real_time
async def test_a_thread_that_ends_says_which_batch_it_had_begun() -> None:
    """The other slot serves on."""
    async with bench(slots=2, greeted=False) as slots:
        kinds = {"slot 0": Exiting, "slot 1": BlockingDealer}
        slots.dial = lambda wake: kinds[threading.current_thread().name](slots.address, wake)
        await slots.serve()
        slots.start(1, 1)
        await slots.until(lambda: slots.news == [ThreadEnded(session=1, slot=0, batch=1)])
        slots.start(2, 2, slot=1)
        await slots.wait_for(2)
    assert {2} == set(slots.reports)


@real_time
async def test_a_slot_that_hears_nothing_while_it_waits_has_lost_its_server() -> None:
    """A heartbeat is enough; the time of a batch does not count."""
    async with bench(greeted=False) as slot:
        await slot.serve(silence_s=2.0)
        for _ in range(5):
            await trio.sleep(0.5)  # together longer than the silence, each far below it
            slot.say(Heartbeat())
        assert [] == slot.news
        await slot.until(lambda: slot.news == [SessionBroken(session=1, why="the server is silent")])


@real_time
async def test_what_a_server_does_not_say_to_slots_ends_the_session() -> None:
    """A goodbye, for one; the slot is good for another session."""
    async with bench() as slot:
        slot.say(Goodbye())
        await slot.until(
            lambda: slot.news == [SessionBroken(session=1, why="the server sent Goodbye to a slot")]
        )
        await slot.serve(session=2)
        slot.start(1, 4, session=2)
        await slot.wait_for(1)
    assert [8] == slot.values(1)


@real_time
async def test_slots_that_end_run_nothing_new() -> None:
    """The batch behind the running one is not begun, and what ran is not reported."""
    release, entered = threading.Event(), threading.Event()
    ran: list[int] = []
    async with bench(before=lambda: (entered.set(), ran.append(1)), release=release) as slot:
        slot.start(1, 1)
        slot.start(2, 2)
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slot.slots.aclose)
            await trio.testing.wait_all_tasks_blocked()
            release.set()
    assert ([1], {}) == (ran, slot.reports)


@real_time
async def test_a_large_tensor_is_not_copied_on_its_way_to_a_slot_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot gathers from the very bytes that were sent: `inproc` hands frames over."""
    addresses: list[int] = []

    def run(runner: Runner, batch: BatchInputs, ahead_s: float) -> None:
        addresses.append(np.frombuffer(batch.members[0].buffers[0], np.uint8).ctypes.data)

    monkeypatch.setattr(Runner, "run", run)
    array = np.zeros(1 << 20, np.uint8)
    tensors = Tensors(layout=((0, "i64", (1 << 17,)),), buffers=(array.data,))
    async with bench() as slot:
        slot.say(execute_of(1, (tensors,), model="times 2", sizes=()))
        while not addresses:
            await trio.lowlevel.checkpoint()
    assert [array.ctypes.data] == addresses


def test_news_after_the_event_loop_has_ended_are_dropped() -> None:
    """A slot's thread may outlive the loop; it must not die of that."""

    def refuse(wake: Wake) -> BlockingConnection:
        raise TransportError("nobody is there")

    slots = SlotThreads(models={"times 2": times(2)}, dial=refuse)

    async def main() -> None:
        slots.start(lambda news: None)

    trio.run(main)
    slots.begin(SlotSession(number=1, token=TOKEN, silence_s=None))  # the slot's thread tells of its end
    slots.withdraw(0, 1, ErrorCode.RECALLED)  # and this one of a batch
    trio.run(slots.aclose)


def test_entries_are_handed_over_once_and_nothing_else_is_read() -> None:
    """Between a server and its own slots, where no bytes are checked."""
    codec = HANDOVER
    (frames,) = codec.pack([entry := Heartbeat()])
    assert [entry] == codec.read(frames)
    for unknown in (frames, encode([entry], limits=WORKER_LIMITS), [b"", b""]):
        with pytest.raises(ProtocolError):
            codec.read(unknown)


def test_results_that_fit_no_message_fail_their_batch() -> None:
    """More outputs than a result may hold: what the slot says instead is a report, too."""
    layout = tuple((number, "u8", (2048,)) for number in range(MAX_TENSORS + 1))
    tensors = Tensors(layout=layout, buffers=[bytes(2048)] * len(layout))
    done = entry_of_report(BatchReport(batch=1, outputs=(tensors,)), session=3)
    (failed,) = decode(
        frames_of(done, codec_of(Role.WORKER)), role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS
    ).entries
    assert isinstance(failed, BatchFailedEntry)
    assert (1, 3, "model_error") == (failed.batch, failed.session, failed.code)
    assert "do not fit the protocol" in failed.message

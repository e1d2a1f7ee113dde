"""A worker's tasks in memory, under a clock that jumps; the test plays the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import trio
import trio.testing
from tests.entries import (
    WORKER_PROTOCOL,
    BatchDone,
    BatchFailedEntry,
    CancelBatchEntry,
    Entry,
    Execute,
    Goodbye,
    Heartbeat,
    RecallBatchEntry,
    Role,
    SlotEnded,
    SlotHello,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
    execute_of,
)

from shapestream.serving.slot_threads import (
    BatchWithdrawn,
    News,
    SessionBroken,
    SlotIdle,
    SlotSession,
    ThreadEnded,
    entry_of_report,
)
from shapestream.transport.interface import Connection, PeerSocket
from shapestream.transport.memory import MemoryEndpoint, MemoryServer
from shapestream.wire.codec import decode, encode
from shapestream.wire.limits import WORKER_LIMITS
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Buffer, Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_workers.worker import ORPHAN_S, RETRY_MAX_S, Worker, WorkerEnd

T = TypeVar("T", bound=Entry)

ROWS = NamedShape.parse("batch:1..8, 2")
SIGNATURE = ModelSignature("m", (InputPort("x", "f32", ROWS),), (OutputPort("y", "f32", ROWS, Rows()),))
TENSORS = Tensors(layout=((0, "f32", (1, 2)),), buffers=(bytes(range(8)),))


class EchoSlots:
    """One slot that answers with its input, after `delay_s`."""

    slots = 1
    digests: Mapping[str, str] = {}
    tolerances: Mapping[str, Mapping[str, Any]] = {}
    engines: Mapping[str, str] = {}
    models: Mapping[str, ModelSignature] = {"m": SIGNATURE}
    costs: Mapping[str, CostTable] = {}
    wide_costs: Mapping[str, CostTable] = {}

    def __init__(self, nursery: trio.Nursery, delay_s: float, connect: Callable[[], Connection]) -> None:
        self._nursery = nursery
        self._delay_s = delay_s
        self._connect = connect
        self._session: SlotSession | None = None
        self.occupied = False
        self.withdrawn: list[tuple[int, int, str]] = []
        self.closed = False

    def start(self, tell: Callable[[News], None]) -> None:
        """Remembers to whom to tell."""
        self.tell = tell

    def listen(self) -> PeerSocket:
        """Not asked of a worker's slots."""
        raise AssertionError

    def begin(self, session: SlotSession) -> None:
        """Greets, on a connection of its own."""
        self._session = session
        self._nursery.start_soon(self._serve, session)

    def end(self) -> None:
        """What runs cannot be interrupted."""
        self._session = None

    def withdraw(self, slot: int, batch: int, code: ErrorCode) -> None:
        """Remembers."""
        self.withdrawn.append((slot, batch, code))

    def set_clock(self, difference_s: float) -> None:
        """No deadlines here."""

    async def aclose(self) -> None:
        """Remembers."""
        self.closed = True

    async def _serve(self, session: SlotSession) -> None:
        connection = self._connect()
        connection.send_nowait(encode([SlotHello(token=session.token, slot=0)], limits=WORKER_LIMITS))
        while self._session is session:
            for frames in await connection.receive():
                for entry in decode(frames, role=Role.WORKER, limits=WORKER_LIMITS).entries:
                    if isinstance(entry, Execute):
                        await self._answer(connection, session, entry)

    async def _answer(self, connection: Connection, session: SlotSession, execute: Execute) -> None:
        self.occupied = True
        await trio.sleep(self._delay_s)
        self.occupied = False
        if self._session is not session:
            self.tell(SlotIdle(slot=0))
            return
        report = BatchReport(
            batch=execute.batch,
            outputs=execute.members,
            run_s=self._delay_s,
            busy_s=self._delay_s,
        )
        done = entry_of_report(report, session=session.number)
        connection.send_nowait(encode([done], limits=WORKER_LIMITS))


class Played:
    """The server's end: what the worker said, and what it is told."""

    _sessions = count(1)

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        self.socket: MemoryServer = endpoint.bind()
        self.peer = b""
        """The worker's control."""
        self.slot = b""
        self.left = trio.Event()
        """Set when the worker has ended."""
        self._entries: list[Entry] = []

    async def next(self, kind: type[T], *, within_s: float = 60.0) -> T:
        """The next entry of that kind; what comes before is passed over."""
        with trio.fail_after(within_s):
            while True:
                while self._entries:
                    entry = self._entries.pop(0)
                    if isinstance(entry, kind):
                        return entry
                for peer, frames in await self.socket.receive():
                    entries = decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS).entries
                    if any(isinstance(entry, SlotHello) for entry in entries):
                        self.slot = peer
                    elif peer != self.slot:
                        self.peer = peer
                    self._entries += entries

    def say(self, *entries: Entry) -> None:
        """To the worker heard last, or to its slot."""
        for entry in entries:
            peer = self.slot if isinstance(entry, Execute) else self.peer
            self.socket.send_nowait(peer, encode([entry], limits=WORKER_LIMITS))

    async def welcome(self) -> WorkerHello:
        """Waits for the greeting, answers it, and waits for the slot's."""
        hello = await self.next(WorkerHello)
        token = bytes(16)
        self.session = next(self._sessions)
        self.say(WorkerWelcome(epoch=b"e" * 16, token=token, session=self.session, heartbeat_ms=500))
        assert SlotHello(token=token, slot=0) == await self.next(SlotHello)
        return hello

    def execute(self, batch: int) -> None:
        """One member of one row, for the slot to run."""
        self.say(execute_of(batch, (TENSORS,), session=self.session, model="m"))


SLOTS: list[EchoSlots] = []
"""Those of each scene."""


def play(
    scene: Callable[[Played, Worker, list[float]], Awaitable[None]],
    *,
    delay_s: float = 0.1,
) -> EchoSlots:
    """Runs a worker and the scene; `ready` collects the times at which the worker was welcomed."""

    async def main() -> None:
        endpoint = MemoryEndpoint()
        ready: list[float] = []
        async with trio.open_nursery() as nursery:
            SLOTS.append(EchoSlots(nursery, delay_s, endpoint.connect))
            worker = Worker(
                "w-1", SLOTS[-1], endpoint.connect, ready=lambda: ready.append(trio.current_time())
            )
            server = Played(endpoint)

            async def live() -> None:
                await worker.run()
                server.left.set()

            nursery.start_soon(live)
            await scene(server, worker, ready)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return SLOTS[-1]


def test_a_worker_greets_is_welcomed_and_answers() -> None:
    """The tensors come back as they went; readiness is told once."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        hello = await server.welcome()
        assert ("w-1", ["m"]) == (hello.worker, list(hello.models))
        server.execute(7)
        done = await server.next(BatchDone)
        assert (7, 100_000) == (done.batch, round(done.report.run_s * 1e6))
        assert [bytes(range(8))] == [
            bytes(member.buffers[0]) for member in done.report.outputs if member is not None
        ]
        assert 1 == len(ready)

    play(scene)


def test_a_worker_beats_as_often_as_the_server_asks() -> None:
    """Ten heartbeats in five seconds, on one connection, as long as the server beats too."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        await server.next(Heartbeat)
        began = trio.current_time()
        for _ in range(10):
            server.say(Heartbeat())
            await server.next(Heartbeat)
        assert 5.0 == trio.current_time() - began
        assert 1 == len(ready)

    play(scene)


def test_a_silent_server_is_looked_for_again() -> None:
    """After three seconds without a heartbeat the worker connects anew and greets."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        first, began = server.peer, trio.current_time()
        await server.welcome()
        assert first != server.peer
        assert 3.0 < trio.current_time() - began < 5.0
        await trio.testing.wait_all_tasks_blocked()
        assert 2 == len(ready)

    play(scene)


def test_a_greeting_that_was_lost_is_said_again() -> None:
    """The server went away before it answered; its successor knows nothing, and nobody waits for ever."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.next(WorkerHello)
        endpoint = server.socket.endpoint
        server.socket.close()
        await Played(endpoint).welcome()
        await trio.testing.wait_all_tasks_blocked()
        assert 1 == len(ready)

    play(scene)


def test_a_connection_that_takes_nothing_is_given_up_like_a_silent_one() -> None:
    """What could not be said is said again on the next one, which is all that a server hears."""

    async def main() -> None:
        endpoint = MemoryEndpoint()
        blocked = [True]

        class Blocked:
            """A connection without a server behind it: it takes nothing."""

            def __init__(self) -> None:
                self._inner = endpoint.connect()
                self.run, self.receive, self.close = self._inner.run, self._inner.receive, self._inner.close
                self.receive_nowait = self._inner.receive_nowait

            def send_nowait(self, frames: Sequence[Buffer]) -> None:
                """No room."""
                raise trio.WouldBlock

            async def send(self, frames: Sequence[Buffer]) -> None:
                """Never any room."""
                await trio.sleep_forever()

        def connect() -> Connection:
            return Blocked() if blocked and blocked.pop() else endpoint.connect()

        async with trio.open_nursery() as nursery:
            server = Played(endpoint)
            worker = Worker("w-1", EchoSlots(nursery, 0.0, endpoint.connect), connect)
            nursery.start_soon(worker.run)
            began = trio.current_time()
            await server.welcome()
            assert 3.0 < trio.current_time() - began < 6.0
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_new_server_at_the_same_address_gets_a_greeting() -> None:
    """It answers the first heartbeat with `Unknown`; the worker introduces itself on the same connection."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        endpoint = server.socket.endpoint
        server.socket.close()
        again = Played(endpoint)
        await again.next(Heartbeat)
        again.say(Unknown())
        await again.welcome()
        again.execute(1)
        assert 1 == (await again.next(BatchDone)).batch

    play(scene)


def test_the_answer_of_an_old_session_is_swallowed() -> None:
    """The server forgot batch 1 in the middle; what it calls batch 1 now is answered once, by its own run."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        server.execute(1)
        await server.next(Heartbeat)
        began = trio.current_time()
        server.say(Unknown())
        await server.welcome()
        server.execute(1)
        assert 1 == (await server.next(BatchDone)).batch
        assert trio.current_time() - began > 2.0
        with trio.move_on_after(5):
            await server.next(BatchDone, within_s=100)
            raise AssertionError("the orphan was answered")

    play(scene, delay_s=2.0)


def test_a_worker_whose_slot_is_held_for_ever_ends() -> None:
    """A batch of a session that is over cannot be interrupted: the process goes, so that another can be started."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        server.execute(1)
        await trio.testing.wait_all_tasks_blocked()
        server.say(Unknown())
        began = trio.current_time()
        await server.left.wait()
        assert WorkerEnd.SLOT_HANGS is worker.end
        assert ORPHAN_S < trio.current_time() - began < 2 * ORPHAN_S

    play(scene, delay_s=1e6)


def test_a_worker_that_stood_still_reads_before_it_calls_the_server_silent() -> None:
    """Its own silence, for whatever reason, says nothing about the server's."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        await trio.testing.wait_all_tasks_blocked()
        first = server.peer
        server.say(Heartbeat())
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock)
        clock.jump(30.0)
        await server.next(Heartbeat)
        assert first == server.peer
        assert 1 == len(ready)

    play(scene)


def test_a_server_that_turns_the_worker_away_is_asked_less_and_less_often() -> None:
    """0.5 s after a working session; without a welcome the pause doubles, up to its limit."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        pauses = []
        for _ in range(8):
            await trio.testing.wait_all_tasks_blocked()
            server.say(Goodbye())
            began = trio.current_time()
            await server.next(WorkerHello)
            pauses.append(trio.current_time() - began)
        assert [0.5, 1.0, 2.0, 4.0, 8.0, RETRY_MAX_S, RETRY_MAX_S, RETRY_MAX_S] == pauses

    play(scene)


def test_what_cannot_be_read_ends_the_connection_not_the_worker() -> None:
    """A server that speaks nonsense is left and tried again."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        first = server.peer
        server.socket.send_nowait(server.peer, [b"\xc1 this is no msgpack"])
        await server.welcome()
        assert first != server.peer

    play(scene)


def test_a_drained_worker_answers_and_ends_with_the_servers_goodbye() -> None:
    """It says that it drains; what runs is finished first; the slots' threads are ended last."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        server.execute(3)
        await trio.testing.wait_all_tasks_blocked()
        worker.drain()
        await server.next(WorkerDraining)
        assert 3 == (await server.next(BatchDone)).batch
        server.say(Goodbye())
        with trio.fail_after(5):
            await server.left.wait()

    assert play(scene).closed


def test_a_draining_worker_does_not_wait_for_a_silent_server() -> None:
    """After three seconds of silence nobody is left to say goodbye."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        await trio.testing.wait_all_tasks_blocked()
        worker.drain()
        await server.next(WorkerDraining)
        with trio.fail_after(7):
            await server.left.wait()

    assert play(scene).closed


def test_a_worker_without_a_server_can_be_drained() -> None:
    """It waits for the silence that ends any session: its greeting may be answered yet."""

    async def main() -> None:
        endpoint = MemoryEndpoint()
        async with trio.open_nursery() as nursery:
            worker = Worker("w-1", EchoSlots(nursery, 0.0, endpoint.connect), endpoint.connect)
            nursery.start_soon(worker.run)
            await trio.testing.wait_all_tasks_blocked()
            worker.drain()
        # The nursery has ended, and so has the worker.
        assert 0 == len(endpoint.connections)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_withdrawals_go_to_the_slots_and_their_news_to_the_server() -> None:
    """The control answers for a batch that had not begun; news of an earlier session concern nobody."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        server.say(CancelBatchEntry(batch=7, slot=0), RecallBatchEntry(batch=8, slot=0))
        await trio.testing.wait_all_tasks_blocked()
        slots = SLOTS[-1]
        assert [(0, 7, "cancelled"), (0, 8, "recalled")] == slots.withdrawn
        for session in (server.session - 1, server.session):
            slots.tell(BatchWithdrawn(session=session, slot=0, batch=8))
        failed = await server.next(BatchFailedEntry)
        assert (8, server.session, "recalled") == (failed.batch, failed.session, failed.code)
        await server.next(Heartbeat)

    play(scene)


def test_a_thread_that_ended_is_told_and_ends_the_worker() -> None:
    """The server hears which batch it had begun; the worker drains."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        SLOTS[-1].tell(ThreadEnded(session=server.session, slot=0, batch=9))
        assert SlotEnded(slot=0, session=server.session, batch=9) == await server.next(SlotEnded)
        await server.next(WorkerDraining)
        server.say(Goodbye())
        await server.left.wait()
        assert WorkerEnd.SLOT_ENDED is worker.end

    play(scene)


def test_a_slot_that_lost_the_server_has_the_worker_greet_again() -> None:
    """On another connection, in a new session; what a slot of the last session says later changes nothing."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        first, session = server.peer, server.session
        SLOTS[-1].tell(SessionBroken(session=session, why="the server is silent"))
        await server.welcome()
        assert first != server.peer
        SLOTS[-1].tell(SessionBroken(session=session, why="the server is silent"))
        await server.next(Heartbeat)
        await trio.testing.wait_all_tasks_blocked()
        assert 2 == len(ready)

    play(scene)


def test_a_server_that_refuses_this_version_is_not_asked_again() -> None:
    """The worker ends, and says why in its log."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        assert WORKER_PROTOCOL == (await server.next(WorkerHello)).protocol
        server.say(WorkerRefused(model="", message="it speaks version 2"))
        await server.left.wait()
        assert WorkerEnd.UNUSABLE is worker.end

    play(scene)

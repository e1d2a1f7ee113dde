"""A worker's tasks in memory, under a clock that jumps; the test plays the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import trio
import trio.testing

from shapestream.serving.executor import Reports
from shapestream.transport.interface import Connection
from shapestream.transport.memory import MemoryEndpoint, MemoryServer
from shapestream.wire.codec import Role, decode, encode
from shapestream.wire.limits import MAX_TENSORS, WORKER_LIMITS
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Entry,
    Execute,
    ExecuteMember,
    Goodbye,
    Heartbeat,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerWelcome,
)
from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Buffer, Tensors
from shapestream_engine.ports import Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import InputPort, ModelSignature, OutputPort
from shapestream_workers.worker import ORPHAN_S, RETRY_MAX_S, Worker

T = TypeVar("T", bound=Entry)

ROWS = NamedShape.parse("batch:1..8, 2")
SIGNATURE = ModelSignature("m", (InputPort("x", "f32", ROWS),), (OutputPort("y", "f32", ROWS, Rows()),))
TENSORS = Tensors(layout=((0, "f32", (1, 2)),), buffers=(bytes(range(8)),))


class EchoSlots:
    """One slot that answers with its input, after `delay_s`; a slot source and its executor at once."""

    name = "echo"
    slots = 1
    prefetch_s = 0.0
    digests: Mapping[str, str] = {}
    models: Mapping[str, ModelSignature] = {"m": SIGNATURE}
    costs: Mapping[str, CostTable] = {}

    def __init__(self, nursery: trio.Nursery, delay_s: float, outputs: Tensors | None = None) -> None:
        self._nursery = nursery
        self._outputs = outputs
        self._delay_s = delay_s
        self._busy = trio.Lock()
        self.closed = False

    def start(self, report: Reports) -> EchoSlots:
        """Remembers to whom to report."""
        self._report = report
        return self

    def start_nowait(self, batch: Batch) -> None:
        """Answers later."""
        self._nursery.start_soon(self._answer, batch)

    def cancel_nowait(self, batch: int) -> None:
        """Cannot be cancelled."""

    def recall_nowait(self, batch: int) -> None:
        """Cannot be taken back."""

    async def aclose(self) -> None:
        """Remembers."""
        self.closed = True

    async def _answer(self, batch: Batch) -> None:
        async with self._busy:  # a batch that comes meanwhile waits behind it
            await trio.sleep(self._delay_s)
        report = BatchReport(
            batch=batch.batch,
            outputs=batch.members if self._outputs is None else (self._outputs,),
            run_s=self._delay_s,
            busy_s=self._delay_s,
            reallocations=0,
            preparations=0,
            code=None,
            message="",
        )
        self._report([report])


class Played:
    """The server's end: what the worker said, and what it is told."""

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        self.socket: MemoryServer = endpoint.bind()
        self.peer = b""
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
                    self.peer = peer
                    self._entries += decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS).entries

    def say(self, *entries: Entry) -> None:
        """To the worker heard last."""
        self.socket.send_nowait(self.peer, encode(entries, limits=WORKER_LIMITS))

    async def welcome(self) -> WorkerHello:
        """Waits for the greeting, and answers it."""
        hello = await self.next(WorkerHello)
        self.say(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=500))
        return hello


def execute(batch: int) -> Execute:
    """One member of one row."""
    member = ExecuteMember(remaining_ms=None, tensors=TENSORS)
    return Execute(batch=batch, slot=0, model="m", sizes=(1,), members=(member,))


def play(
    scene: Callable[[Played, Worker, list[float]], Awaitable[None]],
    *,
    delay_s: float = 0.1,
    outputs: Tensors | None = None,
) -> EchoSlots:
    """Runs a worker and the scene; `ready` collects the times at which the worker was welcomed."""
    slots: Sequence[EchoSlots] = []

    async def main() -> None:
        nonlocal slots
        endpoint = MemoryEndpoint()
        ready: list[float] = []
        async with trio.open_nursery() as nursery:
            slots = [EchoSlots(nursery, delay_s, outputs)]
            worker = Worker(
                "w-1", slots[0], endpoint.connect, ready=lambda: ready.append(trio.current_time())
            )
            server = Played(endpoint)

            async def live() -> None:
                await worker.run()
                server.left.set()

            nursery.start_soon(live)
            await scene(server, worker, ready)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return slots[0]


def test_a_worker_greets_is_welcomed_and_answers() -> None:
    """The tensors come back as they went; readiness is told once."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        hello = await server.welcome()
        assert ("w-1", ["m"]) == (hello.worker, list(hello.models))
        server.say(execute(7))
        done = await server.next(BatchDone)
        assert (7, 100_000) == (done.batch, done.run_us)
        assert [bytes(range(8))] == [
            bytes(member.buffers[0]) for member in done.outputs if member is not None
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
            worker = Worker("w-1", EchoSlots(nursery, 0.0), connect)
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
        again.say(execute(1))
        assert 1 == (await again.next(BatchDone)).batch

    play(scene)


def test_the_answer_of_an_old_session_is_swallowed() -> None:
    """The server forgot batch 1 in the middle; what it calls batch 1 now is answered once, by its own run."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        server.say(execute(1))
        await server.next(Heartbeat)
        began = trio.current_time()
        server.say(Unknown())
        await server.welcome()
        server.say(execute(1))
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
        server.say(execute(1))
        await trio.testing.wait_all_tasks_blocked()
        server.say(Unknown())
        began = trio.current_time()
        await server.left.wait()
        assert worker.hangs
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
        server.say(execute(3))
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
            worker = Worker("w-1", EchoSlots(nursery, 0.0), endpoint.connect)
            nursery.start_soon(worker.run)
            await trio.testing.wait_all_tasks_blocked()
            worker.drain()
        # The nursery has ended, and so has the worker.
        assert 0 == len(endpoint.connections)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_results_that_fit_no_message_fail_their_batch_alone() -> None:
    """More outputs than a result may hold: the batch is answered as failed, the worker goes on."""

    async def scene(server: Played, worker: Worker, ready: list[float]) -> None:
        await server.welcome()
        server.say(execute(1))
        failed = await server.next(BatchFailed)
        assert (1, "model_error") == (failed.batch, failed.code)
        assert "do not fit the protocol" in failed.message
        server.say(Heartbeat())
        await server.next(Heartbeat)

    layout = tuple((number, "u8", (2048,)) for number in range(MAX_TENSORS + 1))
    play(scene, outputs=Tensors(layout=layout, buffers=[bytes(2048)] * len(layout)))

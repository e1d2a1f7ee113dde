"""What every transport promises, shown over memory, ipc and tcp."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.transport.conftest import OpenLink

from shapestream.errors import OutboxFull, PeerGone
from shapestream.transport.interface import Connection, Message, PeerSocket


def plain(frames: Message) -> list[bytes]:
    """Frames as bytes, whatever holds them."""
    return [bytes(memoryview(frame)) for frame in frames]


async def receive_exactly(socket: PeerSocket | Connection, count: int) -> list[list[bytes]]:
    """The frames of the next `count` messages."""
    came: list[list[bytes]] = []
    while len(came) < count:
        for message in await socket.receive():
            came.append(plain(message[1] if isinstance(message, tuple) else message))
    assert count == len(came)
    return came


@real_time
async def test_messages_arrive_whole_and_in_order(open_link: OpenLink) -> None:
    """Messages of several frames, small, large and empty, arrive as they were sent, and go back likewise."""
    messages = [
        [b"%d" % number, bytes(number * 97), b"", b"x" * (number % 7 * 30_000)] for number in range(200)
    ]

    async with open_link(1) as link:
        (connection,) = link.connections
        for frames in messages:
            await connection.send(frames)
        came = []
        while len(came) < len(messages):
            for peer, frames in await link.server.receive():
                came.append(plain(frames))
                link.server.send_nowait(peer, frames)
        assert messages == came
        assert messages == await receive_exactly(connection, len(messages))


@real_time
async def test_each_peer_gets_its_own_answers(open_link: OpenLink) -> None:
    """Peers are told apart by their id, which stays the same from message to message."""

    async def client(number: int, connection: Connection) -> None:
        for turn in range(50):
            await connection.send([b"%d %d" % (number, turn)])
        expected = [[b"%d %d" % (number, turn)] for turn in range(50)]
        assert expected == await receive_exactly(connection, 50)

    async with open_link(5) as link, trio.open_nursery() as nursery:
        for number, connection in enumerate(link.connections):
            nursery.start_soon(client, number, connection)
        peers: dict[bytes, set[bytes]] = {}
        answered = 0
        while answered < 250:
            for peer, frames in await link.server.receive():
                peers.setdefault(peer, set()).add(plain(frames)[0].split()[0])
                link.server.send_nowait(peer, frames)
                answered += 1
        assert 5 == len(peers)
        assert [1] * 5 == [len(numbers) for numbers in peers.values()]


@real_time
async def test_many_tasks_may_wait_on_one_socket(open_link: OpenLink) -> None:
    """No BusyResourceError: every message reaches exactly one of the waiting tasks, on both sides."""

    async def gather(
        socket: PeerSocket | Connection, came: list[bytes], done: trio.Event, total: int
    ) -> None:
        while True:
            for message in await socket.receive():
                came.append(plain(message[1] if isinstance(message, tuple) else message)[0])
            if len(came) == total:
                done.set()

    async with open_link(1) as link, trio.open_nursery() as nursery:
        (connection,) = link.connections
        there: list[bytes] = []
        done = trio.Event()
        for _ in range(10):
            nursery.start_soon(gather, link.server, there, done, 500)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(500):
            await connection.send([b"%d" % number])
            if number % 50 == 0:
                await trio.testing.wait_all_tasks_blocked(0.001)
        await done.wait()
        assert sorted(b"%d" % number for number in range(500)) == sorted(there)
        nursery.cancel_scope.cancel()


@real_time
async def test_a_cancelled_receive_loses_nothing(open_link: OpenLink) -> None:
    """Receives are cancelled at random, again and again, under load; every message arrives once, in order."""
    total = 3000

    async def feed(connection: Connection) -> None:
        for number in range(total):
            await connection.send([b"%d" % number, b"payload"])
            if number % 17 == 0:
                await trio.lowlevel.checkpoint()

    async def collect(server: PeerSocket, came: list[int], chance: random.Random) -> int:
        cancelled = 0
        while len(came) < total:
            with trio.CancelScope() as scope:
                # The deadline is often over before the receive begins, or passes while it waits or just as it ends.
                scope.deadline = trio.current_time() + chance.choice([-1, 0, 0, 1e-5, 1e-4, 1e-3])
                for _, frames in await server.receive():
                    came.append(int(frames[0]))
            cancelled += scope.cancelled_caught
            if scope.cancelled_caught:
                await trio.lowlevel.checkpoint()
        return cancelled

    async with open_link(1) as link, trio.open_nursery() as nursery:
        nursery.start_soon(feed, link.connections[0])
        came: list[int] = []
        cancelled = await collect(link.server, came, random.Random(7))
        assert list(range(total)) == came
        assert cancelled > 10


@real_time
async def test_a_cancelled_send_sent_nothing(open_link: OpenLink) -> None:
    """A send that was cancelled before it began leaves no message behind, and no half of one."""

    async with open_link(1) as link:
        (connection,) = link.connections
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.send([b"cancelled", b"rest"])
        assert scope.cancelled_caught
        await connection.send([b"sent"])
        assert [[b"sent"]] == await receive_exactly(link.server, 1)


@real_time
async def test_receive_nowait_takes_what_is_there(open_link: OpenLink) -> None:
    """An empty socket gives an empty list, at once."""

    async with open_link(1) as link:
        assert [] == link.server.receive_nowait()
        assert [] == link.connections[0].receive_nowait()


@real_time
async def test_a_flood_does_not_hold_the_event_loop(open_link: OpenLink) -> None:
    """One receive takes at most a burst; another task gets its turn in between."""

    async with open_link(1) as link:
        (connection,) = link.connections
        sizes = []
        turns = 0

        async def watch() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for _ in range(700):
                await connection.send([b"x"])
            nursery.start_soon(watch)
            while sum(sizes) < 700:
                sizes.append(len(await link.server.receive()))
            # Within one turn of the loop trio runs tasks in any order, so the last turn may be missing.
            assert turns >= len(sizes) - 1 >= 2
            nursery.cancel_scope.cancel()
        assert max(sizes) <= 256


@real_time
async def test_unknown_peers_are_gone(open_link: OpenLink) -> None:
    """A message to nobody raises instead of vanishing."""

    async with open_link(1) as link:
        with pytest.raises(PeerGone):
            link.server.send_nowait(b"nobody", [b"hello"])


@real_time
async def test_a_disconnected_peer_is_gone(open_link: OpenLink) -> None:
    """After a peer has closed its connection, messages to it raise, sooner or later."""

    async with open_link(1) as link:
        (connection,) = link.connections
        await connection.send([b"hello"])
        ((peer, _),) = await link.server.receive()
        connection.close()

        async def talk() -> None:
            while True:
                try:
                    link.server.send_nowait(peer, [b"are you there?"])
                except OutboxFull:
                    link.server.forget(peer)
                await trio.lowlevel.checkpoint()

        with pytest.raises(PeerGone):
            await talk()


@real_time
async def test_a_peer_that_is_cut_off_is_not_heard_again(open_link: OpenLink) -> None:
    """What it sends is dropped, even a flood of it; the others are served."""

    async with open_link(2) as link:
        bad, good = link.connections
        await bad.send([b"bad"])
        ((peer, _),) = await link.server.receive()
        link.server.cut_off(peer)
        for _ in range(600):
            await bad.send([b"more"])
        await good.send([b"good"])
        assert [[b"good"]] == await receive_exactly(link.server, 1)


@pytest.mark.parametrize("side", ["server", "connection"])
@real_time
async def test_closing_wakes_those_who_wait(open_link: OpenLink, side: str) -> None:
    """A waiting receive ends with ClosedResourceError, run() returns, closing twice is once."""

    async with open_link(1) as link:
        socket = link.server if side == "server" else link.connections[0]
        ended = 0

        async def wait() -> None:
            nonlocal ended
            with pytest.raises(trio.ClosedResourceError):
                await socket.receive()
            ended += 1

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            socket.close()
            socket.close()
        assert 3 == ended
        with pytest.raises(trio.ClosedResourceError):
            socket.receive_nowait()
        with pytest.raises(trio.ClosedResourceError):
            await socket.receive()


@real_time
async def test_buffers_of_all_sorts_can_be_sent(open_link: OpenLink) -> None:
    """bytes, bytearray and memoryview, small and large, contiguous as they are."""
    frames = [b"a", bytearray(b"b" * 10), memoryview(b"c" * 70_000), bytearray(b"d" * 70_000), b"e" * 70_000]

    async with open_link(1) as link:
        (connection,) = link.connections
        await connection.send(frames)
        ((peer, came),) = await link.server.receive()
        assert plain(list(frames)) == plain(came)
        assert [bytes, bytes] == [type(frame) for frame in came[:2]]
        link.server.send_nowait(peer, came)
        assert [plain(list(frames))] == await receive_exactly(connection, 1)

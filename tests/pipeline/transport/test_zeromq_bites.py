"""The hazards of ZeroMQ under an event loop, which `transport/zeromq.py` lists: none of them strikes here."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from select import select
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
import zmq
from tests.held import held
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.transport.witness import Witness, WitnessedRoom

from shapestream.errors import OutboxFull, PeerGone, TransportError
from shapestream.transport.interface import Wake
from shapestream.transport.router import Outbox, OutboxRoom, RouterSocket
from shapestream.transport.zeromq import DealerSocket, SocketOptions

_NUMBERS = count()
LARGE = SocketOptions(high_water_mark=1000, receive_high_water_mark=1000)
SMALL = SocketOptions(
    high_water_mark=2, receive_high_water_mark=2, outbox_messages=50, outbox_bytes=20_000_000
)


@asynccontextmanager
async def opened(
    address: str,
    count: int = 1,
    *,
    options: SocketOptions | None = None,
    watched: bool = True,
    context: zmq.Context[Any] | None = None,
    room: OutboxRoom | None = None,
) -> AsyncIterator[tuple[RouterSocket, list[DealerSocket]]]:
    """A router and so many dealers; dealers that are not `watched` are slow peers: nobody ever reads there.

    An address in memory is numbered: libzmq frees one some time after its socket was closed.
    """
    router = RouterSocket(options=options, context=context, room=room)
    router.bind(f"{address}-{next(_NUMBERS)}" if address.startswith("inproc:") else address)
    dealers = [DealerSocket(options=options, context=context) for _ in range(count)]
    for dealer in dealers:
        dealer.connect(router.addresses[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(router.run)
        if watched:
            for dealer in dealers:
                await nursery.start(dealer.run)
        try:
            with trio.fail_after(60):
                yield router, dealers
        finally:
            for socket in (router, *dealers):
                socket.close()


async def introduce(router: RouterSocket, dealers: Sequence[DealerSocket]) -> list[bytes]:
    """The peer ids of the dealers, in their order."""
    peers = []
    for dealer in dealers:
        dealer.send_nowait([b"hello"])
        ((peer, _),) = await router.receive()
        peers.append(peer)
    return peers


# ---------------------------------------------------------------- ZMQ_FD


@pytest.mark.parametrize("in_watcher", [False, True], ids=["receiver", "watcher"])
@pytest.mark.parametrize("address", ["ipc://{}/s", "tcp://127.0.0.1:*", "inproc://fd"])
@real_time
async def test_the_announcement_is_never_missed(tmp_path: Path, address: str, in_watcher: bool) -> None:
    """Bursts cross in both directions while other tasks send: a swallowed ZMQ_FD would stop one side for ever."""
    rounds, senders = 400, 3

    async def push(dealer: DealerSocket, name: int) -> None:
        for number in range(rounds):
            await dealer.send([b"%d:%d" % (name, number)])
            if number % (name + 2) == 0:
                await trio.lowlevel.checkpoint()

    async def answer(router: RouterSocket, inbox: trio.MemorySendChannel[Any]) -> None:
        while True:
            for message in await router.receive():
                inbox.send_nowait(message)

    async def reply(router: RouterSocket, outbox: trio.MemoryReceiveChannel[Any]) -> None:
        # A task of its own: its sends swallow announcements while `answer` is parked.
        async for peer, frames in outbox:
            router.send_nowait(peer, frames)
            router.send_nowait(peer, [b"again", *frames])

    async def collect(dealer: DealerSocket) -> None:
        came, all_came = 0, trio.Event()

        def count(messages: list[Any]) -> None:
            nonlocal came
            came += len(messages)
            if came == 2 * rounds * senders:
                all_came.set()

        async def receive() -> None:
            while True:
                count(await dealer.receive())

        if in_watcher:
            dealer.on_messages = lambda: count(dealer.receive_nowait())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await all_came.wait()
            nursery.cancel_scope.cancel()

    async with opened(address.format(tmp_path)) as (router, (dealer,)):
        async with trio.open_nursery() as nursery:
            ends = trio.open_memory_channel[Any](10_000)
            nursery.start_soon(answer, router, ends[0])
            nursery.start_soon(reply, router, ends[1])
            for name in range(senders):
                nursery.start_soon(push, dealer, name)
            await collect(dealer)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("address", ["ipc://{}/s", "tcp://127.0.0.1:*"])
@real_time
async def test_a_send_to_a_peer_that_is_gone_swallows_nobodys_news(tmp_path: Path, address: str) -> None:
    """The router would be deaf until something else happened: a heartbeat to a client that had just left did that."""

    context = Witness()
    async with opened(address.format(tmp_path), 2, context=context) as (router, (leaving, staying)):
        descriptor = context.made[0].get(zmq.FD)
        gone, _ = await introduce(router, (leaving, staying))
        leaving.close()
        with trio.fail_after(60):
            while True:  # until the router has heard of it
                try:
                    router.send_nowait(gone, [b"still here?"])
                except PeerGone:
                    break
                await trio.lowlevel.checkpoint()
        for number in range(100):
            heard = trio.Event()

            async def listen(heard: trio.Event) -> None:
                assert [[b"news"]] == [frames for _, frames in await router.receive()]
                heard.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen, heard)
                await trio.testing.wait_all_tasks_blocked()
                staying.send_nowait([b"news"])
                # Blocks this thread until the news are there, and nobody but the send can take them.
                assert select([descriptor], [], [], 30) == ([descriptor], [], [])
                with pytest.raises(PeerGone):
                    router.send_nowait(gone, [b"%d" % number])
                with trio.fail_after(120):
                    await heard.wait()


@pytest.mark.parametrize("address", ["ipc://{}/s", "inproc://pingpong"])
@real_time
async def test_thousands_of_single_messages(tmp_path: Path, address: str) -> None:
    """One message at a time, both sides parked in between: the hardest case for a descriptor that speaks once."""

    async def echo(router: RouterSocket) -> None:
        while True:
            for peer, frames in await router.receive():
                router.send_nowait(peer, frames)

    async with opened(address.format(tmp_path)) as (router, (dealer,)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo, router)
            for number in range(3000):
                dealer.send_nowait([b"%d" % number])
                assert [[b"%d" % number]] == await dealer.receive()
            nursery.cancel_scope.cancel()


@real_time
async def test_a_message_that_a_send_found_does_not_stop_the_event_loop() -> None:
    """It came before the watcher waits, and its receiver comes later."""

    def stands_still(*_: object) -> None:
        raise AssertionError("the event loop stands still")

    context = Witness()
    async with opened("inproc://found", watched=False, context=context) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        router.send_nowait(peer, [b"news"])
        (socket,) = [made for made in context.made if made.type == zmq.DEALER]
        select([socket.get(zmq.FD)], [], [], 30)
        dealer.send_nowait([b"finds it"])
        before = signal.signal(signal.SIGALRM, stands_still)
        signal.alarm(30)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dealer.run)
                await trio.testing.wait_all_tasks_blocked()
                assert [[b"news"]] == await dealer.receive()
                nursery.cancel_scope.cancel()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("swallow", ["send", "receive", "bind"])
@real_time
async def test_whoever_swallows_the_announcement_wakes_the_receiver(tmp_path: Path, swallow: str) -> None:
    """A message that another call found first still reaches the task that waits for one."""

    async with opened(f"inproc://swallow-{swallow}", 2) as (router, (dealer, other)):
        (_, peer) = await introduce(router, [dealer, other])
        came: list[Any] = []

        async def wait() -> None:
            came.extend(await router.receive())

        for _ in range(200):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                # In memory, so that the message is there before the next line, in the same turn of the loop.
                dealer.send_nowait([b"wake up"])
                match swallow:
                    case "send":
                        router.send_nowait(peer, [b"unrelated"])
                    case "receive":
                        came.extend(router.receive_nowait())
                        dealer.send_nowait([b"wake up, too"])
                    case _:
                        router.bind("inproc://elsewhere" + str(len(came)))
                other.receive_nowait()
        assert len(came) >= 200


@real_time
async def test_what_a_burst_leaves_reaches_the_next_waiter() -> None:
    """One task takes a burst and does not come back; another gets the rest, though nothing more arrives."""

    async with opened("inproc://burst", options=LARGE) as (router, (dealer,)):
        await introduce(router, [dealer])
        came: list[int] = []

        async def take_once() -> None:
            came.append(len(await router.receive()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_once)
            nursery.start_soon(take_once)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(400):
                dealer.send_nowait([b"%d" % number])
        assert [256, 144] == came


@real_time
async def test_a_thread_without_an_event_loop_goes_on_where_its_burst_ended() -> None:
    """libzmq announces nothing for the messages that a burst leaves."""
    wake = Wake()
    async with opened("inproc://thread", options=LARGE, watched=False) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        for number in range(400):
            router.send_nowait(peer, [b"%d" % number])
        came: list[Any] = []
        while len(came) < 400:
            assert dealer.wait(wake, 60, for_room=False)
            came += dealer.receive_nowait()
        assert not dealer.wait(wake, 0, for_room=False)
        wake.set()
        assert not dealer.wait(wake, 60, for_room=False)
    wake.close()


@real_time
async def test_peers_that_are_cut_off_are_drained() -> None:
    """A receive goes on until it has found a message to hand over, or libzmq has nothing left."""

    context = Witness()
    async with opened("inproc://cutoff", options=LARGE, context=context) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        router.cut_off(peer)
        for _ in range(700):
            dealer.send_nowait([b"ignored"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.receive)
            await trio.testing.wait_all_tasks_blocked()
            assert not context.made[0].get(zmq.EVENTS) & zmq.POLLIN
            nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- slow peers


@real_time
async def test_nothing_is_dropped_at_the_high_water_mark() -> None:
    """Far more messages than libzmq holds wait in the outbox, and all arrive in order once the peer reads."""

    async with opened("inproc://hwm", options=SMALL, watched=False) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        for number in range(40):
            router.send_nowait(peer, [b"%d" % number])
        came: list[int] = []
        while len(came) < 40:
            came += [int(frames[0]) for frames in dealer.receive_nowait()]
            await trio.lowlevel.checkpoint()
        assert list(range(40)) == came
        assert [] == [thing for thing in held(router) if isinstance(thing, Outbox)]


@real_time
async def test_a_peer_that_does_not_read_is_given_up() -> None:
    """The outbox is bounded in messages; after `forget` nothing of it is left, and the peer may start again."""

    async with opened("inproc://full", options=SMALL, watched=False) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        taken = 0

        def overfill() -> None:
            nonlocal taken
            for taken in range(1000):
                router.send_nowait(peer, [b"%d" % taken])

        with pytest.raises(OutboxFull, match="<Outbox: 50 messages"):
            overfill()
        assert 50 <= taken <= 60
        router.forget(peer)
        came = [int(frames[0]) for frames in dealer.receive_nowait()]
        assert list(range(taken - 50)) == came
        router.send_nowait(peer, [b"afresh"])
        while not (frames := dealer.receive_nowait()):
            await trio.lowlevel.checkpoint()
        assert [[b"afresh"]] == frames


@real_time
async def test_the_outbox_is_bounded_in_bytes() -> None:
    """A few huge messages fill it as well; their bytes are counted."""

    async with opened("inproc://bytes", options=SMALL, watched=False) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        huge = bytes(9_000_000)

        def overfill() -> None:
            for _ in range(40):
                router.send_nowait(peer, [huge])

        with pytest.raises(OutboxFull, match="3 messages, 27000000 bytes"):
            overfill()


@real_time
async def test_a_slow_peer_does_not_hold_up_the_others() -> None:
    """While one peer's outbox fills, another gets a thousand messages through the same socket."""

    async with opened("inproc://slow", 2, options=SMALL, watched=False) as (router, (slow, fast)):
        slow_peer, fast_peer = await introduce(router, [slow, fast])
        for number in range(30):
            router.send_nowait(slow_peer, [b"%d" % number])
        came: list[int] = []
        for number in range(1000):
            router.send_nowait(fast_peer, [b"%d" % number])
            came += [int(frames[0]) for frames in fast.receive_nowait()]
        while len(came) < 1000:
            await trio.lowlevel.checkpoint()
            came += [int(frames[0]) for frames in fast.receive_nowait()]
        assert list(range(1000)) == came
        late: list[int] = []
        while len(late) < 30:
            late += [int(frames[0]) for frames in slow.receive_nowait()]
            await trio.lowlevel.checkpoint()
        assert list(range(30)) == late


@real_time
async def test_a_message_that_comes_after_the_last_receive_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that found nothing looks once more, to empty an outbox: that look takes the announcement of a message."""
    heard: list[bytes] = []

    room = WitnessedRoom()
    async with opened("inproc://after", 2, options=SMALL, watched=False, room=room) as (router, (slow, fast)):
        slow_peer, _ = await introduce(router, [slow, fast])
        while not room.nbytes:
            router.send_nowait(slow_peer, [b"one more"])
        look = router._look

        def look_late() -> int:
            monkeypatch.undo()
            slow.receive_nowait()
            fast.send_nowait([b"between"])
            return look()

        async def receive() -> None:
            heard.extend([bytes(frames[0]) for _, frames in await router.receive()])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            while not router._receivers:
                await trio.lowlevel.checkpoint()
            monkeypatch.setattr(router, "_look", look_late)
            router._receivers.unpark()  # as for a message that another task took first
    assert [b"between"] == heard


@real_time
async def test_an_outbox_goes_with_its_peer(tmp_path: Path) -> None:
    """When a peer disconnects with messages waiting for it, they are dropped, and the next send says so."""

    room = WitnessedRoom()
    async with opened(f"ipc://{tmp_path}/s", options=SMALL, watched=False, room=room) as (router, (dealer,)):
        (peer,) = await introduce(router, [dealer])
        for _ in range(15):
            router.send_nowait(peer, [bytes(1_000_000)])
        assert room.nbytes
        dealer.close()
        while room.nbytes:
            await trio.lowlevel.checkpoint()
        with pytest.raises(PeerGone):
            router.send_nowait(peer, [b"anybody?"])


@real_time
async def test_a_dealer_waits_for_room() -> None:
    """`send_nowait` says WouldBlock, `send` waits; every message that was accepted arrives, in order."""

    async with opened("inproc://room", options=SMALL) as (router, (dealer,)):
        accepted = 0

        def fill() -> None:
            nonlocal accepted
            while True:
                dealer.send_nowait([b"%d" % accepted, b"rest"])
                accepted += 1

        with pytest.raises(trio.WouldBlock):
            fill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dealer.send, [b"cancelled while it waited", b""])
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        came: list[int] = []

        async def read() -> None:
            while len(came) < accepted + 20:
                came.extend(int(frames[0]) for _, frames in await router.receive())

        async with trio.open_nursery() as nursery:
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(read)
            for number in range(20):
                await dealer.send([b"%d" % (accepted + number), b"rest"])
        assert list(range(accepted + 20)) == came


class _EventfulSocket(zmq.Socket[bytes]):
    """A socket that calls `meanwhile` once, when libzmq has refused a message."""

    meanwhile: Callable[[], None] | None = None

    def send(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().send(*arguments, **options)
        except zmq.Again:
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                meanwhile()
            raise


@real_time
async def test_room_that_comes_during_a_refused_send_is_used() -> None:
    """libzmq may refuse a message and report room right after; it announces that room to nobody else."""

    sockets: list[_EventfulSocket] = []

    class EventfulContext(zmq.Context[Any]):
        def socket(self, *arguments: Any, **options: Any) -> Any:
            sockets.append(_EventfulSocket(self, *arguments, **options))
            return sockets[-1]

    context = EventfulContext.shadow(zmq.Context.instance())
    router = RouterSocket(options=SMALL)
    router.bind("inproc://room-meanwhile")
    dealer = DealerSocket(options=SMALL, context=context)
    dealer.connect("inproc://room-meanwhile")
    came: list[bytes] = []
    sent = False

    async def send_one_more() -> None:
        nonlocal sent
        await dealer.send([b"one more"])
        sent = True

    def read() -> None:
        came.extend(bytes(memoryview(frames[0])) for _, frames in router.receive_nowait())

    async with trio.open_nursery() as nursery:
        await nursery.start(dealer.run)
        accepted = 0
        with contextlib.suppress(trio.WouldBlock):
            while True:
                dealer.send_nowait([b"%d" % accepted])
                accepted += 1
        (socket,) = (socket for socket in sockets if socket.type == zmq.DEALER)
        socket.meanwhile = read
        nursery.start_soon(send_one_more)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert sent
        read()
        assert [*(b"%d" % number for number in range(accepted)), b"one more"] == came
        dealer.close()
        router.close()


# ---------------------------------------------------------------- frames


@real_time
async def test_large_frames_are_neither_copied_in_nor_out(tmp_path: Path) -> None:
    """A received large frame is ZeroMQ's own memory, is relayed as it is, and may lie at any address."""

    async with opened(f"ipc://{tmp_path}/s") as (router, (dealer,)):
        values = np.arange(100_000, dtype="f4")
        dealer.send_nowait([b"header", values.data, b"small"])
        ((peer, frames),) = await router.receive()
        assert [bytes, zmq.Frame, bytes] == [type(frame) for frame in frames]
        np.testing.assert_array_equal(values, np.frombuffer(frames[1], "f4"))
        router.send_nowait(peer, frames)
        ((_, back, _),) = await dealer.receive()
        np.testing.assert_array_equal(values, np.frombuffer(back, "f4"))


@pytest.mark.parametrize(
    "frames", [[], [b"first", memoryview(bytes(10))[::2]], [b"first", "text"], [b"first", 5]]
)
@real_time
async def test_a_message_that_cannot_be_sent_leaves_no_half_behind(tmp_path: Path, frames: list[Any]) -> None:
    """What libzmq would refuse is refused before its first frame is sent; the next message is whole."""

    async with opened(f"ipc://{tmp_path}/s") as (router, (dealer,)):
        with pytest.raises((TypeError, ValueError)):
            dealer.send_nowait(frames)
        (peer,) = await introduce(router, [dealer])
        with pytest.raises((TypeError, ValueError)):
            router.send_nowait(peer, frames)
        router.send_nowait(peer, [b"whole", b"message"])
        assert [[b"whole", b"message"]] == await dealer.receive()


@real_time
async def test_a_connection_that_breaks_within_a_message() -> None:
    """libzmq then swallows up to the last frame; we let it, so that the next message keeps its beginning."""

    calls: list[tuple[bytes, bool]] = []

    class Breaking(zmq.Socket[Any]):
        """Refuses the second frame, as libzmq does when the pipe ends between two frames."""

        def send(self, frame: bytes, flags: int) -> None:  # type: ignore[override]
            calls.append((frame, bool(flags & zmq.SNDMORE)))
            if len(calls) == 2:
                raise zmq.Again

        def get(self, option: int) -> Any:
            return 0 if calls and option == zmq.EVENTS else super().get(option)  # no room: the pipe has ended

    async with DealerSocket(context=Witness(kind=Breaking)) as dealer:
        with pytest.raises(trio.WouldBlock):
            dealer.send_nowait([b"a", b"b", b"c", b"d"])
        assert [(b"a", True), (b"b", True), (b"c", True), (b"d", False)] == calls


@real_time
async def test_an_oversized_frame_ends_its_connection_only(tmp_path: Path) -> None:
    """A peer that announces more than the limit is disconnected by libzmq; the others do not notice."""
    options = SocketOptions(max_frame_bytes=1_000_000)

    async with opened(f"ipc://{tmp_path}/s", 2, options=options) as (router, (greedy, modest)):
        first, _ = await introduce(router, [greedy, modest])
        greedy.send_nowait([bytes(1_000_001)])

        async def until_gone() -> None:
            while True:
                try:
                    router.send_nowait(first, [b"still there?"])
                except OutboxFull:
                    router.forget(first)
                await trio.lowlevel.checkpoint()

        with pytest.raises(PeerGone):
            await until_gone()
        modest.send_nowait([bytes(1_000_000)])
        ((_, frames),) = await router.receive()
        assert 1_000_000 == len(frames[0])


@pytest.mark.parametrize("sockets", [0, 1])
@real_time
async def test_where_no_more_sockets_are_given_a_dealer_says_so_and_leaves_none_behind(sockets: int) -> None:
    """Whether its own is refused, or the one by which it hears of handshakes: libzmq says "too many open files"."""

    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, sockets + 1)
        taken = context.socket(zmq.PAIR)
        for _ in range(3):
            with pytest.raises(TransportError, match=r"cannot make another connection: .*open files"):
                DealerSocket(context=context)
        taken.close()


def test_a_receiver_holds_no_message_back_while_the_watcher_takes_later_ones() -> None:
    """Else a cancellation could be served before its request, and a report before an earlier one."""
    rounds = 20  # trio takes its tasks in any order
    came: list[bytes] = []

    async def receive(router: RouterSocket) -> None:
        came.extend(bytes(frames[0]) for _, frames in await router.receive())

    async def main() -> None:
        async with opened("inproc://order") as (router, (dealer,)), trio.open_nursery() as nursery:
            await introduce(router, [dealer])
            for already in range(0, 2 * rounds, 2):
                dealer.send_nowait([b"1"])
                nursery.start_soon(receive, router)
                await trio.lowlevel.checkpoint()
                dealer.send_nowait([b"2"])
                came.extend(bytes(frames[0]) for _, frames in router.receive_nowait())
                while len(came) < already + 2:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert [b"1", b"2"] * rounds == came

"""A message of more frames than any may have costs little memory, and ends where it ends."""

from __future__ import annotations

import trio
import zmq
from tests.e2e.zmtp import Raw, dialled, message
from tests.pipeline.serving.clocks import real_time

from shapestream.transport.router import FRAMES_AT_ONCE, RouterSocket
from shapestream.transport.zeromq import MAX_FRAMES, SocketOptions, receive_frames
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS


def test_of_an_endless_message_only_the_beginning_is_kept() -> None:
    """More than any decoder accepts, so that it is refused; the next message is whole."""
    assert MAX_FRAMES > 1 + max(WORKER_LIMITS.max_frames, CLIENT_LIMITS.max_frames)
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        receiver.bind("inproc://endless")
        sender.connect("inproc://endless")
        sender.send_multipart([b"x"] * (MAX_FRAMES + 1_000))
        sender.send_multipart([b"next", b"message"])
        assert MAX_FRAMES == len(receive_frames(receiver.recv))
        assert [b"next", b"message"] == receive_frames(receiver.recv)


def parts(count: int) -> bytes:
    """One message of so many parts of one byte each, as libzmq writes it."""
    return b"\x01\x01x" * (count - 1) + b"\x00\x01x"


@real_time
async def test_one_receive_takes_or_drops_a_bounded_number_of_frames() -> None:
    """Many messages of many parts lie there; each receive takes some of them, and those that are too long are cut."""

    async with (
        RouterSocket(options=SocketOptions(max_frames=1026)) as router,
        trio.open_nursery() as nursery,
    ):
        router.bind("tcp://127.0.0.1:*")
        await nursery.start(router.run)
        with trio.fail_after(60):
            raw = await trio.to_thread.run_sync(lambda: Raw(dialled(router.addresses[0]), b"DEALER", b""))
            raw.socket.sendall(parts(1000) * 200 + parts(50_000) + message(b"last"))
            sizes: list[int] = []
            while 201 > len(sizes):
                taken = [len(frames) for _, frames in await router.receive()]
                assert FRAMES_AT_ONCE + 1026 > sum(taken)
                sizes += taken
            assert [1000] * 200 + [1026] == sizes[:201]
        raw.socket.close()
        nursery.cancel_scope.cancel()

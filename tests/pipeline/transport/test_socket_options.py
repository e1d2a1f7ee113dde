"""What our sockets ask of libzmq, seen on real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import zmq

from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.zeromq import DealerSocket, RouterSocket


def test_libzmq_beats_in_both_directions() -> None:
    """Each side looks for the other, and asks it to do the same; none of it sooner than the heartbeats above."""
    options = SocketOptions()
    socket = zmq.Context.instance().socket(zmq.DEALER)
    try:
        options.apply(socket)
        beats = [
            socket.get(option) for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL)
        ]
    finally:
        socket.close(0)
    assert [5000, 15000, 15000] == beats


def test_an_immediate_dealer_takes_nothing_without_a_server(tmp_path: Path) -> None:
    """So nothing of it reaches a server that comes later; a sender that waits goes on once there is one."""
    address = f"ipc://{tmp_path}/s"

    async def main() -> None:
        dealer = DealerSocket(options=SocketOptions(immediate=True))
        dealer.connect(address)
        async with trio.open_nursery() as nursery:
            await nursery.start(dealer.run)
            with pytest.raises(trio.WouldBlock):
                dealer.send_nowait([b"too early"])
            nursery.start_soon(dealer.send, [b"in time"])
            async with RouterSocket() as router:
                router.bind(address)
                await nursery.start(router.run)
                with trio.fail_after(120):
                    ((_, frames),) = await router.receive()
                assert [b"in time"] == frames
            dealer.close()

    trio.run(main)

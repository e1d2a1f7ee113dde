"""What our sockets ask of libzmq, seen on real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import zmq
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.transport.witness import Witness

from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import DealerSocket, SocketOptions


@pytest.mark.parametrize("socket", [RouterSocket, DealerSocket])
@real_time
async def test_the_kernel_watches_tcp_connections_and_libzmq_does_not(
    socket: type[RouterSocket] | type[DealerSocket],
) -> None:
    """Nothing of libzmq that can end the process is on; a peer that is gone without a word is found within 15 s."""

    context = Witness()
    async with socket(context=context):
        watched = {
            option.name: context.made[0].get(option)
            for option in (
                zmq.SocketOption.RCVHWM,
                zmq.SocketOption.HEARTBEAT_IVL,
                zmq.SocketOption.HANDSHAKE_IVL,
                zmq.SocketOption.TCP_KEEPALIVE,
                zmq.SocketOption.TCP_KEEPALIVE_IDLE,
                zmq.SocketOption.TCP_KEEPALIVE_INTVL,
                zmq.SocketOption.TCP_KEEPALIVE_CNT,
                zmq.SocketOption.TCP_MAXRT,
            )
        }
    assert {
        "RCVHWM": 0,
        "HEARTBEAT_IVL": 0,
        "HANDSHAKE_IVL": 5000,
        "TCP_KEEPALIVE": 1,
        "TCP_KEEPALIVE_IDLE": 5,
        "TCP_KEEPALIVE_INTVL": 5,
        "TCP_KEEPALIVE_CNT": 2,
        "TCP_MAXRT": 15000,
    } == watched


@real_time
async def test_an_immediate_dealer_takes_nothing_without_a_server(tmp_path: Path) -> None:
    """So nothing of it reaches a server that comes later; a sender that waits goes on once there is one."""
    address = f"ipc://{tmp_path}/s"

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

"""Peers that are cut off: bare sockets at a router."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import trio
from tests.e2e.zmtp import Raw, dialled, message
from tests.pipeline.serving.clocks import real_time

from shapestream.errors import OutboxFull
from shapestream.transport.router import RouterSocket


def until_the_end(raw: Raw) -> None:
    """Returns when the other side has closed this connection."""
    with suppress(ConnectionError):
        while raw.socket.recv(4096):
            pass


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@real_time
async def test_a_peer_that_is_cut_off_loses_its_connection(transport: str, tmp_path: Path) -> None:
    """At its next message; nothing can be sent to it from the first moment on, and others are heard."""

    async with RouterSocket() as router, trio.open_nursery() as nursery:
        router.bind("tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s")
        await nursery.start(router.run)
        (address,) = router.addresses
        with trio.fail_after(60):
            bad = await trio.to_thread.run_sync(lambda: Raw(dialled(address), b"DEALER", b""))
            bad.socket.sendall(message(b"first"))
            ((peer, _),) = await router.receive()
            router.cut_off(peer)
            with pytest.raises(OutboxFull, match="is cut off"):
                router.send_nowait(peer, [b"never"])
            bad.socket.sendall(message(b"second"))
            good = await trio.to_thread.run_sync(lambda: Raw(dialled(address), b"DEALER", b""))
            good.socket.sendall(message(b"hello"))
            ((_, frames),) = await router.receive()
            assert [b"hello"] == frames
            nursery.start_soon(router.receive)  # the second message may come behind the other peer's
            await trio.to_thread.run_sync(until_the_end, bad)
        for raw in (bad, good):
            raw.socket.close()
        nursery.cancel_scope.cancel()

"""The core in a thread, without an event loop: connections that are full, that end, and that no thread can use."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio
from tests.entries import Goodbye

from shapestream import blocking
from shapestream.errors import DeadlineExceeded, TransportError
from shapestream.testing import MemoryEndpoint, ScriptedServer
from shapestream.transport.zeromq import DealerSocket


def row(number: float) -> dict[str, Any]:
    """Inputs that tell calls apart."""
    return {"x": np.full((1, 3), number, np.float32)}


class Gate(DealerSocket):
    """A connection that the test can shut: like libzmq at its high-water mark."""

    shut = False

    def send_nowait(self, frames: Sequence[Any]) -> None:
        """Refuse while shut."""
        if self.shut:
            raise trio.WouldBlock
        super().send_nowait(frames)


def test_a_full_connection_keeps_what_can_still_be_withdrawn(server: ScriptedServer, address: str) -> None:
    """Deadlines pass while there is no room; then the rest goes, in order."""
    gates: list[Gate] = []

    def connect() -> Gate:
        gates.append(Gate())
        gates[-1].connect(address)
        return gates[-1]

    with blocking.connect(connect) as client, ThreadPoolExecutor(1) as pool:
        client.infer("double", row(0))
        (gate,) = gates
        gate.shut = True
        first = pool.submit(client.infer, "double", row(1))
        with pytest.raises(DeadlineExceeded):
            client.infer("double", row(2), deadline=0.05)
        with pytest.raises(DeadlineExceeded, match="never sent"):
            client.infer("double", row(3), deadline=0.05)
        gate.shut = False
        assert 8 == client.infer("double", row(4))["y"][0, 0]
        assert 2 == first.result()["y"][0, 0]
    numbers = [request.sequence for request in server.requests]
    assert sorted(numbers) == numbers
    assert len(server.requests) < 5


def test_a_server_that_left_is_looked_for_until_a_connection_can_be_made(
    server: ScriptedServer, address: str
) -> None:
    """What waits meanwhile is answered on the next connection, or told why there is none."""
    refusals = 0

    def connect() -> DealerSocket:
        nonlocal refusals
        if server.hellos and not refusals:
            refusals += 1
            raise TransportError("too many open files")
        socket = DealerSocket()
        socket.connect(address)
        return socket

    with blocking.connect(connect) as client, ThreadPoolExecutor(1) as pool:
        client.infer("double", row(0))
        server.hold()
        waiting = pool.submit(client.infer, "double", row(1))
        server.wait_until(lambda server: server.held)
        server.say(Goodbye())
        server.restart()
        with pytest.raises(DeadlineExceeded):
            client.infer("double", row(2), deadline=0.05)
        server.wait_until(lambda server: server.held)
        server.release()
        assert 2 == waiting.result()["y"][0, 0]
    assert (2, 1) == (server.hellos, refusals)


def test_a_memory_endpoint_is_refused() -> None:
    """Both of its ends live in one trio run."""
    with pytest.raises(RuntimeError, match=r"use shapestream\.connect"):
        blocking.connect(MemoryEndpoint().connect)

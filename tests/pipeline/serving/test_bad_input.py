"""Bad input over a real socket to real slots: what it does to the good input beside it. The tables are in test_hostile_*."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile_server import scaled, scaled_model
from tests.pipeline.serving.raw_messages import INLINE, assert_served, entry, message
from tests.pipeline.serving.raw_peer import RawPeer, ending, verdict
from tests.pipeline.serving.real_sockets import dialled, socket_serving

from shapestream.serving.server import Server
from shapestream.serving.slot_threads import SlotThreads
from shapestream.wire.messages import Failure, ModelRefused, OpenModel


@asynccontextmanager
async def scaled_serving(
    address: str, function: Callable[..., Any] = scaled, **options: Any
) -> AsyncIterator[Server]:
    """A server with one slot on a real thread, at a real address."""
    local = SlotThreads(models={"scaled": scaled_model(function)}, slots=1)
    async with socket_serving(address, local, **options) as server:
        yield server


@asynccontextmanager
async def scaled_client(address: str, client: bytes) -> AsyncIterator[RawPeer]:
    """A raw client on a real connection, with the model opened."""
    async with dialled(address) as peer:
        await peer.open_session(client, "scaled")
        yield peer


@real_time
async def test_a_bad_entry_fails_alone_among_good_ones(address: str) -> None:
    """Three requests in one message, the second one bad."""
    async with scaled_serving(address), scaled_client(address, b"g" * 16) as peer:
        peer.connection.send_nowait(
            message(entry(sequence=1), entry(sequence=2, priority=None), entry(sequence=3))
        )
        assert 2 == (await peer.hear(Failure)).sequence
        assert [1, 3] == await peer.sequences(2)


@real_time
async def test_a_deadline_that_has_passed_when_it_is_sent_is_exceeded(address: str) -> None:
    """It fails by its id; the next request is served."""
    async with scaled_serving(address), scaled_client(address, b"g" * 16) as peer:
        peer.connection.send_nowait(message(entry(remaining=0)))
        assert (7, "deadline_exceeded", False) == verdict(await peer.hear(Failure))
        await assert_served(peer, 8)


@real_time
async def test_an_unknown_model_name_and_a_worker_entry_are_refused(address: str) -> None:
    """Neither ends the session."""
    async with scaled_serving(address) as server, scaled_client(address, b"g" * 16) as peer:
        peer.say(OpenModel(name="no such"))
        assert "invalid" == (await peer.hear(ModelRefused)).code
        peer.connection.send_nowait(message([40, 0, "w", 1, 1, {}]))
        assert {"clients": 1} == (await peer.statistics())["bad_messages"]
        await assert_served(peer, 1)
        assert 1 == server.statistics()["clients"]


@real_time
async def test_a_full_queue_and_a_spent_deadline_behind_a_busy_slot(address: str) -> None:
    """While the only slot is busy one request waits, one is refused, one runs out of time; then all goes on."""
    release = threading.Event()

    def slow(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        release.wait(120)
        return scaled(x, scale)

    async with (
        scaled_serving(address, slow, max_queued_requests=2) as server,
        scaled_client(address, b"g" * 16) as peer,
    ):
        peer.connection.send_nowait(message(entry(sequence=1)))
        while not server.statistics()["unfinished"]:
            await trio.lowlevel.checkpoint()
        peer.connection.send_nowait(
            message(entry(sequence=2), entry(sequence=3, remaining=30), entry(sequence=4))
        )
        try:
            assert (4, "overloaded", True) == verdict(await peer.hear(Failure))
            assert (3, "deadline_exceeded", False) == verdict(await peer.hear(Failure))
        finally:
            release.set()
        assert [1, 2] == await peer.sequences(2)
        await assert_served(peer, 5)


@real_time
async def test_a_model_that_raises_fails_its_request_and_serves_the_next(address: str) -> None:
    """The engine's words arrive; the slot's thread goes on."""

    def picky(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if scale[0] == 13:
            raise ValueError("no thirteens")
        return scaled(x, scale)

    async with scaled_serving(address, picky), scaled_client(address, b"g" * 16) as peer:
        thirteen = np.array([13.0, 1.0], np.float32).tobytes()
        peer.connection.send_nowait(message(entry(inline=(INLINE[0], thirteen))))
        failure = await peer.hear(Failure)
        assert (7, "model_error") == ending(failure)
        assert "no thirteens" in failure.message
        await assert_served(peer, 8)

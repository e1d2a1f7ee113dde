"""Bad input over a real socket to real slots: each case gets its code or ends its own connection, no other.

The table holds what a client could send; the messages are packed by hand, since our own codec would not.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.harness import RawPeer, ending, verdict
from tests.pipeline.serving.hostile_server import scaled, scaled_model
from tests.pipeline.serving.raw_messages import (
    GOOD,
    HEADER,
    INLINE,
    LAYOUT,
    Frames,
    Refused,
    assert_served,
    entry,
    message,
    packed,
)
from tests.pipeline.serving.real_sockets import dialled, socket_serving

from shapestream.serving.local_executor import LocalSlots
from shapestream.serving.server import Server
from shapestream.wire.messages import (
    Failure,
    Goodbye,
    Heartbeat,
    ModelRefused,
    OpenModel,
    Result,
    Unknown,
)


@asynccontextmanager
async def scaled_serving(
    address: str, function: Callable[..., Any] = scaled, **options: Any
) -> AsyncIterator[Server]:
    """A server with one slot on a real thread, at a real address."""
    local = LocalSlots(models={"scaled": scaled_model(function)}, slots=1)
    async with socket_serving(address, local, **options) as server:
        yield server


@asynccontextmanager
async def scaled_client(address: str, client: bytes) -> AsyncIterator[RawPeer]:
    """A raw client on a real connection, with the model opened."""
    async with dialled(address) as peer:
        await peer.open_session(client, "scaled")
        yield peer


def layout_of(*shapes: tuple[Any, ...], element_type: Any = "f32") -> tuple[tuple[Any, ...], ...]:
    """A layout of these shapes on the ports in order."""
    return tuple((port, element_type, shape) for port, shape in enumerate(shapes))


REFUSED = {
    "unknown model": Refused(message(entry(model=5)), "5"),
    "missing input": Refused(message(entry(layout=LAYOUT[:1], inline=INLINE[:1])), "scale"),
    "no input at all": Refused(message(entry(layout=(), inline=())), "x"),
    "extra input": Refused(
        message(entry(layout=(*LAYOUT, (2, "f32", (1,))), inline=(*INLINE, bytes(4)))), "2"
    ),
    "the same input twice": Refused(
        message(entry(layout=(LAYOUT[0], LAYOUT[0]), inline=(INLINE[0], INLINE[0]))), "port"
    ),
    "wrong element type": Refused(
        message(entry(layout=((0, "i32", (2, 3)), LAYOUT[1]))), "element type"
    ),
    "unknown element type": Refused(message(entry(layout=layout_of((2, 3), (2,), element_type="f8"))), "f8"),
    "object dtype": Refused(message(entry(layout=layout_of((2, 3), (2,), element_type="object"))), "object"),
    "element type is a number": Refused(message(entry(layout=layout_of((2, 3), (2,), element_type=4))), "type"),
    "wrong rank": Refused(message(entry(layout=layout_of((2, 3, 1), (2,)))), "dimensions"),
    "out of bounds": Refused(
        message(entry(layout=layout_of((9, 1), (9,)), inline=(bytes(36), bytes(36)))), "1..8"
    ),
    "below its bounds": Refused(
        message(entry(layout=layout_of((2, 0), (2,)), inline=(b"", INLINE[1]))), "'n'"
    ),
    "disagreeing dimensions": Refused(
        message(entry(layout=layout_of((2, 3), (3,)), inline=(INLINE[0], bytes(12)))), "batch"
    ),
    "one byte too few": Refused(message(entry(inline=(INLINE[0][:-1], INLINE[1]))), "23"),
    "one byte too many": Refused(message(entry(inline=(INLINE[0] + b"\0", INLINE[1]))), "25"),
    "a frame too short": Refused(
        message(entry(frames=1, inline=(None, INLINE[1])), frames=(bytes(23),)), "23"
    ),
    "negative dimension": Refused(message(entry(layout=layout_of((-2, 3), (2,)))), "-2"),
    "dimension beyond 63 bits": Refused(message(entry(layout=layout_of((2**63, 3), (2,)))), str(2**63)),
    "product beyond 63 bits": Refused(
        message(entry(layout=layout_of((2**40, 2**40), (2,)))), "overflow"
    ),
    "product of 0 and beyond 63 bits": Refused(
        message(entry(layout=layout_of((2**40, 2**40, 0), (2,)), inline=(b"", INLINE[1]))), "overflow"
    ),
    "fractional dimension": Refused(message(entry(layout=layout_of((2.0, 3), (2,)))), "float"),
    "boolean dimension": Refused(message(entry(layout=layout_of((True, 6), (1,)))), "bool"),
    "textual dimension": Refused(message(entry(layout=layout_of(("2", 3), (2,)))), "str"),
    "dimension is nil": Refused(message(entry(layout=layout_of((None, 3), (2,)))), "integer"),
    "layout is not msgpack": Refused(message(entry(layout=b"\xc1")), "msgpack"),
    "layout is truncated": Refused(message(entry(layout=packed(LAYOUT)[:-1])), "msgpack"),
    "layout has trailing bytes": Refused(message(entry(layout=packed(LAYOUT) + b"\0")), "msgpack"),
    "fewer inline places than tensors": Refused(message(entry(inline=INLINE[:1])), "inline"),
    "more inline places than tensors": Refused(message(entry(inline=(*INLINE, b""))), "inline"),
    "inline text": Refused(message(entry(inline=("x" * 24, INLINE[1]))), "bin"),
    "more than 1 KiB inline": Refused(
        message(entry(layout=layout_of((1, 300), (1,)), inline=(bytes(1200), bytes(4)))), "frame"
    ),
    "a frame that no tensor uses": Refused(message(entry(frames=1), frames=(b"x",)), "frames"),
    "a frame that is missing": Refused(message(entry(inline=(None, INLINE[1]))), "frame"),
    "fractional deadline": Refused(message(entry(remaining=0.5)), "remaining_ms"),
    "not a number as deadline": Refused(message(entry(remaining=float("nan"))), "remaining_ms"),
    "negative deadline": Refused(message(entry(remaining=-1)), "remaining_ms"),
    "expired deadline": Refused(message(entry(remaining=0)), "deadline", "deadline_exceeded"),
    "model by name": Refused(message(entry(model="scaled")), "model"),
    "boolean priority": Refused(message(entry(priority=True)), "priority"),
    "a field too many": Refused(message([*entry(), 1]), "9"),
    "a field too few": Refused(message(entry()[:-1]), "7"),
}  # fmt: skip
ENDED: dict[str, Frames] = {
    "empty frame": [b""],
    "truncated header": [HEADER[:-5]],
    "header with trailing bytes": [HEADER + b"\0"],
    "not msgpack": [b"\xc1\xc1\xc1"],
    "another protocol": [b"GET / HTTP/1.1\r\n\r\n"],
    "a map as header": [packed({"version": 1})],
    "another version": message(entry(), version=2),
    "boolean version": message(entry(), version=True),
    "entries in a map": [packed([1, {}])],
    "an entry that is no array": message("request"),
    "an empty entry": message([]),
    "oversized header": [packed([1, [[0, 0, bytes(2**20)]]])],
    "too many entries": message(*[[Heartbeat.KIND, 0]] * 257),
    "too many frames": [HEADER, *[b""] * 1025],
    "more frames than claimed": [HEADER, b"x"],
    "fewer frames than claimed": message(entry(frames=2, inline=(None, None)), frames=(INLINE[0],)),
    "negative frame count": message(entry(frames=-1)),
    "deeply nested": [b"\x91" * 100_000 + b"\x90"],
    "array bomb": [b"\x92\x01\xdd\xff\xff\xff\xff"],
    "string bomb": [b"\x92\x01\xdb\xff\xff\xff\xff"],
    "extension type": [packed([1, [[0, 0, msgpack.ExtType(5, b"x")]]])],
    "map with a key twice": [b"\x92\x01\x91\x93\x00\x00\x82\xa1a\x01\xa1a\x02"],
}


@pytest.mark.parametrize("name", REFUSED)
@real_time
async def test_a_bad_request_gets_its_code_and_harms_nobody(name: str, address: str) -> None:
    """The answer has the request's id; the same client, and one beside it, are served on."""
    case = REFUSED[name]
    async with (
        scaled_serving(address) as server,
        scaled_client(address, b"b" * 16) as bad,
        scaled_client(address, b"h" * 16) as honest,
    ):
        bad.connection.send_nowait(case.frames)
        failure = await bad.hear(Failure)
        assert (7, case.code) == ending(failure)
        assert case.word in failure.message
        assert not failure.retryable
        await assert_served(bad, 8)
        await assert_served(honest, 7)
        assert {case.code: 1} == server.statistics()["failures"]


@pytest.mark.parametrize("name", ENDED)
@real_time
async def test_an_unreadable_message_ends_its_own_connection_only(name: str, address: str) -> None:
    """The sender hears Goodbye and can start again on a new connection; one beside it is served on."""
    async with (
        scaled_serving(address) as server,
        scaled_client(address, b"b" * 16) as bad,
        scaled_client(address, b"h" * 16) as honest,
    ):
        bad.connection.send_nowait(ENDED[name])
        await bad.hear(Goodbye)
        await assert_served(honest, 1)
        assert {"clients": 1} == server.statistics()["bad_messages"]
        assert 1 == server.statistics()["clients"]
        async with scaled_client(address, b"b" * 16) as again:
            await assert_served(again, 1)


@real_time
async def test_the_good_message_of_the_table_is_good(address: str) -> None:
    """Otherwise the cases above would fail for another reason than the one that they name."""
    async with scaled_serving(address), scaled_client(address, b"g" * 16) as peer:
        peer.connection.send_nowait(GOOD)
        assert 7 == (await peer.hear(Result)).sequence


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
async def test_a_request_before_the_greeting_is_told_so(address: str) -> None:
    """There is no session that it could belong to."""
    async with scaled_serving(address), dialled(address) as peer:
        peer.connection.send_nowait(GOOD)
        await peer.hear(Unknown)


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

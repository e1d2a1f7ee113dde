"""Bad input over a real socket to real slots: each case gets its code or ends its own connection, no other.

The table holds what a client could send; the messages are packed by hand, since our own codec would not.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.harness import RawPeer, ending, verdict

from shapestream.serving.local_executor import LocalSlots
from shapestream.serving.options import ServerOptions
from shapestream.serving.server import Server, serve
from shapestream.transport.zeromq import DealerSocket
from shapestream.wire.messages import (
    Failure,
    Goodbye,
    Heartbeat,
    ModelRefused,
    OpenModel,
    Request,
    Result,
    Unknown,
)
from shapestream_engine.layout import Buffer, Tensors
from shapestream_engine.model import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model

Frames = list[Buffer]


def scaled(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The model: rows of x, each times its scale."""
    product: np.ndarray[Any, Any] = x * scale[:, None]
    return product


def compiled(function: Callable[..., Any] = scaled) -> CompiledModel:
    """Two inputs that share the batch dimension, one of them two-dimensional."""
    return compile_model(
        ModelSpec(
            name="scaled",
            model=function,
            inputs={
                "x": InputSpec(shape="batch:1..8, n:1..1000", element_type="f32"),
                "scale": InputSpec(shape="batch", element_type="f32"),
            },
            outputs={"y": OutputSpec(shape="batch, n", element_type="f32")},
        )
    )


@pytest.fixture
def address() -> Iterator[str]:
    """An ipc address in a folder of its own, short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp") as folder:
        yield f"ipc://{Path(folder) / 'run' / 's'}"


@asynccontextmanager
async def real_server(
    address: str, model: CompiledModel | None = None, **options: Any
) -> AsyncIterator[Server]:
    """A server with one slot on a real thread, at a real address."""
    local = LocalSlots(models={"scaled": model or compiled()}, slots=1)

    async def start(*, task_status: trio.TaskStatus[Server]) -> None:
        await serve(ServerOptions(listen=(address,), **options), local=local, task_status=task_status)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            yield await nursery.start(start)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def real_peer(address: str, client: bytes) -> AsyncIterator[RawPeer]:
    """A raw client on a real connection, with the model opened."""
    async with trio.open_nursery() as nursery, DealerSocket() as socket:
        socket.connect(address)
        await nursery.start(socket.run)
        peer = RawPeer(socket)
        await peer.open_session(client, "scaled")
        yield peer
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- the messages

X = np.arange(6, dtype=np.float32).reshape(2, 3)
SCALE = np.array([2.0, 3.0], np.float32)
LAYOUT = ((0, "f32", (2, 3)), (1, "f32", (2,)))
INLINE: tuple[Any, ...] = (X.tobytes(), SCALE.tobytes())


def packed(value: Any) -> bytes:
    """msgpack."""
    data: bytes = msgpack.packb(value)
    return data


def entry(
    *, frames: Any = 0, sequence: Any = 7, model: Any = 0, remaining: Any = None, priority: Any = 0,
    layout: Any = LAYOUT, inline: Any = INLINE,
) -> list[Any]:  # fmt: skip
    """A request as it is on the wire, any field replaced."""
    layout = layout if isinstance(layout, bytes) else packed(layout)
    return [Request.KIND, frames, sequence, model, remaining, priority, layout, inline]


def message(*entries: Any, frames: tuple[bytes, ...] = (), version: Any = 1) -> Frames:
    """One message."""
    return [packed([version, entries]), *frames]


def layout_of(*shapes: tuple[Any, ...], element_type: Any = "f32") -> tuple[tuple[Any, ...], ...]:
    """A layout of these shapes on the ports in order."""
    return tuple((port, element_type, shape) for port, shape in enumerate(shapes))


GOOD = message(entry())


@dataclass(frozen=True)
class Case:
    """What is sent, the code of the answer to request 7, and a word of its message."""

    frames: Frames
    code: str
    word: str


REFUSED = {
    "unknown model": Case(message(entry(model=5)), "invalid", "5"),
    "missing input": Case(message(entry(layout=LAYOUT[:1], inline=INLINE[:1])), "invalid", "scale"),
    "no input at all": Case(message(entry(layout=(), inline=())), "invalid", "x"),
    "extra input": Case(
        message(entry(layout=(*LAYOUT, (2, "f32", (1,))), inline=(*INLINE, bytes(4)))), "invalid", "2"
    ),
    "the same input twice": Case(
        message(entry(layout=(LAYOUT[0], LAYOUT[0]), inline=(INLINE[0], INLINE[0]))), "invalid", "port"
    ),
    "wrong element type": Case(
        message(entry(layout=((0, "i32", (2, 3)), LAYOUT[1]))), "invalid", "element type"
    ),
    "unknown element type": Case(message(entry(layout=layout_of((2, 3), (2,), element_type="f8"))), "invalid", "f8"),
    "object dtype": Case(message(entry(layout=layout_of((2, 3), (2,), element_type="object"))), "invalid", "object"),
    "element type is a number": Case(message(entry(layout=layout_of((2, 3), (2,), element_type=4))), "invalid", "type"),
    "wrong rank": Case(message(entry(layout=layout_of((2, 3, 1), (2,)))), "invalid", "dimensions"),
    "out of bounds": Case(
        message(entry(layout=layout_of((9, 1), (9,)), inline=(bytes(36), bytes(36)))), "invalid", "1..8"
    ),
    "below its bounds": Case(
        message(entry(layout=layout_of((2, 0), (2,)), inline=(b"", INLINE[1]))), "invalid", "'n'"
    ),
    "disagreeing dimensions": Case(
        message(entry(layout=layout_of((2, 3), (3,)), inline=(INLINE[0], bytes(12)))), "invalid", "batch"
    ),
    "one byte too few": Case(message(entry(inline=(INLINE[0][:-1], INLINE[1]))), "invalid", "23"),
    "one byte too many": Case(message(entry(inline=(INLINE[0] + b"\0", INLINE[1]))), "invalid", "25"),
    "a frame too short": Case(
        message(entry(frames=1, inline=(None, INLINE[1])), frames=(bytes(23),)), "invalid", "23"
    ),
    "negative dimension": Case(message(entry(layout=layout_of((-2, 3), (2,)))), "invalid", "-2"),
    "dimension beyond 63 bits": Case(message(entry(layout=layout_of((2**63, 3), (2,)))), "invalid", str(2**63)),
    "product beyond 63 bits": Case(
        message(entry(layout=layout_of((2**40, 2**40), (2,)))), "invalid", "overflow"
    ),
    "product of 0 and beyond 63 bits": Case(
        message(entry(layout=layout_of((2**40, 2**40, 0), (2,)), inline=(b"", INLINE[1]))), "invalid", "overflow"
    ),
    "fractional dimension": Case(message(entry(layout=layout_of((2.0, 3), (2,)))), "invalid", "float"),
    "boolean dimension": Case(message(entry(layout=layout_of((True, 6), (1,)))), "invalid", "bool"),
    "textual dimension": Case(message(entry(layout=layout_of(("2", 3), (2,)))), "invalid", "str"),
    "dimension is nil": Case(message(entry(layout=layout_of((None, 3), (2,)))), "invalid", "integer"),
    "layout is not msgpack": Case(message(entry(layout=b"\xc1")), "invalid", "msgpack"),
    "layout is truncated": Case(message(entry(layout=packed(LAYOUT)[:-1])), "invalid", "msgpack"),
    "layout has trailing bytes": Case(message(entry(layout=packed(LAYOUT) + b"\0")), "invalid", "msgpack"),
    "fewer inline places than tensors": Case(message(entry(inline=INLINE[:1])), "invalid", "inline"),
    "more inline places than tensors": Case(message(entry(inline=(*INLINE, b""))), "invalid", "inline"),
    "inline text": Case(message(entry(inline=("x" * 24, INLINE[1]))), "invalid", "bin"),
    "more than 1 KiB inline": Case(
        message(entry(layout=layout_of((1, 300), (1,)), inline=(bytes(1200), bytes(4)))), "invalid", "frame"
    ),
    "a frame that no tensor uses": Case(message(entry(frames=1), frames=(b"x",)), "invalid", "frames"),
    "a frame that is missing": Case(message(entry(inline=(None, INLINE[1]))), "invalid", "frame"),
    "fractional deadline": Case(message(entry(remaining=0.5)), "invalid", "remaining_ms"),
    "not a number as deadline": Case(message(entry(remaining=float("nan"))), "invalid", "remaining_ms"),
    "negative deadline": Case(message(entry(remaining=-1)), "invalid", "remaining_ms"),
    "expired deadline": Case(message(entry(remaining=0)), "deadline_exceeded", "deadline"),
    "model by name": Case(message(entry(model="scaled")), "invalid", "model"),
    "boolean priority": Case(message(entry(priority=True)), "invalid", "priority"),
    "a field too many": Case(message([*entry(), 1]), "invalid", "9"),
    "a field too few": Case(message(entry()[:-1]), "invalid", "7"),
}  # fmt: skip

HEADER = GOOD[0]
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


async def assert_served(peer: RawPeer, sequence: int) -> None:
    """An honest request gets its honest answer."""
    peer.say(
        Request(
            sequence=sequence,
            model=0,
            remaining_ms=None,
            priority=0,
            tensors=Tensors(layout=LAYOUT, buffers=INLINE),
        )
    )
    result = await peer.hear(Result)
    assert sequence == result.sequence
    assert (X * SCALE[:, None]).tobytes() == bytes(result.tensors.buffers[0])


@pytest.mark.parametrize("name", REFUSED)
@real_time
async def test_a_bad_request_gets_its_code_and_harms_nobody(name: str, address: str) -> None:
    """The answer has the request's id; the same client, and one beside it, are served on."""
    case = REFUSED[name]
    async with (
        real_server(address) as server,
        real_peer(address, b"b" * 16) as bad,
        real_peer(address, b"h" * 16) as honest,
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
        real_server(address) as server,
        real_peer(address, b"b" * 16) as bad,
        real_peer(address, b"h" * 16) as honest,
    ):
        bad.connection.send_nowait(ENDED[name])
        await bad.hear(Goodbye)
        await assert_served(honest, 1)
        assert {"clients": 1} == server.statistics()["bad_messages"]
        assert 1 == server.statistics()["clients"]
        async with real_peer(address, b"b" * 16) as again:
            await assert_served(again, 1)


@real_time
async def test_the_good_message_of_the_table_is_good(address: str) -> None:
    """Otherwise the cases above would fail for another reason than the one that they name."""
    async with real_server(address), real_peer(address, b"g" * 16) as peer:
        peer.connection.send_nowait(GOOD)
        assert 7 == (await peer.hear(Result)).sequence


@real_time
async def test_a_bad_entry_fails_alone_among_good_ones(address: str) -> None:
    """Three requests in one message, the second one bad."""
    async with real_server(address), real_peer(address, b"g" * 16) as peer:
        peer.connection.send_nowait(
            message(entry(sequence=1), entry(sequence=2, priority=None), entry(sequence=3))
        )
        assert 2 == (await peer.hear(Failure)).sequence
        assert [1, 3] == [(await peer.hear(Result)).sequence for _ in range(2)]


@real_time
async def test_an_unknown_model_name_and_a_worker_entry_are_refused(address: str) -> None:
    """Neither ends the session."""
    async with real_server(address) as server, real_peer(address, b"g" * 16) as peer:
        peer.say(OpenModel(name="no such"))
        assert "invalid" == (await peer.hear(ModelRefused)).code
        peer.connection.send_nowait(message([40, 0, "w", 1, 1, {}]))
        assert {"clients": 1} == (await peer.statistics())["bad_messages"]
        await assert_served(peer, 1)
        assert 1 == server.statistics()["clients"]


@real_time
async def test_a_request_before_the_greeting_is_told_so(address: str) -> None:
    """There is no session that it could belong to."""
    async with real_server(address), trio.open_nursery() as nursery, DealerSocket() as socket:
        socket.connect(address)
        await nursery.start(socket.run)
        peer = RawPeer(socket)
        socket.send_nowait(GOOD)
        await peer.hear(Unknown)
        nursery.cancel_scope.cancel()


def test_a_full_queue_and_a_spent_deadline_behind_a_busy_slot(address: str) -> None:
    """While the only slot is busy one request waits, one is refused, one runs out of time; then all goes on."""
    release = threading.Event()

    def slow(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        release.wait(20)
        return scaled(x, scale)

    async def main() -> None:
        model = compiled(slow)
        async with (
            real_server(address, model, max_queued_requests=2) as server,
            real_peer(address, b"g" * 16) as peer,
        ):
            peer.connection.send_nowait(message(entry(sequence=1)))
            while not server.statistics()["unfinished"]:
                await trio.lowlevel.checkpoint()
            peer.connection.send_nowait(
                message(entry(sequence=2), entry(sequence=3, remaining=30), entry(sequence=4))
            )
            full = await peer.hear(Failure)
            assert (4, "overloaded", True) == verdict(full)
            late = await peer.hear(Failure)
            assert (3, "deadline_exceeded", False) == verdict(late)
            release.set()
            assert [1, 2] == [(await peer.hear(Result)).sequence for _ in range(2)]
            await assert_served(peer, 5)

    try:
        trio.run(main)
    finally:
        release.set()


@real_time
async def test_a_model_that_raises_fails_its_request_and_serves_the_next(address: str) -> None:
    """The engine's words arrive; the slot's thread goes on."""

    def picky(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if scale[0] == 13:
            raise ValueError("no thirteens")
        return scaled(x, scale)

    async with real_server(address, compiled(picky)), real_peer(address, b"g" * 16) as peer:
        thirteen = np.array([13.0, 1.0], np.float32).tobytes()
        peer.connection.send_nowait(message(entry(inline=(INLINE[0], thirteen))))
        failure = await peer.hear(Failure)
        assert (7, "model_error") == ending(failure)
        assert "no thirteens" in failure.message
        await assert_served(peer, 8)

"""Hostile messages over a real socket to a server in a process of its own: frames, headers, fields, tensors.

`test_bad_input.py` has the plain mistakes; here is what only somebody who wants to do harm would send. See hostile.py
for what must hold after each case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
import pytest
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.harness import verdict
from tests.pipeline.serving.hostile import (
    INLINE,
    INVERTED,
    LAYOUT,
    PATIENCE_S,
    SCALE,
    Frames,
    Hostile,
    Watch,
    X,
    assert_memory_kept,
    assert_served,
    client,
    entry,
    flags,
    hostile_server,
    message,
    packed,
    some_client,
)

from shapestream.wire.messages import Failure, Goodbye, Result

GOOD = message(entry())
HEADER = GOOD[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    """One for all the cases of this file."""
    with hostile_server() as running:
        yield running


@pytest.fixture(scope="module")
def resident_at_first(server: Hostile) -> int:
    """What the server holds after its first requests."""

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with client(server.ipc) as honest:
                for sequence in range(200):
                    await assert_served(honest, sequence)

    trio.run(main)
    return server.resident_bytes


# ---------------------------------------------------------------- refused by their number


@dataclass(frozen=True, slots=True)
class Refused:
    """What is sent, and a word of the answer to request 7."""

    frames: Frames
    word: str
    code: str = "invalid"


def typed(element_type: object) -> Frames:
    """A request whose first tensor is of this element type."""
    return message(entry(layout=((0, element_type, (2, 3)), LAYOUT[1])))


def shaped(*shape: object) -> Frames:
    """A request whose first tensor has this shape, and next to no bytes."""
    return message(entry(layout=((0, "f32", shape), LAYOUT[1])))


def ported(port: object) -> Frames:
    """A request whose first tensor is for this port."""
    return message(entry(layout=((port, "f32", (2, 3)), LAYOUT[1])))


def raw_layout(data: bytes) -> Frames:
    """A request with these bytes as its layout."""
    return message(entry(layout=data))


REFUSED = {
    # fields
    "priority just above its bound": Refused(message(entry(priority=2**31)), "priority"),
    "priority just below its bound": Refused(message(entry(priority=-(2**31))), "priority"),
    "priority of 64 bits": Refused(message(entry(priority=-(2**63))), "priority"),
    "priority is infinite": Refused(message(entry(priority=float("inf"))), "priority"),
    "the last model number there can be": Refused(message(entry(model=2**63 - 1)), "no model has the number"),
    "a negative model number": Refused(message(entry(model=-1)), "Request.model"),
    "a model number beyond 63 bits": Refused(message(entry(model=2**64 - 1)), "Request.model"),
    "a model that is true": Refused(message(entry(model=True)), "Request.model"),
    "a deadline beyond 63 bits": Refused(message(entry(remaining=2**63)), "remaining_ms"),
    "an infinite deadline": Refused(message(entry(remaining=float("inf"))), "remaining_ms"),
    "a deadline before all time": Refused(message(entry(remaining=float("-inf"))), "remaining_ms"),
    "a deadline in words": Refused(message(entry(remaining="soon")), "remaining_ms"),
    "a deadline in a map": Refused(message(entry(remaining={"ms": 5})), "remaining_ms"),
    "no layout": Refused(message(entry(layout=None)), "the layout must be a bin"),
    "a layout in the header itself": Refused(message(entry(layout=list(LAYOUT))), "the layout must be a bin"),
    "a layout in text": Refused(message(entry(layout="x")), "the layout must be a bin"),
    "no inline": Refused(message(entry(inline=None)), "inline"),
    "inline is a map": Refused(message(entry(inline={"x": b""})), "inline"),
    "inline is bytes": Refused(message(entry(inline=b"xy")), "inline"),
    "inline numbers": Refused(message(entry(inline=((0,) * 24, INLINE[1]))), "bin"),
    # layouts
    "an empty layout": Refused(raw_layout(b""), "msgpack"),
    "a layout that is nil": Refused(raw_layout(b"\xc0"), "must be an array"),
    "a layout that is a bomb": Refused(raw_layout(b"\xdd\xff\xff\xff\xff"), "msgpack"),
    "a layout of 1,000 levels": Refused(raw_layout(b"\x91" * 1_000 + b"\x90"), "[port, element type, shape]"),
    "a layout of 20,000 levels": Refused(raw_layout(b"\x91" * 20_000 + b"\x90"), "bin of at most"),
    "a layout with an extension": Refused(raw_layout(b"\x91\xd4\x01\x00"), "msgpack"),
    "a layout with a map": Refused(raw_layout(packed([{"port": 0}])), "msgpack"),
    "a layout of 65 tensors": Refused(raw_layout(packed([[n, "f32", []] for n in range(65)])), "msgpack"),
    "a layout longer than any": Refused(raw_layout(bytes(100_000)), "at most"),
    "a shape within a shape": Refused(shaped((2, 3)), "tuple"),
    "a shape that is nil": Refused(message(entry(layout=((0, "f32", None), LAYOUT[1]))), "shape must be an array"),
    "a shape of 33 dimensions": Refused(shaped(*(1,) * 33), "at most 32"),
    "a scalar for a table": Refused(shaped(), "takes 4"),
    "port 64": Refused(ported(64), "port"),
    "port 2^63": Refused(ported(2**63), "port"),
    "port -1": Refused(ported(-1), "port"),
    "a port that is true": Refused(ported(True), "port"),
    "a port by name": Refused(ported("x"), "port"),
    "a port that is a fraction": Refused(ported(0.0), "port"),
    # element types: an allow-list, to the letter
    "a NumPy type code": Refused(typed("<f4"), "element type"),
    "a record": Refused(typed("f4,f4"), "element type"),
    "a void": Refused(typed("V8"), "element type"),
    "pickled objects": Refused(typed("|O"), "element type"),
    "dates": Refused(typed("datetime64"), "element type"),
    "another case": Refused(typed("F32"), "element type"),
    "a blank behind it": Refused(typed("f32 "), "element type"),
    "a zero byte behind it": Refused(typed("f32\0"), "element type"),
    "no letters": Refused(typed(""), "element type"),
    "in bytes": Refused(typed(b"f32"), "msgpack"),
    "of 10,000 letters": Refused(typed("f" * 10_000), "msgpack"),
    "an element type in an array": Refused(typed(("f32",)), "element type"),
    "of the right size, but another": Refused(typed("u32"), "element type"),
    # dimensions
    "a dimension of 64 bits": Refused(shaped(2**64 - 1, 1), "outside"),
    "a dimension of -2^63": Refused(shaped(-(2**63), 1), "outside"),
    "2^61 elements of 4 bytes": Refused(shaped(2**61, 1), "overflow"),
    "a product that wraps to the right size": Refused(shaped(2**32 + 2, 2**32, 3), "overflow"),
    "a product that wraps to nothing": Refused(shaped(2**32, 2**32), "overflow"),
    "32 dimensions of 2^63-1": Refused(shaped(*(2**63 - 1,) * 32), "overflow"),
    "a dimension that is not a number": Refused(shaped(float("nan"), 3), "float"),
    "more rows than the model has": Refused(shaped(2**40, 1), "takes"),
    # lengths
    "nothing for something": Refused(message(entry(inline=(b"", INLINE[1]))), "0 bytes"),
    "a frame one byte too long": Refused(
        message(entry(frames=1, inline=(None, INLINE[1])), frames=(bytes(25),)), "25 bytes"
    ),
    "an empty frame for a tensor": Refused(
        message(entry(frames=1, inline=(None, INLINE[1])), frames=(b"",)), "0 bytes"
    ),
    "two frames in each other's place": Refused(
        message(entry(frames=2, inline=(None, None)), frames=(INLINE[1], INLINE[0])), "bytes"
    ),
    "the neighbour's frame": Refused(message(entry(inline=(None, None))), "owns no more"),
    "one byte more than may be inline": Refused(flags(bytes(1025), n=1025), "must travel as a frame"),
    "a megabyte inline": Refused(flags(bytes(1_000_000), n=1_000_000), "must travel as a frame"),
    "no columns, where there must be one": Refused(
        message(entry(layout=((0, "f32", (2, 0)), LAYOUT[1]), inline=(b"", INLINE[1]))), "'n'"
    ),
    "no rows, where there must be one": Refused(
        message(entry(layout=((0, "f32", (0, 3)), (1, "f32", (0,))), inline=(b"", b""))), "'batch'"
    ),
    # values
    "a truth value of 2": Refused(flags(b"\0\1\2\1"), "0 or 1"),
    "a truth value of 255": Refused(flags(b"\xff\0\0\0"), "0 or 1"),
    "a truth value of 255 in a frame": Refused(
        flags(None, n=100_000, frames=(bytes(99_999) + b"\xff",)), "0 or 1"
    ),
    # budgets
    "more bytes than a client may have": Refused(
        flags(None, n=2_000_000, frames=(bytes(2_000_000),)), "at most 1048576", "too_large"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@real_time
async def test_a_hostile_request_is_refused_by_its_number(
    name: str, server: Hostile, resident_at_first: int
) -> None:
    """A typed error; the sender's next request, and those of an honest client beside it, are served."""
    case = REFUSED[name]
    async with client(server.ipc) as bad, client(server.ipc) as honest:
        watch = await Watch.begin(server, honest)
        bad.connection.send_nowait(case.frames)
        failure = await bad.hear(Failure)
        assert (7, case.code, False) == verdict(failure)
        assert case.word in failure.message
        await assert_served(bad, 8)
        await watch.done(f"failures.{case.code}")


# ---------------------------------------------------------------- dropped


def text(length: int) -> str:
    """A text of that many characters."""
    return "n" * length


DROPPED: dict[str, Frames] = {
    "a greeting with 15 bytes": message([10, 0, bytes(15), "software"]),
    "a greeting with a text as its id": message([10, 0, text(16), "software"]),
    "a greeting of endless software": message([10, 0, bytes(16), text(513)]),
    "a greeting that owns a frame": message([10, 1, bytes(16), "software"], frames=(b"x",)),
    "a model by number": message([11, 0, 5]),
    "a model by bytes": message([11, 0, b"scaled"]),
    "a model of 513 characters": message([11, 0, text(513)]),
    "a model in a map": message([11, 0, {"name": "scaled"}]),
    "no model": message([11, 0]),
    "a cancellation of -1": message([13, 0, -1]),
    "a cancellation of 2^63": message([13, 0, 2**63]),
    "a cancellation of everything": message([13, 0, None]),
    "a cancellation of a list": message([13, 0, [1, 2, 3]]),
    "a heartbeat with a passenger": message([0, 0, "x"]),
    "a farewell with a frame": message([1, 1], frames=(b"x",)),
    "a question with a field": message([14, 0, {}]),
    "a kind that nobody knows": message([9_999, 0]),
    "a negative kind": message([-1, 0]),
    "a kind of 64 bits": message([2**64 - 1, 0]),
    "a result": message([24, 0, 7, [0, 0, 0, 1, 1, "w"], packed(LAYOUT), INLINE]),
    "a failure": message([25, 0, 7, "invalid", "no", False, None]),
    "a welcome": message([20, 0, bytes(16), 1, 1, 1]),
    "credit for itself": message([26, 0, 2**62, 2**62]),
    "another's statistics": message([27, 0, {}]),
    "a worker's greeting": message([40, 0, "w", 1, 1, {}, {}]),
    "a worker's report": message([41, 0, 1, 0, 0, 0, 0, [], [None]]),
    "a server's order": message([51, 0, 1, 0, "scaled", [2, 3], [[None, packed(LAYOUT), INLINE]]]),
    "a request without a number": message(entry(sequence=None)),
    "a request whose number is 7.0": message(entry(sequence=7.0)),
    "a request whose number is negative": message(entry(sequence=-7)),
    "a request whose number has 64 bits": message(entry(sequence=2**63)),
    "a request whose number is true": message(entry(sequence=True)),
    "a request that is nothing but its kind": message([12, 0]),
}


@pytest.mark.parametrize("name", DROPPED)
@real_time
async def test_an_entry_that_has_no_number_is_dropped(
    name: str, server: Hostile, resident_at_first: int
) -> None:
    """It is counted; the same message's good entry is served, and so are the sender and an honest client afterwards."""
    async with client(server.ipc) as bad, client(server.ipc) as honest:
        watch = await Watch.begin(server, honest)
        header, *frames = DROPPED[name]
        version, entries = msgpack.unpackb(header)
        bad.connection.send_nowait([packed([version, [*entries, entry(sequence=6)]]), *frames])
        assert 6 == (await bad.hear(Result)).sequence
        await assert_served(bad, 8)
        await watch.done("bad_messages.clients")


# ---------------------------------------------------------------- the end of the connection


def nested(depth: int) -> bytes:
    """A heartbeat with arrays within arrays behind it."""
    return b"\x92\x01\x91\x93\x00\x00" + b"\x91" * depth + b"\x90"


ENDED: dict[str, Frames] = {
    "two empty frames": [b"", b""],
    "1,000 empty frames": [b""] * 1_000,
    "a good header behind an empty frame": [b"", HEADER],
    "a good header twice": [HEADER, HEADER],
    "the header's last byte is missing": [HEADER[:-1]],
    "only the header's first byte": [HEADER[:1]],
    "a second message behind the first": [HEADER + HEADER],
    "the header is nil": [b"\xc0"],
    "the header is a number": [b"\x01"],
    "the header is a text of itself": [packed(HEADER.hex())],
    "no version": [packed([[entry()]])],
    "version 0": message(entry(), version=0),
    "version -1": message(entry(), version=-1),
    "version 1.0": message(entry(), version=1.0),
    "version 2^64-1": message(entry(), version=2**64 - 1),
    "version '1'": message(entry(), version="1"),
    "no entries": [packed([1, None])],
    "entries by bytes": [packed([1, b"\x0c"])],
    "a third element": [packed([1, [entry()], 0])],
    "a kind that is a fraction": message([12.0, 0]),
    "a kind that is nil": message([None, 0]),
    "a frame count that is true": message([12, True]),
    "a frame count that is a fraction": message([12, 0.0]),
    "a frame count of 2^63": message(entry(frames=2**63)),
    "frame counts that wrap around together": message([0, 2**63], [0, 2**63]),
    "a frame nobody owns behind those of a request": message(
        entry(frames=2, inline=(None, None)), frames=(*INLINE, b"x")
    ),
    "1,025 frames, all of them owned": message(entry(frames=1025), frames=(b"",) * 1025),
    "65,537 entries": [packed([1, [[0, 0]] * 65_537])],
    "a header of one byte too many": [packed([1, [[11, 0, text(2**20)]]])],
    "a header of 4 MiB": [bytes(4 << 20)],
    "500 levels of nesting": [nested(500) + b"\x00" * 3],
    "100,000 levels of nesting": [nested(100_000)],
    "a bomb of maps": [b"\x92\x01\xdf\xff\xff\xff\xff"],
    "a bomb of bytes": [b"\x92\x01\x91\x93\x0b\x00\xc6\xff\xff\xff\xff"],
    "a bomb of arrays, one in another": [b"\xdd\x00\x00\x0f\xff" * 200_000],
    "an array of 4 million nils": [b"\x92\x01\x91\x93\x0b\x00\xdd\x00\x0f\x00\x00" + b"\xc0" * 0xF0000],
    "text that is no UTF-8": [b"\x92\x01\x91\x93\x0b\x00\xa2\xc3\x28"],
    "text with half a surrogate": [b"\x92\x01\x91\x93\x0b\x00\xa3\xed\xa0\x80"],
    "the byte that msgpack never uses": [b"\x92\x01\x91\x93\x0b\x00\xc1"],
    "a timestamp": [packed([1, [[14, 0, msgpack.Timestamp(1, 1)]]])],
    "an extension of no bytes": [b"\x92\x01\x91\x93\x0e\x00\xc7\x00\x7f"],
    "a map with a number as its key": [b"\x92\x01\x91\x93\x0e\x00\x81\x01\x02"],
    "a map with nil as its key": [b"\x92\x01\x91\x93\x0e\x00\x81\xc0\x02"],
    "a map with an array as its key": [b"\x92\x01\x91\x93\x0e\x00\x81\x91\x01\x02"],
    "keys that only bytes and text tell apart": [b"\x92\x01\x91\x93\x0e\x00\x82\xa1a\x01\xc4\x01a\x02"],
    "JSON": [b'[1, [[12, 0, 7, 0, null, 0, "", []]]]'],
    "a pickle": [b"cos\nsystem\n(S'true'\ntR."],
    "a gzip": [b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"],
}  # fmt: skip


@pytest.mark.parametrize("name", ENDED)
@real_time
async def test_an_unreadable_message_ends_its_connection(
    name: str, server: Hostile, resident_at_first: int
) -> None:
    """Goodbye; what the sender says behind it is not heard; it may begin again on another connection."""
    number = some_client()
    async with client(server.ipc, number) as bad, client(server.ipc) as honest:
        watch = await Watch.begin(server, honest)
        bad.connection.send_nowait(ENDED[name])
        bad.connection.send_nowait(ENDED[name])
        await bad.hear(Goodbye)
        async with client(server.ipc, number) as again:
            await assert_served(again, 1)
        await watch.done("bad_messages.clients")


# ---------------------------------------------------------------- odd, and right


def wide(entries: bytes) -> Frames:
    """A message whose arrays and numbers are written as long as msgpack allows."""
    return [
        b"\xdd\x00\x00\x00\x02" + b"\xd3\x00\x00\x00\x00\x00\x00\x00\x01" + b"\xdd\x00\x00\x00\x01" + entries
    ]


def wide_bin(data: bytes) -> bytes:
    """Bytes behind a length of 32 bits."""
    return b"\xc6" + len(data).to_bytes(4, "big") + data


def wide_number(value: int) -> bytes:
    """A number of 64 bits."""
    return b"\xcf" + value.to_bytes(8, "big")


WIDE = wide(
    b"\xdd\x00\x00\x00\x08"
    + b"".join(map(wide_number, (12, 0, 7, 0)))
    + b"\xc0"
    + wide_number(0)
    + wide_bin(packed(LAYOUT))
    + b"\xdd\x00\x00\x00\x02"
    + b"".join(map(wide_bin, INLINE))
)
PRODUCT = (X * SCALE[:, None]).tobytes()
TRUE = b"\1"
SERVED: dict[str, tuple[Frames, bytes]] = {
    "the message that all others were made from": (GOOD, PRODUCT),
    "everything as long as it may be written": (WIDE, PRODUCT),
    "the latest deadline there is": (message(entry(remaining=2**63 - 1)), PRODUCT),
    "the highest priority": (message(entry(priority=2**31 - 1)), PRODUCT),
    "both tensors in frames, at odd addresses": (
        message(entry(frames=2, inline=(None, None)), frames=INLINE), PRODUCT
    ),
    "no bytes in a frame of its own": (flags(None, n=0, frames=(b"",)), b""),
    "no columns": (flags(b"", n=0), b""),
    "no rows": (flags(b"", rows=0), b""),
    "no rows of many columns": (flags(b"", rows=0, n=4_000_000), b""),
    "as many bytes as may be inline": (flags(bytes(1024), n=1024), TRUE * 1024),
    "a frame that could be inline": (flags(None, frames=(b"\0\1\0\1",)), b"\1\0\1\0"),
    "all that a client may have at a time": (flags(None, n=2**20, frames=(bytes(2**20),)), TRUE * 2**20),
    "not a number": (
        message(entry(inline=(b"\xff" * 24, INLINE[1]))), b"\xff" * 24
    ),
    "beside entries of kinds that come later": (message([200, 0], [201, 0], entry()), PRODUCT),
}  # fmt: skip
UNKNOWN_KINDS = {"beside entries of kinds that come later": 2}


@pytest.mark.parametrize("name", SERVED)
@real_time
async def test_what_is_odd_but_right_is_served(name: str, server: Hostile, resident_at_first: int) -> None:
    """Otherwise the cases above could be refused for the wrong reason."""
    frames, expected = SERVED[name]
    async with client(server.ipc) as odd, client(server.ipc) as honest:
        watch = await Watch.begin(server, honest)
        odd.connection.send_nowait(frames)
        result = await odd.hear(Result)
        assert 7 == result.sequence
        assert expected == bytes(result.tensors.buffers[0])
        times = UNKNOWN_KINDS.get(name, 0)
        await watch.done("bad_messages.clients" if times else None, times)


@real_time
async def test_a_thousand_requests_without_rows_share_calls_within_bounds(server: Hostile) -> None:
    """Rows alone would not bound a batch of them: a call has as many requests as it may have rows, at most."""
    async with client(server.ipc) as bad, client(server.ipc) as honest:
        watch = await Watch.begin(server, honest)
        for first in range(0, 1_000, 50):
            empty = [
                entry(
                    sequence=first + n,
                    model=INVERTED,
                    layout=((0, "boolean", (0, 4)),),
                    inline=(b"",),
                )
                for n in range(50)
            ]
            bad.connection.send_nowait(message(*empty))
            for _ in range(50):
                assert (await bad.hear(Result)).timings.batch_requests <= 8
        await watch.done(None)


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)

"""Bad requests over a real socket to a server in a process of its own: fields, layouts, element types, lengths.

Plain mistakes, requests that are meant to do harm, and requests that are odd but right. See hostile.py for what must hold
after each case.
"""

from __future__ import annotations

import pytest
from tests.entries import Failure, ResultEntry
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile import INVERTED, Hostile, assert_memory_kept, client, flags, watched
from tests.pipeline.serving.raw_messages import (
    GOOD,
    INLINE,
    LAYOUT,
    PRODUCT,
    Frames,
    Refused,
    assert_served,
    entry,
    layout_of,
    message,
    packed,
)
from tests.pipeline.serving.raw_peer import verdict

pytestmark = pytest.mark.usefixtures("resident_at_first")


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
    # plain mistakes
    "unknown model": Refused(message(entry(model=5)), "5"),
    "missing input": Refused(message(entry(layout=LAYOUT[:1], inline=INLINE[:1])), "scale"),
    "no input at all": Refused(message(entry(layout=(), inline=())), "x"),
    "extra input": Refused(
        message(entry(layout=(*LAYOUT, (2, "f32", (1,))), inline=(*INLINE, bytes(4)))), "2"
    ),
    "the same input twice": Refused(
        message(entry(layout=(LAYOUT[0], LAYOUT[0]), inline=(INLINE[0], INLINE[0]))), "the same port"
    ),
    "wrong element type": Refused(
        message(entry(layout=((0, "i32", (2, 3)), LAYOUT[1]))), "element type"
    ),
    "unknown element type": Refused(typed("f8"), "element type 'f8' is not one of boolean, i8"),
    "object dtype": Refused(typed("object"), "element type 'object' is not one of boolean, i8"),
    "element type is a number": Refused(typed(4), "element type 'int'"),
    "wrong rank": Refused(message(entry(layout=layout_of((2, 3, 1), (2,)))), "dimensions"),
    "out of bounds": Refused(
        message(entry(layout=layout_of((9, 1), (9,)), inline=(bytes(36), bytes(36)))), "1..8"
    ),
    "disagreeing dimensions": Refused(
        message(entry(layout=layout_of((2, 3), (3,)), inline=(INLINE[0], bytes(12)))), "batch"
    ),
    "one byte too few": Refused(
        message(entry(inline=(INLINE[0][:-1], INLINE[1]))), "tensor 0 has 23 bytes, but f32 [2, 3] takes 24"
    ),
    "one byte too many": Refused(message(entry(inline=(INLINE[0] + b"\0", INLINE[1]))), "tensor 0 has 25 bytes"),
    "a frame too short": Refused(
        message(entry(frames=1, inline=(None, INLINE[1])), frames=(bytes(23),)), "23"
    ),
    "negative dimension": Refused(message(entry(layout=layout_of((-2, 3), (2,)))), "dimension 0 is -2"),
    "dimension beyond 63 bits": Refused(message(entry(layout=layout_of((2**63, 3), (2,)))), str(2**63)),
    "product beyond 63 bits": Refused(
        message(entry(layout=layout_of((2**40, 2**40), (2,)))), "overflow"
    ),
    "product of 0 and beyond 63 bits": Refused(
        message(entry(layout=layout_of((2**40, 2**40, 0), (2,)), inline=(b"", INLINE[1]))), "overflow"
    ),
    "fractional dimension": Refused(message(entry(layout=layout_of((2.0, 3), (2,)))), "dimension 0 is float"),
    "layout is not msgpack": Refused(message(entry(layout=b"\xc1")), "the layout is not msgpack"),
    "layout is truncated": Refused(message(entry(layout=packed(LAYOUT)[:-1])), "the layout is not msgpack"),
    "layout has trailing bytes": Refused(message(entry(layout=packed(LAYOUT) + b"\0")), "the layout is not msgpack"),
    "fewer inline places than tensors": Refused(message(entry(inline=INLINE[:1])), "2 tensors are described"),
    "more inline places than tensors": Refused(message(entry(inline=(*INLINE, b""))), "2 tensors are described"),
    "inline text": Refused(message(entry(inline=("x" * 24, INLINE[1]))), "must be a bin or nil"),
    "a frame that no tensor uses": Refused(message(entry(frames=1), frames=(b"x",)), "frames"),
    "a frame that is missing": Refused(message(entry(inline=(None, INLINE[1]))), "should be a frame"),
    "fractional deadline": Refused(message(entry(remaining=0.5)), "Request.remaining_ms"),
    "negative deadline": Refused(message(entry(remaining=-1)), "Request.remaining_ms"),
    "model by name": Refused(message(entry(model="scaled")), "Request.model"),
    "boolean priority": Refused(message(entry(priority=True)), "Request.priority"),
    "a field too many": Refused(message([*entry(tags=None), 1]), "Request has 10 elements instead of 8 or 9"),
    "a field too few": Refused(message(entry()[:-1]), "7"),
    # fields
    "priority just above its bound": Refused(message(entry(priority=2**31)), "priority"),
    "priority just below its bound": Refused(message(entry(priority=-(2**31))), "priority"),
    "the last model number there can be": Refused(message(entry(model=2**63 - 1)), "no model has the number"),
    "a negative model number": Refused(message(entry(model=-1)), "Request.model"),
    "a deadline beyond 63 bits": Refused(message(entry(remaining=2**63)), "remaining_ms"),
    "no layout": Refused(message(entry(layout=None)), "the layout must be a bin"),
    "inline is bytes": Refused(message(entry(inline=b"xy")), "2 tensors are described"),
    # layouts
    "a layout that is nil": Refused(raw_layout(b"\xc0"), "the layout must be an array"),
    "a layout that is a bomb": Refused(raw_layout(b"\xdd\xff\xff\xff\xff"), "msgpack"),
    "a layout of 5,000 levels": Refused(raw_layout(b"\x91" * 5_000 + b"\x90"), "the layout is not msgpack"),
    "a description of two elements": Refused(raw_layout(packed([[0, "f32"]])), "[port, element type, shape]"),
    "a description in text": Refused(raw_layout(packed(["abc"])), "[port, element type, shape]"),
    "a layout with an extension": Refused(raw_layout(b"\x91\xd4\x01\x00"), "msgpack"),
    "a layout of 65 tensors": Refused(raw_layout(packed([[n, "f32", []] for n in range(65)])), "the layout is not msgpack"),
    "a layout longer than any": Refused(raw_layout(bytes(100_000)), "at most"),
    "a shape that is a number": Refused(message(entry(layout=((0, "f32", 6), LAYOUT[1]))), "the shape must be an array"),
    "a shape of 33 dimensions": Refused(shaped(*(1,) * 33), "the shape must be an array of at most 32"),
    "a scalar for a table": Refused(shaped(), "takes 4"),
    "port 64": Refused(ported(64), "the port must be an integer"),
    "port -1": Refused(ported(-1), "the port must be an integer"),
    "a port that is true": Refused(ported(True), "the port must be an integer"),
    # element types: an allow-list, to the letter
    "another case": Refused(typed("F32"), "element type"),
    "in bytes": Refused(typed(b"f32"), "msgpack"),
    "of 10,000 letters": Refused(typed("f" * 10_000), "msgpack"),
    "of the right size, but another": Refused(typed("u32"), "element type"),
    # dimensions
    "2^61 elements of 4 bytes": Refused(shaped(2**61, 1), "overflow"),
    "a product that wraps to the right size": Refused(shaped(2**32 + 2, 2**32, 3), "overflow"),
    "more rows than the model has": Refused(shaped(2**40, 1), "takes"),
    # lengths
    "an empty frame for a tensor": Refused(
        message(entry(frames=1, inline=(None, INLINE[1])), frames=(b"",)), "0 bytes"
    ),
    "two frames in each other's place": Refused(
        message(entry(frames=2, inline=(None, None)), frames=(INLINE[1], INLINE[0])), "bytes"
    ),
    "one byte more than may be inline": Refused(flags(bytes(1025), n=1025), "must travel as a frame"),
    "no columns, where there must be one": Refused(
        message(entry(layout=((0, "f32", (2, 0)), LAYOUT[1]), inline=(b"", INLINE[1]))), "'n'"
    ),
    "no rows, where there must be one": Refused(
        message(entry(layout=((0, "f32", (0, 3)), (1, "f32", (0,))), inline=(b"", b""))), "'batch'"
    ),
    # values
    "a truth value of 2": Refused(flags(b"\0\1\2\1"), "0 or 1"),
    "a truth value of 255 in a frame": Refused(
        flags(None, n=100_000, frames=(bytes(99_999) + b"\xff",)), "0 or 1"
    ),
    # tags
    "tags that are text": Refused(message(entry(tags="request_id")), "Request.tags must be nil or a map"),
    "tags in an array": Refused(message(entry(tags=[["request_id", "a"]])), "Request.tags must be nil or a map"),
    "nine tags": Refused(message(entry(tags={str(n): "" for n in range(9)})), "a map of at most 8"),
    "a tag that is a number": Refused(message(entry(tags={"request_id": 7})), "a map of strings to strings"),
    "an unknown tag that is a map": Refused(message(entry(tags={"x": {"y": "z"}})), "a map of strings to strings"),
    "a tag in bytes": Refused(message(entry(tags={"request_id": b"a"})), "a map of strings to strings"),
    "a request id of no characters": Refused(message(entry(tags={"request_id": ""})), "1 to 128 printable ASCII"),
    "a request id of 129 characters": Refused(message(entry(tags={"request_id": "i" * 129})), "1 to 128 printable"),
    "a request id of two lines": Refused(message(entry(tags={"request_id": "a\nb"})), "1 to 128 printable ASCII"),
    "a request id with an accent": Refused(message(entry(tags={"request_id": "caf\u00e9"})), "1 to 128 printable ASCII"),
    "a traceparent of 513 characters": Refused(message(entry(tags={"traceparent": "0" * 513})), "1 to 512 printable"),
    "a tracestate of 513 characters": Refused(message(entry(tags={"tracestate": "s" * 513})), "1 to 512 printable"),
    "tags of 1,025 characters": Refused(message(entry(tags={"x" * 513: "y" * 512})), "more than 1024 characters"),
    # budgets
    "more bytes than a client may have": Refused(
        flags(None, n=2_000_000, frames=(bytes(2_000_000),)), "at most 1048576", "too_large"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@real_time
async def test_a_hostile_request_is_refused_by_its_number(name: str, server: Hostile) -> None:
    """A typed error; the sender's next request, and those of an honest client beside it, are served."""
    case = REFUSED[name]
    async with watched(server) as watch, client(server.ipc) as bad:
        bad.connection.send_nowait(case.frames)
        failure = await bad.hear(Failure)
        assert (7, case.code, False) == verdict(failure)
        assert case.word in failure.message
        await assert_served(bad, 8)
        await watch.done(f"failures.{case.code}")


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
async def test_what_is_odd_but_right_is_served(name: str, server: Hostile) -> None:
    """Otherwise the cases above could be refused for the wrong reason."""
    frames, expected = SERVED[name]
    async with watched(server) as watch, client(server.ipc) as odd:
        odd.connection.send_nowait(frames)
        result = await odd.hear(ResultEntry)
        assert 7 == result.sequence
        assert expected == bytes(result.tensors.buffers[0])
        times = UNKNOWN_KINDS.get(name, 0)
        await watch.done("bad_messages.clients" if times else None, times)


@real_time
async def test_a_thousand_requests_without_rows_share_calls_within_bounds(server: Hostile) -> None:
    """Rows alone would not bound a batch of them: a call has as many requests as it may have rows, at most."""
    async with watched(server) as watch, client(server.ipc) as bad:
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
                assert (await bad.hear(ResultEntry)).timings.batch_requests <= 8
        await watch.done(None)


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)

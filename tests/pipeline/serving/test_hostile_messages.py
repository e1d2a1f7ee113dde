"""Hostile messages over a real socket to a server in a process of its own: entries without a number, frames, headers.

See hostile.py for what must hold after each case.
"""

from __future__ import annotations

import msgpack
import pytest
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile import Hostile, assert_memory_kept, client, some_client, watched
from tests.pipeline.serving.raw_messages import (
    HEADER,
    INLINE,
    LAYOUT,
    Frames,
    assert_served,
    entry,
    message,
    packed,
)

from shapestream.wire.messages import Goodbye, Heartbeat, Result

pytestmark = pytest.mark.usefixtures("resident_at_first")


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
    "credit below nothing": message([26, 0, -1, 1]),
    "credit beyond 63 bits": message([26, 0, 1, 2**63]),
    "credit without bytes": message([26, 0, 1]),
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
async def test_an_entry_that_has_no_number_is_dropped(name: str, server: Hostile) -> None:
    """It is counted; the same message's good entry is served, and so are the sender and an honest client afterwards."""
    async with watched(server) as watch, client(server.ipc) as bad:
        header, *frames = DROPPED[name]
        version, entries = msgpack.unpackb(header)
        bad.connection.send_nowait([packed([version, [*entries, entry(sequence=6)]]), *frames])
        assert 6 == (await bad.hear(Result)).sequence
        await assert_served(bad, 8)
        await watch.done("bad_messages.clients")


def nested(depth: int) -> bytes:
    """A heartbeat with arrays within arrays behind it."""
    return b"\x92\x01\x91\x93\x00\x00" + b"\x91" * depth + b"\x90"


ENDED: dict[str, Frames] = {
    "empty frame": [b""],
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
async def test_an_unreadable_message_ends_its_connection(name: str, server: Hostile) -> None:
    """Goodbye; what the sender says behind it is not heard; it may begin again on another connection."""
    number = some_client()
    async with watched(server) as watch, client(server.ipc, number) as bad:
        bad.connection.send_nowait(ENDED[name])
        # The next message ends the connection, and with it a Goodbye that libzmq has not written yet.
        await bad.hear(Goodbye)
        bad.connection.send_nowait(ENDED[name])
        async with client(server.ipc, number) as again:
            await assert_served(again, 1)
        await watch.done("bad_messages.clients")


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)

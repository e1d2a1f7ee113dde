"""Hostile messages over a real socket to a server in a process of its own: entries without a number, frames, headers.

See hostile.py for what must hold after each case.
"""

from __future__ import annotations

import msgpack
import pytest
from tests.entries import AcknowledgeAudit, Goodbye, Heartbeat, ResultEntry
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

pytestmark = pytest.mark.usefixtures("resident_at_first")


def text(length: int) -> str:
    """A text of that many characters."""
    return "n" * length


def cases(table: dict[str, dict[str, Frames]]) -> pytest.MarkDecorator:
    """A test for each message, with the words about it."""
    rows = [
        pytest.param(words, frames, id=name)
        for words, group in table.items()
        for name, frames in group.items()
    ]
    return pytest.mark.parametrize(("words", "frames"), rows)


BAD: dict[str, dict[str, Frames]] = {
    "Hello.client must be 16 bytes": {
        "a greeting with 15 bytes": message([10, 0, bytes(15), "software"]),
        "a greeting with a text as its id": message([10, 0, text(16), "software"]),
    },
    "Hello.software must be a string of at most 512": {
        "a greeting of endless software": message([10, 0, bytes(16), text(513)]),
    },
    "Hello owns no frames, but claims 1": {
        "a greeting that owns a frame": message([10, 1, bytes(16), "software"], frames=(b"x",)),
    },
    "OpenModel.name must be a string of at most 512": {
        "a model by number": message([11, 0, 5]),
        "a model of 513 characters": message([11, 0, text(513)]),
    },
    "Cancel.sequence must be an integer": {
        "a cancellation of -1": message([13, 0, -1]),
        "a cancellation of 2^63": message([13, 0, 2**63]),
        "a cancellation of true": message([13, 0, True]),
    },
    "Goodbye owns no frames, but claims 1": {
        "a farewell with a frame": message([1, 1], frames=(b"x",)),
    },
    "elements instead of": {
        "no model": message([11, 0]),
        "a heartbeat with a passenger": message([0, 0, "x"]),
        "a request that is nothing but its kind": message([12, 0]),
    },
    "is not expected here": {
        "a kind that nobody knows": message([9_999, 0]),
        "a result": message([24, 0, 7, [0, 0, 0, 1, 1, "w"], packed(LAYOUT), INLINE]),
        "a worker's greeting": message([40, 0, "w", 1, 1, {}, {}]),
        "a server's order": message([51, 0, 1, 0, "scaled", [2, 3], [[None, packed(LAYOUT), INLINE]]]),
    },
    "Credit.window_requests must be an integer": {
        "credit below nothing": message([26, 0, -1, 1]),
    },
    "Credit.window_bytes must be an integer": {
        "credit beyond 63 bits": message([26, 0, 1, 2**63]),
    },
    "Request.sequence must be an integer": {
        "a request without a number": message(entry(sequence=None)),
        "a request whose number has 64 bits": message(entry(sequence=2**63)),
    },
}
"""Entries without a number that could be answered, by the words that the log has for them."""


@cases(BAD)
@real_time
async def test_an_entry_that_has_no_number_is_dropped(words: str, frames: Frames, server: Hostile) -> None:
    """It is counted, and the log says what is wrong with it. The good entry beside it, the sender and others are served."""
    async with watched(server) as watch, client(server.ipc) as bad:
        header, *raw = frames
        version, entries = msgpack.unpackb(header)
        bad.connection.send_nowait([packed([version, [*entries, entry(sequence=6)]]), *raw])
        assert 6 == (await bad.hear(ResultEntry)).sequence
        await assert_served(bad, 8)
        (line,) = await watch.done("bad_messages.clients")
        assert words in line["why"]


def nested(depth: int) -> bytes:
    """A heartbeat with arrays within arrays behind it."""
    return b"\x92\x01\x91\x93\x00\x00" + b"\x91" * depth + b"\x90"


LONG = [[AcknowledgeAudit.KIND, 0, text(512)]] * 255
"""Entries that together take more bytes than one may."""

UNREADABLE: dict[str, dict[str, Frames]] = {
    "is not [version": {
        "a map as header": [packed({"version": 1})],
        "no version": [packed([[entry()]])],
        "a third element": [packed([1, [entry()], 0])],
        "900 levels of nesting, that can be read": [b"\x91" * 900 + b"\x90"],
    },
    "protocol version 1": {
        "another version": message(entry(), version=2),
        "boolean version": message(entry(), version=True),
        "version 1.0": message(entry(), version=1.0),
    },
    "[version, [entry": {
        "a bomb of arrays, one in another": [b"\xdd\x00\x00\x0f\xff" * 200_000],
    },
    "more than 131072 bytes": {
        "an entry of 129 KiB": [packed([1, [[99, 0, text(129 * 1024)]]])],
        "an entry of 1 MB": [packed([1, [[99, 0, [[[]] * 1000] * 520]]])],
    },
    "ends within an entry": {
        "a long header without its last byte": [packed([1, LONG])[:-1]],
    },
    "goes on behind": {
        "a long header with trailing bytes": [packed([1, LONG]) + b"\0"],
    },
    "at most 256 entries": {
        "entries in a map": [packed([1, {}])],
        "too many entries": message(*[[Heartbeat.KIND, 0]] * 257),
        "65,537 entries": [packed([1, [[0, 0]] * 65_537])],
    },
    "an entry is not an array": {
        "an entry that is no array": message("request"),
        "an empty entry": message([]),
        "an entry of a kind alone": message([12]),
    },
    "must be integers": {
        "negative frame count": message(entry(frames=-1)),
        "a frame count that is true": message([12, True]),
        "a kind that is true": message([True, 0]),
    },
    "claim more than the": {
        "fewer frames than claimed": message(entry(frames=2, inline=(None, None)), frames=(INLINE[0],)),
        "frame counts that wrap around together": message([0, 2**63], [0, 2**63]),
    },
    "claim 0 of the 1": {
        "more frames than claimed": [HEADER, b"x"],
    },
    "claim 2 of the 3": {
        "a frame nobody owns behind those of a request": message(
        entry(frames=2, inline=(None, None)), frames=(*INLINE, b"x")
    ),
    },
    "1026 frames": {
        "too many frames": [HEADER, *[b""] * 1025],
        "1,025 frames, all of them owned": message(entry(frames=1025), frames=(b"",) * 1025),
    },
    "the limit is 1048576": {
        "a header of one byte too many": [packed([1, [[11, 0, text(2**20)]]])],
        "a header of 4 MiB": [bytes(4 << 20)],
    },
    "a key twice": {
        "map with a key twice": [b"\x92\x01\x91\x93\x00\x00\x82\xa1a\x01\xa1a\x02"],
    },
    "a key that is not a string": {
        "keys that only bytes and text tell apart": [b"\x92\x01\x91\x93\x0e\x00\x82\xa1a\x01\xc4\x01a\x02"],
    },
    "extension type": {
        "an extension of no bytes": [b"\x92\x01\x91\x93\x0e\x00\xc7\x00\x7f"],
    },
    "not acceptable msgpack": {
        "empty frame": [b""],
        "header with trailing bytes": [HEADER + b"\0"],
        "deeply nested": [b"\x91" * 100_000 + b"\x90"],
        "array bomb": [b"\x92\x01\xdd\xff\xff\xff\xff"],
        "string bomb": [b"\x92\x01\xdb\xff\xff\xff\xff"],
        "extension type": [packed([1, [[0, 0, msgpack.ExtType(5, b"x")]]])],
        "the header's last byte is missing": [HEADER[:-1]],
        "an array of 1,025 elements": [packed([1, [[14, 0, [None] * 1_025]]])],
        "a map of 65 keys": [packed([1, [[14, 0, {str(n): None for n in range(65)}]]])],
        "a map of 65 keys in a long message": [packed([1, [*LONG, [14, 0, {str(n): None for n in range(65)}]]])],
        "more maps than entries": [packed([1, [[14, 0, [{}] * 257]]])],
        "100,000 levels of nesting": [nested(100_000)],
        "a bomb of maps": [b"\x92\x01\xdf\xff\xff\xff\xff"],
        "an array of 4 million nils": [b"\x92\x01\x91\x93\x0b\x00\xdd\x00\x0f\x00\x00" + b"\xc0" * 0xF0000],
        "text that is no UTF-8": [b"\x92\x01\x91\x93\x0b\x00\xa2\xc3\x28"],
        "the byte that msgpack never uses": [b"\x92\x01\x91\x93\x0b\x00\xc1"],
        "a map with a number as its key": [b"\x92\x01\x91\x93\x0e\x00\x81\x01\x02"],
    },
}  # fmt: skip
"""Messages that cannot be divided into entries, in the same way."""


@cases(UNREADABLE)
@real_time
async def test_an_unreadable_message_ends_its_connection(words: str, frames: Frames, server: Hostile) -> None:
    """Goodbye, and the log says why. What follows is not heard; the sender may begin again on another connection."""
    number = some_client()
    async with watched(server) as watch, client(server.ipc, number) as bad:
        bad.connection.send_nowait(frames)
        # The next message ends the connection, and with it a Goodbye that libzmq has not written yet.
        await bad.hear(Goodbye)
        bad.connection.send_nowait(frames)
        async with client(server.ipc, number) as again:
            await assert_served(again, 1)
        (line,) = await watch.done("bad_messages.clients")
        assert words in line["why"]


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)

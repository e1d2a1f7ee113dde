"""Messages of protocol version 1: frames of the socket to entries, and back.

A message is a msgpack header frame, `[1, [entry, ...]]`, and raw frames. An entry is `[kind, frame count,
field, ...]`; the entries own the raw frames in turn, and own them all. Nothing that arrives is trusted. A message
that cannot be divided into entries raises `ProtocolError`, and its sender is cut off; a bad entry fails alone, by
its id. `ModelSignature.resolve` checks whether tensors suit a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
from msgpack import unpackb

from shapestream.errors import ProtocolError, TooLarge
from shapestream.wire import tensor_entries
from shapestream.wire.fields import (
    BadEntryError,
    Fields,
    Reader,
    Writer,
    columns_of,
    must_be,
    reader_of,
    writer_of,
)
from shapestream.wire.limits import (
    CLIENT_LIMITS,
    ITEMS_PER_ARRAY,
    ITEMS_PER_MAP,
    MAX_CLIENT_ENTRY_BYTES,
    MAX_CLIENT_ITEMS,
    MAX_CLIENT_PAIRS,
    MAX_INTEGER,
    MAX_PLAIN_ITEMS,
    MAX_WORKER_ITEMS,
    WORKER_LIMITS,
    Limits,
)
from shapestream.wire.messages import (
    KINDS,
    PROTOCOL_VERSION,
    BatchDone,
    BatchFailedEntry,
    Cancel,
    Entry,
    Execute,
    Failure,
    Goodbye,
    RequestEntry,
    ResultEntry,
    Role,
)
from shapestream.wire.tensor_entries import refuse_extension
from shapestream_engine.layout import Buffer, value

_READERS: dict[Role, dict[int, Reader]] = {
    role: {
        number: tensor_entries.READERS.get(kind) or reader_of(kind)
        for number, kind in KINDS.items()
        if role in kind.ROLES
    }
    for role in Role
}
_WRITERS: dict[type[Entry], Writer] = {
    kind: tensor_entries.WRITERS.get(kind) or writer_of(kind) for kind in KINDS.values()
}
_KINDS_WITH_ID = frozenset(
    number for number, kind in KINDS.items() if columns_of(kind)[:1] in (["sequence"], ["batch"])
)
_BULK = frozenset({RequestEntry, ResultEntry, Failure, Execute, BatchDone, BatchFailedEntry})


@dataclass(frozen=True, slots=True, kw_only=True)
class BadEntry:
    """An unusable entry. `id` is its sequence or batch number, where that is readable."""

    kind: int
    id: int | None
    message: str


@value
class Envelope:
    """A message divided into entries, in their order."""

    entries: list[Entry]
    bad: list[BadEntry]


# ---------------------------------------------------------------- reading


def decode(frames: Sequence[Buffer], *, role: Role, limits: Limits = CLIENT_LIMITS) -> Envelope:
    """Read a message for `role`; raises `ProtocolError` when it cannot be divided into entries.

    Large tensors are not copied: the entries hold the frames that were given.
    """
    entries: list[Entry] = []
    bad: list[BadEntry] = []
    for item in _divide(frames, role, limits):
        if isinstance(item, BadEntry):
            bad.append(item)
        else:
            entries.append(item)
    return Envelope(entries=entries, bad=bad)


def _divide(frames: Sequence[Buffer], role: Role, limits: Limits) -> Iterator[Entry | BadEntry]:
    """Yield the entries, each read when it is asked for: a caller may do other work between two."""
    readers = _READERS[role]
    first = 1
    total = len(frames)
    for fields in _unpack(frames, role, limits):
        if type(fields) is not tuple or len(fields) < 2:
            raise ProtocolError("an entry is not an array of at least [kind, frame count]")
        kind, count = fields[0], fields[1]
        if type(kind) is not int or type(count) is not int or count < 0:
            raise ProtocolError("an entry's kind and frame count must be integers")
        last = first + count
        if last > total:
            raise ProtocolError(f"the entries claim more than the {total - 1} raw frames of the message")
        reader = readers.get(kind)
        if reader is None:
            yield BadEntry(kind=kind, id=_entry_id(fields), message=f"kind {kind} is not expected here")
        else:
            entry: Entry | BadEntry
            try:
                entry = reader(fields, frames, first, last, limits)
            except BadEntryError as error:
                entry = BadEntry(kind=kind, id=_entry_id(fields), message=str(error))
            yield entry
        first = last
    if first != total:
        raise ProtocolError(f"the entries claim {first - 1} of the {total - 1} raw frames of the message")


def _entry_id(fields: Fields) -> int | None:
    """Return the id of an entry that may be bad: its sequence or batch number, where that is readable."""
    if (
        len(fields) > 2
        and fields[0] in _KINDS_WITH_ID
        and type(fields[2]) is int
        and 0 <= fields[2] <= MAX_INTEGER
    ):
        return fields[2]
    return None


def entries_announced(header: Buffer) -> int:
    """Return the number of entries that a header frame claims, from its first five bytes; 1 for another format.

    An empty message counts as one entry: it costs as much to hold and to read.
    """
    head = header[:5] if type(header) is bytes else bytes(memoryview(header)[:5])
    if len(head) > 2 and head[:2] == b"\x92\x01":
        if head[2] & 0xF0 == 0x90:
            return max(1, head[2] & 0x0F)
        if head[2] == 0xDC and len(head) == 5:
            return max(1, int.from_bytes(head[3:5], "big"))
    return 1


_SERVER_OF_WORKERS, _SERVER_OF_CLIENTS = Role.SERVER_OF_WORKERS, Role.SERVER_OF_CLIENTS
"""A look-up on an enumeration runs through its metaclass."""


def _unpack(frames: Sequence[Buffer], role: Role, limits: Limits) -> Iterable[Any]:
    """Return the unpacked entries, unchecked; those of a client's long header are unpacked when they are asked for."""
    if not 1 <= len(frames) <= limits.max_frames + 1:
        raise ProtocolError(f"{len(frames)} frames; a message has 1 to {limits.max_frames + 1}")
    header = frames[0]
    if len(header) > limits.max_header_bytes:
        raise ProtocolError(f"the header has {len(header)} bytes; the limit is {limits.max_header_bytes}")
    if role is _SERVER_OF_WORKERS:
        items = _Items(MAX_WORKER_ITEMS)
        options = {**_PLAIN_OPTIONS, "list_hook": items.array, "object_pairs_hook": items.map}
    elif role is not _SERVER_OF_CLIENTS:
        options = _PLAIN_OPTIONS
    elif len(header) > MAX_CLIENT_ENTRY_BYTES:
        return _unpack_long(header, limits)
    else:
        options = {**_CLIENT_OPTIONS, "object_pairs_hook": _Maps(limits.max_entries).take}
    try:
        document = unpackb(header, **options)
    except ValueError as error:
        # msgpack's own errors, and UnicodeDecodeError, are ValueErrors all.
        raise _not_msgpack(error) from error
    if type(document) is not tuple or len(document) != 2:
        raise ProtocolError(_NO_HEADER)
    version, rows = document
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise _other_version(version)
    if type(rows) is not tuple or len(rows) > limits.max_entries:
        raise _wrong_count(f"one of {len(rows)}" if type(rows) is tuple else "no array", limits)
    return rows


_NO_HEADER = "the header is not [version, [entry, ...]]"


def _not_msgpack(error: ValueError) -> ProtocolError:
    return ProtocolError(f"the header is not acceptable msgpack: {str(error)[:200]}")


def _other_version(version: Any) -> ProtocolError:
    return ProtocolError(f"the message {must_be(f'of protocol version {PROTOCOL_VERSION}', version)}")


def _wrong_count(found: str, limits: Limits) -> ProtocolError:
    return ProtocolError(
        f"the header must hold an array of at most {limits.max_entries} entries, not {found}"
    )


def _unpack_long(header: Buffer, limits: Limits) -> Iterator[Any]:
    """Yield the entries of a header that is longer than one entry may be. No more of it is unpacked at once."""
    unpacker = msgpack.Unpacker(
        **_CLIENT_OPTIONS,
        object_pairs_hook=_Maps(limits.max_entries).take,
        max_buffer_size=2 * MAX_CLIENT_ENTRY_BYTES,
    )
    view, fed = memoryview(header), 0

    def next_of(read: Callable[[], Any]) -> Any:
        nonlocal fed
        while True:
            try:
                return read()
            except msgpack.OutOfData:
                if fed == len(view):
                    raise ProtocolError("the header ends within an entry") from None
                if fed - unpacker.tell() >= MAX_CLIENT_ENTRY_BYTES:
                    raise ProtocolError(_LONG_ENTRY) from None
                unpacker.feed(view[fed : fed + MAX_CLIENT_ENTRY_BYTES])
                fed = min(len(view), fed + MAX_CLIENT_ENTRY_BYTES)
            except ValueError as error:
                raise _not_msgpack(error) from error

    if next_of(unpacker.read_array_header) != 2:
        raise ProtocolError(_NO_HEADER)
    version = next_of(unpacker.unpack)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise _other_version(version)
    count = next_of(unpacker.read_array_header)
    if count > limits.max_entries:
        raise _wrong_count(f"one of {count}", limits)
    for _ in range(count):
        begin = unpacker.tell()
        entry = next_of(unpacker.unpack)
        if unpacker.tell() - begin > MAX_CLIENT_ENTRY_BYTES:
            raise ProtocolError(_LONG_ENTRY)
        yield entry
    if unpacker.tell() != len(view):
        raise ProtocolError("the header goes on behind its last entry")


_LONG_ENTRY = f"an entry has more than {MAX_CLIENT_ENTRY_BYTES} bytes"


class _Maps:
    """The maps of one message from a client: few, since each costs a call."""

    __slots__ = ("_left",)

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
        """Return the map of these pairs; raises ValueError for one too many."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("more maps than a message has entries")
        return _unique_keys(pairs)


class _Items:
    """The elements of all arrays and maps of one message from a worker: few, since each takes the event loop some time."""

    __slots__ = ("_left",)

    def __init__(self, most: int) -> None:
        self._left = most

    def array(self, items: Any) -> Any:
        """Return the array as it is; raises ValueError for one element too many."""
        self._left -= len(items) + ITEMS_PER_ARRAY
        if self._left < 0:
            raise ValueError(_MANY_ITEMS)
        return items

    def map(self, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
        """Return the map of these pairs; raises ValueError for one too many."""
        self._left -= 2 * len(pairs) + ITEMS_PER_MAP
        if self._left < 0:
            raise ValueError(_MANY_ITEMS)
        return _unique_keys(pairs)


_MANY_ITEMS = f"more than {MAX_WORKER_ITEMS} elements in its arrays and maps"


def items_of(plain: Any) -> int:
    """Return the number of elements that plain data counts for in a message from a worker."""
    if isinstance(plain, Mapping):
        return ITEMS_PER_MAP + sum(2 + items_of(value) for value in plain.values())
    if isinstance(plain, list | tuple):
        return ITEMS_PER_ARRAY + sum(1 + items_of(item) for item in plain)
    return 0


def _unique_keys(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map has a key twice")
    if not _TEXT.issuperset(map(type, result)):
        raise ValueError("a map has a key that is not a string")
    return result


_TEXT = {str}
_OPTIONS: dict[str, Any] = {"use_list": False, "ext_hook": refuse_extension, "max_ext_len": 0}
_CLIENT_OPTIONS = _OPTIONS | {"max_array_len": MAX_CLIENT_ITEMS, "max_map_len": MAX_CLIENT_PAIRS}
_PLAIN_OPTIONS = _OPTIONS | {
    "object_pairs_hook": _unique_keys,
    "max_array_len": MAX_PLAIN_ITEMS,
    "max_map_len": MAX_PLAIN_ITEMS,
}


# ---------------------------------------------------------------- writing


def encode(entries: Sequence[Entry], *, limits: Limits = CLIENT_LIMITS) -> list[Buffer]:
    """Return the frames of one message; raises `TooLarge` where the entries do not fit one (see `pack_messages`)."""
    raw: list[Buffer] = []
    packed = [_WRITERS[type(entry)](entry, raw) for entry in entries]
    frames = _message(packed, raw)
    if (
        len(packed) > limits.max_entries
        or len(raw) > limits.max_frames
        or len(frames[0]) > limits.max_header_bytes
    ):
        raise TooLarge(
            f"{len(packed)} entries, {len(raw)} frames and a header of {len(frames[0])} bytes"
            " do not fit one message"
        )
    return frames


def pack_messages(entries: Sequence[Entry], *, limits: Limits = CLIENT_LIMITS) -> list[list[Buffer]]:
    """Return the frames of as few messages as the limits allow, in the order in which they must be sent.

    Control entries go first; the others keep their order. There are two exceptions: the withdrawal of a request that is
    in `entries` too stays behind it, and a `Goodbye` comes last.
    """
    messages: list[list[Buffer]] = []
    packed: list[bytes] = []
    raw: list[Buffer] = []
    header_bytes = raw_bytes = 0
    room = limits.max_header_bytes - _MAX_PREFIX_BYTES
    for entry in _in_order(entries) if len(entries) > 1 else entries:
        own: list[Buffer] = []
        data = _WRITERS[type(entry)](entry, own)
        own_bytes = sum(memoryview(frame).nbytes for frame in own) if own else 0
        if len(data) > room or len(own) > limits.max_frames:
            raise TooLarge(
                f"a {entry.NAME} of {len(data)} header bytes and {len(own)} frames; a message holds {room} and"
                f" {limits.max_frames}"
            )
        if packed and (
            len(packed) == limits.max_entries
            or header_bytes + len(data) > room
            or len(raw) + len(own) > limits.max_frames
            or (own and raw_bytes + own_bytes > limits.preferred_message_bytes)
        ):
            messages.append(_message(packed, raw))
            packed, raw, header_bytes, raw_bytes = [], [], 0, 0
        packed.append(data)
        header_bytes += len(data)
        if own:
            raw += own
            raw_bytes += own_bytes
    if packed:
        messages.append(_message(packed, raw))
    return messages


_MAX_PREFIX_BYTES = 5


def _message(packed: list[bytes], raw: list[Buffer]) -> list[Buffer]:
    count = len(packed)
    # msgpack: [1, [...]], with the shortest array header.
    prefix = bytes((0x92, 0x01, 0x90 | count)) if count < 16 else b"\x92\x01\xdc" + count.to_bytes(2, "big")
    return [prefix + b"".join(packed), *raw]


def _in_order(entries: Sequence[Entry]) -> Sequence[Entry]:
    kinds = {type(entry) for entry in entries}
    if kinds <= _BULK:
        return entries
    requests = (
        {entry.sequence for entry in entries if isinstance(entry, RequestEntry)} if Cancel in kinds else ()
    )
    control: list[Entry] = []
    bulk: list[Entry] = []
    farewell: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Goodbye):
            farewell.append(entry)
        elif type(entry) in _BULK or (isinstance(entry, Cancel) and entry.sequence in requests):
            bulk.append(entry)
        else:
            control.append(entry)
    return control + bulk + farewell


# ---------------------------------------------------------------- both, for one end of a connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Packs entries into messages and reads them back, at one end of a connection."""

    pack: Callable[[Sequence[Entry]], list[list[Buffer]]]
    """The messages of these entries; raises `RequestError` where one of them fits no message."""
    read: Callable[[Sequence[Buffer]], Iterable[Entry | BadEntry]]
    """The entries of a message in their order, each read when it is asked for.

    Raises `ProtocolError` where the message goes no further, also behind entries that could be read.
    """


def codec_of(role: Role) -> Codec:
    """Return the codec of a reader in this role.

    Between the server and its workers one bad entry makes its whole message unreadable.
    """
    if role in (Role.SERVER_OF_CLIENTS, Role.CLIENT):
        return Codec(
            pack=partial(pack_messages, limits=CLIENT_LIMITS),
            read=partial(_divide, role=role, limits=CLIENT_LIMITS),
        )
    return Codec(
        pack=partial(pack_messages, limits=WORKER_LIMITS),
        read=partial(_read_whole, role=role, limits=WORKER_LIMITS),
    )


def _read_whole(frames: Sequence[Buffer], *, role: Role, limits: Limits) -> Iterator[Entry | BadEntry]:
    for entry in _divide(frames, role, limits):
        if type(entry) is BadEntry:
            raise ProtocolError(entry.message)
        yield entry

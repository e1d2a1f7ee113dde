"""The entries that carry tensors, from and to bytes by hand: the server spends most of its time with them.

A tensor is inline (a `bin`) or the next of the entry's frames (nil), and has exactly the bytes that its layout
takes. Frames are handed on as they came, never copied. A writer trusts its own process except for the lengths of
tensors: the receiver would refuse a wrong one far from the defect.

A layout travels as a msgpack `bin` that holds its own msgpack encoding. Requests repeat a few layouts, so the
receiver looks the bytes up among checked ones: one dictionary access instead of a walk over names, types and
dimensions. Bytes are compared, not values, so that an equal layout of other types (`True == 1 == 1.0`) is no match.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from math import prod
from typing import Any, NamedTuple

import msgpack
import numpy as np

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.wire.fields import (
    INTEGER,
    NAME,
    BadEntryError,
    Fields,
    Reader,
    Writer,
    check_integers,
    checked,
    integer,
    must_be,
    name,
    pack,
)
from shapestream.wire.limits import (
    MAX_FRAME_BYTES,
    MAX_INLINE_BYTES,
    MAX_INTEGER,
    MAX_NAME_CHARACTERS,
    MAX_PRIORITY,
    MAX_RANK,
    MAX_TENSORS,
    Limits,
)
from shapestream.wire.messages import BatchDone, Entry, Execute, RequestEntry, ResultEntry, Timings
from shapestream.wire.tags import read_tags
from shapestream_engine.batch import BatchReport
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.layout import Buffer, Layout, Tensors
from shapestream_engine.string_arrays import LENGTH, STRING_TYPES

# ---------------------------------------------------------------- layouts

# Layouts remembered; when full, the book starts afresh. A longer encoding than this is checked every time, so
# that hostile layouts cannot make the book large.
MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 512
_MAX_PACKED_BYTES = MAX_TENSORS * (16 + 9 * (MAX_RANK + 1))
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in ELEMENT_TYPES.items()} | dict.fromkeys(
    STRING_TYPES, LENGTH.itemsize
)
"""Bytes of one element; of a string those of its length, since the shape ends with the bytes of all strings."""


class LayoutError(InvalidRequest):
    """A layout that no model can take; the message names the tensor and the reason."""


class CheckedLayout(NamedTuple):
    """A layout after all checks that need no model."""

    layout: Layout
    packed: bytes
    nbytes: tuple[int, ...]
    """The exact byte length of each tensor."""


def _check_row(index: int, row: Any) -> int:
    """Check one tensor's description, and return its byte length."""
    if type(row) is not tuple or len(row) != 3:
        raise LayoutError(f"tensor {index}: its description must be [port, element type, shape]")
    port, element_type, shape = row
    if type(port) is not int or not 0 <= port < MAX_TENSORS:
        raise LayoutError(f"tensor {index}: the port must be an integer from 0 to {MAX_TENSORS - 1}")
    if type(element_type) is not str or element_type not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        shown = element_type[:32] if type(element_type) is str else type(element_type).__name__
        raise LayoutError(f"tensor {index}: element type {shown!r} is not one of {known}")
    of_strings = element_type in STRING_TYPES
    if type(shape) is not tuple or not of_strings <= len(shape) <= MAX_RANK + of_strings:
        most = f"{MAX_RANK} integers" + of_strings * ", and one more: the bytes of all strings"
        raise LayoutError(f"tensor {index}: the shape must be an array of at most {most}")
    for axis, size in enumerate(shape):
        if type(size) is not int:
            raise LayoutError(f"tensor {index}: dimension {axis} is {type(size).__name__}, not an integer")
        if not 0 <= size <= MAX_INTEGER:
            raise LayoutError(f"tensor {index}: dimension {axis} is {size}, and not from 0 to 2^63-1")
    sizes, contents = (shape[:-1], shape[-1]) if of_strings else (shape, 0)
    item_bytes = _ITEM_BYTES[element_type]
    # As NumPy counts: dimensions of 0 do not excuse the others.
    if prod(size or 1 for size in sizes) * item_bytes + contents > MAX_INTEGER:
        raise LayoutError(f"tensor {index}: shape {list(shape)} of {element_type} overflows 2^63-1 bytes")
    return prod(sizes) * item_bytes + contents


def _check(layout: Any) -> tuple[int, ...]:
    if type(layout) is not tuple or len(layout) > MAX_TENSORS:
        raise LayoutError(f"the layout must be an array of at most {MAX_TENSORS} tensor descriptions")
    nbytes = tuple(_check_row(index, row) for index, row in enumerate(layout))
    if len({row[0] for row in layout}) != len(layout):
        raise LayoutError(f"two tensors name the same port: {[row[0] for row in layout]}")
    return nbytes


class LayoutBook:
    """Layouts that have been checked, by their bytes and by their value; bounded."""

    __slots__ = ("_by_bytes", "_by_value")

    def __init__(self) -> None:
        self._by_bytes: dict[bytes, CheckedLayout] = {}
        self._by_value: dict[Layout, CheckedLayout] = {}

    def read(self, packed: bytes) -> CheckedLayout:
        """Return the checked layout of these bytes; raises `LayoutError`."""
        known = self._by_bytes.get(packed)
        return self._unpack(packed) if known is None else known

    def write(self, layout: Layout) -> CheckedLayout:
        """Return the checked layout with its encoding; raises `LayoutError`."""
        known = self._by_value.get(layout)
        return self._pack(layout) if known is None else known

    def _unpack(self, packed: bytes) -> CheckedLayout:
        if type(packed) is not bytes or len(packed) > _MAX_PACKED_BYTES:
            raise LayoutError(f"the layout must be a bin of at most {_MAX_PACKED_BYTES} bytes")
        try:
            layout = msgpack.unpackb(
                packed,
                use_list=False,
                max_str_len=32,
                max_bin_len=0,
                max_array_len=max(MAX_TENSORS, MAX_RANK),
                max_map_len=0,
                max_ext_len=0,
                ext_hook=refuse_extension,
            )
        except ValueError as error:
            raise LayoutError(
                "the layout is not msgpack of at most 64 x [port, element type, shape]"
            ) from error
        checked = CheckedLayout(layout, packed, _check(layout))
        if len(packed) <= MAX_REMEMBERED_BYTES:
            if len(self._by_bytes) >= MAX_REMEMBERED:
                self._by_bytes.clear()
            self._by_bytes[packed] = checked
        return checked

    def _pack(self, layout: Layout) -> CheckedLayout:
        # A layout is remembered by value after a check for exact types, so that an equal layout of other
        # types (bool, float, NumPy integers) is refused here or written as the integers that it equals.
        nbytes = _check(layout)
        checked = CheckedLayout(layout, msgpack.packb(layout), nbytes)
        if len(checked.packed) <= MAX_REMEMBERED_BYTES:
            if len(self._by_value) >= MAX_REMEMBERED:
                self._by_value.clear()
            self._by_value[layout] = checked
        return checked


def refuse_extension(code: int, data: bytes) -> Any:
    """Refuse every msgpack extension."""
    raise ValueError(f"msgpack extension type {code} is not part of the protocol")


_LAYOUTS = LayoutBook()


# ---------------------------------------------------------------- reading

# Up to this length deleting the allowed bytes is faster than calling NumPy.
_FEW_BYTES = 512


def _read_tensors(
    packed: Any, inline: Any, frames: Sequence[Buffer], first: int, last: int
) -> tuple[Tensors, int]:
    """Return the tensors of one request or result, and the number of the first frame after theirs."""
    if type(packed) is not bytes:
        raise _wrong("the layout", "a bin", packed)
    try:
        layout, _, nbytes = _LAYOUTS.read(packed)
    except LayoutError as error:
        raise BadEntryError(error.message) from error
    if type(inline) is not tuple or len(inline) != len(nbytes):
        raise BadEntryError(f"{len(nbytes)} tensors are described; `inline` must have as many elements")
    for data, expected in zip(inline, nbytes):  # noqa: B905 - just checked, and hot
        if type(data) is not bytes or len(data) != expected or expected > MAX_INLINE_BYTES:
            return _framed_tensors(layout, nbytes, inline, frames, first, last)
    return Tensors(layout=layout, buffers=inline), first


def _framed_tensors(
    layout: Layout, nbytes: tuple[int, ...], inline: Fields, frames: Sequence[Buffer], first: int, last: int
) -> tuple[Tensors, int]:
    """Do the same in the general case: some tensors are frames, or an element is wrong."""
    buffers: list[Buffer] = []
    for index, (data, expected) in enumerate(zip(inline, nbytes, strict=True)):
        if data is None:
            if first >= last:
                raise BadEntryError(f"tensor {index} should be a frame, but the entry owns no more")
            data = frames[first]
            size = memoryview(data).nbytes
            first += 1
        elif type(data) is not bytes:
            raise _wrong(f"tensor {index}: its element of `inline`", "a bin or nil", data)
        elif len(data) > MAX_INLINE_BYTES:
            raise BadEntryError(
                f"tensor {index} has {len(data)} bytes; more than {MAX_INLINE_BYTES} must travel as a frame"
            )
        else:
            size = len(data)
        if size != expected:
            _, element_type, shape = layout[index]
            raise BadEntryError(
                f"tensor {index} has {size} bytes, but {element_type} {list(shape)} takes {expected}"
            )
        buffers.append(data)
    return Tensors(layout=layout, buffers=buffers), first


def _check_truth_values(tensors: Tensors) -> None:
    """Check the booleans of a request: an engine may index by them, or compute with them as 0 or 1."""
    for index, ((_, element_type, _), data) in enumerate(zip(tensors.layout, tensors.buffers, strict=True)):
        if element_type == "boolean" and not _are_truth_values(data):
            raise BadEntryError(f"tensor {index}: each byte of a boolean tensor must be 0 or 1")


def _are_truth_values(data: Buffer) -> bool:
    if type(data) is bytes and len(data) <= _FEW_BYTES:
        return not data.translate(None, b"\0\1")
    # The largest byte: 5 us per 100 KB.
    return not memoryview(data).nbytes or bool(np.frombuffer(data, np.uint8).max() <= 1)


def _wrong(where: str, what: str, value: Any) -> BadEntryError:
    return BadEntryError(f"{where} {must_be(what, value)}")


def _check_frames_used(used: int, last: int) -> None:
    if used != last:
        raise BadEntryError(f"it claims {last - used} frames more than its tensors use")


def _read_request(
    fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits
) -> RequestEntry:
    """Read a `RequestEntry`. The checks are written out: a call for each would double the time."""
    tags = None
    if len(fields) == 8:
        _, _, sequence, model, remaining_ms, priority, packed, inline = fields
    elif len(fields) == 9:
        _, _, sequence, model, remaining_ms, priority, packed, inline, given = fields
        tags = checked("Request.tags", read_tags, given)
    else:
        raise BadEntryError(f"Request has {len(fields)} elements instead of 8 or 9")
    if type(sequence) is not int or not 0 <= sequence <= MAX_INTEGER:
        raise _wrong("Request.sequence", INTEGER, sequence)
    if type(model) is not int or not 0 <= model <= MAX_INTEGER:
        raise _wrong("Request.model", INTEGER, model)
    if remaining_ms is not None and (type(remaining_ms) is not int or not 0 <= remaining_ms <= MAX_INTEGER):
        raise _wrong("Request.remaining_ms", "nil or an integer from 0 to 2^63-1", remaining_ms)
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise _wrong("Request.priority", "an integer of at most 31 bits and a sign", priority)
    tensors, used = _read_tensors(packed, inline, frames, first, last)
    if used != last:
        _check_frames_used(used, last)
    if b"boolean" in packed:
        _check_truth_values(tensors)
    return RequestEntry(
        sequence=sequence,
        model=model,
        remaining_ms=remaining_ms,
        priority=priority,
        tensors=tensors,
        tags=tags,
    )


class _LatestTimings:
    """The timings that were read last. The requests of a batch that arrived together have equal ones, in one message."""

    def __init__(self) -> None:
        self._latest: tuple[Any, Timings | None] = (None, None)

    def read(self, value: Any) -> Timings:
        """Return the timings; equal ones are not checked again, so that `True` may pass for 1, and is read as 1."""
        seen, timings = self._latest
        if timings is None or value != seen:
            timings = _timings(value)
            self._latest = value, timings  # in one step: other threads read results too
        return timings


_TIMINGS = _LatestTimings()


def _timings(value: Any) -> Timings:
    if type(value) is not tuple or len(value) < 6:
        raise _wrong("Result.timings", "an array of at least 6 elements", value)
    timings = Timings(*value[:8])  # newer servers may send more
    worker, digest, version = timings.worker, timings.digest, timings.version
    for number in value[:5]:
        if type(number) is not int or not 0 <= number <= MAX_INTEGER:
            raise _wrong("each time in Result.timings", INTEGER, number)
    if type(worker) is not str or len(worker) > MAX_NAME_CHARACTERS:
        raise _wrong("Result.timings.worker", NAME, worker)
    if digest is not None and (type(digest) is not str or len(digest) > MAX_NAME_CHARACTERS):
        raise _wrong("Result.timings.digest", NAME, digest)
    if version is not None and (type(version) is not str or len(version) > MAX_NAME_CHARACTERS):
        raise _wrong("Result.timings.version", NAME, version)
    return timings


def _read_result(
    fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits
) -> ResultEntry:
    """Read a `ResultEntry`."""
    if len(fields) != 6:
        raise BadEntryError(f"Result has {len(fields)} elements instead of 6")
    _, _, sequence, timings, packed, inline = fields
    if type(sequence) is not int or not 0 <= sequence <= MAX_INTEGER:
        raise _wrong("Result.sequence", INTEGER, sequence)
    tensors, used = _read_tensors(packed, inline, frames, first, last)
    if used != last:
        _check_frames_used(used, last)
    return ResultEntry(sequence=sequence, timings=_TIMINGS.read(timings), tensors=tensors)


def _read_execute(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Execute:
    """Read an `Execute`; one bad member makes the whole batch bad."""
    if len(fields) != 9:
        raise BadEntryError(f"Execute has {len(fields)} elements instead of 9")
    _, _, batch, session, slot, sent_us, model, sizes, rows = fields
    if type(sizes) is not tuple or type(rows) is not tuple or not 0 < len(rows) <= limits.max_members:
        raise BadEntryError(f"Execute needs an array of sizes, and one of 1 to {limits.max_members} members")
    members: list[Tensors] = []
    deadlines: list[float | None] = []
    for row in rows:
        if type(row) is not tuple or len(row) != 3:
            raise BadEntryError("a member of Execute must be [deadline_us, layout, inline]")
        tensors, first = _read_tensors(row[1], row[2], frames, first, last)
        members.append(tensors)
        if (deadline_us := row[0]) is None:
            deadlines.append(None)
        else:
            check_integers("Execute", deadline_us=deadline_us)
            deadlines.append(deadline_us / 1e6)
    _check_frames_used(first, last)
    check_integers("Execute", batch=batch, session=session, slot=slot, sent_us=sent_us)
    for size in sizes:
        check_integers("Execute", sizes=size)
    return Execute(
        batch=batch,
        session=session,
        slot=slot,
        sent_us=sent_us,
        model=checked("Execute.model", name, model),
        sizes=sizes,
        members=tuple(members),
        start_before=None if deadlines.count(None) == len(deadlines) else tuple(deadlines),
    )


def _read_batch_done(
    fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits
) -> BatchDone:
    """Read a `BatchDone`; one bad output makes the whole report bad."""
    if len(fields) != 11:
        raise BadEntryError(f"BatchDone has {len(fields)} elements instead of 11")
    _, _, batch, session, run_us, busy_us, reallocations, preparations, calls, rows, gather_us = fields
    if type(rows) is not tuple or not 0 < len(rows) <= limits.max_members:
        raise BadEntryError(f"BatchDone needs an array of 1 to {limits.max_members} outputs")
    outputs: list[Tensors | None] = []
    for row in rows:
        if row is None:
            outputs.append(None)
        elif type(row) is tuple and len(row) == 2:
            tensors, first = _read_tensors(row[0], row[1], frames, first, last)
            outputs.append(tensors)
        else:
            raise BadEntryError("an output of BatchDone must be nil or [layout, inline]")
    _check_frames_used(first, last)
    check_integers(
        "BatchDone",
        batch=batch,
        session=session,
        run_us=run_us,
        busy_us=busy_us,
        reallocations=reallocations,
        preparations=preparations,
        gather_us=gather_us,
    )
    report = BatchReport(
        batch=batch,
        outputs=tuple(outputs),
        gather_s=gather_us * 1e-6,
        run_s=run_us * 1e-6,
        busy_s=busy_us * 1e-6,
        reallocations=reallocations,
        preparations=preparations,
        calls=_calls(calls, limits),
    )
    return BatchDone(session=session, report=report)


def _calls(rows: Any, limits: Limits) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if rows == () and type(rows) is tuple:
        return ()
    if type(rows) is not tuple or len(rows) > limits.max_members:
        raise BadEntryError(f"BatchDone.calls must be an array of at most {limits.max_members} elements")
    calls = []
    for row in rows:
        if type(row) is not tuple or len(row) != 2 or type(row[1]) is not tuple:
            raise BadEntryError("an element of BatchDone.calls must be [count, sizes]")
        count = checked("a count in BatchDone.calls", integer, row[0])
        calls.append((count, tuple([checked("a size in BatchDone.calls", integer, size) for size in row[1]])))
    return tuple(calls)


# ---------------------------------------------------------------- writing

_REQUEST, _RESULT = RequestEntry.KIND, ResultEntry.KIND
"""As plain names: what a class has is looked up anew each time."""


def _write_tensors(tensors: Tensors, frames: list[Buffer]) -> tuple[bytes, list[Any]]:
    """Return the layout's bytes and `inline`: the bytes of each small tensor, nil for each that became a frame."""
    _, packed, nbytes = _LAYOUTS.write(tensors.layout)
    buffers = tensors.buffers
    if len(buffers) != len(nbytes):
        raise InvalidRequest(f"the layout describes {len(nbytes)} tensors, but {len(buffers)} are given")
    inline: list[Any] = []
    for data, expected in zip(buffers, nbytes):  # noqa: B905 - just checked, and hot
        if type(data) is bytes and len(data) == expected and expected <= MAX_INLINE_BYTES:
            inline.append(data)
        else:
            inline.append(_inline_or_frame(data, expected, frames))
    return packed, inline


def _inline_or_frame(data: Buffer, expected: int, frames: list[Buffer]) -> bytes | None:
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidRequest("the bytes of a tensor must be C-contiguous")
    if view.nbytes != expected:
        raise InvalidRequest(f"a tensor has {view.nbytes} bytes, but its layout takes {expected}")
    if expected <= MAX_INLINE_BYTES:
        return view.tobytes()
    if expected > MAX_FRAME_BYTES:
        raise TooLarge(f"a tensor of {expected} bytes; in one message it may have {MAX_FRAME_BYTES}")
    frames.append(data)
    return None


def _write_request(entry: RequestEntry, frames: list[Buffer]) -> bytes:
    before = len(frames)
    packed, inline = _write_tensors(entry.tensors, frames)
    remaining_ms = entry.remaining_ms
    if remaining_ms is not None and remaining_ms < 0:
        remaining_ms = 0  # late already; the receiver says so
    row = (
        _REQUEST,
        len(frames) - before,
        entry.sequence,
        entry.model,
        remaining_ms,
        entry.priority,
        packed,
        inline,
    )
    return pack(row if entry.tags is None else (*row, entry.tags))


def _write_result(entry: ResultEntry, frames: list[Buffer]) -> bytes:
    before = len(frames)
    packed, inline = _write_tensors(entry.tensors, frames)
    times = entry.timings
    return pack(
        (
            _RESULT,
            len(frames) - before,
            entry.sequence,
            times if times.version is not None else times[:6] if times.digest is None else times[:7],
            packed,
            inline,
        )
    )


def _write_execute(entry: Execute, frames: list[Buffer]) -> bytes:
    before = len(frames)
    members = []
    deadlines = entry.start_before or repeat(None)
    for tensors, at in zip(entry.members, deadlines):  # noqa: B905 - without deadlines the second has no end
        deadline_us = None if at is None else min(max(0, round(at * 1e6)), MAX_INTEGER)
        members.append((deadline_us, *_write_tensors(tensors, frames)))
    return pack(
        (
            Execute.KIND,
            len(frames) - before,
            entry.batch,
            entry.session,
            entry.slot,
            entry.sent_us,
            entry.model,
            entry.sizes,
            members,
        )
    )


def _write_batch_done(entry: BatchDone, frames: list[Buffer]) -> bytes:
    before = len(frames)
    report = entry.report
    outputs = [None if output is None else _write_tensors(output, frames) for output in report.outputs or ()]
    return pack(
        (
            BatchDone.KIND,
            len(frames) - before,
            report.batch,
            entry.session,
            round(report.run_s * 1e6),
            round(report.busy_s * 1e6),
            report.reallocations,
            report.preparations,
            report.calls,
            outputs,
            round(report.gather_s * 1e6),
        )
    )


READERS: dict[type[Entry], Reader] = {
    RequestEntry: _read_request,
    ResultEntry: _read_result,
    Execute: _read_execute,
    BatchDone: _read_batch_done,
}
WRITERS: dict[type[Entry], Writer] = {
    RequestEntry: _write_request,
    ResultEntry: _write_result,
    Execute: _write_execute,
    BatchDone: _write_batch_done,
}

"""One unpacked entry -> one object of `messages.py`, every field checked.

The functions here get the fields of an entry as msgpack gave them (tuples, not lists) and the message's frames
from `first` to `last`, which the entry owns. They raise `BadEntryError`; the codec turns that into a `BadEntry`.
`Request` and `Result` are the hot kinds and have functions of their own; most others are a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from shapestream.wire.layouts import LayoutBook, LayoutError
from shapestream.wire.limits import (
    MAX_INLINE_BYTES,
    MAX_INTEGER,
    MAX_MESSAGE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    Limits,
)
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Cancel,
    CancelBatch,
    Credit,
    Entry,
    Execute,
    ExecuteMember,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    Request,
    Result,
    Statistics,
    StatisticsRequest,
    Timings,
    Unknown,
    Welcome,
    WorkerHello,
    WorkerWelcome,
)
from shapestream_engine.layout import Buffer, Layout, Tensors

__all__ = ["READERS", "BadEntryError", "Reader", "entry_id"]

Fields: TypeAlias = tuple[Any, ...]
Reader: TypeAlias = Callable[[Fields, Sequence[Buffer], int, int, Limits], Entry]
MAX_PRIORITY = 2**31 - 1
_LAYOUTS = LayoutBook()


class BadEntryError(Exception):
    """This entry, alone, cannot be used; the message says why."""


# ---------------------------------------------------------------- single fields


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise BadEntryError("must be an integer from 0 to 2^63-1")
    return value


def _optional_integer(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise BadEntryError("must be true or false")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_NAME_CHARACTERS:
        raise BadEntryError(f"must be a string of at most {MAX_NAME_CHARACTERS} characters")
    return value


def _words(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_MESSAGE_CHARACTERS:
        raise BadEntryError(f"must be a string of at most {MAX_MESSAGE_CHARACTERS} characters")
    return value


def _uuid(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 16:
        raise BadEntryError("must be 16 bytes")
    return value


def _plain_map(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise BadEntryError("must be a map with strings as keys")
    return value


def _map_of_maps(value: Any) -> dict[str, dict[str, Any]]:
    return {_name(key): _plain_map(item) for key, item in _plain_map(value).items()}


_COLD: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    Heartbeat: {},
    Goodbye: {},
    Hello: {"client": _uuid, "software": _name},
    OpenModel: {"name": _name},
    Cancel: {"sequence": _integer},
    StatisticsRequest: {},
    Welcome: {
        "epoch": _uuid,
        "window_requests": _integer,
        "window_bytes": _integer,
        "heartbeat_ms": _integer,
    },
    Unknown: {},
    ModelOpened: {"name": _name, "number": _integer, "signature": _plain_map},
    ModelRefused: {"name": _name, "code": _name, "message": _words},
    Failure: {
        "sequence": _integer,
        "code": _name,
        "message": _words,
        "retryable": _flag,
        "retry_after_ms": _optional_integer,
    },
    Credit: {"window_requests": _integer, "window_bytes": _integer},
    Statistics: {"values": _plain_map},
    WorkerHello: {"worker": _name, "pid": _integer, "slots": _integer, "models": _map_of_maps},
    BatchFailed: {"batch": _integer, "code": _name, "message": _words},
    WorkerWelcome: {"epoch": _uuid, "heartbeat_ms": _integer},
    CancelBatch: {"batch": _integer},
}


def _cold_reader(kind: type[Any], columns: dict[str, Callable[[Any], Any]]) -> Reader:
    def read(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Entry:
        if len(fields) != len(columns) + 2:
            raise BadEntryError(f"{kind.__name__} has {len(fields)} elements instead of {len(columns) + 2}")
        if first != last:
            raise BadEntryError(f"{kind.__name__} owns no frames, but claims {last - first}")
        values = {}
        for (name, check), value in zip(columns.items(), fields[2:], strict=True):
            try:
                values[name] = check(value)
            except BadEntryError as error:
                raise BadEntryError(f"{kind.__name__}.{name} {error}") from None
        entry: Entry = kind(**values)
        return entry

    return read


# ---------------------------------------------------------------- tensors


def _tensors(
    packed: Any, inline: Any, frames: Sequence[Buffer], first: int, last: int
) -> tuple[Tensors, int]:
    """The tensors of one request or result, and the first frame that they did not use."""
    if type(packed) is not bytes:
        raise BadEntryError("the layout must be a bin")
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
    """The general case: some tensors are frames, or something is wrong."""
    buffers: list[Buffer] = []
    for index, (data, expected) in enumerate(zip(inline, nbytes, strict=True)):
        if data is None:
            if first >= last:
                raise BadEntryError(f"tensor {index} should be a frame, but the entry owns no more")
            data = frames[first]
            size = memoryview(data).nbytes
            first += 1
        elif type(data) is not bytes:
            raise BadEntryError(f"tensor {index}: inline bytes must be a bin or nil")
        elif len(data) > MAX_INLINE_BYTES:
            raise BadEntryError(f"tensor {index}: more than {MAX_INLINE_BYTES} bytes must travel as a frame")
        else:
            size = len(data)
        if size != expected:
            _, element_type, shape = layout[index]
            raise BadEntryError(
                f"tensor {index} has {size} bytes, but {element_type} {list(shape)} takes {expected}"
            )
        buffers.append(data)
    return Tensors(layout=layout, buffers=buffers), first


def _check_frames_used(used: int, last: int) -> None:
    if used != last:
        raise BadEntryError(f"it claims {last - used} frames more than its tensors use")


def _read_request(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Request:
    if len(fields) != 8:
        raise BadEntryError(f"Request has {len(fields)} elements instead of 8")
    _, _, sequence, model, remaining_ms, priority, packed, inline = fields
    if type(sequence) is not int or not 0 <= sequence <= MAX_INTEGER:
        raise BadEntryError("Request.sequence must be an integer from 0 to 2^63-1")
    if type(model) is not int or not 0 <= model <= MAX_INTEGER:
        raise BadEntryError("Request.model must be an integer from 0 to 2^63-1")
    if remaining_ms is not None and (type(remaining_ms) is not int or not 0 <= remaining_ms <= MAX_INTEGER):
        raise BadEntryError("Request.remaining_ms must be nil or an integer from 0 to 2^63-1")
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise BadEntryError("Request.priority must be an integer of at most 31 bits and a sign")
    tensors, used = _tensors(packed, inline, frames, first, last)
    if used != last:
        _check_frames_used(used, last)
    return Request(
        sequence=sequence, model=model, remaining_ms=remaining_ms, priority=priority, tensors=tensors
    )


def _timings(value: Any) -> Timings:
    if type(value) is not tuple or len(value) != 6:
        raise BadEntryError("Result.timings must be an array of 6 elements")
    queue_us, run_us, total_us, batch_requests, batch_rows, worker = value
    for number in value[:5]:
        if type(number) is not int or not 0 <= number <= MAX_INTEGER:
            raise BadEntryError("Result.timings must hold integers from 0 to 2^63-1")
    if type(worker) is not str or len(worker) > MAX_NAME_CHARACTERS:
        raise BadEntryError(
            f"Result.timings.worker must be a string of at most {MAX_NAME_CHARACTERS} characters"
        )
    return Timings(
        queue_us=queue_us,
        run_us=run_us,
        total_us=total_us,
        batch_requests=batch_requests,
        batch_rows=batch_rows,
        worker=worker,
    )


def _read_result(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Result:
    if len(fields) != 6:
        raise BadEntryError(f"Result has {len(fields)} elements instead of 6")
    _, _, sequence, timings, packed, inline = fields
    if type(sequence) is not int or not 0 <= sequence <= MAX_INTEGER:
        raise BadEntryError("Result.sequence must be an integer from 0 to 2^63-1")
    tensors, used = _tensors(packed, inline, frames, first, last)
    if used != last:
        _check_frames_used(used, last)
    return Result(sequence=sequence, timings=_timings(timings), tensors=tensors)


def _read_execute(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Execute:
    if len(fields) != 7:
        raise BadEntryError(f"Execute has {len(fields)} elements instead of 7")
    _, _, batch, slot, model, sizes, rows = fields
    if type(sizes) is not tuple or type(rows) is not tuple or not 0 < len(rows) <= limits.max_members:
        raise BadEntryError(f"Execute needs an array of sizes, and one of 1 to {limits.max_members} members")
    members = []
    for row in rows:
        if type(row) is not tuple or len(row) != 3:
            raise BadEntryError("a member of Execute must be [remaining_ms, layout, inline]")
        tensors, first = _tensors(row[1], row[2], frames, first, last)
        members.append(ExecuteMember(remaining_ms=_optional_integer(row[0]), tensors=tensors))
    _check_frames_used(first, last)
    return Execute(
        batch=_integer(batch),
        slot=_integer(slot),
        model=_name(model),
        sizes=tuple(_integer(size) for size in sizes),
        members=tuple(members),
    )


def _read_batch_done(
    fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits
) -> BatchDone:
    if len(fields) != 7:
        raise BadEntryError(f"BatchDone has {len(fields)} elements instead of 7")
    _, _, batch, run_us, reallocations, new_shape, rows = fields
    if type(rows) is not tuple or not 0 < len(rows) <= limits.max_members:
        raise BadEntryError(f"BatchDone needs an array of 1 to {limits.max_members} outputs")
    outputs: list[Tensors | None] = []
    for row in rows:
        if row is None:
            outputs.append(None)
        elif type(row) is tuple and len(row) == 2:
            tensors, first = _tensors(row[0], row[1], frames, first, last)
            outputs.append(tensors)
        else:
            raise BadEntryError("an output of BatchDone must be nil or [layout, inline]")
    _check_frames_used(first, last)
    return BatchDone(
        batch=_integer(batch),
        run_us=_integer(run_us),
        reallocations=_integer(reallocations),
        new_shape=_flag(new_shape),
        outputs=tuple(outputs),
    )


READERS: dict[type[Any], Reader] = {
    **{kind: _cold_reader(kind, columns) for kind, columns in _COLD.items()},
    Request: _read_request,
    Result: _read_result,
    Execute: _read_execute,
    BatchDone: _read_batch_done,
}
"""How each kind is read."""

_WITH_ID = {
    kind.KIND for kind in (Request, Cancel, Result, Failure, BatchDone, BatchFailed, Execute, CancelBatch)
}


def entry_id(fields: Fields) -> int | None:
    """The id of an entry that may be bad: its sequence or batch number, where it has a readable one."""
    if len(fields) > 2 and fields[0] in _WITH_ID and type(fields[2]) is int and 0 <= fields[2] <= MAX_INTEGER:
        return fields[2]
    return None

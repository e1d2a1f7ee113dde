"""One unpacked entry -> one object of `messages.py`, every field checked.

A reader gets the fields of an entry as msgpack gave them (tuples, not lists) and the message's frames, of which
the entry owns `first` up to, not including, `last`. It raises `BadEntryError`, which the codec turns into a
`BadEntry`. Kinds without tensors are a table here; the others have readers of their own in tensor_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from shapestream.wire.fields import (
    BadEntryError,
    checked,
    flag,
    integer,
    map_of_maps,
    map_of_names,
    name,
    optional_integer,
    plain_map,
    uuid,
    words,
)
from shapestream.wire.limits import MAX_INTEGER, Limits
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Cancel,
    CancelBatch,
    Clock,
    Credit,
    Entry,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    RecallBatch,
    Request,
    Result,
    Statistics,
    StatisticsRequest,
    Unknown,
    Welcome,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shapestream.wire.tensor_reader import read_batch_done, read_execute, read_request, read_result
from shapestream_engine.layout import Buffer

__all__ = ["READERS", "Reader", "entry_id"]

Fields: TypeAlias = tuple[Any, ...]
Reader: TypeAlias = Callable[[Fields, Sequence[Buffer], int, int, Limits], Entry]

_COLD: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    Heartbeat: {},
    Goodbye: {},
    Clock: {"sent_us": integer},
    Hello: {"client": uuid, "software": name},
    OpenModel: {"name": name},
    Cancel: {"sequence": integer},
    StatisticsRequest: {},
    Welcome: {
        "epoch": uuid,
        "window_requests": integer,
        "window_bytes": integer,
        "heartbeat_ms": integer,
    },
    Unknown: {},
    ModelOpened: {"name": name, "number": integer, "signature": plain_map},
    ModelRefused: {"name": name, "code": name, "message": words},
    Failure: {
        "sequence": integer,
        "code": name,
        "message": words,
        "retryable": flag,
        "retry_after_ms": optional_integer,
    },
    Credit: {"window_requests": integer, "window_bytes": integer},
    Statistics: {"values": plain_map},
    WorkerHello: {
        "worker": name,
        "pid": integer,
        "slots": integer,
        "models": map_of_maps,
        "costs": map_of_maps,
        "digests": map_of_names,
    },
    BatchFailed: {"batch": integer, "code": name, "message": words},
    WorkerDraining: {},
    WorkerWelcome: {"epoch": uuid, "heartbeat_ms": integer},
    WorkerRefused: {"model": name, "message": words},
    CancelBatch: {"batch": integer},
    RecallBatch: {"batch": integer},
}


_OPTIONAL = {WorkerHello: 1}
"""Of which kinds how many fields at the end may be left out, as peers do that were made before these."""


def _cold_reader(kind: type[Any], columns: dict[str, Callable[[Any], Any]]) -> Reader:
    optional = _OPTIONAL.get(kind, 0)

    def read(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Entry:
        if not len(columns) - optional <= len(fields) - 2 <= len(columns):
            raise BadEntryError(f"{kind.__name__} has {len(fields)} elements instead of {len(columns) + 2}")
        if first != last:
            raise BadEntryError(f"{kind.__name__} owns no frames, but claims {last - first}")
        values = {
            column: checked(f"{kind.__name__}.{column}", check, value)
            for (column, check), value in zip(columns.items(), fields[2:], strict=optional == 0)
        }
        entry: Entry = kind(**values)
        return entry

    return read


READERS: dict[type[Any], Reader] = {
    **{kind: _cold_reader(kind, columns) for kind, columns in _COLD.items()},
    Request: read_request,
    Result: read_result,
    Execute: read_execute,
    BatchDone: read_batch_done,
}
"""How each kind is read."""

_KINDS_WITH_ID = {
    kind.KIND
    for kind in (Request, Cancel, Result, Failure, BatchDone, BatchFailed, Execute, CancelBatch, RecallBatch)
}


def entry_id(fields: Fields) -> int | None:
    """The id of an entry that may be bad: its sequence or batch number, where it has a readable one."""
    if (
        len(fields) > 2
        and fields[0] in _KINDS_WITH_ID
        and type(fields[2]) is int
        and 0 <= fields[2] <= MAX_INTEGER
    ):
        return fields[2]
    return None

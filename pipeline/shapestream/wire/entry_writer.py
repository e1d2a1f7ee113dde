"""One object of `messages.py` -> its packed bytes; its large tensors become frames of the message, untouched.

What our own process hands in is not checked again here, except that the bytes of each tensor are as many as
its layout says: a wrong length would be refused by the receiver, far from the defect.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeAlias

import msgpack

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.wire.layouts import LayoutBook
from shapestream.wire.limits import MAX_FRAME_BYTES, MAX_INLINE_BYTES, MAX_MESSAGE_CHARACTERS
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Cancel,
    CancelBatch,
    Clock,
    Credit,
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
from shapestream_engine.layout import Buffer, Tensors

__all__ = ["WRITERS", "Writer"]

Writer: TypeAlias = Callable[[Any, list[Buffer]], bytes]
_LAYOUTS = LayoutBook()
# One packer for the process: a new one costs more than packing an entry. `pack` is a single C call that runs
# no Python code on the way, so threads cannot meet inside it.
_pack: Callable[[Any], bytes] = msgpack.Packer(autoreset=True).pack


def _tensors(tensors: Tensors, frames: list[Buffer]) -> tuple[bytes, list[Any]]:
    """The layout's bytes and `inline`: the bytes of each small tensor, nil for each that became a frame."""
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


def _write_request(entry: Request, frames: list[Buffer]) -> bytes:
    before = len(frames)
    packed, inline = _tensors(entry.tensors, frames)
    remaining_ms = entry.remaining_ms
    if remaining_ms is not None and remaining_ms < 0:
        remaining_ms = 0  # late already; the receiver says so
    return _pack(
        (12, len(frames) - before, entry.sequence, entry.model, remaining_ms, entry.priority, packed, inline)
    )


def _write_result(entry: Result, frames: list[Buffer]) -> bytes:
    before = len(frames)
    packed, inline = _tensors(entry.tensors, frames)
    times = entry.timings
    digest = () if times.digest is None else (times.digest,)
    return _pack(
        (
            24,
            len(frames) - before,
            entry.sequence,
            (
                times.queue_us,
                times.run_us,
                times.total_us,
                times.batch_requests,
                times.batch_rows,
                times.worker,
                *digest,
            ),
            packed,
            inline,
        )
    )


def _write_execute(entry: Execute, frames: list[Buffer]) -> bytes:
    before = len(frames)
    members = []
    for member in entry.members:
        remaining_ms = member.remaining_ms
        packed, inline = _tensors(member.tensors, frames)
        members.append((remaining_ms and max(remaining_ms, 0), packed, inline))
    return _pack(
        (Execute.KIND, len(frames) - before, entry.batch, entry.slot, entry.model, entry.sizes, members)
    )


def _write_batch_done(entry: BatchDone, frames: list[Buffer]) -> bytes:
    before = len(frames)
    outputs = [None if output is None else _tensors(output, frames) for output in entry.outputs]
    return _pack(
        (
            BatchDone.KIND,
            len(frames) - before,
            entry.batch,
            entry.run_us,
            entry.busy_us,
            entry.reallocations,
            entry.preparations,
            entry.calls,
            outputs,
        )
    )


def _fields_writer(kind: Any, *fields: str) -> Writer:
    if not fields:
        whole = _pack((kind.KIND, 0))
        return lambda entry, frames: whole
    if len(fields) == 1:
        only = attrgetter(*fields)
        return lambda entry, frames: _pack((kind.KIND, 0, only(entry)))
    values = attrgetter(*fields)
    return lambda entry, frames: _pack((kind.KIND, 0, *values(entry)))


def _write_words(kind: Any, *fields: str) -> Writer:
    """For kinds with a `message` for humans, which an engine may have made long, or of what is no text (any surrogate)."""
    values = attrgetter(*fields)
    at = fields.index("message")

    def write(entry: Any, frames: list[Buffer]) -> bytes:
        row = list(values(entry))
        row[at] = row[at][:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
        return _pack((kind.KIND, 0, *row))

    return write


WRITERS: dict[type[Any], Writer] = {
    Heartbeat: _fields_writer(Heartbeat),
    Goodbye: _fields_writer(Goodbye),
    Clock: _fields_writer(Clock, "sent_us"),
    Hello: _fields_writer(Hello, "client", "software"),
    OpenModel: _fields_writer(OpenModel, "name"),
    Request: _write_request,
    Cancel: _fields_writer(Cancel, "sequence"),
    StatisticsRequest: _fields_writer(StatisticsRequest),
    Welcome: _fields_writer(Welcome, "epoch", "window_requests", "window_bytes", "heartbeat_ms"),
    Unknown: _fields_writer(Unknown),
    ModelOpened: _fields_writer(ModelOpened, "name", "number", "signature"),
    ModelRefused: _write_words(ModelRefused, "name", "code", "message"),
    Result: _write_result,
    Failure: _write_words(Failure, "sequence", "code", "message", "retryable", "retry_after_ms"),
    Credit: _fields_writer(Credit, "window_requests", "window_bytes"),
    Statistics: _fields_writer(Statistics, "values"),
    WorkerHello: _fields_writer(WorkerHello, "worker", "pid", "slots", "models", "costs", "digests"),
    BatchDone: _write_batch_done,
    BatchFailed: _write_words(BatchFailed, "batch", "code", "message"),
    WorkerDraining: _fields_writer(WorkerDraining),
    WorkerWelcome: _fields_writer(WorkerWelcome, "epoch", "heartbeat_ms"),
    WorkerRefused: _write_words(WorkerRefused, "model", "message"),
    Execute: _write_execute,
    CancelBatch: _fields_writer(CancelBatch, "batch"),
    RecallBatch: _fields_writer(RecallBatch, "batch"),
}
"""How each kind is written."""

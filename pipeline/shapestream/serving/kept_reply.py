"""One reply as it is kept: bytes, at which the garbage collector does not look.

As objects, tens of thousands of replies would make each of its full passes, and so some requests, milliseconds slower.
They are made from the bytes again when somebody asks, which is rare. (marshal is the fastest way there, and safe: it reads
only what was written here, in this process.)
"""

from __future__ import annotations

import marshal
from dataclasses import dataclass
from typing import Any, TypeAlias

from shapestream.serving.fingerprint import checksum
from shapestream.wire.messages import Failure, Result, Timings
from shapestream_engine.layout import Buffer, Tensors

__all__ = ["OVERHEAD_NBYTES", "KeptReply", "Packed", "pack"]

OVERHEAD_NBYTES = 512
"""Counted for each reply beside its tensors: what the objects around them take."""
INLINE_NBYTES = 1024
"""Larger tensors are not copied but kept as they are."""
# Of marshal: the last one that does not look for equal parts, which takes half as long again.
_FORMAT = 2


Packed: TypeAlias = tuple[int, float, bytes, tuple[Buffer, ...] | None]
"""What a kept reply counts for in bytes, when it was given, its fields, and its tensors if they are not among those.

A plain tuple, since the garbage collector lets go of no other that holds only numbers and bytes.
"""


def pack(model: int, tensors: Tensors, reply: Result | Failure, at: float) -> Packed:
    """The reply to a request for this model with these tensors, given at this time."""
    nbytes, large = OVERHEAD_NBYTES, None
    if type(reply) is Result:
        outputs, spent = reply.tensors, reply.timings
        inline: list[bytes | None] = []
        for buffer in outputs.buffers:
            if type(buffer) is bytes and len(buffer) <= INLINE_NBYTES:
                nbytes += len(buffer)
                inline.append(buffer)
            else:
                nbytes += memoryview(buffer).nbytes
                large = tuple(outputs.buffers)
        times = (spent.queue_us, spent.run_us, spent.total_us, spent.batch_requests, spent.batch_rows)
        said: Any = (reply.sequence, times, spent.worker, spent.digest, outputs.layout, inline)
    else:
        assert type(reply) is Failure
        said = (reply.sequence, reply.code, reply.message, reply.retryable, reply.retry_after_ms)
    known_by = (model, tensors.layout, checksum(tensors))
    fields = marshal.dumps((known_by, type(reply) is Failure, said), _FORMAT)
    return (nbytes, at, fields, large)


@dataclass(frozen=True, slots=True)
class KeptReply:
    """One request's terminal reply, and what the request is known by."""

    _packed: Packed

    def answers(self, model: int, tensors: Tensors) -> bool:
        """Whether this is the reply to such a request, as far as the checksum can tell."""
        (of_model, layout, value), _, _ = marshal.loads(self._packed[2])
        return bool(of_model == model and layout == tensors.layout and value == checksum(tensors))

    @property
    def reply(self) -> Result | Failure:
        """The reply as it was."""
        _, _, fields, large = self._packed
        _, failed, said = marshal.loads(fields)
        return _failure(*said) if failed else _result(*said, large=large)


def _failure(sequence: int, code: str, message: str, retryable: bool, retry_after_ms: int | None) -> Failure:
    return Failure(
        sequence=sequence, code=code, message=message, retryable=retryable, retry_after_ms=retry_after_ms
    )


def _result(
    sequence: int,
    times: tuple[int, ...],
    worker: str,
    digest: str | None,
    layout: Any,
    inline: list[bytes],
    *,
    large: tuple[Buffer, ...] | None,
) -> Result:
    queue_us, run_us, total_us, batch_requests, batch_rows = times
    timings = Timings(
        queue_us=queue_us,
        run_us=run_us,
        total_us=total_us,
        batch_requests=batch_requests,
        batch_rows=batch_rows,
        worker=worker,
        digest=digest,
    )
    buffers: tuple[Buffer, ...] = tuple(inline) if large is None else large
    return Result(sequence=sequence, timings=timings, tensors=Tensors(layout=layout, buffers=buffers))

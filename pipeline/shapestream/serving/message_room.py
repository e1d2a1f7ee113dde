"""How many rows of a model one batch may have, so that it, and its answer, fit one message between server and worker.

A batch travels as one `Execute` and comes back as one `BatchDone`, and neither can be divided. In the worst case each
row is a request by itself, and all its tensors are as large as may be inside the header, or each a frame of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from shapestream.wire.limits import MAX_INLINE_BYTES, WORKER_LIMITS, Limits
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature

__all__ = ["most_rows"]

# Bytes of msgpack in a header, at most: a tensor's port, element type and the heads of its arrays and bytes; a size;
# what a member has besides its tensors; what a batch has besides its members (names, sizes, and the calls it took).
_TENSOR_BYTES = 64
_SIZE_BYTES = 9
_MEMBER_BYTES = 32
_BATCH_BYTES = 64 * 1024


def most_rows(signature: ModelSignature, limits: Limits = WORKER_LIMITS) -> int:
    """Rows of one batch that are sure to fit, at least 1: a single request always does."""
    room = limits.max_header_bytes - _BATCH_BYTES
    fits = [limits.max_members]
    for ports in (signature.inputs, signature.outputs):
        fits.append(limits.max_frames // max(1, len(ports)))
        fits.append(room // _header_bytes(ports))
    return max(1, min(fits))


def _header_bytes(ports: Sequence[InputPort | OutputPort]) -> int:
    """Of one request, or of one result, with every tensor inline."""
    return _MEMBER_BYTES + sum(
        MAX_INLINE_BYTES + _TENSOR_BYTES + _SIZE_BYTES * port.shape.rank for port in ports
    )

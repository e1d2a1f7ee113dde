"""The profile of a model: what the scheduler knows of it, from its signature and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shapestream.errors import ConfigurationError
from shapestream.scheduling.events import InputBytes, ModelProfile
from shapestream.settings import ModelSettings
from shapestream.telemetry.logging import get_logger
from shapestream.wire.limits import MAX_INLINE_BYTES, MAX_WORKER_ITEMS, WORKER_LIMITS, Limits
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.calibration_shapes import DEFAULT_MAX_BATCH
from shapestream_engine.element_types import dtype_of
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import BATCH
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import LENGTH

log = get_logger()

DEFAULT_BATCH_BYTES = 256 << 20
"""Default for the bytes of the inputs of one call, padding included.

Larger calls gain almost nothing from batching, and each slot keeps memory for its largest call.
"""
MAX_STEPS = 1 << 20
"""Limit of the work of planning the calls of every batch size: about half a second. A step tries one size for one number
of rows."""
STEPS_PER_CALL = 8
"""Steps that one planned call takes as long as."""
# Upper limits of the bytes of msgpack in a header.
_TENSOR_BYTES = 64
"""A tensor's port, element type, and the heads of its arrays and bytes."""
_SIZE_BYTES = 9
_MEMBER_BYTES = 32
"""A member without its tensors."""
_BATCH_BYTES = 64 * 1024
"""A batch without its members: names, sizes, and the calls it took."""
_BATCH_ITEMS = 64


def profile_of(
    name: str, signature: ModelSignature, settings: ModelSettings, generation: int
) -> ModelProfile:
    """Return the profile of a model; raises `ConfigurationError` where its batches are too many to plan."""
    max_batch = _max_batch(signature, settings)
    batching, strategy = settings.batching, signature.strategy
    return ModelProfile(
        name=name,
        generation=generation,
        dimensions=signature.dimensions,
        has_batch=signature.has_batch,
        paddable=signature.paddable,
        max_batch=max_batch,
        max_delay_s=batching.max_delay_ms / 1000,
        max_padding_ratio=batching.max_padding_ratio,
        inputs=_input_bytes(signature),
        max_batch_bytes=batching.max_batch_bytes or DEFAULT_BATCH_BYTES,
        hang_after_s=batching.hang_limit_s,
        bounds=tuple([bounds.maximum for bounds in signature.bounds]),
        row_calls=_row_calls(signature, max_batch),
        free_sizes=not strategy.sizes.keys() - {BATCH},
        max_shapes=strategy.chosen_shapes,
        fills_rows=strategy.fill_rows and max_batch > 1,
        strings=tuple([number for number in signature.table.strings if number is not None]),
        static_shapes=signature.static_sizes,
        idempotent=settings.idempotent,
    )


def _input_bytes(signature: ModelSignature) -> tuple[InputBytes, ...]:
    """Return the bytes of each input as a function of the sizes of a call; of strings, those of lengths and contents."""
    found = []
    for port, axes, strings in zip(
        signature.inputs, signature.table.axes, signature.table.strings, strict=True
    ):
        pairs = zip(axes, port.shape.dimensions, strict=True)
        elements = prod([dimension.minimum for number, dimension in pairs if number is None])
        dynamic = tuple([number for number in axes if number is not None])
        itemsize = LENGTH.itemsize if port.is_string else dtype_of(port.element_type).itemsize
        found.append(InputBytes(nbytes=itemsize * elements, axes=dynamic))
        if strings is not None:
            found.append(InputBytes(nbytes=elements, axes=(*dynamic, strings)))
    return tuple(found)


def _max_batch(signature: ModelSignature, settings: ModelSettings) -> int:
    """Return the most rows of a batch: as configured, or as the model allows, and never more than fit in a message."""
    if not settings.idempotent or signature.strategy.alone:
        return 1  # a request with more rows runs alone
    allowed = signature.strategy.sizes.get(signature.dimensions[0]) if signature.has_batch else None
    bound = signature.bounds[0].maximum if signature.has_batch else None
    # More rows than the largest allowed call has would run in several calls, one after the other, beside idle slots.
    by_default = DEFAULT_MAX_BATCH if bound is None else bound
    max_batch = settings.batching.max_batch or (allowed[-1] if allowed else by_default)
    if not allowed and bound is not None:
        # Only a batch axis with allowed sizes is divided into calls.
        max_batch = min(max_batch, bound)
    if signature.strategy.most_rows is not None:
        # No more rows than a worker has tried: its configuration may differ.
        max_batch = min(max_batch, signature.strategy.most_rows)
    most = most_rows(signature)
    if max_batch > most and signature.has_batch:
        why = (
            f"{len(signature.inputs)} inputs and {len(signature.outputs)} outputs per request, in one message"
        )
        log.warning("batches are smaller", model=signature.name, wanted=max_batch, max_batch=most, why=why)
        return most
    return max_batch


def _row_calls(signature: ModelSignature, max_batch: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the rows of each call of a batch, by the rows of the batch; None if every batch is one call."""
    if not signature.has_batch or signature.allowed[0] is None:
        return None
    planner = CallPlanner(signature)
    others = (1,) * (len(signature.dimensions) - 1)
    calls: list[tuple[int, ...]] = []
    room = MAX_STEPS - max_batch * len(signature.strategy.sizes[signature.dimensions[0]])
    for rows in range(max_batch + 1):
        if room < 0:
            text = (
                f"model {signature.name!r}: the calls of every batch of up to {max_batch} rows are too many to work out "
                "(make max_batch smaller, allow fewer sizes of batch, or sizes that are closer to the largest)"
            )
            raise ConfigurationError([text])
        calls.append(tuple([call.sizes[0] for call in planner.plan((rows, *others))]))
        room -= STEPS_PER_CALL * len(calls[-1])
    return tuple(calls)


def most_rows(signature: ModelSignature, limits: Limits = WORKER_LIMITS) -> int:
    """Return the rows of a batch that fit in a message in the worst case; at least 1: one request always fits.

    A batch is sent as one `Execute` and returned as one `BatchDone`; neither can be divided. In the worst case each row is
    a request, and its tensors are as large as the header allows, or each is a frame of its own.
    """
    room = limits.max_header_bytes - _BATCH_BYTES
    fits = [limits.max_members]
    dimensions = len(signature.dimensions)
    for ports in (signature.inputs, signature.outputs):
        # A row's tensors, their array, the row itself; and a call of its own, with its count and sizes.
        fits.append((MAX_WORKER_ITEMS - _BATCH_ITEMS) // (len(ports) + dimensions + 8))
        fits.append(limits.max_frames // max(1, len(ports)))
        fits.append(room // _header_bytes(ports))
    return max(1, min(fits))


def _header_bytes(ports: Sequence[InputPort | OutputPort]) -> int:
    """Return the header bytes of one request, or of one result, with every tensor inline."""
    return _MEMBER_BYTES + sum(
        MAX_INLINE_BYTES + _TENSOR_BYTES + _SIZE_BYTES * port.shape.rank for port in ports
    )

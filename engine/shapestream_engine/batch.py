"""The inputs of one batch and its report, the types between the pipeline and a slot.

The server makes a `BatchInputs` from a scheduler's decision, the wire carries it, and a slot runs it. The `BatchReport`
takes the same way back. Both are free of sockets, events and engine tensors.
"""

from __future__ import annotations

from enum import StrEnum

from shapestream_engine.layout import RequestShape, Tensors, value


class ErrorCode(StrEnum):
    """The reason why a batch did not run."""

    MODEL_ERROR = "model_error"
    """The data or the model caused the failure; the server runs halves of the batch until the culprit runs alone."""
    INVALID = "invalid"
    """The model does not take the data, and says so (`InvalidInput`); the server looks for the culprit as above."""
    UNAVAILABLE = "unavailable"
    """The device caused the failure, for example a lack of memory; the batch may run elsewhere."""
    CANCELLED = "cancelled"
    """The server cancelled the batch."""
    RECALLED = "recalled"
    """The server took the batch back before it began; it runs elsewhere, and this does not count as an attempt."""
    INTERNAL = "internal"
    """A defect of shapestream caused the failure."""


@value
class BatchInputs:
    """The requests of one batch. `members`, `shapes` and `start_before` are parallel, in the order of the rows."""

    batch: int
    """Number of the batch, unique in the process that made it."""
    slot: int = 0
    """The worker's number of the slot, 0 .. slots - 1."""
    model: str
    sizes: tuple[int, ...]
    """Size of each of the signature's `dimensions` in the call, padding included; no smaller than the members need.
    Missing rows are filled up. If members are left out, the call shrinks to the others."""
    members: tuple[Tensors, ...]
    shapes: tuple[RequestShape, ...] = ()
    """The members' sizes from the signature's `resolve`. Empty: the slot resolves the members' layouts."""
    start_before: tuple[float | None, ...] | None = None
    """Time after which a member may not start, in seconds of the sender's clock; None: no limit. It is a point in
    time, not a duration, because a process may be stopped between two readings of the clock."""


@value
class BatchReport:
    """The result of a batch. Each batch that starts has one, unless its slot is lost first."""

    batch: int
    outputs: tuple[Tensors | None, ...] | None
    """The members' results; None for a member whose time to start had passed, and None as a whole after a failure."""
    gather_s: float = 0.0
    """Seconds before the calls, for planning and gathering."""
    run_s: float = 0.0
    """Seconds of the inference calls."""
    busy_s: float = 0.0
    """Seconds of the slot: gathering, calls, and copying results out."""
    reallocations: int = 0
    """Number of input tensors that this batch reallocated."""
    preparations: int = 0
    """Number of calls with a new shape: new to the slot or, with prepared models, to the process."""
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Number and sizes of the calls. Empty: one call of the batch's sizes."""
    code: ErrorCode | None = None
    """The reason of a failure; None if the batch ran."""
    message: str = ""

"""One batch and its report: the only types in which requests reach a slot and their results come back.

The server makes a `BatchInputs` of a scheduler's decision, the wire carries it, a slot runs it. The `BatchReport` goes
the same way back. Neither knows of sockets, events or an engine's tensors.
"""

from __future__ import annotations

from enum import StrEnum

from shapestream_engine.layout import RequestShape, Tensors, value


class ErrorCode(StrEnum):
    """Why a batch did not run."""

    MODEL_ERROR = "model_error"
    """The data or the model is to blame: halves of the batch are tried until the culprit runs alone."""
    UNAVAILABLE = "unavailable"
    """The device is to blame, such as a lack of memory: the batch may run elsewhere."""
    CANCELLED = "cancelled"
    """The server asked for the end of the batch."""
    RECALLED = "recalled"
    """The server asked for the batch before it began; it runs elsewhere, and this is no attempt."""
    INTERNAL = "internal"
    """The program itself is to blame."""


@value
class BatchInputs:
    """Requests that run together. `members`, `shapes` and `start_before` are parallel, in the order of their rows."""

    batch: int
    """Number of the batch, unique to the process that made it."""
    slot: int = 0
    """The worker's own number of the slot: 0 .. slots - 1."""
    model: str
    sizes: tuple[int, ...]
    """The call's size of each of the signature's `dimensions`, padding included: at least what the members need.
    Rows beyond theirs are filled up. If members are left out, the others get no more than they need."""
    members: tuple[Tensors, ...]
    shapes: tuple[RequestShape, ...] = ()
    """The members' sizes, as the signature's `resolve` gives them. Empty: the slot resolves the members' layouts."""
    start_before: tuple[float | None, ...] | None = None
    """Time from which on a member may not start, in seconds of the maker's clock; None: at any time. Never the time that
    is left: a process may be stopped between two looks at a clock."""


@value
class BatchReport:
    """Outcome of a batch. One comes for each batch that was started, unless its slot is lost first."""

    batch: int
    outputs: tuple[Tensors | None, ...] | None
    """Parallel to the members; None for a member whose time to start had passed. None as a whole on failure."""
    gather_s: float = 0.0
    """Seconds before the calls: dividing the batch into calls, and gathering their inputs."""
    run_s: float = 0.0
    """Seconds in the inference calls alone."""
    busy_s: float = 0.0
    """Seconds of the slot's time: gathering, the calls, copying the results out."""
    reallocations: int = 0
    """Input tensors that grew for this batch."""
    preparations: int = 0
    """Calls whose shape was new: to the slot, or to the process where models are prepared for their shapes."""
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Number and sizes of the calls that the batch took. Empty: one call, of the batch's own sizes."""
    code: ErrorCode | None = None
    """None if the batch ran."""
    message: str = ""

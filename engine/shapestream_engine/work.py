"""What a slot is given to run, and what it reports of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shapestream_engine.layout import Tensors
from shapestream_engine.signature import RequestShape

__all__ = ["ErrorCode", "Report", "Work"]

ErrorCode: TypeAlias = Literal["model_error", "unavailable", "cancelled", "internal"]
"""`model_error`: this data, or this model. `unavailable`: the device, such as no memory; elsewhere it may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch. `members`, `shapes` and `start_before` are parallel, in the order of their rows in the call."""

    batch: int
    model: str
    sizes: tuple[int, ...]
    """The call's size of each of the signature's `dimensions`, padding included."""
    members: tuple[Tensors, ...]
    shapes: tuple[RequestShape, ...] | None = None
    """What the signature's `resolve` said of each member; None: it is asked here."""
    start_before: tuple[float | None, ...] | None = None
    """Time of `time.monotonic` after which a member may not start any more; None: whenever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a batch."""

    batch: int
    outputs: tuple[Tensors | None, ...] | None
    """Parallel to the members; None for one whose time to start had passed. None as a whole on failure."""
    run_s: float = 0.0
    """Seconds of the inference alone."""
    gather_s: float = 0.0
    """Seconds from the start of the work to the start of the inference."""
    reallocations: int = 0
    """Of input tensors, by this batch."""
    new_shape: bool = False
    """This slot had not run the model with these sizes before."""
    error_code: ErrorCode | None = None
    message: str = ""

"""What a slot is given to run, and what it reports of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal, TypeAlias

from shapestream_engine.layout import Tensors
from shapestream_engine.signature import RequestShape

__all__ = ["ErrorCode", "Report", "Work", "in_time"]

ErrorCode: TypeAlias = Literal["model_error", "unavailable", "cancelled", "recalled", "internal"]
"""`model_error`: this data, or this model. `unavailable`: the device, such as no memory; elsewhere it may run.
`recalled`: taken back before it began, as was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch. `members`, `shapes` and `start_before` are parallel, in the order of their rows in the call."""

    batch: int
    model: str
    sizes: tuple[int, ...]
    """The call's size of each of the signature's `dimensions`, padding included: at least what the members need.
    Rows beyond theirs are filled up. If members are left out, what is left gets no more than it needs."""
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
    busy_s: float = 0.0
    """Seconds of the slot's time: from the start of the work until all results were copied out."""
    reallocations: int = 0
    """Of input tensors, by this batch."""
    preparations: int = 0
    """Calls whose shape was new: to this slot, or to the process where models are prepared for their shapes."""
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The calls that the batch took: how many of which sizes. Empty: one, of the batch's own sizes."""
    error_code: ErrorCode | None = None
    message: str = ""
    slot_ended: bool = False
    """The slot's thread has ended without being asked to: it runs nothing more."""


def in_time(start_before: tuple[float | None, ...] | None, places: Sequence[int]) -> Sequence[int]:
    """The places of `places` whose members may still start; the same object where none is late."""
    if start_before is None:
        return places
    deadlines = [time for time in start_before if time is not None]
    if not deadlines:
        return places
    now = monotonic()
    if min(deadlines) > now:
        return places
    left = [place for place in places if (time := start_before[place]) is None or time > now]
    return places if len(left) == len(places) else left

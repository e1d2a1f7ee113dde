"""The scheduler's counters, for people and for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelStatistics:
    """How one model stands."""

    name: str
    queued: int
    slots: int
    free_slots: int
    call_s: float | None
    """Running mean of the seconds of a call."""
    shapes_seen: int
    """Distinct call shapes that the cost model remembers."""

    def __repr__(self) -> str:
        return f"{self.name}: {self.queued} queued, {self.free_slots} of {self.slots} slots free"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Statistics:
    """How the scheduler stands, and what it has done since it was made."""

    queued: int
    """Requests that wait, to be run for the first time or again."""
    queued_bytes: int
    running: int
    """Requests in running batches that somebody still waits for."""
    batches: int
    """Running batches."""
    slots: int
    free_slots: int
    draining: bool
    admitted: int
    delivered: int
    failed: Mapping[str, int]
    """By code; refused requests included."""
    forgotten: int
    batches_started: int
    rows_started: int
    padding_ratio: float
    """Elements computed only as padding / elements computed, over all batches started."""
    models: tuple[ModelStatistics, ...]

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs: a drained server may stop."""
        return not (self.queued or self.batches)

    def __repr__(self) -> str:
        return f"{self.running} running, {self.queued} queued"


class Counters:
    """What only ever grows."""

    __slots__ = (
        "admitted",
        "batches_started",
        "delivered",
        "elements_computed",
        "elements_padding",
        "failed",
        "forgotten",
        "rows_started",
    )

    def __init__(self) -> None:
        self.admitted = 0
        self.delivered = 0
        self.failed: dict[str, int] = {}
        self.forgotten = 0
        self.batches_started = 0
        self.rows_started = 0
        self.elements_computed = 0
        self.elements_padding = 0

    @property
    def padding_ratio(self) -> float:
        """Elements computed only as padding / elements computed."""
        return self.elements_padding / self.elements_computed if self.elements_computed else 0.0

"""The present state of the scheduler, and its last troubles: decisions that no request's usual way explains.

Counters of what ran stand in telemetry/counters.py. serving/stories.py tells a request's user of its troubles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

Told: TypeAlias = list[tuple[float, str]]
"""Troubles of one request, oldest first, as (time, text)."""
MOST_TROUBLES = 1024
"""Troubles that are remembered, at most; each concerns the requests of a batch."""


class Troubles:
    """The last recalls, losses, failures, rests and hangs. A text is formatted when it is read."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[tuple[float, tuple[int, ...], str, tuple[object, ...]]] = deque(
            maxlen=MOST_TROUBLES
        )

    def add(self, time: float, ids: tuple[int, ...], what: str, *details: object) -> None:
        """Remember what happened to these requests; `what` is a format string for the details."""
        self._last.append((time, ids, what, details))

    def of(self, id: int) -> Told:  # noqa: A002 - the name that events and actions use
        """Return the troubles that are remembered of one request, oldest first."""
        return [(time, what.format(*details)) for time, ids, what, details in self._last if id in ids]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelStatistics:
    """The present queue and slots of one model, and the work that it has had."""

    name: str
    queued: int
    queued_s: float
    """Predicted seconds of one slot for what waits; those that came before anything was measured count nothing."""
    queued_s_per_slot: float
    """The same of all models that share slots with this one, divided by the slots of each: until a slot is free."""
    oldest_s: float
    """Seconds since the arrival of the oldest request of those that wait; 0 without any."""
    waited_s: float
    """Seconds that requests have spent in the queue, also those that are still there."""
    slots: int
    free_slots: int
    shapes_seen: int
    """Distinct call shapes that the cost model remembers."""
    predicted_s: float
    """Predicted seconds of the batches that ran and had a prediction."""
    measured_s: float
    """Seconds that these took."""

    def __repr__(self) -> str:
        return f"{self.name}: {self.queued} queued, {self.free_slots} of {self.slots} slots free"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SchedulerStatistics:
    """The present state of the scheduler."""

    queued: int
    """Requests in the queue, to run for the first time or again."""
    queued_bytes: int
    running: int
    """Requests in batches, running or queued behind another, that have not ended."""
    batches: int
    """Batches that run, or are queued behind one that does."""
    slots: int
    free_slots: int
    closing_slots: int
    """Slots that finish what they run and then leave."""
    slots_resting: int
    """Slots that rest because they could not run a batch."""
    slots_reserved: int
    """Idle slots whose worker is reserved for a suspect, or is to be killed."""
    slots_lost: int
    """Slots whose call hangs, and that nothing could end."""
    suspects: int
    """Queued requests that are to run alone in a worker, because one that may have run them died or hung."""
    draining: bool
    models: tuple[ModelStatistics, ...]

    @property
    def idle(self) -> bool:
        """Whether no request is queued and no batch runs."""
        return not (self.queued or self.batches)

    def to_dict(self, names: Container[str]) -> dict[str, Any]:
        """Return the numbers; of the models, those of these names."""
        told = {model.name: model for model in self.models if model.name in names}
        return {**_numbers(self), "models": {name: _numbers(model) for name, model in told.items()}}

    def __repr__(self) -> str:
        return f"{self.running} running, {self.queued} queued"


def _numbers(statistics: SchedulerStatistics | ModelStatistics) -> dict[str, float]:
    columns = {column.name: getattr(statistics, column.name) for column in fields(statistics)}
    return {name: round(value, 6) for name, value in columns.items() if isinstance(value, int | float)}

"""Statistics and stories: the state of the scheduler, and its last decisions.

Counters of what ran stand in telemetry/counters.py. A story has one entry per decision, not per request, and is formatted
when it is read: it costs a tuple per batch to keep. serving/stories.py adds times and outcomes, for the requests' users.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

Told: TypeAlias = list[tuple[float, str]]
"""Decisions about one request, oldest first, as (time, what)."""
_Ring: TypeAlias = deque[tuple[float, tuple[int, ...], str, tuple[object, ...]]]


class Story:
    """The last `length` decisions, and the last `length` troubles. With length 0 it remembers nothing."""

    __slots__ = ("_entries", "_troubles")

    def __init__(self, length: int) -> None:
        self._entries: _Ring = deque(maxlen=length)
        self._troubles: _Ring = deque(maxlen=length)

    def note(self, time: float, ids: tuple[int, ...], what: str, *details: object) -> None:
        """Remember one decision about these requests; `what` is a format string for the details."""
        self._entries.append((time, ids, what, details))

    def trouble(self, time: float, ids: tuple[int, ...], what: str, *details: object) -> None:
        """Remember a decision that does not follow from the usual way of a request, for longer than usual ones."""
        self.note(time, ids, what, *details)
        self._troubles.append((time, ids, what, details))

    def of(self, id: int) -> Told:  # noqa: A002 - the name that events and actions use
        """Everything remembered of one request, oldest first; nothing if it was long ago."""
        return _told(self._entries, id)

    def troubles_of(self, id: int) -> Told:  # noqa: A002
        """The troubles that are remembered of one request."""
        return _told(self._troubles, id)


def _told(ring: _Ring, id: int) -> Told:  # noqa: A002
    return [(time, what.format(*details)) for time, ids, what, details in ring if id in ids]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelStatistics:
    """How one model stands."""

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
        """The numbers; of the models, those of these names."""
        told = {model.name: model for model in self.models if model.name in names}
        return {**_numbers(self), "models": {name: _numbers(model) for name, model in told.items()}}

    def __repr__(self) -> str:
        return f"{self.running} running, {self.queued} queued"


def _numbers(statistics: SchedulerStatistics | ModelStatistics) -> dict[str, float]:
    columns = {column.name: getattr(statistics, column.name) for column in fields(statistics)}
    return {name: round(value, 6) for name, value in columns.items() if isinstance(value, int | float)}

"""Statistics and stories: what the scheduler tells people and metrics about itself.

A story is one entry per decision, not per request. Nothing is formatted until it is asked for, so that it costs a tuple
per batch to keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Seconds(NamedTuple):
    """A prediction, put into words when somebody asks."""

    seconds: float | None

    def __format__(self, _: str) -> str:
        return "" if self.seconds is None else f"; predicted {self.seconds:.6f} s"


class Behind(NamedTuple):
    """The batch that another one is sent ahead to wait for."""

    batch: int

    def __format__(self, _: str) -> str:
        return f"; sent ahead, behind batch {self.batch}"


class Story:
    """The last `length` decisions. With length 0 it remembers nothing."""

    __slots__ = ("_entries",)

    def __init__(self, length: int) -> None:
        self._entries: deque[tuple[float, tuple[int, ...], str, tuple[object, ...]]] = deque(maxlen=length)

    def note(self, time: float, ids: tuple[int, ...], what: str, *details: object) -> None:
        """Remembers one decision about these requests; `what` is a format string for the details."""
        self._entries.append((time, ids, what, details))

    def of(self, id: int) -> list[tuple[float, str]]:  # noqa: A002 - the name that events and actions use
        """What is remembered of one request, oldest first; nothing if it was long ago."""
        return [(time, what.format(*details)) for time, ids, what, details in self._entries if id in ids]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelStatistics:
    """How one model stands."""

    name: str
    queued: int
    queued_s: float
    """Predicted seconds of one slot for what waits; those that came before anything was measured count nothing."""
    slots: int
    free_slots: int
    call_s: float | None
    """Running mean of the seconds of a call."""
    shapes_seen: int
    """Distinct call shapes that the cost model remembers."""
    predicted_s: float
    """Predicted seconds of the batches that ran and had a prediction."""
    measured_s: float
    """Seconds that these took."""

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
    """Batches that run, or are sent ahead to wait behind one that does."""
    slots: int
    free_slots: int
    closing_slots: int
    """Slots that finish what they run and then leave."""
    slots_aside: int
    """Slots that rest, since they could not run what they got."""
    slots_kept: int
    """Idle slots that get nothing, since a suspect runs, or will run, in their worker, or it is to be killed."""
    slots_lost: int
    """Slots whose call hangs, and that nothing could end."""
    suspects: int
    """Of those that wait, requests that are to be run alone in a worker, since one died, or hung, that may have run them."""
    draining: bool
    admitted: int
    delivered: int
    failed: Mapping[str, int]
    """By code; refused requests included."""
    forgotten: int
    batches_started: int
    batches_ahead: int
    """Of those, the ones that were sent to a busy slot, to wait there."""
    batches_recalled: int
    """Of those in turn, the ones that were called back, whether or not in time."""
    planning_cuts: int
    """Dynamic programmes that the planner ran."""
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
        "batches_ahead",
        "batches_recalled",
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
        self.batches_ahead = 0
        self.batches_recalled = 0
        self.rows_started = 0
        self.elements_computed = 0
        self.elements_padding = 0

    @property
    def padding_ratio(self) -> float:
        """Elements computed only as padding / elements computed."""
        return self.elements_padding / self.elements_computed if self.elements_computed else 0.0

"""The hang watch: batches that run far longer than their model's batches do, and what is done about them, step by step.

First the slot is asked to stop the batch; after a grace its process is to be killed; if its slot is still there after
another, as a thread's of the server would be, the members are answered and the slot is lost. Knows no clock: it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from shapestream.scheduling.records import Batch, Hang

__all__ = ["HangLimits", "HangWatch"]

TIMES_P99 = 10.0
"""A batch hangs that takes so many times what all but one of a hundred of its model's batches take."""
TIMES_PREDICTED = 20.0
"""And so many times what it was itself predicted to take: predictions are rougher, and wrong for what is new."""
ENOUGH = 20
"""Batches, from which on the 99th percentile says something; the largest of fewer than a hundred is taken for it."""
REMEMBERED = 512
"""Batches per model that it is taken of."""
STALL_S = 1.0
"""A look that comes so late proves nothing: reports have waited, too, and are read first."""
RECKON_EVERY = 32
"""Sorting them takes some 30 us, so it is done once in so many batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """What is a hang, at least, and how much patience there is."""

    min_s: float = 10.0
    """No batch is said to hang before it has run so long, except where its model has a limit of its own."""
    grace_s: float = 5.0
    """From one step to the next."""

    def __post_init__(self) -> None:
        if not (self.min_s > 0.0 and self.grace_s > 0.0):
            raise ValueError("a batch cannot hang from the start: the limits must be more than 0 s")


class HangWatch:
    """When each running batch will have run too long. Without limits it never looks."""

    __slots__ = ("_busy", "limits", "next_look")

    def __init__(self, limits: HangLimits | None) -> None:
        self.limits = limits
        self._busy: dict[str, _BusyTimes] = {}
        self.next_look = inf
        """When `look` is wanted. Batches end without a word here, so it may be in vain, once per limit at most."""

    def observe(self, model: str, busy_s: float) -> None:
        """A batch ran so long."""
        if self.limits is None:
            return
        times = self._busy.get(model)
        if times is None:
            times = self._busy[model] = _BusyTimes()
        times.add(busy_s)

    def began(self, batch: Batch, now: float) -> None:
        """A batch begins to run."""
        if self.limits is None:
            return
        batch.hang_at = hang_at = now + self.limit_s(batch)
        if hang_at < self.next_look:
            self.next_look = hang_at

    def limit_s(self, batch: Batch) -> float:
        """How long it may run: what its model says, or by what is known. While nothing is, the prediction is taken to be
        the least that could be called a hang, since a first call may have to compile."""
        assert self.limits is not None
        own_s = batch.queue.profile.hang_after_s
        if own_s is not None:
            return own_s
        least_s = self.limits.min_s
        times = self._busy.get(batch.queue.profile.name)
        known = times is not None and times.count >= ENOUGH
        if known and times is not None:
            least_s = max(least_s, TIMES_P99 * times.p99_s)
        if batch.predicted_s is not None:
            return max(least_s, TIMES_PREDICTED * batch.predicted_s)
        return least_s if known else TIMES_PREDICTED * least_s

    def look(self, batches: Iterable[Batch], now: float) -> list[Batch]:
        """The running batches for which it is time to take the next step (`Batch.hang`), which the caller takes."""
        assert self.limits is not None
        due = []
        self.next_look = inf
        for batch in batches:
            if batch.started is None or batch.hang is Hang.GIVEN_UP:
                continue
            if batch.hang_at + STALL_S < now:
                # Nobody looked in time, so this process stood still, and perhaps the worker's as well (a paused machine).
                batch.hang_at = now + self.limits.grace_s
            elif batch.hang_at <= now:
                batch.hang = Hang(batch.hang + 1)
                batch.hang_at = inf if batch.hang is Hang.GIVEN_UP else now + self.limits.grace_s
                due.append(batch)
            self.next_look = min(self.next_look, batch.hang_at)
        return due


class _BusyTimes:
    """The last so many, and what all but one of a hundred of them do not exceed."""

    __slots__ = ("_last", "count", "p99_s")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self.count = 0
        self.p99_s = 0.0

    def add(self, busy_s: float) -> None:
        self._last.append(busy_s)
        self.count += 1
        if self.count < 100:
            self.p99_s = max(self.p99_s, busy_s)
        elif self.count % RECKON_EVERY == 0:
            self.p99_s = sorted(self._last)[ceil(0.99 * len(self._last)) - 1]

"""The hang watch: when a running batch has run far longer than batches of its model do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf

from shapestream.scheduling.batches import Batch, BatchState

TIMES_P99 = 10.0
"""Multiple of the model's p99 batch time after which a batch counts as hung."""
TIMES_PREDICTED = 20.0
"""Multiple of its predicted time that a batch may take as well. The larger limit counts, since predictions are rough."""
TIMES_AT_MOST = 5.0
"""The largest limit: so many times the expected seconds, plus the time of a first call. A crowded machine delays a batch by
a factor, a preparation by a time. Twenty times would let a batch of minutes hang for an hour."""
FIRST_CALL_TIMES = 20.0
"""Times `HangLimits.min_s` that a call may take of which nothing is known: it may have to compile."""
MOST_FIRST_CALL_S = 600.0
"""Most seconds of such a call, unless `min_s` is more."""
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
    """Seconds before a batch can hang, and between the steps against one that does."""

    min_s: float
    """No batch is said to hang before it has run so long, except where its model has a limit of its own."""
    grace_s: float
    """Seconds from one step against a hanging batch to the next."""

    first_call_s: float = field(init=False)
    """The longest time of a call of which nothing is known."""

    def __post_init__(self) -> None:
        if not (self.min_s > 0.0 and self.grace_s > 0.0):
            raise ValueError("a batch cannot hang from the start: the limits must be more than 0 s")
        first_s = max(self.min_s, min(FIRST_CALL_TIMES * self.min_s, MOST_FIRST_CALL_S))
        object.__setattr__(self, "first_call_s", first_s)


class HangWatch:
    """Knows when each running batch will have run too long. Without limits it never looks."""

    __slots__ = ("_busy", "limits", "next_look")

    def __init__(self, limits: HangLimits | None) -> None:
        self.limits = limits
        self._busy: tuple[dict[str, _BusyTimes], dict[str, _BusyTimes]] = ({}, {})
        """By model; the second ones are those on wide slots, whose calls take less time."""
        self.next_look = inf
        """When `look` is wanted. Ended batches stay listed, so a look may find nothing."""

    def forget_model(self, model: str) -> None:
        """Forget the times of a model that is gone."""
        for busy in self._busy:
            busy.pop(model, None)

    def observe(self, batch: Batch, busy_s: float) -> None:
        """Learn from the time that a batch took."""
        if self.limits is None:
            return
        model, busy = batch.queue.name, self._busy[batch.slot.wide]
        times = busy.get(model)
        if times is None:
            times = busy[model] = _BusyTimes(measured=batch.predicted_s is not None)
        times.add(busy_s, batch.sizes)

    def began(self, batch: Batch, now: float) -> None:
        """Note that a batch begins to run, and when it will have run too long."""
        if self.limits is None:
            return
        batch.hang_at = hang_at = now + self.limit_s(batch)
        if hang_at < self.next_look:
            self.next_look = hang_at

    def limit_s(self, batch: Batch) -> float:
        """Return the seconds after which this batch counts as hanging.

        They are its model's own limit; else they follow from known times and its prediction. For sizes that never ran,
        where costs are learned from traffic alone, they are those of a first call.
        """
        assert self.limits is not None
        own_s = batch.queue.profile.hang_after_s
        if own_s is not None:
            return own_s
        first_s = self.limits.first_call_s
        times = self._busy[batch.slot.wide].get(batch.queue.name)
        p99_s = 0.0 if times is None or times.count < ENOUGH else times.p99_s
        predicted_s = batch.predicted_s
        if predicted_s is None and (times is None or times.count < ENOUGH):
            return first_s
        longest_s = max(p99_s, predicted_s or 0.0)
        times_s = max(TIMES_P99 * p99_s, TIMES_PREDICTED * (predicted_s or 0.0))
        limit_s = max(self.limits.min_s, min(times_s, TIMES_AT_MOST * longest_s + first_s))
        return max(limit_s, first_s) if times is not None and times.new_to(batch) else limit_s

    def look(self, batches: Iterable[Batch], now: float) -> list[Batch]:
        """Return the running batches against which it is time to take the next step, which the caller takes."""
        assert self.limits is not None
        due = []
        self.next_look = inf
        for batch in batches:
            if batch.is_behind or batch.state is BatchState.STUCK:
                continue
            if batch.hang_at + STALL_S < now:
                # This look is late, so this process stood still, and perhaps the worker's as well (a paused machine).
                batch.hang_at = now + self.limits.grace_s
            elif batch.hang_at <= now:
                last = batch.state is BatchState.CONDEMNED
                batch.hang_at = inf if last else now + self.limits.grace_s
                due.append(batch)
            self.next_look = min(self.next_look, batch.hang_at)
        return due


class _BusyTimes:
    """The last `REMEMBERED` busy times, and their 99th percentile."""

    __slots__ = ("_last", "_sizes", "count", "p99_s")

    def __init__(self, *, measured: bool) -> None:
        """`measured`: its first batch had a prediction, by a calibration, which has met what is new."""
        self._sizes: set[tuple[int, ...]] | None = None if measured else set()
        """Of the first batches, where nothing was measured before; None when there were enough."""
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self.count = 0
        self.p99_s = 0.0

    def new_to(self, batch: Batch) -> bool:
        """Tell whether its sizes may have to be prepared for, for all that is known."""
        return self._sizes is not None and batch.sizes not in self._sizes

    def add(self, busy_s: float, sizes: tuple[int, ...]) -> None:
        if self._sizes is not None:
            self._sizes.add(sizes)
            if self.count + 1 >= ENOUGH:
                self._sizes = None  # first calls are among those that the 99th percentile is taken of
        self._last.append(busy_s)
        self.count += 1
        if self.count < 100:
            self.p99_s = max(self.p99_s, busy_s)
        elif self.count % RECKON_EVERY == 0:
            self.p99_s = sorted(self._last)[ceil(0.99 * len(self._last)) - 1]

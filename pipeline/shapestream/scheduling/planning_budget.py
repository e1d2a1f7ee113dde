"""What planning may spend: a share of the time of the batches that it plans.

Counted in work, not by a clock, so that the same events give the same cuts. The seconds that work is said to take
were measured on one core of a 2020s server; where they are off, so is the share, by the same factor.
"""

from __future__ import annotations

from shapestream.scheduling.call_costs import CallCosts, Prediction
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding

__all__ = ["PlanningBudget", "planning_s"]

SHARE = 0.02
"""Of each batch's predicted seconds, what may be spent on planning."""
LOOP_SHARE = 0.1
"""Of the time that passes, what may be spent on planning: many slots have many batches, one thread plans."""
MOST_S = 0.02
"""What may be saved up: some twenty windows of 256."""
FIRST_S = 0.005
"""What there is before the first batch."""
UNMEASURED_S = 0.01
"""What a batch is taken to last while nothing of its model is measured."""

MOST_CUT_S = 1e-3
"""What one dynamic programme may take; the window is made so small."""

CUT_S = 150e-6
"""Of one dynamic programme, whatever its size."""
REQUEST_S = 2e-6
"""Per request in its window."""
SEGMENT_S = 15e-9
"""Per segment that it looks at, where one dimension is padded: each has the shape of its last request."""
MIXED_CUT_S = 150e-6
MIXED_SEGMENT_S = 120e-9
"""In addition, and instead, where two or three dimensions are padded, and each segment has a shape of its own; with each
two more it takes that much more."""

_SURFACES = 256
"""Surfaces whose costs are remembered. Workers that are alike share theirs, unless what is new to each of them matters."""


def planning_s(requests: int, reach: int, dimensions: int) -> float:
    """Seconds that the optimal cuts of a window take: `requests` in it, `reach` in a segment at most."""
    segments = requests * min(requests, reach)
    if dimensions < 2:
        return CUT_S + requests * REQUEST_S + segments * SEGMENT_S
    return CUT_S + MIXED_CUT_S + requests * REQUEST_S + segments * (dimensions // 2) * MIXED_SEGMENT_S


class PlanningBudget:
    """A scheduler's one account of planning: earned by batches, spent on cuts. It keeps what was worked out on costs."""

    __slots__ = ("_at", "_costs", "_free_s", "balance_s", "cuts", "share", "spent_s")

    def __init__(self, share: float = SHARE, first_s: float = FIRST_S) -> None:
        self.share = share
        self.balance_s = first_s
        self._at: float | None = None
        self._free_s = MOST_S
        """Of the planning thread's own time, what batches have not earned yet."""
        self.cuts = 0
        """Dynamic programmes that were run."""
        self.spent_s = 0.0
        """Seconds that they are said to have taken."""
        self._costs: dict[tuple[str, int], CallCosts] = {}

    def __repr__(self) -> str:
        return (
            f"<planning: {self.cuts} cuts, {self.spent_s * 1e3:.3g} ms, {self.balance_s * 1e3:.3g} ms left>"
        )

    def earn(self, batch_s: float | None, now: float) -> None:
        """A batch was started; None where it cannot be predicted in seconds."""
        if self._at is not None:
            self._free_s = min(MOST_S, self._free_s + LOOP_SHARE * (now - self._at))
        self._at = now
        earned = min(self._free_s, self.share * (UNMEASURED_S if batch_s is None else batch_s))
        self._free_s -= earned
        self.balance_s = min(MOST_S, self.balance_s + earned)

    def spend(self, seconds: float) -> bool:
        """Whether there was enough, and it is no more than one programme may take; then it is spent."""
        if seconds > self.balance_s or seconds > MOST_CUT_S:
            return False
        self.balance_s -= seconds
        self.spent_s += seconds
        self.cuts += 1
        return True

    def costs(
        self, surface: Prediction, profile: ModelProfile, sizes: ShapeRounding | None = None
    ) -> CallCosts:
        """The costs of a model on a surface, as far as they were worked out before."""
        key = profile.name, id(surface if surface.prepares else surface.kind)
        known = self._costs.get(key)
        # The entry holds on to its surface and so to its kind: nothing else can have their ids.
        if known is None:
            if len(self._costs) >= _SURFACES:
                del self._costs[next(iter(self._costs))]
            known = self._costs[key] = CallCosts(surface, profile, sizes)
        known.renew()
        return known

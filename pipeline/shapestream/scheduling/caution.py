"""How far admission trusts its own estimates of waits, learned from how its promises end.

A wait is estimated from what waits now. Others come later and go first, batches take longer in company, predictions err; so
under overload, where the queue is filled up to what the estimate allows, everything would be admitted that ends just after
its deadline, and the slots would work for nobody. So estimates are multiplied by a factor that each late end raises, and
each result lowers by less: the share of late ends stays small, whatever the reason. (Additive increase and multiplicative
decrease of congestion control, the other way around: D.-M. Chiu, R. Jain, 1989.) As there, a burst counts once: what was
admitted before the factor rose says nothing of what it is now, so all of that together raises it by half at most. Too much
caution costs little where calls are short: a shorter queue keeps the slots as busy, until it runs dry.
"""

from __future__ import annotations

from math import inf

__all__ = ["FIRST_CAUTION", "MAX_CAUTION", "Caution"]

FIRST_CAUTION = 1.1
"""Before anything is known of how good estimates are: the first rush fills the queue before any late end can teach it."""
MAX_CAUTION = 4.0
"""Times the estimate, at most: a queue of a quarter of what deadlines allow."""

_RAISE = 1.05
_BURST = 1.5
_FADE = 0.999
"""Of what the factor is above 1, this is left by each result: at 1.3 one late end in 200 results keeps it where it is."""


class Caution:
    """The factor of one model."""

    __slots__ = ("_burst_at", "_most", "factor")

    def __init__(self) -> None:
        self.factor = FIRST_CAUTION
        self._burst_at = -inf
        """When the present burst of late ends began."""
        self._most = 0.0
        """What it may raise the factor to."""

    def __repr__(self) -> str:
        return f"<caution {self.factor:.2f}>"

    def ended_late(self, arrived: float, now: float) -> None:
        """A request that was admitted when it arrived missed its deadline."""
        if arrived >= self._burst_at:
            self._burst_at = now
            self._most = min(MAX_CAUTION, self.factor * _BURST)
        self.factor = max(self.factor, min(self._most, self.factor * _RAISE))

    def ended_well(self, requests: int) -> None:
        """So many got their results."""
        if self.factor > 1.0:
            self.factor = 1.0 + (self.factor - 1.0) * _FADE**requests

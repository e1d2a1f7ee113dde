"""How far admission trusts its own estimates of waits, learned from how its promises end.

A wait is estimated from what waits now. Others come later and go first, batches take longer in company, predictions err; so
under overload, where the queue is filled up to what the estimate allows, everything would be admitted that ends just after
its deadline, and the slots would work for nobody. So estimates are multiplied by a factor that each late end raises, and
each result lowers by less: the share of late ends stays small, whatever the reason. (Additive increase and multiplicative
decrease of congestion control, the other way around: D.-M. Chiu, R. Jain, 1989.) Too much caution costs little: a queue that
is shorter than it may be keeps the slots as busy, until it runs dry.
"""

from __future__ import annotations

__all__ = ["MAX_CAUTION", "Caution"]

MAX_CAUTION = 4.0
"""Times the estimate, at most: a queue of a quarter of what deadlines allow."""

_RAISE = 1.05
_FADE = 0.999
"""Of what the factor is above 1, this is left by each result: at 1.3 one late end in 200 results keeps it where it is."""


class Caution:
    """The factor of one model. 1.0 until something ends late."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def __repr__(self) -> str:
        return f"<caution {self.factor:.2f}>"

    def ended_late(self) -> None:
        """A request that was admitted missed its deadline."""
        self.factor = min(MAX_CAUTION, self.factor * _RAISE)

    def ended_well(self, requests: int) -> None:
        """So many got their results."""
        if self.factor > 1.0:
            self.factor = 1.0 + (self.factor - 1.0) * _FADE**requests

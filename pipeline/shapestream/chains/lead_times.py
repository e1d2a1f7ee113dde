"""The time that the stages after a stage take at least, by which a late request fails before a dear stage.

Each stage's seconds are those from its first request to its last answer, its waits in the queue included. The low end of the
latest ones counts: a request fails early only if hardly any would still be in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from shapestream.chains.plan import Chain, Stage

LATEST = 64
"""Durations of a stage that are remembered."""
FEW = 8
"""Durations below which nothing is known."""
LOW_END = 0.1
"""The quantile of the durations that a stage takes at least."""


class LeadTimes:
    """The durations of the stages of one chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._seconds: Mapping[str, deque[float]] = {
            stage.name: deque(maxlen=LATEST) for stage in chain.stages
        }
        self._least_s: dict[str, float | None] = {stage.name: 0.0 for stage in chain.stages}
        """By stage; None: to be worked out again."""
        self._users: Mapping[str, list[Stage]] = {
            stage.name: [user for user in chain.stages if stage.name in user.needs] for stage in chain.stages
        }

    def took(self, stage: str, seconds: float) -> None:
        """Note how long a stage took."""
        self._seconds[stage].append(seconds)
        self._least_s[stage] = None

    def after(self, stage: str) -> float:
        """Return the seconds that the stages after this one take at least, one after the other; 0.0 while unknown."""
        after: dict[str, float] = {}
        for each in reversed(self.chain.stages):  # the stages that take its outputs come later in the chain
            after[each.name] = max(
                (self._least(user.name) + after[user.name] for user in self._users[each.name]), default=0.0
            )
        return after[stage]

    def _least(self, stage: str) -> float:
        known = self._least_s[stage]
        if known is None:
            seconds = sorted(self._seconds[stage])
            known = 0.0 if len(seconds) < FEW else seconds[int(LOW_END * len(seconds))]
            self._least_s[stage] = known
        return known

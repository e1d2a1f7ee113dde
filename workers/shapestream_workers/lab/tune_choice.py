"""Which candidate is best: by what was measured, where differences are larger than the noise.

Pure. Within the noise the one that holds less memory is better, and of those that hold about as much the one with
fewer settings: nobody should have to maintain a setting that buys nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import median
from typing import Literal, TypeAlias

__all__ = ["LEAST_NOISE", "UNKNOWN_NOISE", "Objective", "Scored", "choose", "noise_of"]

Objective: TypeAlias = Literal["throughput", "latency"]
LEAST_NOISE = 0.02
"""Relative: differences below this are never believed, however alike the rounds were."""
UNKNOWN_NOISE = 0.15
"""Relative: what is assumed where single rounds show no noise."""
ALIKE_MEMORY = 0.10
"""Relative: resident memory moves by so much from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One candidate with what was measured of it, round by round, and what it costs to have."""

    number: int
    values: tuple[float, ...]
    """Results per second, or seconds, by round; rounds of the same number ran the same requests."""
    memory_bytes: int
    settings: int
    is_baseline: bool = False

    @property
    def middle(self) -> float:
        """The median over its rounds."""
        return float(median(self.values))


def noise_of(scored: Sequence[Scored]) -> float:
    """The relative error to be expected of a median: from how far rounds lie from their candidate's median.

    The median of absolute deviations, which no outlier moves, over all candidates, after what is common to a round has been
    taken out: rounds run different requests, and a machine's slower minute hits all candidates alike. x 1.4826 makes it
    a standard deviation (of normal errors), x 1.2533 / sqrt(rounds) that of a median, x 2 a bound that few exceed.
    """
    alike = [each for each in scored if each.values and all(map(isfinite, each.values)) and each.middle > 0]
    rounds = min((len(each.values) for each in alike), default=0)
    if rounds < 2:
        return UNKNOWN_NOISE
    common = [median(each.values[number] / each.middle for each in alike) for number in range(rounds)]
    deviations = [
        abs(each.values[number] / each.middle / common[number] - 1)
        for each in alike
        for number in range(rounds)
        if common[number] > 0
    ]
    if not deviations:
        return LEAST_NOISE
    return max(LEAST_NOISE, 2 * 1.4826 * 1.2533 * median(deviations) / sqrt(rounds))


def choose(scored: Sequence[Scored], objective: Objective) -> Scored:
    """The best of them. Raises `ValueError` where there is none."""
    if not scored:
        raise ValueError("nothing was measured")
    higher = objective == "throughput"
    best = max(each.middle for each in scored) if higher else min(each.middle for each in scored)
    noise = noise_of(scored)
    alike = [each for each in scored if _about(each.middle, best, noise, higher=higher)]
    least = min(each.memory_bytes for each in alike)
    frugal = [each for each in alike if each.memory_bytes <= least * (1 + ALIKE_MEMORY)]
    # Of equals the user's own file, then the fewest settings, then the better measurement.
    return min(
        frugal,
        key=lambda each: (
            not each.is_baseline,
            each.settings,
            -each.middle if higher else each.middle,
            each.number,
        ),
    )


def _about(value: float, best: float, noise: float, *, higher: bool) -> bool:
    if value == best:
        return True
    return value >= best * (1 - noise) if higher else value <= best * (1 + noise)

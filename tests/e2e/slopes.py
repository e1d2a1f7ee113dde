"""Does a series of samples grow? Robustly: a few outliers, or a step of the allocator's, are no growth.

The slope is the median of the slopes between all pairs of samples (Theil 1950, Sen 1968). Its statistical doubt is
the interval that Sen gives for it, by Kendall's variance: what lies below the interval's lower end grew beyond doubt.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 99 %.
_Z = 2.576
# Of the samples, the share at the start that is left out: pools and caches fill.
WARM_UP = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a quantity changed over a run, per second."""

    slope: float
    lowest: float
    """The lower end of the slope's 99 % interval."""
    window_s: float
    level: float
    """The median."""

    @property
    def growth(self) -> float:
        """Over the window, by the median slope."""
        return self.slope * self.window_s

    def grows(self, *, by_more_than: float) -> bool:
        """Whether it grew by more than that over the window, and beyond doubt at all."""
        return self.growth > by_more_than and self.lowest > 0.0


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of samples, the warm-up left out; raises ValueError for fewer than 10 that remain."""
    first = math.ceil(len(times_s) * WARM_UP)
    times_s, values = times_s[first:], values[first:]
    count = len(times_s)
    if count < 10:
        raise ValueError(f"{count} samples after the warm-up are too few to see a slope (sample more often)")
    slopes = sorted(
        (values[late] - values[early]) / (times_s[late] - times_s[early])
        for early in range(count)
        for late in range(early + 1, count)
    )
    doubt = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lowest = max(0, math.floor((len(slopes) - doubt) / 2))
    return Trend(
        slope=statistics.median(slopes),
        lowest=slopes[lowest],
        window_s=times_s[-1] - times_s[0],
        level=statistics.median(values),
    )

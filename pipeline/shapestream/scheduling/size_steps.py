"""The step that sizes of requests are rounded up to, where hardly any call shape comes again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf, prod

import numpy as np

from shapestream.scheduling.cost_grid import Sizes
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.surface import Surface

_FIRST_LOOK, _LOOK_EVERY = 32, 256
"""Requests before the first look at steps; later, looks are as far apart as there were requests, up to the second. A
look takes half a millisecond at most."""
_LEAST_STEP = 8
"""The smallest step: smaller ones saved 2 % at most in simulations."""
_MOST_MET = 1024
"""Call shapes that are remembered to tell new ones."""
_WEIGHT = 1 / 32
"""Weight of a batch in the part that would be new."""


class SizeSteps:
    """Rounds the sizes of one model's requests up to a step, so that call shapes come again.

    The step is the largest power of two whose padding costs less than the first calls that it saves: see `_look`. It is
    1, so that nothing is rounded, where first calls are free or call shapes come again by themselves. Deterministic: it
    counts requests and batches, and reads no clock.

    Simulated detectors, sizes 32..96 by 32..96, 64 in flight, first calls of 1.4 to 2.6 ms: 17 to 26 % more goodput than
    padding each new batch to a shape that the device knows, and half the time per decision, as requests become equal.
    """

    def __init__(self, profile: ModelProfile, prices: Callable[[], Surface]) -> None:
        """`prices`: the surface to ask at each look. Raises `ValueError` for a model whose requests may not be rounded."""
        if not self.suits(profile):
            raise ValueError(f"requests of model {profile.name!r} may not be rounded up")
        self._profile = profile
        self._first = first = 1 if profile.has_batch else 0
        self._prices = prices
        self._padded = profile.paddable[first:]
        self._bounds = [inf if most is None else most for most in profile.bounds[first:]] or [inf] * len(
            self._padded
        )
        self._lately: deque[Sizes] = deque(maxlen=_LOOK_EVERY)
        self._met: dict[Sizes, None] = {}
        """Shapes that calls would have without rounding, the last met last."""
        self._batches = 0
        self._arrivals = 0
        self._next_look = _FIRST_LOOK
        self.new_share = 0.0
        """Part of the calls that would be new without rounding: a moving average."""
        self.step = 1
        """Sizes are rounded up to multiples of it."""

    @staticmethod
    def suits(profile: ModelProfile) -> bool:
        """Tell whether requests may be rounded: padding is allowed and unlimited, and sizes are free."""
        return (
            profile.free_sizes
            and profile.max_shapes is None
            and profile.max_padding_ratio is None
            and not profile.static_shapes
            and any(profile.paddable[1 if profile.has_batch else 0 :])
        )

    def rounded(self, sizes: Sizes) -> Sizes:
        """Return the shape that a request of these sizes is padded to; one without elements stays as it is."""
        shape = sizes[self._first :]
        if 0 in sizes:
            return shape
        self._lately.append(shape)
        self._arrivals += 1
        if self._arrivals >= self._next_look:
            self._next_look = self._arrivals + min(self._arrivals, _LOOK_EVERY)
            self._look()
        step = self.step
        if step == 1:
            return shape
        larger = tuple(
            [
                max(size, int(min(most, -(-size // step) * step))) if padded else size
                for size, padded, most in zip(shape, self._padded, self._bounds, strict=True)
            ]
        )
        most_bytes = self._profile.max_batch_bytes
        if most_bytes is not None and self._nbytes((*sizes[: self._first], *larger)) > most_bytes:
            return shape
        return larger

    def _nbytes(self, sizes: Sizes) -> int:
        """Bytes of the inputs of a call of these sizes."""
        return sum([each.nbytes * prod([sizes[axis] for axis in each.axes]) for each in self._profile.inputs])

    def started(self, sizes: Sizes) -> None:
        """Note a batch that would be a call of `sizes`, (rows, *shape), without rounding."""
        self._batches += 1
        is_new = sizes not in self._met
        self._met.pop(sizes, None)
        self._met[sizes] = None
        if len(self._met) > _MOST_MET:
            del self._met[next(iter(self._met))]
        self.new_share += max(_WEIGHT, 1.0 / self._batches) * (is_new - self.new_share)

    def _look(self) -> None:
        """Choose the step by the requests that came lately.

        A batch has up to the rows that good company takes, in the mean half of them. Their padding must cost less than the
        first call, times the part of the calls that would be new. A step that does not halve the number of different
        shapes is no use: requests have few sizes. One above the mean size would make nearly all of them equal.
        """
        self.step = 1
        prices = self._prices()
        lately = np.array(self._lately, np.float64)
        mean = lately.mean(axis=0)
        saved_s = self.new_share * prices.first_call_s(float(mean.prod()))
        if not prices.measured or not saved_s:
            return
        shape = tuple(mean.astype(int).tolist())
        own_s, call_s = prices.company_s(1, shape)
        rows = max(1, round(0.5 * call_s / own_s)) if own_s > 0.0 else 1
        plain_s = prices.second(rows, shape)
        different = len(np.unique(lately, axis=0))
        padded = np.array(self._padded)
        step = _LEAST_STEP
        while step <= mean[padded].min():
            larger = np.where(padded, np.minimum(np.ceil(lately / step) * step, self._bounds), lately)
            most_s = prices.second(rows, tuple(larger.mean(axis=0).astype(int).tolist()))
            if not most_s - plain_s < saved_s:
                return
            if 2 * len(np.unique(larger, axis=0)) <= different:
                self.step = step
            step *= 2

"""What calls cost, as measured: the scheduler's estimate of how long something takes.

A first, honest version: running means, no interpolation between shapes. It answers "when may a refused
caller try again" and "does this deadline leave room for a delay", and fills the statistics. How batches
are cut does not depend on it yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WEIGHT = 0.2
"""Weight of the newest measurement in a running mean: the mean follows a change within about ten calls."""

MAX_SHAPES = 1024
"""Shapes remembered per model. When another comes, the one that was met first is forgotten."""


@dataclass(slots=True)
class _Means:
    """The running means of one model."""

    call_s: float
    request_s: float
    shapes: dict[tuple[int, ...], float]


class CostModel:
    """Running means of seconds: per call of each shape, and per call and per request of each model."""

    def __init__(self) -> None:
        self._models: dict[str, _Means] = {}

    def observe(self, model: str, sizes: tuple[int, ...], requests: int, run_s: float) -> None:
        """Learns from one finished call. Times that cannot be (negative, not a number) are ignored."""
        if not 0.0 <= run_s < float("inf") or requests < 1:
            return
        request_s = run_s / requests
        means = self._models.get(model)
        if means is None:
            self._models[model] = _Means(run_s, request_s, {sizes: run_s})
            return
        means.call_s += WEIGHT * (run_s - means.call_s)
        means.request_s += WEIGHT * (request_s - means.request_s)
        shapes = means.shapes
        known = shapes.get(sizes)
        if known is not None:
            shapes[sizes] = known + WEIGHT * (run_s - known)
            return
        if len(shapes) >= MAX_SHAPES:
            del shapes[next(iter(shapes))]
        shapes[sizes] = run_s

    def call_s(self, model: str, sizes: tuple[int, ...] | None = None) -> float | None:
        """Expected seconds of a call: of this shape if it was met, else of the model, else unknown."""
        means = self._models.get(model)
        if means is None:
            return None
        if sizes is not None:
            return means.shapes.get(sizes, means.call_s)
        return means.call_s

    def request_s(self, model: str) -> float | None:
        """Expected seconds of one slot per request, batching included; None before the first call."""
        means = self._models.get(model)
        return None if means is None else means.request_s

    def shapes(self, model: str) -> Mapping[tuple[int, ...], float]:
        """Seconds per call of each shape that is remembered, oldest first."""
        means = self._models.get(model)
        return {} if means is None else dict(means.shapes)

"""How fast the traffic could be served if all of it were known beforehand: the bound that planning is measured by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import prod

from shapestream.scheduling.events import ModelProfile
from shapestream.simulation.simulated_slots import SlotPlan
from shapestream.simulation.trace import TraceRequest
from shapestream.simulation.true_cost import TrueCost

__all__ = ["oracle_rate"]

SAMPLE = 8192
"""Requests that are looked at: more would change little and take long."""
_BUDGETS = 24


def oracle_rate(
    requests: Iterable[TraceRequest],
    profiles: Sequence[ModelProfile],
    costs: Mapping[str, TrueCost],
    slots: Sequence[SlotPlan],
) -> float:
    """Requests per second, offline: sorted by size, cut at the best budget of elements per call, on all slots.

    No arrival is waited for and no slot ever idles, so that no server can be much faster; with several dynamic
    dimensions, sorting them in order is a good way, not always the best. 0.0 for no requests.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = defaultdict(list)
    count = 0
    for request in islice(requests, SAMPLE):
        count += 1
        profile = profiles[request.model]
        fixed = tuple(
            size for size, padded in zip(request.sizes, profile.paddable, strict=True) if not padded
        )
        groups[request.model, fixed[1:] if profile.has_batch else fixed].append(request.sizes)
    total_s = 0.0
    for (model, _), shapes in groups.items():
        total_s += _group_s(shapes, profiles[model], costs[profiles[model].name])
    speed = sum(1.0 / slot.speed for slot in slots)
    return count / total_s * speed if total_s else 0.0


def _group_s(shapes: list[tuple[int, ...]], profile: ModelProfile, cost: TrueCost) -> float:
    """Seconds of one slot for all of these, which may be padded to share calls."""
    if not profile.has_batch:
        return sum(cost.seconds(shape) for shape in shapes)
    shapes.sort(key=lambda shape: (shape[1:], shape[0]))
    smallest = max(min(map(prod, shapes)), 1)
    largest = max(max(map(prod, shapes)) * profile.max_batch, smallest + 1)
    budgets = {smallest * (largest / smallest) ** (step / (_BUDGETS - 1)) for step in range(_BUDGETS)}
    return min(_cut_s(shapes, budget, profile, cost) for budget in sorted({0.0, *budgets}))


def _cut_s(shapes: list[tuple[int, ...]], budget: float, profile: ModelProfile, cost: TrueCost) -> float:
    total_s = 0.0
    rows = 0
    extent: tuple[int, ...] = ()
    for shape in shapes:
        grown = tuple(map(max, extent, shape[1:])) if rows else shape[1:]
        if rows and (rows + shape[0] > profile.max_batch or (rows + shape[0]) * prod(grown) > budget):
            total_s += _batch_s(rows, extent, profile, cost)
            rows, grown = 0, shape[1:]
        rows += shape[0]
        extent = grown
    return total_s + (_batch_s(rows, extent, profile, cost) if rows else 0.0)


def _batch_s(rows: int, extent: tuple[int, ...], profile: ModelProfile, cost: TrueCost) -> float:
    if profile.row_calls is None or rows >= len(profile.row_calls):
        return cost.seconds((rows, *extent))
    return sum(cost.seconds((call_rows, *extent)) for call_rows in profile.row_calls[rows])

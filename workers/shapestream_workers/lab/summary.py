"""Figures of one simulation, and the bound that its goodput is compared with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import islice
from math import nan, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.events import ModelProfile
from shapestream_workers.lab.simulator import DONE, EXPIRED, FAILED, LATE, LEFT, REFUSED, Scenario, Simulated
from shapestream_workers.lab.true_cost import TrueCost

__all__ = ["Summary", "latencies_s", "oracle_rate", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures in seconds, and rates per second of virtual time; latencies of answered requests, from intended arrival."""

    requests: int
    done: int
    """Requests answered in time."""
    late: int
    """Requests answered, or ended, after their deadline."""
    refused: int
    failed: int
    left: int
    """Requests neither answered nor ended, with no event left for them."""
    duration_s: float
    offered: float
    """Requests offered per second, over the whole run."""
    goodput: float
    """Requests answered in time, per second."""
    elements_per_s: float
    """Elements of requests answered in time, without padding, per second."""
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    padding_ratio: float
    utilisation: float
    """Busy seconds of all slots / (slots x duration)."""
    mean_batch: float
    """Requests per batch."""
    batches: int
    prefetched: int
    recalled: int
    preparations: int
    decide_us: float
    """Processor time of the decisions, microseconds per request, on the machine that simulated."""
    longest_decision_ms: float

    @property
    def lost_ratio(self) -> float:
        """The share of requests that were not answered in time."""
        return 1.0 - self.done / self.requests if self.requests else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, with None for nan."""
        return {
            key: None if isinstance(value, float) and np.isnan(value) else value
            for key, value in asdict(self).items()
        }


def summarise(simulated: Simulated) -> Summary:
    """The figures of a simulation; latencies are nan where nothing was answered."""
    requests, slots = simulated.requests, simulated.slots
    outcomes = requests.outcomes()
    counts = np.bincount(outcomes, minlength=6)
    latencies = latencies_s(simulated)
    quantiles = np.percentile(latencies, [50, 95, 99, 100]) if len(latencies) else np.full(4, np.nan)
    duration_s = max(simulated.ended_s - simulated.began_s, 1e-12)
    elements = requests.column(requests.elements)  # type: ignore[arg-type]  # integers, which become floats
    total = max(len(requests), 1)
    return Summary(
        requests=len(requests),
        done=int(counts[DONE]),
        late=int(counts[LATE] + counts[EXPIRED]),
        refused=int(counts[REFUSED]),
        failed=int(counts[FAILED]),
        left=int(counts[LEFT]),
        duration_s=duration_s,
        offered=len(requests) / duration_s,
        goodput=float(counts[DONE]) / duration_s,
        elements_per_s=float(elements[outcomes == DONE].sum()) / duration_s,
        mean_s=float(latencies.mean()) if len(latencies) else float("nan"),
        p50_s=float(quantiles[0]),
        p95_s=float(quantiles[1]),
        p99_s=float(quantiles[2]),
        max_s=float(quantiles[3]),
        padding_ratio=1.0 - slots.useful / slots.computed if slots.computed else 0.0,
        utilisation=slots.busy_s / (simulated.slot_count * duration_s),
        mean_batch=slots.members / max(slots.batches, 1),
        batches=slots.batches,
        prefetched=slots.prefetched,
        recalled=slots.recalled,
        preparations=slots.preparations,
        decide_us=simulated.decide_s / total * 1e6,
        longest_decision_ms=simulated.longest_decision_s * 1e3,
    )


def latencies_s(simulated: Simulated) -> NDArray[np.float64]:
    """Latencies of all answered requests, in time or late, in the order of arrival."""
    requests = simulated.requests
    outcomes = requests.outcomes()
    answered = (outcomes == DONE) | (outcomes == LATE)
    took_s = requests.column(requests.ended) - requests.column(requests.arrived)
    latencies: NDArray[np.float64] = took_s[answered]
    return latencies


SAMPLE = 8192
"""Requests in the sample: more would change little and take long."""
_BUDGETS = 24


def oracle_rate(scenario: Scenario) -> float:
    """Requests per second if all were known beforehand: sorted by size, cut at the best budget of elements per call.

    No arrival is waited for and no slot ever idles, so that no server can be much faster; with several dynamic
    dimensions, sorting them in order is a good way, not always the best. nan for no requests.
    """
    profiles, costs = scenario.profiles, scenario.costs
    groups: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = defaultdict(list)
    count = 0
    for request in islice(scenario.requests(), SAMPLE):
        count += 1
        profile = profiles[request.model]
        fixed = tuple(
            size for size, padded in zip(request.sizes, profile.paddable, strict=True) if not padded
        )
        groups[request.model, fixed[1:] if profile.has_batch else fixed].append(request.sizes)
    total_s = 0.0
    for (model, _), shapes in groups.items():
        total_s += _group_s(shapes, profiles[model], costs[profiles[model].name])
    speed = sum(1.0 / scenario.speed_of(slot) for slot in range(scenario.slots))
    return count / total_s * speed if total_s else nan


def _group_s(shapes: list[tuple[int, ...]], profile: ModelProfile, cost: TrueCost) -> float:
    """Seconds of one slot for these requests, which may be padded to share calls."""
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

"""The figures of one simulation: goodput, latencies, padding, how busy the slots were."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapestream.simulation.records import DONE, EXPIRED, FAILED, LATE, LEFT, REFUSED
from shapestream.simulation.simulator import Simulated

__all__ = ["Summary", "goodput_over_time", "latencies_s", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times in seconds, rates per second of virtual time. Latencies are of answered requests, from intended arrival."""

    requests: int
    done: int
    """Answered in time."""
    late: int
    """Answered, or ended, after their deadline."""
    refused: int
    failed: int
    left: int
    """Neither answered nor ended: nothing would have happened to them any more."""
    duration_s: float
    offered: float
    """Requests per second that came, over the whole run."""
    goodput: float
    """Requests per second that were answered in time."""
    elements_per_s: float
    """Elements of those, without padding, per second."""
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
        """Plain data, for JSON; what there is no value of is None."""
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
    """Of all answered requests, in time or late, in the order of arrival."""
    requests = simulated.requests
    outcomes = requests.outcomes()
    answered = (outcomes == DONE) | (outcomes == LATE)
    took_s = requests.column(requests.ended) - requests.column(requests.arrived)
    latencies: NDArray[np.float64] = took_s[answered]
    return latencies


def goodput_over_time(
    simulated: Simulated, windows: int = 100
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The ends of equal windows of time, and the requests per second that were answered in time in each."""
    requests = simulated.requests
    ended = requests.column(requests.ended)[requests.outcomes() == DONE]
    edges = np.linspace(simulated.began_s, max(simulated.ended_s, simulated.began_s + 1e-12), windows + 1)
    counts, _ = np.histogram(ended, edges)
    rates: NDArray[np.float64] = counts / np.diff(edges)
    return edges[1:], rates

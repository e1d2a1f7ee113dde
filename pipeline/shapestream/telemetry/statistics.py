"""The server's counters, which the `Statistics` entry carries.

Nothing here grows with the number of requests: counters, histograms of fixed size, a capped set of shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

# Each power of two is cut into so many buckets: a quantile is at most 1/16 (6 %) off.
_BUCKETS_PER_OCTAVE = 8
_SUB_BITS = 3
# Up to 2^40 us, 12 days; longer times count as that.
_MAX_US = (1 << 40) - 1
# Integers of the wire end here.
_MOST = (1 << 63) - 1
# Shapes are counted exactly up to here; beyond it the count says "at least".
MAX_DISTINCT_SHAPES = 10_000


class LatencyHistogram:
    """Times in microseconds, in buckets that widen with the time: fixed memory, quantiles to 6 %."""

    __slots__ = ("_buckets", "count", "total_us")

    def __init__(self) -> None:
        self._buckets = [0] * _bucket_of(_MAX_US + 1)
        self.count = 0
        self.total_us = 0

    def record(self, us: int, times: int = 1) -> None:
        """Count `times` measurements of `us` microseconds each."""
        self._buckets[_bucket_of(us if us < _MAX_US else _MAX_US)] += times
        self.count += times
        self.total_us += us * times

    def quantile_us(self, q: float) -> int:
        """The time, in microseconds, that a share `q` of the measurements did not exceed; 0 without any."""
        rank = q * self.count
        seen = 0
        for bucket, count in enumerate(self._buckets):
            seen += count
            if count and seen >= rank:
                return _middle_of(bucket)
        return 0

    def to_dict(self) -> dict[str, float]:
        """Mean and usual quantiles, in microseconds."""
        return {
            "mean": round(self.total_us / self.count, 1) if self.count else 0.0,
            "p50": self.quantile_us(0.5),
            "p90": self.quantile_us(0.9),
            "p99": self.quantile_us(0.99),
        }


def _bucket_of(us: int) -> int:
    """Bucket of a time: small times have one each; above that the leading 1 and the next three bits choose it."""
    if us < _BUCKETS_PER_OCTAVE:
        return us if us > 0 else 0
    shift = us.bit_length() - 1 - _SUB_BITS
    return (shift << _SUB_BITS) + (us >> shift)


def _middle_of(bucket: int) -> int:
    if bucket < 2 * _BUCKETS_PER_OCTAVE:
        return bucket
    shift = (bucket >> _SUB_BITS) - 1
    lowest = ((bucket & (_BUCKETS_PER_OCTAVE - 1)) + _BUCKETS_PER_OCTAVE) << shift
    return lowest + (1 << shift) // 2


class ServerStatistics:
    """Counters of one server process, from its start."""

    def __init__(self) -> None:
        self.messages = 0
        self.requests = 0
        self.results = 0
        self.failures: Counter[str] = Counter()
        """Failed requests by code."""
        self.duplicates = 0
        """Requests that were sent again while they ran; they share the one reply."""
        self.faults = 0
        """Defects of the scheduler; the log describes each."""
        self.late_reports = 0
        """Reports about batches that a worker was sent before it greeted again: they ran again elsewhere."""
        self.repeated = 0
        """Requests that were sent again after they were answered, and got the reply that was kept."""
        self.bad_messages: Counter[str] = Counter()
        """Messages and entries that were refused, by the port that they came in at."""
        self.strangers: Counter[str] = Counter()
        """Messages of peers that have no session here, answered `Unknown`, by the port that they came in at."""
        self.failed_handshakes: Counter[str] = Counter()
        """Connections that ended before they began, by port: other protocols, wrong keys, garbage."""
        self.peers_lost: Counter[str] = Counter()
        """Clients and workers that vanished or were cut off, by reason."""
        self.batches = 0
        self.batches_failed = 0
        self.batches_prefetched = 0
        """Batches that were queued behind the running one of a slot."""
        self.batches_recalled = 0
        """Batches of these that came back before they began; their requests ran elsewhere."""
        self.scheduling_s = 0.0
        """Seconds that the scheduler took for all its decisions."""
        self.scheduled_requests = 0
        """Requests that the scheduler was given."""
        self.batched_requests = 0
        self.rows = 0
        self.reallocations = 0
        self.calls = 0
        """Inference calls; a batch takes one, or several where only some shapes are allowed."""
        self.preparations = 0
        """Calls with a shape that was new and had to be prepared."""
        self.elements_computed = 0
        self.elements_padding = 0
        """Elements of these that were padding, or filled a call up."""
        self.queue_us = LatencyHistogram()
        self.run_us = LatencyHistogram()
        self.total_us = LatencyHistogram()
        self._shapes: set[tuple[str, tuple[int, ...]]] = set()

    def count_batch(
        self,
        model: str,
        calls: Sequence[tuple[int, tuple[int, ...]]],
        *,
        requests: int,
        rows: int,
        elements: int,
        run_us: int,
        reallocations: int,
        preparations: int,
    ) -> None:
        """Count a batch that ran: its `calls` by number and sizes, the `elements` of its requests without padding."""
        self.batches += 1
        self.batched_requests += requests
        self.rows = min(_MOST, self.rows + rows)  # rows without elements are as many as a caller claims
        self.reallocations += reallocations
        self.preparations += preparations
        self.run_us.record(run_us)
        computed = 0
        for count, sizes in calls:
            self.calls += count
            computed += count * prod(sizes)
            if len(self._shapes) < MAX_DISTINCT_SHAPES:
                self._shapes.add((model, sizes))
        self.elements_computed += computed
        self.elements_padding += max(0, computed - elements)

    @property
    def distinct_shapes(self) -> int:
        """Distinct shapes of calls, over all models, counted up to `MAX_DISTINCT_SHAPES`."""
        return len(self._shapes)

    @property
    def padding_ratio(self) -> float:
        """Padding elements / computed elements, by the requests' real sizes."""
        return self.elements_padding / self.elements_computed if self.elements_computed else 0.0

    @property
    def scheduling_us_per_request(self) -> float:
        """Microseconds of the scheduler's decisions per request."""
        if not self.scheduled_requests:
            return 0.0
        return round(self.scheduling_s / self.scheduled_requests * 1e6, 2)

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for the `Statistics` entry."""
        return {
            "messages": self.messages,
            "requests": self.requests,
            "results": self.results,
            "failures": dict(self.failures),
            "duplicates": self.duplicates,
            "faults": self.faults,
            "late_reports": self.late_reports,
            "repeated": self.repeated,
            "bad_messages": dict(self.bad_messages),
            "strangers": dict(self.strangers),
            "failed_handshakes": dict(self.failed_handshakes),
            "peers_lost": dict(self.peers_lost),
            "batches": self.batches,
            "batches_failed": self.batches_failed,
            "batches_prefetched": self.batches_prefetched,
            "batches_recalled": self.batches_recalled,
            "mean_batch_requests": round(self.batched_requests / self.batches, 2) if self.batches else 0.0,
            "rows": self.rows,
            "distinct_shapes": self.distinct_shapes,
            "calls": self.calls,
            "preparations": self.preparations,
            "prepared_hits": max(0, self.calls - self.preparations),
            "padding_ratio": round(self.padding_ratio, 4),
            "reallocations": self.reallocations,
            "scheduling_s": round(self.scheduling_s, 6),
            "scheduling_us_per_request": self.scheduling_us_per_request,
            "queue_us": self.queue_us.to_dict(),
            "run_us": self.run_us.to_dict(),
            "total_us": self.total_us.to_dict(),
        }

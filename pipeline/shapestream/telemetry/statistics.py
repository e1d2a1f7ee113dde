"""The server's counters, which the `Statistics` entry and the metrics are made of.

Nothing here grows with the number of requests: counters, histograms of fixed size, a capped set of shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from shapestream.telemetry.recent import Recent

# Each power of two is cut into so many buckets: a quantile is at most 1/16 (6 %) off.
_BUCKETS_PER_OCTAVE = 8
_SUB_BITS = 3
# Larger numbers count as this: of microseconds, 12 days.
_MAX = (1 << 40) - 1
# Integers of the wire end here.
_MOST = (1 << 63) - 1
# Shapes are counted exactly up to here; beyond it the count says "at least".
MAX_DISTINCT_SHAPES = 10_000


class Histogram:
    """Whole numbers, such as microseconds, in buckets that widen with the number: fixed memory, quantiles to 6 %."""

    __slots__ = ("_buckets", "count", "total")

    def __init__(self) -> None:
        self._buckets = [0] * _bucket_of(_MAX + 1)
        self.count = 0
        self.total = 0

    def record(self, number: int, times: int = 1) -> None:
        """Count `times` measurements of `number` each."""
        self._buckets[_bucket_of(number if number < _MAX else _MAX)] += times
        self.count += times
        self.total += number * times

    def quantile(self, q: float) -> int:
        """The number that a share `q` of the measurements did not exceed; 0 without any."""
        rank = q * self.count
        seen = 0
        for bucket, count in enumerate(self._buckets):
            seen += count
            if count and seen >= rank:
                return _middle_of(bucket)
        return 0

    def up_to(self, exponents: Iterable[int]) -> list[int]:
        """How many measurements were below 2^exponent, for each of these, which rise."""
        below, counted, seen = [], 0, 0
        for exponent in exponents:
            end = _bucket_of(1 << exponent)
            seen += sum(self._buckets[counted:end])
            counted = end
            below.append(seen)
        return below

    def to_dict(self) -> dict[str, float]:
        """Mean and usual quantiles."""
        return {
            "mean": round(self.total / self.count, 1) if self.count else 0.0,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
        }

    @classmethod
    def of_all(cls, parts: Iterable[Histogram]) -> Histogram:
        """The measurements of all of these."""
        whole = cls()
        for part in parts:
            whole._buckets = [
                ours + theirs for ours, theirs in zip(whole._buckets, part._buckets, strict=True)
            ]
            whole.count += part.count
            whole.total += part.total
        return whole


def _bucket_of(number: int) -> int:
    """Bucket of a number: small ones have one each; above that the leading 1 and the next three bits choose it."""
    if number < _BUCKETS_PER_OCTAVE:
        return number if number > 0 else 0
    shift = number.bit_length() - 1 - _SUB_BITS
    return (shift << _SUB_BITS) + (number >> shift)


def _middle_of(bucket: int) -> int:
    if bucket < 2 * _BUCKETS_PER_OCTAVE:
        return bucket
    shift = (bucket >> _SUB_BITS) - 1
    lowest = ((bucket & (_BUCKETS_PER_OCTAVE - 1)) + _BUCKETS_PER_OCTAVE) << shift
    return lowest + (1 << shift) // 2


class ModelCounters:
    """Counters of one model, from the server's start."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Requests that were well-formed and ended without a result, by code."""
        self.attempts_failed = 0
        """Requests in batches that failed; one that runs again counts again."""
        self.batches_failed = 0
        self.rows = 0
        self.reallocations = 0
        self.calls = 0
        """Inference calls; a batch takes one, or several where only some shapes are allowed."""
        self.preparations = 0
        """Calls with a shape that was new and had to be prepared."""
        self.elements_computed = 0
        self.elements_padding = 0
        """Elements of these that were padding, or filled a call up."""
        self.batch_requests = Histogram()
        """Requests of the batches that ran."""
        self.queue_us = Histogram()
        self.run_us = Histogram()
        """The calls of a batch."""
        self.busy_us = Histogram()
        """The same, with gathering before and splitting after."""
        self.total_us = Histogram()

    @property
    def results(self) -> int:
        """Requests that were answered with a result."""
        return self.total_us.count

    @property
    def batches(self) -> int:
        """Batches that ran."""
        return self.run_us.count


class ServerStatistics:
    """Counters of one server process, from its start."""

    def __init__(self) -> None:
        self.messages = 0
        self.requests = 0
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
        self.batches_prefetched = 0
        """Batches that were queued behind the running one of a slot."""
        self.batches_recalled = 0
        """Batches of these that came back before they began; their requests ran elsewhere."""
        self.scheduling_s = 0.0
        """Seconds that the scheduler took for all its decisions."""
        self.scheduled_requests = 0
        """Requests that the scheduler was given."""
        self.worker_ends: Counter[str] = Counter()
        """Worker processes of this server that have ended, `died` or `ended`."""
        self.lag_us = Histogram()
        """How late the event loop came to its heartbeats."""
        self.models: dict[str, ModelCounters] = {}
        """By name; workers bring these, and a server holds so many models at most."""
        self.recent = Recent()
        """The last batches and errors."""
        self._shapes: set[tuple[str, tuple[int, ...]]] = set()

    def of(self, model: str) -> ModelCounters:
        """The counters of a model."""
        counters = self.models.get(model)
        if counters is None:
            counters = self.models[model] = ModelCounters()
        return counters

    @property
    def results(self) -> int:
        """Requests that were answered with a result."""
        return self._sum("results")

    @property
    def batches(self) -> int:
        """Batches that ran."""
        return self._sum("batches")

    def _sum(self, name: str) -> int:
        return sum(getattr(model, name) for model in self.models.values())

    def _all(self, name: str) -> Histogram:
        return Histogram.of_all(getattr(model, name) for model in self.models.values())

    def count_batch(
        self,
        model: str,
        calls: Sequence[tuple[int, tuple[int, ...]]],
        *,
        requests: int,
        rows: int,
        elements: int,
        run_us: int,
        busy_us: int,
        reallocations: int,
        preparations: int,
    ) -> int:
        """Count a batch that ran: its `calls` by number and sizes, the `elements` of its requests without padding.

        Returns the elements that were computed, padding included.
        """
        counters = self.of(model)
        counters.batch_requests.record(requests)
        counters.rows = min(
            _MOST, counters.rows + rows
        )  # rows without elements are as many as a caller claims
        counters.reallocations += reallocations
        counters.preparations += preparations
        counters.run_us.record(run_us)
        counters.busy_us.record(busy_us)
        computed = 0
        for count, sizes in calls:
            counters.calls += count
            computed += count * prod(sizes)
            if len(self._shapes) < MAX_DISTINCT_SHAPES:
                self._shapes.add((model, sizes))
        counters.elements_computed += computed
        counters.elements_padding += max(0, computed - elements)
        return computed

    @property
    def distinct_shapes(self) -> int:
        """Distinct shapes of calls, over all models, counted up to `MAX_DISTINCT_SHAPES`."""
        return len(self._shapes)

    @property
    def padding_ratio(self) -> float:
        """Padding elements / computed elements, by the requests' real sizes."""
        computed = self._sum("elements_computed")
        return self._sum("elements_padding") / computed if computed else 0.0

    @property
    def scheduling_us_per_request(self) -> float:
        """Microseconds of the scheduler's decisions per request."""
        if not self.scheduled_requests:
            return 0.0
        return round(self.scheduling_s / self.scheduled_requests * 1e6, 2)

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for the `Statistics` entry."""
        sizes = self._all("batch_requests")
        batches, calls, preparations = self.batches, self._sum("calls"), self._sum("preparations")
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
            "batches": batches,
            "batches_failed": self._sum("batches_failed"),
            "batches_prefetched": self.batches_prefetched,
            "batches_recalled": self.batches_recalled,
            "mean_batch_requests": round(sizes.total / sizes.count, 2) if sizes.count else 0.0,
            "rows": min(_MOST, self._sum("rows")),
            "distinct_shapes": self.distinct_shapes,
            "calls": calls,
            "preparations": preparations,
            "prepared_hits": max(0, calls - preparations),
            "padding_ratio": round(self.padding_ratio, 4),
            "reallocations": self._sum("reallocations"),
            "scheduling_s": round(self.scheduling_s, 6),
            "scheduling_us_per_request": self.scheduling_us_per_request,
            "queue_us": self._all("queue_us").to_dict(),
            "run_us": self._all("run_us").to_dict(),
            "total_us": self._all("total_us").to_dict(),
        }

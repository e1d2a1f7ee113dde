"""The server's counters, from which `StatisticsEntry` and the metrics are made.

Their memory does not grow with the number of requests: counters, histograms of bounded size, a limited set of shapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import zip_longest
from math import prod
from typing import Any, Self

from shapestream.slices import Slices

_SUB_BITS = 3
_BUCKETS_PER_OCTAVE = 1 << _SUB_BITS
"""Buckets between two powers of two: a quantile is wrong by 1/16 (6 %) at most."""
_MAX = (1 << 40) - 1
"""Largest number that a histogram tells apart: 12 days in microseconds."""
_MOST = (1 << 63) - 1
"""Largest integer that the wire carries."""
MAX_DISTINCT_SHAPES = 10_000
"""Largest number of shapes that are counted exactly."""
HISTOGRAMS_PER_SLICE = 64
"""Histograms that one turn of the event loop adds up, at up to 20 us each."""


class Histogram:
    """Counts of whole numbers, such as microseconds, in buckets that widen with the number.

    The memory is bounded; quantiles are exact to 6 %.
    """

    __slots__ = ("_buckets", "count", "total")

    def __init__(self) -> None:
        self._buckets: list[int] = []
        """Counts up to the bucket of the largest number so far: a short list is copied and searched faster."""
        self.count = 0
        self.total = 0

    def record(self, number: int, times: int = 1) -> None:
        """Count `times` measurements of `number` each."""
        bucket = _bucket_of(number if number < _MAX else _MAX)
        try:
            self._buckets[bucket] += times
        except IndexError:
            self._buckets += [0] * (bucket - len(self._buckets)) + [times]
        self.count += times
        self.total += number * times

    def quantile(self, q: float) -> int:
        """Return the number that a share `q` of the measurements did not exceed; 0 without any."""
        return _quantile(self._filled(), q * self.count)

    def up_to(self, exponents: Iterable[int]) -> list[int]:
        """Return numbers of measurements below 2^exponent, for each of these ascending exponents."""
        below, counted, seen = [], 0, 0
        for exponent in exponents:
            end = _bucket_of(1 << exponent)
            seen += sum(self._buckets[counted:end])
            counted = end
            below.append(seen)
        return below

    def to_dict(self) -> dict[str, Any]:
        """Count, mean and quantiles as plain data, and each filled bucket as `[largest number of the bucket, count]`."""
        filled = self._filled()
        return {
            "count": self.count,
            "mean": round(self.total / self.count, 1) if self.count else 0.0,
            **{f"p{percent}": _quantile(filled, percent / 100 * self.count) for percent in (50, 90, 95, 99)},
            "buckets": [[_LOWEST[bucket + 1] - 1, count] for bucket, count in filled],
        }

    def _filled(self) -> list[tuple[int, int]]:
        return [(bucket, count) for bucket, count in enumerate(self._buckets) if count]

    def __copy__(self) -> Histogram:
        twin = Histogram.__new__(Histogram)
        twin._buckets, twin.count, twin.total = self._buckets.copy(), self.count, self.total
        return twin

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Return the measurements since an earlier copy."""
        later = copy(self)
        for bucket, count in enumerate(earlier._buckets):
            later._buckets[bucket] -= count
        later.count -= earlier.count
        later.total -= earlier.total
        return later

    @classmethod
    def of_all(cls, parts: Iterable[Histogram]) -> Slices[Histogram]:
        """Return the sum of several histograms."""
        whole = cls()
        for place, part in enumerate(parts):
            if place % HISTOGRAMS_PER_SLICE == 0:
                yield
            if part.count:
                whole._buckets = [
                    ours + theirs for ours, theirs in zip_longest(whole._buckets, part._buckets, fillvalue=0)
                ]
                whole.count += part.count
                whole.total += part.total
        return whole


def _bucket_of(number: int) -> int:
    """Return bucket of a number. Numbers below 8 have one each; above, the leading 1 and the next three bits choose it."""
    if number < _BUCKETS_PER_OCTAVE:
        return number if number > 0 else 0
    shift = number.bit_length() - 1 - _SUB_BITS
    return (shift << _SUB_BITS) + (number >> shift)


def _lowest_of(bucket: int) -> int:
    if bucket < 2 * _BUCKETS_PER_OCTAVE:
        return bucket
    shift = (bucket >> _SUB_BITS) - 1
    return ((bucket & (_BUCKETS_PER_OCTAVE - 1)) + _BUCKETS_PER_OCTAVE) << shift


_LOWEST = tuple([_lowest_of(bucket) for bucket in range(_bucket_of(_MAX) + 2)])


def _quantile(filled: Iterable[tuple[int, int]], rank: float) -> int:
    """Return the middle of the bucket that holds the measurement of this rank; 0 without measurements."""
    seen = 0
    for bucket, count in filled:
        seen += count
        if seen >= rank:
            return (_LOWEST[bucket] + _LOWEST[bucket + 1]) // 2
    return 0


class ModelCounters:
    """Counters of one model, from the server's start on, or between two times."""

    def __init__(self) -> None:
        self.arrived = 0
        """Requests that the scheduler received."""
        self.failures: Counter[str] = Counter()
        """Requests that were well-formed and ended without a result, by code."""
        self.attempts_failed = 0
        """Requests in batches that failed; one that runs again counts again."""
        self.batches_failed = 0
        self.failed_us = 0
        """Microseconds that failed and lost batches held their slots."""
        self.rows = 0
        self.reallocations = 0
        self.calls = 0
        """Inference calls; a batch takes one, or several where only some shapes are allowed."""
        self.preparations = 0
        """Calls with a shape that was new and had to be prepared."""
        self.elements_computed = 0
        self.elements_padding = 0
        """Computed elements that were padding, or filled rows of a call."""
        self.batch_requests = Histogram()
        """Requests of the batches that ran."""
        self.queue_us = Histogram()
        self.gather_us = Histogram()
        """Time of a batch before and between its calls."""
        self.run_us = Histogram()
        """Time of the calls of a batch."""
        self.split_us = Histogram()
        """Time of a batch for its results, after and between its calls."""
        self.busy_us = Histogram()
        """Sum of these three times."""
        self.total_us = Histogram()

    @property
    def results(self) -> int:
        """Requests that were answered with a result."""
        return self.total_us.count

    @property
    def batches(self) -> int:
        """Batches that ran."""
        return self.run_us.count

    @property
    def activity(self) -> int:
        """A number that grows with every change of the counters."""
        ended = self.results + self.failures.total()
        return self.arrived + ended + self.batches + self.batches_failed + self.failed_us

    def __copy__(self) -> ModelCounters:
        return self._made_of({name: copy(value) for name, value in vars(self).items()})

    def __sub__(self, earlier: ModelCounters) -> ModelCounters:
        """Return the counters since an earlier copy."""
        return self._made_of({name: value - getattr(earlier, name) for name, value in vars(self).items()})

    @classmethod
    def _made_of(cls, values: dict[str, Any]) -> Self:
        made = cls.__new__(cls)
        vars(made).update(values)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain data, for the last minute."""
        return {
            "arrived": self.arrived,
            "results": self.results,
            "failures": dict(self.failures),
            "failed_us": self.failed_us,
            "batches": self.batches,
            "rows": self.rows,
            "calls": self.calls,
            "new_shapes": self.preparations,
            "elements_computed": min(_MOST, self.elements_computed),
            "elements_padding": min(_MOST, self.elements_padding),
            "queue_us": self.queue_us.to_dict(),
            "gather_us": self.gather_us.to_dict(),
            "run_us": self.run_us.to_dict(),
            "split_us": self.split_us.to_dict(),
            "total_us": self.total_us.to_dict(),
            "batch_requests": self.batch_requests.to_dict(),
        }


class ServerStatistics:
    """Counters of one server process, from its start on."""

    def __init__(self) -> None:
        self.messages = 0
        self.requests = 0
        self.failures: Counter[str] = Counter()
        """Failed requests by code."""
        self.overloaded: Counter[str] = Counter()
        """Requests that failed with `overloaded`, by the limit that they met."""
        self.duplicates = 0
        """Requests that were sent again while they ran; both share one reply."""
        self.faults = 0
        """Defects of the scheduler; the log describes each."""
        self.late_reports = 0
        """Reports of batches from before the worker greeted again; those batches ran again on other slots."""
        self.repeated = 0
        """Requests that were sent again after their answer, and got the kept reply."""
        self.bad_messages: Counter[str] = Counter()
        """Refused messages and entries, by port."""
        self.strangers: Counter[str] = Counter()
        """Messages of peers without a session, answered with `Unknown`, by port."""
        self.failed_handshakes: Counter[str] = Counter()
        """Connections that ended before they began, by port: other protocols, wrong keys, garbage."""
        self.peers_lost: Counter[str] = Counter()
        """Clients and workers that vanished or were cut off, by reason."""
        self.batches_prefetched = 0
        """Batches that were queued behind the running one of a slot."""
        self.batches_recalled = 0
        """Queued batches that were recalled before they began; their requests ran on other slots."""
        self.scheduling_s = 0.0
        """Seconds that the scheduler took for all its decisions."""
        self.scheduled_requests = 0
        """Requests that the scheduler received."""
        self.worker_ends: Counter[tuple[int, str]] = Counter()
        """Ends of this server's worker processes, by entry of `workers` (from 0), and `died` or `ended`."""
        self.reloads: Counter[str] = Counter()
        """Finished reloads of the configuration, by result."""
        self.reloaded_at = 0.0
        """Unix time of the end of the last reload that was `ok`; 0 without one."""
        self.reload_s = 0.0
        """Seconds that this reload took."""
        self.dialled_in_ends: Counter[str] = Counter()
        """Workers that dialled in and left: `drained`, or `lost` without a goodbye."""
        self.lag_us = Histogram()
        """Delay of the event loop's heartbeats."""
        self.models: defaultdict[str, ModelCounters] = defaultdict(ModelCounters)
        """Counters by name of the model. The number of models of a server is limited (`MAX_MODELS`)."""
        self._shapes: set[tuple[str, tuple[int, ...]]] = set()

    def of(self, model: str) -> ModelCounters:
        """Return the counters of a model."""
        return self.models[model]

    @property
    def refused(self) -> Counter[str]:
        """Requests that were refused before the scheduler received them, by code. No model counts them."""
        refused = Counter(self.failures)
        for model in self.models.values():
            refused.subtract(model.failures)
        return +refused

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

    def _all(self, name: str) -> Slices[Histogram]:
        return Histogram.of_all(getattr(model, name) for model in list(self.models.values()))

    def count_batch(
        self,
        model: str,
        calls: Sequence[tuple[int, tuple[int, ...]]],
        *,
        requests: int,
        rows: int,
        elements: int,
        gather_us: int,
        run_us: int,
        busy_us: int,
        reallocations: int,
        preparations: int,
    ) -> None:
        """Count a batch that ran: its `calls` by number and sizes, the `elements` of its requests without padding."""
        counters = self.of(model)
        counters.batch_requests.record(requests)
        # A caller may claim any number of rows that have no elements.
        counters.rows = min(_MOST, counters.rows + rows)
        counters.reallocations += reallocations
        counters.preparations += preparations
        counters.gather_us.record(gather_us)
        counters.run_us.record(run_us)
        counters.split_us.record(max(0, busy_us - gather_us - run_us))
        counters.busy_us.record(busy_us)
        computed = 0
        for count, sizes in calls:
            counters.calls += count
            computed += count * prod(sizes)
            if len(self._shapes) < MAX_DISTINCT_SHAPES:
                self._shapes.add((model, sizes))
        counters.elements_computed += computed
        counters.elements_padding += max(0, computed - elements)

    @property
    def distinct_shapes(self) -> int:
        """Distinct shapes of calls, over all models, counted up to `MAX_DISTINCT_SHAPES`."""
        return len(self._shapes)

    @property
    def padding_ratio(self) -> float:
        """Padding elements / computed elements; requests count with their real sizes."""
        computed = self._sum("elements_computed")
        return self._sum("elements_padding") / computed if computed else 0.0

    @property
    def scheduling_us_per_request(self) -> float:
        """Mean microseconds of the scheduler's decisions per request."""
        if not self.scheduled_requests:
            return 0.0
        return round(self.scheduling_s / self.scheduled_requests * 1e6, 2)

    def to_dict(self) -> Slices[dict[str, Any]]:
        """Return the counters as plain data, for `StatisticsEntry`."""
        sizes = yield from self._all("batch_requests")
        times = {}
        for name in ("queue_us", "run_us", "total_us"):
            times[name] = (yield from self._all(name)).to_dict()
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
            **times,
        }

"""The server's counters, from which `StatisticsEntry` and the metrics are made.

Their memory does not grow with the number of requests: counters, histograms of bounded size, a limited set of shapes.

Batches are counted together: a batch adds one row, and the rows are added up when a counter is read, or when there are many.
To add up 256 of them takes a tenth of the time that each by itself would take.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from itertools import groupby, zip_longest
from math import prod
from operator import mul
from typing import Any, NamedTuple, Self

from shapestream.slices import Slices
from shapestream_engine.batch import BatchReport

_LOWEST: tuple[int, ...] = (
    *range(16),
    *[(8 + eighth) << shift for shift in range(1, 37) for eighth in range(8)],
    1 << 40,
)
"""The smallest number of each bucket, and the end of the last one: 2^40, which is 12 days in microseconds.

Eight buckets lie between two powers of two, so a quantile is wrong by 1/16 (6 %) at most.
"""
_BUCKETS = len(_LOWEST) - 1
_smaller_or_equal = partial(bisect_right, _LOWEST)
"""Returns how many buckets begin at a number or below it."""
_MOST = (1 << 63) - 1
"""Largest integer that the wire carries."""
MAX_DISTINCT_SHAPES = 10_000
"""Largest number of shapes that are counted exactly."""
MOST_ROWS = 256
"""Most batches whose counts are not added up yet: to add up more at once would hold the event loop."""
STAGE_KEYS = ("runs", "us", "requests", "failed")
"""Counts of a chain's stage: the chain's requests for which it ran, their microseconds there, its requests, and those of
these that failed."""
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
        self._add(_smaller_or_equal(number), times)
        self.count += times
        self.total += number * times

    def record_all(self, numbers: Sequence[int]) -> None:
        """Count a measurement of each of these numbers.

        Negative numbers count as 0, and too large ones belong to the last bucket.
        """
        for place, times in Counter(map(_smaller_or_equal, numbers)).items():
            self._add(place, times)
        self.count += len(numbers)
        self.total += sum(numbers)

    def _add(self, place: int, times: int) -> None:
        buckets = self._buckets
        bucket = min(max(place - 1, 0), _BUCKETS - 1)
        if bucket >= len(buckets):
            buckets += [0] * (bucket + 1 - len(buckets))
        buckets[bucket] += times

    def up_to(self, exponents: Iterable[int]) -> list[int]:
        """Return the numbers of measurements below 2^exponent, for each of these ascending exponents."""
        below, counted, seen = [], 0, 0
        for exponent in exponents:
            end = bisect_left(_LOWEST, 1 << exponent)
            seen += sum(self._buckets[counted:end])
            counted = end
            below.append(seen)
        return below

    def to_dict(self) -> dict[str, Any]:
        """Count, mean and quantiles as plain data, and each filled bucket as `[largest number of the bucket, count]`."""
        filled = [(bucket, count) for bucket, count in enumerate(self._buckets) if count]
        return {
            "count": self.count,
            "mean": round(self.total / self.count, 1) if self.count else 0.0,
            **{f"p{percent}": _quantile(filled, percent / 100 * self.count) for percent in (50, 90, 95, 99)},
            "buckets": [[_LOWEST[bucket + 1] - 1, count] for bucket, count in filled],
        }

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
        self.members_gather_us = 0
        """Sum of the batches' gather times, each counted once per request answered; run and split likewise."""
        self.members_run_us = 0
        self.members_split_us = 0
        self.room_us = 0
        """Of a chain: microseconds that its requests waited for room for their stages."""
        self.stages: Counter[tuple[str, str]] = Counter()
        """Of a chain: by stage and key, what `STAGE_KEYS` names."""
        self.last_ended = 0.0
        """When the last batch that ran ended, in seconds of the server's clock; 0 before the first one."""

    @property
    def results(self) -> int:
        """Return the number of requests that were answered with a result."""
        return self.total_us.count

    @property
    def batches(self) -> int:
        """Return the number of batches that ran."""
        return self.run_us.count

    @property
    def activity(self) -> int:
        """Return a number that grows with every change of the counters."""
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

    def count_stage(self, stage: str, us: int, requests: int, failed: int) -> None:
        """Count one run of a stage, when its chain has ended."""
        for key, number in zip(STAGE_KEYS, (1, us, requests, failed), strict=True):
            self.stages[stage, key] += number

    def totals(self) -> dict[str, int]:
        """Return sums since the server's start; times are microseconds, each summed over the requests with a result."""
        sums = {
            "results": self.results,
            "failures": self.failures.total(),
            "rows": self.rows,
            "calls": self.calls,
            "queue_us": self.queue_us.total,
            "gather_us": self.members_gather_us,
            "run_us": self.members_run_us,
            "split_us": self.members_split_us,
            "total_us": self.total_us.total,
        }
        return {name: min(_MOST, number) for name, number in sums.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain data, for the last minute."""
        histograms = ("queue_us", "gather_us", "run_us", "split_us", "total_us", "batch_requests")
        return {
            **{
                name: getattr(self, name)
                for name in ("arrived", "results", "failed_us", "batches", "rows", "calls")
            },
            "failures": dict(self.failures),
            **self._chain_dict(),
            "new_shapes": self.preparations,
            "elements_computed": min(_MOST, self.elements_computed),
            "elements_padding": min(_MOST, self.elements_padding),
            **{name: getattr(self, name).to_dict() for name in histograms},
        }

    def _chain_dict(self) -> dict[str, Any]:
        """Return what only chains have."""
        if not self.stages:
            return {}
        stages: dict[str, dict[str, int]] = {}
        for (stage, key), count in self.stages.items():
            stages.setdefault(stage, dict.fromkeys(STAGE_KEYS, 0))[key] = min(_MOST, count)
        return {"room_us": min(_MOST, self.room_us), "stages": stages}


class _BatchRow(NamedTuple):
    """One batch that ran: the arguments of `count_batch`, without its tensors."""

    calls: tuple[tuple[int, tuple[int, ...]], ...]
    requests: int
    rows: int
    elements: int
    gather_s: float
    run_s: float
    busy_s: float
    reallocations: int
    preparations: int
    began: float
    ended: float
    arrived: Sequence[float]


class ServerStatistics:
    """Counters of one server process, from its start on."""

    def __init__(self) -> None:
        self.messages = 0
        self.requests = 0
        self.failures: Counter[str] = Counter()
        """Failed requests by code."""
        self.overloaded: Counter[str] = Counter()
        """Requests that failed with `overloaded`, by the limit that they met."""
        self.stage_results = 0
        """Results of chains' stages; their models count them as well."""
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
        self._models: defaultdict[str, ModelCounters] = defaultdict(ModelCounters)
        self._shapes: set[tuple[str, tuple[int, ...]]] = set()
        self._rows: defaultdict[str, list[_BatchRow]] = defaultdict(list)
        """Batches that are not added up yet, by model; `MOST_ROWS` of each."""

    @property
    def models(self) -> defaultdict[str, ModelCounters]:
        """Return the counters by name of the model. The number of models of a server is limited (`MAX_MODELS`)."""
        if self._rows:
            rows, self._rows = self._rows, defaultdict(list)
            for model, batches in rows.items():
                self._add_up(model, batches)
        return self._models

    def to_add(self, model: str) -> ModelCounters:
        """Return the counters of a model for what is no batch. Read them from `models`, where all batches are in."""
        return self._models[model]

    @property
    def refused(self) -> Counter[str]:
        """Return the numbers of requests refused before the scheduler received them, by code. No model counts them."""
        refused = Counter(self.failures)
        for model in self.models.values():
            refused.subtract(model.failures)
        return +refused

    @property
    def results(self) -> int:
        """Return the number of requests that were answered with a result; those of chains' stages answer nobody."""
        return self._sum("results") - self.stage_results

    @property
    def batches(self) -> int:
        """Return the number of batches that ran."""
        return self._sum("batches")

    def _sum(self, name: str) -> int:
        return sum(getattr(model, name) for model in self.models.values())

    def _all(self, name: str) -> Slices[Histogram]:
        return Histogram.of_all(getattr(model, name) for model in list(self.models.values()))

    def count_batch(
        self,
        model: str,
        sizes: tuple[int, ...],
        report: BatchReport,
        *,
        requests: int,
        rows: int,
        elements: int,
        began: float = 0.0,
        ended: float = 0.0,
        arrived: Sequence[float] = (),
    ) -> None:
        """Count a batch of these `sizes` that ran.

        requests, rows, elements: those that were in its calls, without padding.
        began, ended: when it began, and when its requests were answered, in seconds of the clock of `arrived`.
        arrived: the arrival of each request that was answered.
        """
        waiting = self._rows[model]
        row = (
            report.calls or ((1, sizes),),
            requests,
            rows,
            elements,
            report.gather_s,
            report.run_s,
            report.busy_s,
            report.reallocations,
            report.preparations,
            began,
            ended,
            arrived,
        )
        # As in `ends.py`: this takes a third of the time of `_BatchRow(*row)`.
        waiting.append(tuple.__new__(_BatchRow, row))
        if len(waiting) >= MOST_ROWS:
            self._add_up(model, self._rows.pop(model))

    def _add_up(self, model: str, batches: Sequence[_BatchRow]) -> None:
        """Count batches of one model."""
        counters = self._models[model]
        calls, requests, rows, elements, gather_s, run_s, busy_s, *others = zip(*batches, strict=True)
        reallocations, preparations, began, ended, arrived = others
        # A caller may claim any number of rows that have no elements.
        counters.rows = min(_MOST, counters.rows + sum(rows))
        counters.reallocations += sum(reallocations)
        counters.preparations += sum(preparations)
        gather_us = [round(seconds * 1e6) for seconds in gather_s]
        run_us = [round(seconds * 1e6) for seconds in run_s]
        busy_us = [round(seconds * 1e6) for seconds in busy_s]
        split_us = [
            max(0, busy - gather - run) for gather, run, busy in zip(gather_us, run_us, busy_us, strict=True)
        ]
        answered = [*map(len, arrived)]
        counters.members_gather_us += sum(map(mul, answered, gather_us))
        counters.members_run_us += sum(map(mul, answered, run_us))
        counters.members_split_us += sum(map(mul, answered, split_us))
        counters.last_ended = max(counters.last_ended, *ended)
        counters.batch_requests.record_all(requests)
        counters.gather_us.record_all(gather_us)
        counters.run_us.record_all(run_us)
        counters.split_us.record_all(split_us)
        counters.busy_us.record_all(busy_us)
        queue_us, total_us = [], []
        for begins, ends, arrives in zip(began, ended, arrived, strict=True):
            for at, alike in groupby(arrives):
                waited_us, lasted_us = round((begins - at) * 1e6), round((ends - at) * 1e6)
                queue_us.append(waited_us)
                total_us.append(lasted_us)
                more = len(list(alike)) - 1
                if more:  # those that arrived together have equal times
                    counters.queue_us.record(waited_us, more)
                    counters.total_us.record(lasted_us, more)
        counters.queue_us.record_all(queue_us)
        counters.total_us.record_all(total_us)
        for (own_calls, useful), count in Counter(zip(calls, elements, strict=True)).items():
            computed = 0
            for repeats, call in own_calls:
                counters.calls += count * repeats
                computed += repeats * prod(call)
                if len(self._shapes) < MAX_DISTINCT_SHAPES:
                    self._shapes.add((model, call))
            counters.elements_computed += count * computed
            counters.elements_padding += count * max(0, computed - useful)

    @property
    def distinct_shapes(self) -> int:
        """Return the number of distinct shapes of calls, over all models, counted up to `MAX_DISTINCT_SHAPES`."""
        _ = self.models  # adds up what is not counted yet
        return len(self._shapes)

    @property
    def padding_ratio(self) -> float:
        """Return the share of computed elements that are padding; requests count with their real sizes."""
        computed = self._sum("elements_computed")
        return self._sum("elements_padding") / computed if computed else 0.0

    @property
    def scheduling_us_per_request(self) -> float:
        """Return the mean microseconds of the scheduler's decisions per request."""
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

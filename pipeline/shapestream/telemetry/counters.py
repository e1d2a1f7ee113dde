"""The server's counts: one table, whose rows have a name, a value, a meaning, labels and a unit.

A count is a field of `ServerStatistics`, or of `ModelCounters` where it is counted by model. The field has the name and the
value. Its `Row` says what it means, and where it is told: `statistics()` (`StatisticsEntry`), the last minute, /metrics. To
add a count takes one field, and the place that counts. What is computed from several counts is in `to_dict`, and in
metrics.py.

The memory of counts does not grow with the number of requests: numbers, histograms of bounded size, a limited set of shapes.

Batches are counted together: the records of ended batches wait, and are added up when a count is read, or when there are
many. To add up 256 of them takes a tenth of the time that each by itself would take.

`LastMinute` has the counts of the last minute: those of now, minus those of a minute ago. The server's heartbeat takes a
snapshot every few seconds; nothing is done per request. All times are arguments, in seconds.
"""

# ruff: noqa: RUF009 - the functions that declare a count return `dataclasses.field`
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import groupby, zip_longest
from math import prod
from operator import mul
from typing import Any, NamedTuple, Self

import msgpack

from shapestream.scheduling.events import Overload
from shapestream.slices import Slices
from shapestream.telemetry.runs import Run

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
MOST_ROWS = 128
"""Most batches of all models that are not added up yet: to add them up takes 1 to 2 ms of the event loop."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a count means, and where it is told."""

    help: str
    metric: str = ""
    """Its name in /metrics, without the prefix; empty: it is none, or one that metrics.py computes."""
    labels: tuple[str, ...] = ()
    """The labels of its metric, besides the model."""
    unit: float = 1.0
    """One of it, in the metric's unit."""
    told: bool = False
    """Whether `statistics()` has it by its name; a count by model is summed over all models."""
    minute: bool = False
    """Whether the last minute has it by its name, by model."""
    is_histogram: bool = False


_US = 1e-6
"""The unit of microseconds."""


def _number(help: str, metric: str = "", *, at_first: float = 0, **more: Any) -> Any:  # noqa: A002 - the word of /metrics
    """Declare a count that is one number."""
    return field(default=at_first, metadata={"row": Row(help=help, metric=metric, **more)})


def _numbers(
    help: str,  # noqa: A002 - see above
    metric: str = "",
    *labels: str,
    at_first: Iterable[Any] = (),
    **more: Any,
) -> Any:
    """Declare a count that is a number by each of its labels' values; those of `at_first` begin with 0."""
    row = Row(help=help, metric=metric, labels=labels, **more)
    return field(default_factory=lambda: Counter(dict.fromkeys(at_first, 0)), metadata={"row": row})


def _histogram(help: str, metric: str = "", unit: float = _US, **more: Any) -> Any:  # noqa: A002 - see above
    """Declare a histogram."""
    return field(
        default_factory=Histogram,
        metadata={"row": Row(help=help, metric=metric, unit=unit, is_histogram=True, **more)},
    )


@cache
def rows_of(counts: type[ModelCounters | ServerStatistics]) -> tuple[tuple[str, Row], ...]:
    """Return the rows of a table, each with the name of its count."""
    return tuple([(one.name, one.metadata["row"]) for one in fields(counts) if one.metadata])


def _plain(value: Any) -> Any:
    """Return the value of a count as plain data, of which integers fit the wire."""
    if isinstance(value, Histogram):
        return value.to_dict()
    if isinstance(value, Counter):
        return dict(value)
    return round(value, 6) if isinstance(value, float) else min(_MOST, value)


@dataclass(eq=False)
class ModelCounters:
    """The counts of one model, from the server's start on, or between two times."""

    arrived: int = _number("Requests that the scheduler received.", minute=True)
    failures: Counter[str] = _numbers(
        "Requests that were well-formed and ended without a result, by code.", minute=True
    )
    attempts_failed: int = _number("Requests in batches that failed; one that runs again counts again.")
    batches_failed: int = _number("Batches that failed.", told=True)
    failed_us: int = _number(
        "Time that failed batches held their slots: what failing requests cost, and what was lost with workers.",
        "batches_failed_seconds_total",
        unit=_US,
        minute=True,
    )
    rows: int = _number("Rows that ran.", "rows_total", told=True, minute=True)
    reallocations: int = _number("Input tensors that had to grow.", "input_reallocations_total", told=True)
    calls: int = _number(
        "Inference calls; a batch takes one, or several where only some shapes are allowed.",
        "calls_total",
        told=True,
        minute=True,
    )
    preparations: int = _number(
        "Calls with a shape new to their slot or process.", "calls_at_new_shapes_total", told=True
    )
    elements_computed: int = _number(
        "Elements computed, padding included.", "elements_computed_total", minute=True
    )
    elements_padding: int = _number(
        "Elements computed only as padding, or in rows that fill a call up.",
        "elements_padding_total",
        minute=True,
    )
    batch_requests: Histogram = _histogram(
        "Requests of a batch that ran.", "batch_requests", 1.0, minute=True
    )
    queue_us: Histogram = _histogram(
        "Time from arrival to the start of the batch, of results.",
        "request_queue_seconds",
        told=True,
        minute=True,
    )
    gather_us: Histogram = _histogram(
        "Time that a batch held its slot before and between its calls: gathering inputs.",
        "batch_gather_seconds",
        minute=True,
    )
    run_us: Histogram = _histogram(
        "Time of the calls of a batch.", "batch_infer_seconds", told=True, minute=True
    )
    split_us: Histogram = _histogram(
        "Time that a batch held its slot for its results: splitting and copying them out.",
        "batch_split_seconds",
        minute=True,
    )
    busy_us: Histogram = _histogram(
        "Time that a batch held its slot: gathering, calls, splitting.", "batch_busy_seconds"
    )
    total_us: Histogram = _histogram(
        "Time from arrival to answer, of results.", "request_seconds", told=True, minute=True
    )
    members_gather_us: int = _number("Gather times of batches, each counted once per request answered.")
    members_run_us: int = _number("Times of their calls, likewise.")
    members_split_us: int = _number("Split times, likewise.")
    room_us: int = _number("Of a chain: microseconds that its requests waited for room for their stages.")
    stages: Counter[tuple[str, str]] = _numbers("Of a chain: by stage and key, what `STAGE_KEYS` names.")
    last_ended: float = 0.0
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
        """Return a number that grows with every change of the counts."""
        ended = self.results + self.failures.total()
        return self.arrived + ended + self.batches + self.batches_failed + self.failed_us

    def __copy__(self) -> ModelCounters:
        return self._made_of({name: copy(value) for name, value in vars(self).items()})

    def __sub__(self, earlier: ModelCounters) -> ModelCounters:
        """Return the counts since an earlier copy."""
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
        """Return the counts as plain data, for the last minute."""
        return {
            **{name: _plain(getattr(self, name)) for name, row in rows_of(ModelCounters) if row.minute},
            "results": self.results,
            "batches": self.batches,
            "new_shapes": self.preparations,
            **self._chain_dict(),
        }

    def _chain_dict(self) -> dict[str, Any]:
        """Return what only chains have."""
        if not self.stages:
            return {}
        stages: dict[str, dict[str, int]] = {}
        for (stage, key), count in self.stages.items():
            stages.setdefault(stage, dict.fromkeys(STAGE_KEYS, 0))[key] = min(_MOST, count)
        return {"room_us": min(_MOST, self.room_us), "stages": stages}

    def add_up(self, runs: Sequence[Run]) -> Iterator[tuple[int, ...]]:
        """Count batches that ran; yields the shape of each call."""
        # A caller may claim any number of rows that have no elements.
        self.rows = min(_MOST, self.rows + sum([run.rows for run in runs]))
        self.reallocations += sum([run.reallocations for run in runs])
        self.preparations += sum([run.preparations for run in runs])
        self.last_ended = max(self.last_ended, *[run.ended for run in runs])
        gather_us = [run.gather_us for run in runs]
        run_us = [run.run_us for run in runs]
        busy_us = [run.busy_us for run in runs]
        split_us = [run.split_us for run in runs]
        answered = [len(run.members) for run in runs]
        self.members_gather_us += sum(map(mul, answered, gather_us))
        self.members_run_us += sum(map(mul, answered, run_us))
        self.members_split_us += sum(map(mul, answered, split_us))
        self.batch_requests.record_all([run.ran for run in runs])
        self.gather_us.record_all(gather_us)
        self.run_us.record_all(run_us)
        self.split_us.record_all(split_us)
        self.busy_us.record_all(busy_us)
        queue_us, total_us = [], []
        for run in runs:
            for at, alike in groupby([member.arrived for member in run.members]):
                waited_us, lasted_us = round((run.began - at) * 1e6), round((run.ended - at) * 1e6)
                queue_us.append(waited_us)
                total_us.append(lasted_us)
                more = len(list(alike)) - 1
                if more:  # those that arrived together have equal times
                    self.queue_us.record(waited_us, more)
                    self.total_us.record(lasted_us, more)
        self.queue_us.record_all(queue_us)
        self.total_us.record_all(total_us)
        for (calls, useful), count in Counter([(run.own_calls, run.useful) for run in runs]).items():
            computed = 0
            for repeats, call in calls:
                self.calls += count * repeats
                computed += repeats * prod(call)
                yield call
            self.elements_computed += count * computed
            self.elements_padding += count * max(0, computed - useful)


@dataclass(eq=False)
class ServerStatistics:
    """The counts of one server process, from its start on."""

    messages: int = _number("Messages of clients.", "messages_total", told=True)
    requests: int = _number("Requests that were admitted.", told=True)
    failures: Counter[str] = _numbers("Failed requests by code.", told=True)
    overloaded: Counter[str] = _numbers(
        "Requests refused as overloaded, by the bound that they met: that of the queue (queue), the "
        "client's share of it (client_share, model_share), the request's deadline, its client's credit, or the memory for "
        "large requests.",
        "requests_overloaded_total",
        "cause",
        at_first=Overload,
    )
    stage_results: int = _number("Results of chains' stages; their models count them as well.")
    duplicates: int = _number("Requests that came again while they ran; both share one reply.", told=True)
    repeated: int = _number("Requests that came again after their answer, and got the kept reply.", told=True)
    faults: int = _number(
        "Defects of the scheduler; the log describes each.", "scheduler_faults_total", told=True
    )
    late_reports: int = _number(
        "Reports of batches from before the worker greeted again; those batches ran again on other slots.",
        told=True,
    )
    bad_messages: Counter[str] = _numbers(
        "Messages and entries that were refused.", "bad_messages_total", "port", told=True
    )
    strangers: Counter[str] = _numbers(
        "Messages of peers without a session, answered with `Unknown`, by port.", told=True
    )
    failed_handshakes: Counter[str] = _numbers(
        "Connections that ended before they began: other protocols, wrong keys, garbage.",
        "failed_handshakes_total",
        "port",
        told=True,
    )
    peers_lost: Counter[str] = _numbers("Sessions of clients and workers that ended, by reason.", told=True)
    batches_prefetched: int = _number(
        "Batches queued behind a running one.", "batches_prefetched_total", told=True
    )
    batches_wide: int = _number(
        "Batches that were started on wide slots: lone requests.", "batches_wide_total", told=True
    )
    batches_recalled: int = _number(
        "Queued batches that were recalled before they began; their requests ran on other slots.", told=True
    )
    scheduling_s: float = _number(
        "Time of the scheduler's decisions.", "scheduling_seconds_total", at_first=0.0, told=True
    )
    scheduled_requests: int = _number("Requests that the scheduler received.")
    worker_ends: Counter[tuple[int, str]] = _numbers(
        "Worker processes of this server that have ended, by their entry of `workers` (from 0), and how: died or ended. "
        "Each is replaced, unless given up.",
        "worker_ends_total",
        "group",
        "how",
    )
    reloads: Counter[str] = _numbers(
        "Reloads of the configuration: ok, refused, or incomplete (keys stay, or a worker is not replaced).",
        "reloads_total",
        "result",
    )
    reloaded_at: float = _number(
        "Unix time at which the last reload that was ok ended; 0 without any.",
        "reload_success_timestamp_seconds",
    )
    reload_s: float = _number(
        "Time that the last reload that was ok took, until its last worker was replaced.",
        "reload_success_seconds",
    )
    dialled_in_ends: Counter[str] = _numbers(
        "Workers that dialled in and left: drained, or lost without a goodbye.",
        "dialled_in_worker_ends_total",
        "how",
        at_first=("drained", "lost"),
    )
    lag_us: Histogram = _histogram("How late the event loop came to a heartbeat.", "loop_lag_seconds")

    def __post_init__(self) -> None:
        self._models: defaultdict[str, ModelCounters] = defaultdict(ModelCounters)
        self._shapes: set[tuple[str, tuple[int, ...]]] = set()
        self._runs: defaultdict[str, list[Run]] = defaultdict(list)
        """Batches that are not added up yet, by model."""
        self._rows = 0
        """Their number."""

    @property
    def models(self) -> defaultdict[str, ModelCounters]:
        """Return the counts by name of the model. The number of models of a server is limited (`MAX_MODELS`)."""
        if self._runs:
            waiting, self._runs, self._rows = self._runs, defaultdict(list), 0
            for model, runs in waiting.items():
                self._add_up(model, runs)
        return self._models

    def to_add(self, model: str) -> ModelCounters:
        """Return the counts of a model for what is no batch. Read them from `models`, where all batches are in."""
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

    def count_batch(self, run: Run) -> None:
        """Count a batch that ran."""
        self._runs[run.model].append(run)
        self._rows += 1
        if self._rows >= MOST_ROWS:
            _ = self.models  # adds them up

    def _add_up(self, model: str, runs: Sequence[Run]) -> None:
        for call in self._models[model].add_up(runs):
            if len(self._shapes) < MAX_DISTINCT_SHAPES:
                self._shapes.add((model, call))

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
        """Return the counts as plain data, for `StatisticsEntry`."""
        sizes = yield from self._all("batch_requests")
        told = {name: _plain(getattr(self, name)) for name, row in rows_of(ServerStatistics) if row.told}
        for name, row in rows_of(ModelCounters):
            if row.told:
                told[name] = _plain((yield from self._all(name)) if row.is_histogram else self._sum(name))
        return {
            **told,
            "results": self.results,
            "batches": self.batches,
            "mean_batch_requests": round(sizes.total / sizes.count, 2) if sizes.count else 0.0,
            "distinct_shapes": self.distinct_shapes,
            "prepared_hits": max(0, told["calls"] - told["preparations"]),
            "padding_ratio": round(self.padding_ratio, 4),
            "scheduling_us_per_request": self.scheduling_us_per_request,
        }


WINDOW_S = 60.0
SNAPSHOT_S = 5.0
"""Seconds between two snapshots. The window is longer than a minute by up to this time."""
MAX_BYTES = 256 * 1024
"""Bytes for models in a `StatisticsEntry`, which holds 1 MiB. The models with the fewest requests are left out first."""
_SCHEDULER_BYTES = 224
"""Bytes of a model's part of the scheduler's statistics: 10 numbers of 9 bytes, and their keys."""
MODELS_PER_SLICE = 4
"""Models that one turn of the event loop turns into plain data: each takes up to 0.4 ms."""
COPIES_PER_SLICE = 64
"""Models that one turn of the event loop copies for a snapshot: each takes up to 20 us."""
_NOTHING = ModelCounters()


class _Snapshot(NamedTuple):
    taken_at: float
    models: dict[str, ModelCounters]
    refused: Counter[str]


class LastMinute:
    """The changes of a server's counters within a minute.

    A snapshot takes about 6 KB for each model that was used since the one before. Unused models share its copy.
    """

    def __init__(self, counters: ServerStatistics, now: float) -> None:
        self._counters = counters
        self._snapshots = deque([_Snapshot(now, {}, Counter())])
        """The oldest first. After `take`, at most one of them is older than a minute."""

    def take(self, now: float) -> Slices[None]:
        """Take a snapshot, unless the last one is younger than `SNAPSHOT_S`. Take one at a time."""
        snapshots = self._snapshots
        last = snapshots[-1]
        if now < last.taken_at + SNAPSHOT_S:
            return
        models = {}
        for place, (name, model) in enumerate(list(self._counters.models.items())):
            if place % COPIES_PER_SLICE == 0:
                yield
            before = last.models.get(name, _NOTHING)
            models[name] = copy(model) if model.activity != before.activity else before
        snapshots.append(_Snapshot(now, models, self._counters.refused))
        while snapshots[1].taken_at <= now - WINDOW_S:
            snapshots.popleft()

    def to_dict(self, now: float, served: Iterable[str]) -> Slices[dict[str, Any]]:
        """Return the last minute as plain data, of the models that changed and of those that are `served`.

        `seconds` is the length of the window: shorter soon after the start, else longer than a minute by up to
        `SNAPSHOT_S` and a heartbeat.
        """
        begin = next(
            (one for one in reversed(self._snapshots) if one.taken_at <= now - WINDOW_S), self._snapshots[0]
        )
        models = dict.fromkeys(served, (_NOTHING, _NOTHING))
        for name, model in self._counters.models.items():
            before = begin.models.get(name, _NOTHING)
            if before.activity != model.activity:
                models[name] = model, before
        told: dict[str, Any] = {}
        room = MAX_BYTES
        for place, (name, (model, before)) in enumerate(sorted(models.items(), key=_busiest)):
            if place % MODELS_PER_SLICE == 0:
                yield
            row = (model - before).to_dict()
            room -= len(msgpack.packb(row)) + _SCHEDULER_BYTES + 2 * len(name.encode())
            if room < 0:
                break
            told[name] = row
        return {
            "seconds": round(now - begin.taken_at, 3),
            "models": told,
            "models_left_out": len(models) - len(told),
            "refused": dict(self._counters.refused - begin.refused),
        }


def _busiest(item: tuple[str, tuple[ModelCounters, ModelCounters]]) -> int:
    _, (model, before) = item
    return before.arrived - model.arrived

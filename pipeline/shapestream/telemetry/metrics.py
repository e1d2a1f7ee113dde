"""The metrics of a server: one table, which docs/metrics.md shows.

A count has its row in counters.py, and its metric follows from that. The rows here are of what is not counted: the present
state of the server, and what is computed from several counts. `key` names a row that `statistics()` has, too.

Names and units follow Prometheus. The values of labels come from the configuration and from fixed lists, never from
clients. Nothing is counted only for a metric: a row is read when a scrape asks for it.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from shapestream.chains.room import RoomStatistics
from shapestream.scheduling.scheduler_statistics import ModelStatistics, SchedulerStatistics
from shapestream.settings import ServerSettings
from shapestream.slices import Slices
from shapestream.telemetry.counters import Histogram, ModelCounters, Row, ServerStatistics, rows_of
from shapestream.telemetry.presence import ConfiguredWorker, Presence

_US = 1e-6
_VERSIONS = (version("shapestream"), platform.python_version())
SAMPLES_PER_SLICE = 64
"""Samples that one turn of the event loop reads; a histogram takes up to 30 us."""
# Upper bounds of buckets, by exponents of two: times from 64 us to 134 s, and sizes from 1 to 8191. A size is a whole
# number, so its bound is the power less one.
_TIMES = {exponent: f"{(1 << exponent) * _US:g}" for exponent in range(6, 28)}
_SIZES = {exponent: str((1 << exponent) - 1) for exponent in range(1, 14)}


class MetricType(StrEnum):
    """Types of metrics, by Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Buckets(NamedTuple):
    """A histogram: the number of measurements up to each bound, and the sum of all measurements."""

    counts: tuple[tuple[str, int], ...]
    total: float


Sample: TypeAlias = tuple[tuple[str, ...], float | Buckets]
"""The values of the labels, and the value of the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """The state of a server at one time."""

    ready: bool
    counters: ServerStatistics
    scheduler: SchedulerStatistics
    settings: ServerSettings
    slots_busy_s: float
    """Seconds that slots have had batches, running ones included."""
    configured_workers: Callable[[], Sequence[ConfiguredWorker]]
    """Returns the workers that this server starts and keeps running; the first call reads their memory."""
    clients: int
    pending: int
    """Requests without a terminal reply."""
    pending_bytes: int
    credit_used: float
    """The largest share of its credit that one client holds."""
    workers: Mapping[str, int]
    """Numbers of connected workers, by state: `serving`, `leaving`."""
    quarantined: int
    kept_replies: int
    kept_bytes: int
    peers_refused: Mapping[str, Mapping[str, int]]
    """Numbers of refused connections, by port and reason."""
    audit: Mapping[str, Mapping[str, float]]
    """The findings of audits, by model: `audited`, `unjudged`, `mismatches`, `stopped` and others."""
    shadows: Mapping[str, Mapping[str, Any]]
    """What was found of shadows, by model: `compared`, `equal`, `unjudged`, `failed`, `dropped` and others."""
    chains: Sequence[str]
    """The names of the chains that are served."""
    room: RoomStatistics
    """What waits for room for its stages, and what is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    key: str = ""
    """Its name in `statistics()`; empty: it has none there."""
    read: Callable[[ServerSnapshot], Iterable[Sample]]


def read_metrics(snapshot: ServerSnapshot) -> Slices[list[tuple[Metric, list[Sample]]]]:
    """Read all metrics, with their samples."""
    found: list[tuple[Metric, list[Sample]]] = []
    for metric in METRICS:
        found.append((metric, []))
        for sample in metric.read(snapshot):
            found[-1][1].append(sample)
            if len(found[-1][1]) % SAMPLES_PER_SLICE == 0:
                yield
        yield
    return found


def told_now(snapshot: ServerSnapshot) -> dict[str, Any]:
    """Return the rows of one sample that `statistics()` has, by their keys there."""
    return {metric.key: value for metric in METRICS if metric.key for _, value in metric.read(snapshot)}


# ---------------------------------------------------------------- ways to read a row


def _one(name: str, text: str, read: Callable[[ServerSnapshot], float], key: str = "") -> Metric:
    """Return a row of one sample."""
    return _row(name, text, (), lambda seen: [((), read(seen))], key=key)


def _by(label: str, name: str, text: str, read: Callable[[ServerSnapshot], Mapping[str, float]]) -> Metric:
    """Return a row of one sample per key."""
    return _row(name, text, (label,), lambda seen: [((key,), value) for key, value in read(seen).items()])


def _of_counts(of_model: bool, name: str, row: Row) -> Metric:
    """Return the metric of a count: one sample, or one per value of its labels; `of_model`: of each model."""
    value_of, is_histogram = attrgetter(name), row.is_histogram

    def samples(seen: ServerSnapshot) -> Iterator[Sample]:
        counted = list(seen.counters.models.items()) if of_model else [("", seen.counters)]
        for model, counts in counted:
            value, labels = value_of(counts), (model,) if of_model else ()
            if is_histogram:
                yield labels, _buckets(value, _SIZES if row.unit == 1.0 else _TIMES, row.unit)
            elif row.labels:
                for key, count in list(value.items()):
                    keys = key if isinstance(key, tuple) else (key,)
                    yield (*labels, *map(str, keys)), count * row.unit
            else:
                yield labels, value * row.unit

    labels = ("model", *row.labels) if of_model else row.labels
    return _row(row.metric, row.help, labels, samples, MetricType.HISTOGRAM if is_histogram else None)


def _of_queue(name: str, text: str, read: Callable[[ModelStatistics], float]) -> Metric:
    """Return a row of one sample per model that the scheduler knows."""
    return _by("model", name, text, lambda seen: {one.name: read(one) for one in seen.scheduler.models})


def _of_audit(name: str, text: str, key: str) -> Metric:
    """Return a row of one sample per audited model."""
    return _by("model", name, text, lambda seen: {model: one[key] for model, one in seen.audit.items()})


def _of_shadow(name: str, text: str, key: str) -> Metric:
    """Return a row of one sample per shadow."""
    return _by("model", name, text, lambda seen: {model: one[key] for model, one in seen.shadows.items()})


def _of_chain(name: str, text: str, read: Callable[[RoomStatistics], Mapping[str, int]]) -> Metric:
    """Return a row of one sample per chain; to its clients a chain is a model."""
    return _by(
        "model", name, text, lambda seen: {chain: read(seen.room).get(chain, 0) for chain in seen.chains}
    )


def _row(
    name: str,
    text: str,
    labels: tuple[str, ...],
    read: Callable[[ServerSnapshot], Iterable[Sample]],
    type_: MetricType | None = None,
    key: str = "",
) -> Metric:
    """Return a row. By Prometheus' convention, only the names of counters end in `_total`."""
    type_ = type_ or (MetricType.COUNTER if name.endswith("_total") else MetricType.GAUGE)
    return Metric(name=f"shapestream_{name}", type=type_, help=text, labels=labels, key=key, read=read)


def _buckets(histogram: Histogram, bounds: Mapping[int, str], unit: float = 1.0) -> Buckets:
    """Return a histogram with buckets by exponents of two; `bounds` holds the upper bound of each as text."""
    counts = [*zip(bounds.values(), histogram.up_to(bounds), strict=True), ("+Inf", histogram.count)]
    return Buckets(tuple(counts), histogram.total * unit)


def _outcomes(seen: ServerSnapshot) -> Iterator[Sample]:
    for name, model in list(seen.counters.models.items()):
        yield (name, "ok"), model.results
        for code, count in list(model.failures.items()):
            yield (name, code), count


def _attempts(seen: ServerSnapshot) -> Iterator[Sample]:
    for name, model in list(seen.counters.models.items()):
        yield (name,), model.batch_requests.total + model.attempts_failed


def _batches(seen: ServerSnapshot) -> Iterator[Sample]:
    for name, model in list(seen.counters.models.items()):
        yield (name, "ran"), model.batches
        yield (name, "failed"), model.batches_failed


def _by_group(name: str, text: str, read: Callable[[ConfiguredWorker], float]) -> Metric:
    """Return a row of one sample per entry of `workers`: the sum over the entry's workers."""

    def sums(seen: ServerSnapshot) -> Mapping[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for worker in seen.configured_workers():
            found[str(worker.group)] += read(worker)
        return found

    return _by("group", name, text, sums)


def _peers_lost(seen: ServerSnapshot) -> Mapping[str, float]:
    lost = {"client": 0, "worker": 0}
    for reason, count in seen.counters.peers_lost.items():
        lost[reason.partition(":")[0]] += count
    return lost


def _peers_refused(seen: ServerSnapshot) -> Iterator[Sample]:
    for port, reasons in seen.peers_refused.items():
        for reason, count in reasons.items():
            yield (port, reason), count


# ---------------------------------------------------------------- the table

_COMPUTED: tuple[Metric, ...] = (
    _one("ready", "1 while the server is ready, as /health/ready says.", lambda seen: float(seen.ready)),
    _row(
        "build_info",
        "1, with the versions of this server and of its Python.",
        ("version", "python"),
        lambda seen: [(_VERSIONS, 1)],
    ),
    # Requests
    _row(
        "requests_total",
        "Requests that have ended, by model and outcome: ok, or the code of the error.",
        ("model", "outcome"),
        _outcomes,
    ),
    _by(
        "code",
        "requests_refused_total",
        "Requests refused before the scheduler saw them, by code: malformed, or beyond their client's credit.",
        lambda seen: seen.counters.refused,
    ),
    _row(
        "requests_resent_total",
        "Requests that came again: running ones share one reply, answered ones get the kept reply.",
        ("state",),
        lambda seen: [(("running",), seen.counters.duplicates), (("answered",), seen.counters.repeated)],
    ),
    _row(
        "request_attempts_total",
        "Requests in batches that ran or failed; one that runs again counts again.",
        ("model",),
        _attempts,
    ),
    _one("requests_pending", "Requests without an answer.", lambda seen: seen.pending, "unfinished"),
    _one(
        "requests_pending_bytes",
        "Bytes of the tensors of requests without an answer, and of those that clients may send now.",
        lambda seen: seen.pending_bytes,
    ),
    _of_queue("requests_queued", "Requests in the queue.", lambda model: model.queued),
    _one("queued_bytes", "Bytes of the tensors in the queue.", lambda seen: seen.scheduler.queued_bytes),
    _of_queue(
        "queued_predicted_seconds",
        "Predicted seconds of one slot for the queue, where costs are measured.",
        lambda model: model.queued_s,
    ),
    _of_queue(
        "queued_predicted_seconds_per_slot",
        "The same of all models that share slots with this one, divided by their slots: the wait of a new request. "
        "Scale on it.",
        lambda model: model.queued_s_per_slot,
    ),
    _of_queue(
        "queue_oldest_seconds",
        "Seconds since the arrival of the oldest request in the queue; 0 without any.",
        lambda model: model.oldest_s,
    ),
    _of_queue(
        "queue_seconds_total",
        "Seconds that requests have spent in the queue, also those that are still there. Its rate is their mean number.",
        lambda model: model.waited_s,
    ),
    _one(
        "queue_limit_requests",
        "Requests in the queue at most (max_queued_requests).",
        lambda seen: seen.settings.max_queued_requests,
    ),
    _one(
        "queue_limit_bytes",
        "Bytes in the queue at most (max_queued_bytes).",
        lambda seen: seen.settings.max_queued_bytes,
    ),
    _one(
        "requests_suspected",
        "Requests that wait to run alone in a worker.",
        lambda seen: seen.scheduler.suspects,
        "suspects",
    ),
    _one(
        "requests_quarantined", "Digests of poisoned requests.", lambda seen: seen.quarantined, "quarantined"
    ),
    # Chains
    _of_chain(
        "chain_requests_waiting",
        "Requests of a chain that wait until there is room for what its stages may fan out to.",
        lambda room: room.waiting,
    ),
    _of_chain("chain_requests_running", "Requests of a chain that have begun.", lambda room: room.running),
    _one(
        "chain_reserved_requests",
        "Requests reserved for the stages of chains that have begun: as many as at_most says, and their number once known.",
        lambda seen: seen.room.reserved.requests,
    ),
    _one(
        "chain_reserved_bytes",
        "Bytes of the inputs of reserved requests, likewise (at_most_bytes).",
        lambda seen: seen.room.reserved.nbytes,
    ),
    _one(
        "chain_reserved_limit_requests",
        "Requests that may be reserved: half of max_queued_requests. A chain's request that runs alone may reserve more.",
        lambda seen: seen.room.limit.requests,
    ),
    _one(
        "chain_reserved_limit_bytes",
        "Bytes that may be reserved: half of max_queued_bytes. A chain's request that runs alone may reserve more.",
        lambda seen: seen.room.limit.nbytes,
    ),
    # Batches
    _row("batches_total", "Batches, by result: ran or failed.", ("model", "result"), _batches),
    _of_queue(
        "call_shapes", "Distinct call shapes that the cost model remembers.", lambda model: model.shapes_seen
    ),
    _of_queue(
        "cost_predicted_seconds_total",
        "Predicted seconds of the batches that ran and had a prediction.",
        lambda model: model.predicted_s,
    ),
    _of_queue(
        "cost_measured_seconds_total",
        "Seconds that the batches took that had a prediction.",
        lambda model: model.measured_s,
    ),
    # Audits
    _of_audit("audited_total", "Answers that were compared with their requests run alone.", "audited"),
    _of_audit("audit_mismatches_total", "Audited answers that differed.", "mismatches"),
    _of_audit(
        "audit_unjudged_total",
        "Audited answers whose difference was no more than rounding explains.",
        "unjudged",
    ),
    _of_audit(
        "batching_stopped",
        "1 while each request runs alone, since answers in company differed.",
        "stopped",
    ),
    # Shadows
    _of_shadow("shadow_compared_total", "Answers of a shadow that were compared.", "compared"),
    _of_shadow("shadow_equal_total", "Compared answers of a shadow that were equal.", "equal"),
    _of_shadow(
        "shadow_unjudged_total", "Answers of a shadow whose difference rounding explains.", "unjudged"
    ),
    _of_shadow(
        "shadow_failed_total", "Requests that a shadow refused, or that its process ended with.", "failed"
    ),
    _of_shadow("shadow_dropped_total", "Sampled requests that found no idle slots in time.", "dropped"),
    # Slots, workers, clients
    _one("slots_in_all", "Slots, whatever they serve.", lambda seen: seen.scheduler.slots),
    _one(
        "slots_busy_seconds_total",
        "Seconds that slots have had batches, also of batches that still run.",
        lambda seen: seen.slots_busy_s,
    ),
    _of_queue("slots", "Slots that serve a model.", lambda model: model.slots),
    _of_queue(
        "slots_free", "Slots that serve a model and may be given a batch.", lambda model: model.free_slots
    ),
    _one(
        "slots_lost",
        "Slots whose call hangs, and that nothing could end.",
        lambda seen: seen.scheduler.slots_lost,
    ),
    _by(
        "state",
        "workers",
        "Workers with slots here, by state: serving or leaving.",
        lambda seen: seen.workers,
    ),
    _by_group(
        "workers_configured",
        "Worker processes that this server is to run, by their entry of `workers` (from 0).",
        lambda worker: 1,
    ),
    _by_group(
        "workers_serving",
        "Worker processes that this server is to run and that serve, by their entry of `workers`.",
        lambda worker: worker.state.presence is Presence.SERVING,
    ),
    _by_group(
        "worker_restarts_total",
        "Processes started in the place of one that ended, or is replaced.",
        lambda worker: worker.state.restarts,
    ),
    _by_group(
        "worker_memory_bytes",
        "Memory in RAM of the processes of an entry together.",
        lambda worker: worker.memory_bytes,
    ),
    _one("clients", "Clients with a session.", lambda seen: seen.clients, "clients"),
    _one(
        "clients_limit",
        "Clients at most (max_clients, or what the limit of open files allows).",
        lambda seen: seen.settings.max_clients,
    ),
    _one(
        "client_credit_ratio",
        "The largest share of its credit that one client holds.",
        lambda seen: seen.credit_used,
    ),
    _one(
        "kept_replies",
        "Replies kept for clients that ask again.",
        lambda seen: seen.kept_replies,
        "kept_replies",
    ),
    _one("kept_replies_bytes", "Bytes of kept replies.", lambda seen: seen.kept_bytes, "kept_bytes"),
    _by("peer", "peers_lost_total", "Sessions that ended, of clients and of workers.", _peers_lost),
    _row(
        "peers_refused_total", "Callers not let in, by port and reason.", ("port", "reason"), _peers_refused
    ),
)
_COUNTED = [
    _of_counts(counts is ModelCounters, name, row)
    for counts in (ServerStatistics, ModelCounters)
    for name, row in rows_of(counts)
    if row.metric
]
METRICS: tuple[Metric, ...] = tuple(sorted([*_COMPUTED, *_COUNTED], key=attrgetter("name")))


def table() -> str:
    """Return the metrics as the Markdown table of docs/metrics.md."""
    lines = ["| metric | meaning |", "|---|---|"]
    for metric in METRICS:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        suffix = " (histogram)" if metric.type is MetricType.HISTOGRAM else ""
        lines.append(f"| `{metric.name}{labels}`{suffix} | {metric.help} |")
    return "\n".join(lines)

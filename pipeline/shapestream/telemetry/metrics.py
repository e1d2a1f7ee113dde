"""The metrics of a server: one table, whose rows read what the server counts anyway. docs/metrics.md shows it.

Names and units follow Prometheus. Labels come from the configuration and from fixed lists, never from clients. Nothing
is counted for a metric: a row is read when a scrape asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from shapestream.scheduling.statistics import ModelStatistics, Statistics
from shapestream.telemetry.statistics import Histogram, ModelCounters, ServerStatistics

# Times in buckets from 64 us to 134 s, each twice as long as the one before; sizes from 1 to 4096.
_TIMES = range(6, 28)
_SIZES = range(1, 14)
_US = 1e-6


class Kind(StrEnum):
    """Types of metrics, by Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Buckets(NamedTuple):
    """A histogram: numbers of measurements at or below each bound, and what all measurements sum up to."""

    counts: tuple[tuple[str, int], ...]
    total: float


Sample: TypeAlias = tuple[tuple[str, ...], float | Buckets]
"""Values of the labels, and what was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a server tells about itself at one time."""

    ready: bool
    counters: ServerStatistics
    scheduler: Statistics
    clients: int
    pending: int
    """Requests without a terminal reply."""
    pending_bytes: int
    credit_used: float
    """The largest share of its credit that one client holds."""
    workers: Mapping[str, int]
    """By state."""
    quarantined: int
    kept_replies: int
    kept_bytes: int
    peers_refused: Mapping[str, Mapping[str, int]]
    """By port and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    read: Callable[[Observation], Iterable[Sample]]


def observe(observation: Observation) -> list[tuple[Metric, list[Sample]]]:
    """All metrics with their samples."""
    return [(metric, list(metric.read(observation))) for metric in METRICS]


# ---------------------------------------------------------------- ways to read a row


def _one(read: Callable[[Observation], float]) -> Callable[[Observation], Iterator[Sample]]:
    def samples(seen: Observation) -> Iterator[Sample]:
        yield (), read(seen)

    return samples


def _by_key(read: Callable[[Observation], Mapping[str, float]]) -> Callable[[Observation], Iterator[Sample]]:
    def samples(seen: Observation) -> Iterator[Sample]:
        for key, value in read(seen).items():
            yield (key,), value

    return samples


def _by_model(read: Callable[[ModelCounters], float]) -> Callable[[Observation], Iterator[Sample]]:
    def samples(seen: Observation) -> Iterator[Sample]:
        for name, model in seen.counters.models.items():
            yield (name,), read(model)

    return samples


def _by_queue(read: Callable[[ModelStatistics], float]) -> Callable[[Observation], Iterator[Sample]]:
    def samples(seen: Observation) -> Iterator[Sample]:
        for model in seen.scheduler.models:
            yield (model.name,), read(model)

    return samples


def _buckets(histogram: Histogram, exponents: range, unit: float) -> Buckets:
    bounds = [f"{(1 << exponent) * unit:g}" for exponent in exponents]
    counts = [*zip(bounds, histogram.up_to(exponents), strict=True), ("+Inf", histogram.count)]
    return Buckets(tuple(counts), histogram.total * unit)


def _times(read: Callable[[ModelCounters], Histogram]) -> Callable[[Observation], Iterator[Sample]]:
    def samples(seen: Observation) -> Iterator[Sample]:
        for name, model in seen.counters.models.items():
            yield (name,), _buckets(read(model), _TIMES, _US)

    return samples


def _batch_sizes(seen: Observation) -> Iterator[Sample]:
    for name, model in seen.counters.models.items():
        # Bounds are powers of two less one: a size is a whole number, and a bucket holds what is below its end.
        exponents, sizes = _SIZES, model.batch_requests
        bounds = [str((1 << exponent) - 1) for exponent in exponents]
        counts = [*zip(bounds, sizes.up_to(exponents), strict=True), ("+Inf", sizes.count)]
        yield (name,), Buckets(tuple(counts), sizes.total)


def _outcomes(seen: Observation) -> Iterator[Sample]:
    for name, model in seen.counters.models.items():
        yield (name, "ok"), model.results
        for code, count in model.failures.items():
            yield (name, code), count


def _refused(seen: Observation) -> Mapping[str, float]:
    """Failures that are no model's: these requests were refused before the scheduler saw them."""
    refused = dict(seen.counters.failures)
    for model in seen.counters.models.values():
        for code, count in model.failures.items():
            refused[code] = refused.get(code, 0) - count
    return {code: count for code, count in refused.items() if count > 0}


def _batches(seen: Observation) -> Iterator[Sample]:
    for name, model in seen.counters.models.items():
        yield (name, "ran"), model.batches
        yield (name, "failed"), model.batches_failed


def _peers_lost(seen: Observation) -> Mapping[str, float]:
    lost = {"client": 0, "worker": 0}
    for reason, count in seen.counters.peers_lost.items():
        lost[reason.partition(":")[0]] += count
    return lost


def _peers_refused(seen: Observation) -> Iterator[Sample]:
    for port, reasons in seen.peers_refused.items():
        for reason, count in reasons.items():
            yield (port, reason), count


# ---------------------------------------------------------------- the table

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_MODEL = ("model",)


def _row(
    name: str,
    kind: Kind,
    text: str,
    read: Callable[[Observation], Iterable[Sample]],
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(name=f"shapestream_{name}", kind=kind, help=text, labels=labels, read=read)


METRICS: tuple[Metric, ...] = (
    _row(
        "ready",
        _G,
        "1 while the server is ready, as /health/ready says.",
        _one(lambda seen: float(seen.ready)),
    ),
    # Requests
    _row(
        "requests_total",
        _C,
        "Requests that have ended, by model and outcome: ok, or the code of the error.",
        _outcomes,
        ("model", "outcome"),
    ),
    _row(
        "requests_refused_total",
        _C,
        "Requests refused before the scheduler saw them, by code: malformed, or beyond their client's credit.",
        _by_key(_refused),
        ("code",),
    ),
    _row(
        "requests_resent_total",
        _C,
        "Requests that came again: running ones share one reply, answered ones get the kept reply.",
        lambda seen: [(("running",), seen.counters.duplicates), (("answered",), seen.counters.repeated)],
        ("state",),
    ),
    _row(
        "request_seconds",
        _H,
        "Time from arrival to answer, of results.",
        _times(lambda model: model.total_us),
        _MODEL,
    ),
    _row(
        "request_queue_seconds",
        _H,
        "Time from arrival to the start of the batch, of results.",
        _times(lambda model: model.queue_us),
        _MODEL,
    ),
    _row(
        "request_attempts_total",
        _C,
        "Requests in batches that ran or failed; one that runs again counts again.",
        _by_model(lambda model: model.batch_requests.total + model.attempts_failed),
        _MODEL,
    ),
    _row("requests_pending", _G, "Requests without an answer.", _one(lambda seen: seen.pending)),
    _row("requests_pending_bytes", _G, "Bytes of their tensors.", _one(lambda seen: seen.pending_bytes)),
    _row("requests_queued", _G, "Requests in the queue.", _by_queue(lambda model: model.queued), _MODEL),
    _row(
        "queued_bytes",
        _G,
        "Bytes of the tensors in the queue.",
        _one(lambda seen: seen.scheduler.queued_bytes),
    ),
    _row(
        "queued_predicted_seconds",
        _G,
        "Predicted seconds of one slot for the queue, where costs are measured.",
        _by_queue(lambda model: model.queued_s),
        _MODEL,
    ),
    _row(
        "requests_suspected",
        _G,
        "Requests that wait to run alone in a worker.",
        _one(lambda seen: seen.scheduler.suspects),
    ),
    _row("requests_quarantined", _G, "Digests of poisoned requests.", _one(lambda seen: seen.quarantined)),
    # Batches
    _row("batches_total", _C, "Batches, by result: ran or failed.", _batches, ("model", "result")),
    _row(
        "batches_prefetched_total",
        _C,
        "Batches queued behind a running one.",
        _one(lambda seen: seen.counters.batches_prefetched),
    ),
    _row("batch_requests", _H, "Requests of a batch that ran.", _batch_sizes, _MODEL),
    _row(
        "batch_infer_seconds", _H, "Time of the calls of a batch.", _times(lambda model: model.run_us), _MODEL
    ),
    _row(
        "batch_busy_seconds",
        _H,
        "Time that a batch held its slot: gathering, calls, splitting.",
        _times(lambda model: model.busy_us),
        _MODEL,
    ),
    _row("rows_total", _C, "Rows that ran.", _by_model(lambda model: model.rows), _MODEL),
    _row("calls_total", _C, "Inference calls.", _by_model(lambda model: model.calls), _MODEL),
    _row(
        "calls_at_new_shapes_total",
        _C,
        "Calls with a shape new to their slot or process.",
        _by_model(lambda model: model.preparations),
        _MODEL,
    ),
    _row(
        "call_shapes",
        _G,
        "Distinct call shapes that the cost model remembers.",
        _by_queue(lambda model: model.shapes_seen),
        _MODEL,
    ),
    _row(
        "elements_computed_total",
        _C,
        "Elements computed, padding included.",
        _by_model(lambda model: model.elements_computed),
        _MODEL,
    ),
    _row(
        "elements_padding_total",
        _C,
        "Elements computed only as padding.",
        _by_model(lambda model: model.elements_padding),
        _MODEL,
    ),
    _row(
        "input_reallocations_total",
        _C,
        "Input tensors that had to grow.",
        _by_model(lambda model: model.reallocations),
        _MODEL,
    ),
    _row(
        "cost_predicted_seconds_total",
        _C,
        "Predicted seconds of the batches that ran and had a prediction.",
        _by_queue(lambda model: model.predicted_s),
        _MODEL,
    ),
    _row(
        "cost_measured_seconds_total",
        _C,
        "Seconds that these batches took.",
        _by_queue(lambda model: model.measured_s),
        _MODEL,
    ),
    # Slots, workers, clients
    _row("slots", _G, "Slots that serve a model.", _by_queue(lambda model: model.slots), _MODEL),
    _row(
        "slots_free",
        _G,
        "Slots of these that may be given a batch.",
        _by_queue(lambda model: model.free_slots),
        _MODEL,
    ),
    _row(
        "slots_lost",
        _G,
        "Slots whose call hangs, and that nothing could end.",
        _one(lambda seen: seen.scheduler.slots_lost),
    ),
    _row(
        "workers",
        _G,
        "Workers with slots here, by state: serving or leaving.",
        _by_key(lambda seen: seen.workers),
        ("state",),
    ),
    _row(
        "worker_ends_total",
        _C,
        "Worker processes of this server that have ended, by how: died or ended. Each is replaced, unless given up.",
        _by_key(lambda seen: {"died": 0, "ended": 0} | seen.counters.worker_ends),
        ("how",),
    ),
    _row("clients", _G, "Clients with a session.", _one(lambda seen: seen.clients)),
    _row(
        "client_credit_ratio",
        _G,
        "The largest share of its credit that one client holds.",
        _one(lambda seen: seen.credit_used),
    ),
    _row(
        "kept_replies", _G, "Replies kept for clients that ask again.", _one(lambda seen: seen.kept_replies)
    ),
    _row("kept_replies_bytes", _G, "Bytes of kept replies.", _one(lambda seen: seen.kept_bytes)),
    _row(
        "peers_lost_total",
        _C,
        "Sessions that ended, of clients and of workers.",
        _by_key(_peers_lost),
        ("peer",),
    ),
    _row(
        "peers_refused_total",
        _C,
        "Callers not let in, by port and reason.",
        _peers_refused,
        ("port", "reason"),
    ),
    _row(
        "failed_handshakes_total",
        _C,
        "Connections that ended before they began.",
        _by_key(lambda seen: seen.counters.failed_handshakes),
        ("port",),
    ),
    _row(
        "bad_messages_total",
        _C,
        "Messages and entries that were refused.",
        _by_key(lambda seen: seen.counters.bad_messages),
        ("port",),
    ),
    _row("messages_total", _C, "Messages of clients.", _one(lambda seen: seen.counters.messages)),
    # The event loop
    _row(
        "loop_lag_seconds",
        _H,
        "How late the event loop came to a heartbeat.",
        lambda seen: [((), _buckets(seen.counters.lag_us, _TIMES, _US))],
    ),
    _row(
        "scheduling_seconds_total",
        _C,
        "Time of the scheduler's decisions.",
        _one(lambda seen: seen.counters.scheduling_s),
    ),
    _row(
        "scheduler_faults_total",
        _C,
        "Defects of the scheduler; the log describes each.",
        _one(lambda seen: seen.counters.faults),
    ),
)


def table() -> str:
    """The metrics as the Markdown table of docs/metrics.md."""
    lines = ["| metric | type | meaning |", "|---|---|---|"]
    for metric in METRICS:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        lines.append(f"| `{metric.name}{labels}` | {metric.kind} | {metric.help} |")
    return "\n".join(lines)

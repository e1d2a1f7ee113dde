"""The part of a trace that is tuned for: one model's requests, checked against what the model takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from shapestream.errors import ConfigurationError
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.signature import ModelSignature

__all__ = ["Workload", "hot_shapes", "read_workload"]

MOST_REQUESTS = 200_000
"""Of a trace, from its beginning: more than is ever run within a budget, and enough to know the sizes by."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one model, in the order of their times."""

    model: str
    dimensions: tuple[str, ...]
    requests: tuple[TraceRequest, ...]
    cut_off: bool = False
    """The trace holds more of them."""

    def counts(self) -> Counter[tuple[int, ...]]:
        """How often each combination of sizes came."""
        return Counter(request.sizes for request in self.requests)

    def counts_along(self, dimension: int) -> Counter[int]:
        """How often each size of one dimension came."""
        return Counter(request.sizes[dimension] for request in self.requests)


def read_workload(path: Path, model: str, signature: ModelSignature) -> Workload:
    """The requests of `model` in the trace at `path`.

    Raises `ConfigurationError` for a trace that is none, has no request of the model, or other dimensions, and for
    sizes that the model does not take.
    """
    reader = TraceReader(path)
    kept = list(islice(_of_model(reader, model), MOST_REQUESTS + 1))
    if not kept:
        known = ", ".join(name for name in reader.models if name != model)
        hint = f"; it is about {known} (name the model by --model)" if known else ""
        raise ConfigurationError([f"{path}: has no request of the model {model!r}{hint}"])
    dimensions = reader.models[model]
    if dimensions != signature.dimensions:
        raise ConfigurationError(
            [
                f"{path}: recorded {model!r} with the dimensions {_listed(dimensions)}, but the model has "
                f"{_listed(signature.dimensions)} (a trace of another model, or of other names in its inputs' shapes)"
            ]
        )
    _check_bounds(path, kept, signature)
    return Workload(
        model=model,
        dimensions=dimensions,
        requests=tuple(kept[:MOST_REQUESTS]),
        cut_off=len(kept) > MOST_REQUESTS,
    )


def _of_model(reader: TraceReader, model: str) -> Iterator[TraceRequest]:
    number = None
    for request in reader:
        if number is None and model in reader.models:
            # Only now: a model may join the trace's list while it is read.
            number = list(reader.models).index(model)
        if request.model == number:
            yield request


def _check_bounds(path: Path, requests: Sequence[TraceRequest], signature: ModelSignature) -> None:
    problems: list[str] = []
    for number, (name, bounds) in enumerate(zip(signature.dimensions, signature.bounds, strict=True)):
        outside = sorted({each.sizes[number] for each in requests if each.sizes[number] not in bounds})
        if outside:
            shown = ", ".join(map(str, outside[:_SHOWN])) + (", ..." if len(outside) > _SHOWN else "")
            problems.append(f"{path}: {name} {shown}: the model takes {bounds} (a trace of another model?)")
    if problems:
        raise ConfigurationError(problems)


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def hot_shapes(workload: Workload, *, most: int, least_share: float) -> tuple[tuple[int, ...], ...]:
    """The sizes that come most often, each in at least this share of the requests; small ones first among equals."""
    counts = workload.counts()
    needed = least_share * len(workload.requests)
    hot = [(-count, sizes) for sizes, count in counts.items() if count >= needed]
    return tuple(sizes for _, sizes in sorted(hot)[:most])

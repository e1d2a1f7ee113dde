"""The workload of `shapestream tune`: one model's requests of a trace, and made-up inputs of their sizes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream.settings import ModelSettings
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.inputs import Values, default_values, make_request
from shapestream_engine.signature import ModelSignature
from shapestream_workers.proof import probe_options

__all__ = ["InputMaker", "Workload", "read_workload"]

MOST_REQUESTS = 200_000
"""Requests read from the beginning of a trace: more than any budget replays."""
MAX_KEPT_BYTES = 256 << 20
"""Bytes of inputs that are kept for their next use; the least recently used go first."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one model, in the order of their times."""

    model: str
    dimensions: tuple[str, ...]
    requests: tuple[TraceRequest, ...]
    cut_off: bool = False
    """Whether the trace holds more of them."""

    def counts(self) -> Counter[tuple[int, ...]]:
        """Number of requests per combination of sizes."""
        return Counter(request.sizes for request in self.requests)

    def counts_along(self, dimension: int) -> Counter[int]:
        """Number of requests per size of one dimension."""
        return Counter(request.sizes[dimension] for request in self.requests)

    def hot(self, *, most: int, least_share: float) -> tuple[tuple[int, ...], ...]:
        """The most frequent sizes, each of at least this share of the requests; small ones first among equals."""
        needed = least_share * len(self.requests)
        hot = [(-count, sizes) for sizes, count in self.counts().items() if count >= needed]
        return tuple(sizes for _, sizes in sorted(hot)[:most])


def read_workload(path: Path, model: str, signature: ModelSignature) -> Workload:
    """The requests of `model` in the trace at `path`.

    Raises `ConfigurationError` for a file that is no trace, a trace without requests of the model or with other
    dimensions, and for sizes that the model does not take.
    """
    reader = TraceReader(path)
    kept = list(islice(_of_model(reader, model), MOST_REQUESTS + 1))
    if not kept:
        known = ", ".join(name for name in reader.models if name != model)
        hint = f"; it is about {known} (name the model by --model)" if known else ""
        raise ConfigurationError([f"{path}: has no request of the model {model!r}{hint}"])
    dimensions = reader.models[model]
    if dimensions != signature.dimensions:
        found, expected = (f"[{', '.join(names)}]" for names in (dimensions, signature.dimensions))
        message = f"recorded {model!r} with the dimensions {found}, but the model has {expected}"
        hint = "(a trace of another model, or of other names in its inputs' shapes)"
        raise ConfigurationError([f"{path}: {message} {hint}"])
    _check_bounds(path, kept, signature)
    return Workload(
        model=model,
        dimensions=dimensions,
        requests=tuple(kept[:MOST_REQUESTS]),
        cut_off=len(kept) > MOST_REQUESTS,
    )


def _of_model(reader: TraceReader, model: str) -> Iterator[TraceRequest]:
    for request in reader:
        # Looked up for each: a model may join the trace's list while it is read.
        if model in reader.models and request.model == list(reader.models).index(model):
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


class InputMaker:
    """Make inputs of given sizes, the same for the same sizes, with values as the probe draws them.

    Traces hold shapes, never data. Inputs are kept, so that making them does not weigh on measurements.
    """

    def __init__(self, settings: ModelSettings, signature: ModelSignature) -> None:
        first = {port.name: default_values(port.element_type)[0] for port in signature.inputs}
        self._values: Mapping[str, Values] = {**first, **values_of(signature, probe_options(settings))}
        self._signature = signature
        self._kept: OrderedDict[tuple[int, ...], Tensors] = OrderedDict()
        self._kept_bytes = 0

    def tensors(self, sizes: tuple[int, ...]) -> Tensors:
        """Inputs as a slot takes them. Masks that the server generates are left out."""
        made = self._kept.get(sizes)
        if made is not None:
            self._kept.move_to_end(sizes)
            return made
        made = self._kept[sizes] = make_request(self._signature, self._values, sizes)
        self._kept_bytes += _nbytes(made)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= _nbytes(dropped)
        return made

    def arrays(self, sizes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
        """Inputs as a client takes them, by name."""
        made = self.tensors(sizes)
        return {
            self._signature.inputs[number].name: np.frombuffer(buffer, dtype_of(element_type)).reshape(shape)
            for (number, element_type, shape), buffer in zip(made.layout, made.buffers, strict=True)
        }


def _nbytes(tensors: Tensors) -> int:
    return sum(memoryview(buffer).nbytes for buffer in tensors.buffers)

"""Makes up traffic: when requests come, and how large they are. The same seed gives the same traffic.

Sizes come from distributions, or from another trace; arrivals are drawn here, or, in a closed loop, follow from
how fast the simulated server answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shapestream.errors import ConfigurationError
from shapestream.simulation.distributions import BadText, Constant, Distribution, parse_distribution
from shapestream.simulation.trace import TraceReader, TraceRequest

__all__ = ["Arrivals", "SizedModel", "Traffic", "generate", "parse_arrivals", "parse_sizes", "replay"]

_CHUNK = 8192
_RESOLUTION_S = 1e-6
"""Of the times in a trace: requests within less came all at once, which no rate stretches."""
_MOST_IN_BURST = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """One model of the traffic, and the sizes of its requests."""

    name: str
    sizes: Mapping[str, Distribution]
    """By dimension, `batch` first where requests have rows."""
    empirical: tuple[tuple[int, ...], ...] = ()
    """Instead of drawing each dimension by itself: whole shapes to choose from, as they were seen."""
    weight: float = 1.0
    """Its share of the requests, beside the other models' weights."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.sizes)

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
        """The sizes of so many requests."""
        if self.empirical:
            return [self.empirical[number] for number in rng.integers(0, len(self.empirical), count).tolist()]
        columns = [distribution.draw(rng, count).tolist() for distribution in self.sizes.values()]
        return list(zip(*columns, strict=True)) if columns else [()] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come, in the long run `rate` per second."""

    rate: float
    """Requests per second; inf: all at once, as a closed loop needs it."""
    kind: Literal["poisson", "constant", "bursts"] = "poisson"
    burst: int = 1
    """For `bursts`: requests that come together; the bursts themselves come as a Poisson stream."""

    def draw(self, rng: np.random.Generator, after_s: float, first: int, count: int) -> NDArray[np.float64]:
        """The times of so many requests, of which `first` is the number of the first, after a time."""
        if np.isinf(self.rate):
            return np.zeros(count)
        if self.kind == "constant":
            return np.arange(first + 1, first + count + 1) / self.rate
        if self.kind == "poisson":
            return after_s + np.cumsum(rng.exponential(1 / self.rate, count))
        gaps = rng.exponential(self.burst / self.rate, count)
        gaps[np.arange(first, first + count) % self.burst != 0] = 0.0
        return after_s + np.cumsum(gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Everything that `generate` needs."""

    models: Sequence[SizedModel]
    arrivals: Arrivals
    requests: int
    clients: int = 1
    """Requests are spread over them at random."""
    deadline_s: float | None = None
    priorities: Sequence[int] = field(default=(0,))
    """One of these, at random."""
    seed: int = 0


def generate(traffic: Traffic) -> Iterator[TraceRequest]:
    """The requests of made-up traffic, in order of time. Holds a few thousand at a time."""
    rng = np.random.default_rng(traffic.seed)
    weights = np.array([model.weight for model in traffic.models])
    weights /= weights.sum()
    after_s = 0.0
    for first in range(0, traffic.requests, _CHUNK):
        count = min(_CHUNK, traffic.requests - first)
        times = traffic.arrivals.draw(rng, after_s, first, count)
        after_s = float(times[-1])
        numbers = rng.choice(len(weights), count, p=weights).tolist()
        clients = rng.integers(0, traffic.clients, count).tolist()
        priorities = rng.choice(np.asarray(traffic.priorities), count).tolist()
        sizes = [iter(model.draw(rng, numbers.count(number))) for number, model in enumerate(traffic.models)]
        for at_s, number, client, priority in zip(times.tolist(), numbers, clients, priorities, strict=True):
            yield TraceRequest(at_s, number, client, next(sizes[number]), traffic.deadline_s, priority)


def replay(
    reader: TraceReader, *, rate: float | None = None, requests: int | None = None
) -> Iterator[TraceRequest]:
    """The requests of a trace, its times stretched to another mean rate if one is given.

    That keeps its rhythm: what came in a burst still does. Raises `ConfigurationError` for what is no trace.
    """
    factor = 1.0
    if rate is not None:
        count, last_s = 0, 0.0
        for request in islice(reader, requests):
            count, last_s = count + 1, request.at_s
        if last_s >= _RESOLUTION_S:
            factor = count / last_s / rate
    for request in islice(reader, requests):
        yield request if factor == 1.0 else request._replace(at_s=request.at_s * factor)


def parse_arrivals(text: str, rate: float) -> Arrivals:
    """`poisson`, `constant` or `bursts:SIZE`; raises `BadText`."""
    kind, _, size = text.partition(":")
    match kind, size:
        case "poisson" | "constant" as plain, "":
            return Arrivals(rate=rate, kind=plain)
        case "bursts", size if size.isdecimal() and len(size) < 11 and 0 < int(size) <= _MOST_IN_BURST:
            return Arrivals(rate=rate, kind="bursts", burst=int(size))
        case _:
            raise BadText([f"arrivals {text!r}: expected poisson, constant or bursts:SIZE"])


def parse_sizes(text: str) -> SizedModel:
    """`[MODEL[*WEIGHT]/]DIMENSION=DISTRIBUTION[;...]`, or `[MODEL[*WEIGHT]/]trace:FILE`.

    `batch=1` is put in front unless it is named: every request has one row then. Raises `BadText`, and
    `ConfigurationError` for a trace that cannot be read.
    """
    # A trace's path may have slashes of its own.
    head, slash, rest = text.partition("/") if not text.startswith("trace:") else ("", "", text)
    if not slash or "=" in head:
        head, rest = "model", text
    name, star, weight = head.partition("*")
    try:
        share = float(weight) if star else 1.0
        if not (name and 0 < share < float("inf")):
            raise ValueError
    except ValueError as error:
        raise ConfigurationError(
            [f"sizes {text!r}: expected MODEL*WEIGHT/... with a weight above 0"]
        ) from error
    if rest.startswith("trace:"):
        return _empirical(TraceReader(rest.removeprefix("trace:")), name, share)
    sizes: dict[str, Distribution] = {}
    for part in rest.split(";"):
        dimension, equals, words = part.partition("=")
        dimension = dimension.strip()
        if not equals or not dimension or dimension in sizes:
            raise BadText([f"sizes {text!r}: expected DIMENSION=DISTRIBUTION, got {part!r}"])
        sizes[dimension] = parse_distribution(words)
    batch = sizes.pop("batch", Constant(1))
    return SizedModel(name=name, sizes={"batch": batch, **sizes}, weight=share)


def _empirical(reader: TraceReader, name: str, weight: float) -> SizedModel:
    shapes: list[tuple[int, ...]] = []
    number = 0
    for request in reader:
        names = list(reader.models)
        if not shapes:
            number = names.index(name) if name in names else request.model
        if request.model == number:
            shapes.append(request.sizes)
    if not shapes:
        raise ConfigurationError([f"{reader.path}: no request of a model {name!r} to take sizes from"])
    dimensions = list(reader.models.values())[number]
    return SizedModel(
        name=name if name != "model" else list(reader.models)[number],
        sizes={dimension: Constant(1) for dimension in dimensions},
        empirical=tuple(shapes),
        weight=weight,
    )

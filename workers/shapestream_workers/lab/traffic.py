"""Made-up traffic: distributions of sizes, arrivals, and the requests that follow from them or from a trace.

The same seed gives the same traffic. In a closed loop arrivals follow from the simulated server's answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shapestream.errors import ConfigurationError
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.cost_table import MAX_ELEMENTS

__all__ = [
    "Arrivals",
    "BadText",
    "Choice",
    "Constant",
    "Distribution",
    "Lognormal",
    "SizedModel",
    "Traffic",
    "Uniform",
    "generate",
    "parse_arrivals",
    "parse_distribution",
    "parse_range",
    "parse_sizes",
    "replay",
]

_FORMS = "lognormal:MEDIAN,SIGMA,LOW..HIGH, uniform:LOW..HIGH, choice:A,B,C or a number"


class BadText(ConfigurationError):
    """What a caller wrote to describe traffic or costs cannot be meant; no file is to blame."""


class Distribution(ABC):
    """Whole sizes of one dimension."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """So many sizes."""


@dataclass(frozen=True, slots=True)
class Constant(Distribution):
    """Always the same."""

    size: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """So many times the size."""
        return np.full(count, self.size, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform(Distribution):
    """Every size from `low` to `high`, both included, is as likely."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """So many sizes."""
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class Choice(Distribution):
    """Each of some sizes is as likely; one that is named twice is twice as likely."""

    sizes: tuple[int, ...]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """So many sizes."""
        return np.asarray(self.sizes, np.int64)[rng.integers(0, len(self.sizes), count)]


@dataclass(frozen=True, slots=True)
class Lognormal(Distribution):
    """exp(N(ln median, sigma)), rounded, and cut at `low` and `high`: how lengths of texts are often distributed."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """So many sizes."""
        sizes = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))
        return np.clip(sizes, self.low, self.high).astype(np.int64)


def parse_distribution(text: str) -> Distribution:
    """Reads one; raises `BadText` that shows the forms there are."""
    kind, _, rest = text.strip().partition(":")
    try:
        match kind, rest.split(","):
            case "lognormal", [median, sigma, bounds]:
                low, high = parse_range(bounds)
                if not (0 < float(median) < inf and 0 <= float(sigma) < inf):
                    raise ValueError("a median above 0 and a sigma of at least 0 are needed")
                return Lognormal(float(median), float(sigma), low, high)
            case "uniform", [bounds]:
                return Uniform(*parse_range(bounds))
            case "choice", [_, *_] as sizes:
                return Choice(tuple(_size(size) for size in sizes))
            case "constant", [size]:
                return Constant(_size(size))
            case size, [""]:
                return Constant(_size(size))
            case _:
                raise ValueError("no such distribution")
    except ValueError as error:
        raise BadText([f"sizes {text!r}: {error} (expected {_FORMS})"]) from error


def parse_range(text: str) -> tuple[int, int]:
    """`4..256`, both included. Raises ValueError."""
    low, dots, high = text.partition("..")
    if not dots:
        raise ValueError(f"{text!r} is not LOW..HIGH")
    bounds = _size(low), _size(high)
    if bounds[0] > bounds[1]:
        raise ValueError(f"{low} is above {high}")
    return bounds


def _size(text: str) -> int:
    size = int(text)
    if not 1 <= size <= MAX_ELEMENTS:
        raise ValueError(f"a size of {size} is not within 1..{MAX_ELEMENTS}")
    return size


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

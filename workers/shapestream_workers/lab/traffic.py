"""Traffic of a simulation: made up of distributions of sizes and arrivals, or recorded in a trace.

The same seed gives the same traffic. In a closed loop arrivals follow from the simulated server's answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from shapestream.errors import ConfigurationError
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.cost_table import MAX_ELEMENTS

_FORMS = "lognormal:MEDIAN,SIGMA,LOW..HIGH, uniform:LOW..HIGH, choice:A,B,C or a number"
_CHUNK = 8192
_RESOLUTION_S = 1e-6
"""Resolution of times in a trace: a shorter one is of requests at once, which no rate stretches."""
_MOST_IN_BURST = 1 << 31


class BadText(ConfigurationError):
    """A wrong description of traffic or costs on the command line."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of whole sizes of one dimension.

    `choice`: one of the values, equally likely. `uniform`: from the first to the second value. `lognormal`: median, sigma,
    least and largest value: exp(N(ln median, sigma)), rounded and clipped, as lengths of texts are often distributed.
    """

    kind: Literal["choice", "uniform", "lognormal"]
    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw `count` sizes."""
        match self.kind:
            case "choice":
                return np.asarray(self.values, np.int64)[rng.integers(0, len(self.values), count)]
            case "uniform":
                low, high = map(int, self.values)
                return rng.integers(low, high, count, endpoint=True)
            case "lognormal":
                median, sigma, least, largest = self.values
                sizes = np.rint(median * np.exp(sigma * rng.standard_normal(count)))
                return np.clip(sizes, least, largest).astype(np.int64)
            case _:
                assert_never(self.kind)


def parse_distribution(text: str) -> Distribution:
    """Read a distribution; raises `BadText`, which shows the forms."""
    kind, _, rest = text.strip().partition(":")
    try:
        match kind, rest.split(","):
            case "lognormal", [median, sigma, bounds]:
                low, high = _range(bounds)
                if not (0 < float(median) < inf and 0 <= float(sigma) < inf):
                    raise ValueError("a median above 0 and a sigma of at least 0 are needed")
                return Distribution("lognormal", (float(median), float(sigma), low, high))
            case "uniform", [bounds]:
                return Distribution("uniform", _range(bounds))
            case "choice", [_, *_] as sizes:
                return Distribution("choice", tuple(_size(size) for size in sizes))
            case "constant", [size]:
                return Distribution("choice", (_size(size),))
            case size, [""]:
                return Distribution("choice", (_size(size),))
            case _:
                raise ValueError("no such distribution")
    except ValueError as error:
        raise BadText([f"sizes {text!r}: {error} (expected {_FORMS})"]) from error


def _range(text: str) -> tuple[int, int]:
    """Both ends of `4..256`; raises ValueError."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """One model of the traffic, and the sizes of its requests."""

    name: str
    sizes: Mapping[str, Distribution]
    """Distributions by dimension, `batch` first where requests have rows."""
    empirical: tuple[tuple[int, ...], ...] = ()
    """Observed shapes to choose from, instead of drawing each dimension by itself."""
    weight: float = 1.0
    """Share of the requests, relative to the other models' weights."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return tuple(self.sizes)

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
        """Draw the sizes of `count` requests."""
        if self.empirical:
            return [self.empirical[number] for number in rng.integers(0, len(self.empirical), count).tolist()]
        columns = [distribution.draw(rng, count).tolist() for distribution in self.sizes.values()]
        return list(zip(*columns, strict=True)) if columns else [()] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrival times of requests, `rate` per second in the long run."""

    rate: float
    """Requests per second; inf: all at once, as for a closed loop."""
    kind: Literal["poisson", "constant", "bursts"] = "poisson"
    burst: int = 1
    """Requests that arrive together, for `bursts`; the bursts are a Poisson stream."""

    def draw(self, rng: np.random.Generator, after_s: float, first: int, count: int) -> NDArray[np.float64]:
        """Draw the times of `count` requests from number `first` on, after the time `after_s`."""
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
    """Made-up traffic, for `generate`."""

    models: Sequence[SizedModel]
    arrivals: Arrivals
    requests: int
    clients: int = 1
    """Number of clients; requests are spread over them at random."""
    deadline_s: float | None = None
    priorities: Sequence[int] = field(default=(0,))
    """Priorities to choose from at random."""
    seed: int = 0


def generate(traffic: Traffic) -> Iterator[TraceRequest]:
    """Generate the requests of made-up traffic, in order of time, a few thousand at a time."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Traffic of a trace file, at its own rate or at another."""

    path: Path
    rate: float | None = None
    """Mean requests per second that the times are stretched to; bursts stay bursts."""
    requests: int | None = None
    deadline_s: float | None = None
    """Deadline that replaces the trace's own; None keeps them."""


def replay(recorded: Recorded) -> Iterator[TraceRequest]:
    """The requests of a trace. Raises `ConfigurationError` for what is no trace."""
    reader = TraceReader(recorded.path)
    factor = 1.0
    if recorded.rate is not None:
        count, last_s = 0, 0.0
        for request in islice(reader, recorded.requests):
            count, last_s = count + 1, request.at_s
        if last_s >= _RESOLUTION_S:
            factor = count / last_s / recorded.rate
    for request in islice(reader, recorded.requests):
        deadline_s = request.deadline_s if recorded.deadline_s is None else recorded.deadline_s
        yield request._replace(at_s=request.at_s * factor, deadline_s=deadline_s)


def parse_arrivals(text: str, rate: float) -> Arrivals:
    """Read `poisson`, `constant` or `bursts:SIZE`; raises `BadText`."""
    kind, _, size = text.partition(":")
    match kind, size:
        case "poisson" | "constant" as plain, "":
            return Arrivals(rate=rate, kind=plain)
        case "bursts", size if size.isdecimal() and len(size) < 11 and 0 < int(size) <= _MOST_IN_BURST:
            return Arrivals(rate=rate, kind="bursts", burst=int(size))
        case _:
            raise BadText([f"arrivals {text!r}: expected poisson, constant or bursts:SIZE"])


def parse_sizes(text: str) -> SizedModel:
    """Read `[MODEL[*WEIGHT]/]DIMENSION=DISTRIBUTION[;...]`, or `[MODEL[*WEIGHT]/]trace:FILE`.

    Unless `batch` is named, every request has one row. Raises `BadText`, and
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
    batch = sizes.pop("batch", Distribution("choice", (1,)))
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
        sizes={dimension: Distribution("choice", (1,)) for dimension in dimensions},
        empirical=tuple(shapes),
        weight=weight,
    )

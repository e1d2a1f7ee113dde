"""Traffic of a simulation: drawn from distributions of sizes and arrivals, or recorded in a trace.

The same seed gives the same traffic. In a closed loop arrivals follow from the simulated server's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray

from shapestream.telemetry.trace import Sent, TraceReader, TraceRequest
from shapestream_engine.cost_table import MAX_ELEMENTS

_FORMS = "lognormal:MEDIAN,SIGMA,LOW..HIGH, uniform:LOW..HIGH, choice:A,B,C or a number"
_CHUNK = 8192
_RESOLUTION_S = 1e-6
"""Resolution of times in a trace, in seconds. A shorter trace has all requests at once, and no rate can stretch it."""
_MOST_IN_BURST = 1 << 31

Distribution: TypeAlias = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Function that draws a number of sizes of one dimension."""


def parse_distribution(text: str) -> Distribution:
    """Read a distribution; raises `BadParameter`, which shows the forms.

    Sizes of `lognormal` are exp(N(ln median, sigma)), rounded and clipped, as lengths of texts are often distributed;
    those of `choice` are equally likely.
    """
    kind, _, rest = text.strip().partition(":")
    try:
        match kind, rest.split(","):
            case "lognormal", [median, sigma, bounds]:
                return _lognormal(float(median), float(sigma), *_range(bounds))
            case "uniform", [bounds]:
                low, high = _range(bounds)
                return lambda rng, count: rng.integers(low, high, count, endpoint=True)
            case "choice", sizes:
                return _choice(sizes)
            case ("constant", [size]) | (size, [""]):
                return _choice([size])
            case _:
                raise ValueError("no such distribution")
    except ValueError as error:
        raise typer.BadParameter(f"sizes {text!r}: {error} (expected {_FORMS})") from error


def _lognormal(median: float, sigma: float, low: int, high: int) -> Distribution:
    if not (0 < median < inf and 0 <= sigma < inf):
        raise ValueError("a median above 0 and a sigma of at least 0 are needed")

    def draw(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        sizes = np.rint(median * np.exp(sigma * rng.standard_normal(count)))
        return np.clip(sizes, low, high).astype(np.int64)

    return draw


def _choice(texts: Sequence[str]) -> Distribution:
    sizes = np.array([_size(text) for text in texts], np.int64)
    return lambda rng, count: sizes[rng.integers(0, len(sizes), count)]


def _range(text: str) -> tuple[int, int]:
    """Return both ends of `4..256`; raises ValueError."""
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
    dimensions: tuple[str, ...]
    """Names of the dimensions, `batch` first where requests have rows."""
    draw: Callable[[np.random.Generator, int], list[tuple[int, ...]]]
    """Function that draws the sizes of a number of requests."""
    weight: float = 1.0
    """Share of the requests, relative to the other models' weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Made-up traffic; an iteration generates its requests in order of time, a few thousand at a time."""

    models: Sequence[SizedModel]
    requests: int
    rate: float = inf
    """Requests per second in the long run; inf: all at once, as for a closed loop."""
    burst: int = 1
    """Requests that arrive together, in a Poisson stream of bursts; 0: one by one at equal distances."""
    clients: int = 1
    """Number of clients; requests are spread over them at random."""
    deadline_s: float | None = None
    seed: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = np.random.default_rng(self.seed)
        weights = np.array([model.weight for model in self.models])
        weights /= weights.sum()
        after_s = 0.0
        for first in range(0, self.requests, _CHUNK):
            count = min(_CHUNK, self.requests - first)
            times = self._times(rng, after_s, first, count)
            after_s = float(times[-1])
            numbers = rng.choice(len(weights), count, p=weights).tolist()
            clients = rng.integers(0, self.clients, count).tolist()
            sizes = [iter(model.draw(rng, numbers.count(number))) for number, model in enumerate(self.models)]
            for at_s, number, client in zip(times.tolist(), numbers, clients, strict=True):
                yield TraceRequest(at_s, number, client, next(sizes[number]), self.deadline_s)

    def _times(self, rng: np.random.Generator, after_s: float, first: int, count: int) -> NDArray[np.float64]:
        """Draw the times of `count` requests from number `first` on, after the time `after_s`."""
        if self.rate == inf:
            return np.zeros(count)
        if self.burst == 0:
            return np.arange(first + 1, first + count + 1) / self.rate
        gaps = rng.exponential(self.burst / self.rate, count)
        gaps[np.arange(first, first + count) % self.burst != 0] = 0.0
        return after_s + np.cumsum(gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Traffic of a trace file; an iteration raises `ConfigurationError` for what is no trace."""

    path: Path
    rate: float | None = None
    """Mean requests per second that the times are stretched to; bursts stay bursts."""
    requests: int | None = None
    deadline_s: float | None = None
    """Deadline that replaces the trace's own; None keeps them."""

    def __iter__(self) -> Iterator[Sent]:
        reader = TraceReader(self.path)
        factor = 1.0
        if self.rate is not None:
            count, last_s = 0, 0.0
            for request in islice(reader.sent(), self.requests):
                count, last_s = count + 1, request.at_s
            if last_s >= _RESOLUTION_S:
                factor = count / last_s / self.rate
        for request in islice(reader.sent(), self.requests):
            deadline_s = request.deadline_s if self.deadline_s is None else self.deadline_s
            yield request._replace(at_s=request.at_s * factor, deadline_s=deadline_s)


def parse_arrivals(text: str) -> int:
    """Read `poisson`, `constant` or `bursts:SIZE` as a `Traffic.burst`; raises `BadParameter`."""
    kind, _, size = text.partition(":")
    match kind, size:
        case "poisson", "":
            return 1
        case "constant", "":
            return 0
        case "bursts", size if size.isdecimal() and len(size) < 11 and 0 < int(size) <= _MOST_IN_BURST:
            return int(size)
        case _:
            raise typer.BadParameter(f"arrivals {text!r}: expected poisson, constant or bursts:SIZE")


def parse_sizes(text: str) -> SizedModel:
    """Read `[MODEL[*WEIGHT]/]DIMENSION=DISTRIBUTION[;...]`; raises `BadParameter`.

    Unless `batch` is named, every request has one row.
    """
    head, slash, rest = text.partition("/")
    if not slash:
        head, rest = "model", text
    name, star, weight = head.partition("*")
    try:
        share = float(weight) if star else 1.0
        if not (name and 0 < share < inf):
            raise ValueError
    except ValueError as error:
        message = f"sizes {text!r}: expected MODEL*WEIGHT/... with a weight above 0"
        raise typer.BadParameter(message) from error
    sizes: dict[str, Distribution] = {}
    for part in rest.split(";"):
        dimension, equals, words = part.partition("=")
        dimension = dimension.strip()
        if not equals or not dimension or dimension in sizes:
            raise typer.BadParameter(f"sizes {text!r}: expected DIMENSION=DISTRIBUTION, got {part!r}")
        sizes[dimension] = parse_distribution(words)
    sizes = {"batch": sizes.pop("batch", _choice(["1"])), **sizes}

    def draw(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
        return list(zip(*(each(rng, count).tolist() for each in sizes.values()), strict=True))

    return SizedModel(name=name, dimensions=tuple(sizes), draw=draw, weight=share)

"""Distributions of sizes, and how they are written on a command line: `lognormal:24,0.9,4..256`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from shapestream.errors import ConfigurationError
from shapestream_engine.cost_table import MAX_ELEMENTS

__all__ = [
    "BadText",
    "Choice",
    "Constant",
    "Distribution",
    "Lognormal",
    "Uniform",
    "parse_distribution",
    "parse_range",
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

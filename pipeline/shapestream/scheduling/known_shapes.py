"""The call shapes of one model that were given out, among those that may be rounded to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["CallArrays", "KnownShapes", "Truths"]

Shape: TypeAlias = tuple[int, ...]
Truths: TypeAlias = NDArray[np.bool_]


@dataclass(slots=True)
class KnownShapes:
    """Call sizes, rows first where there is a batch axis."""

    largest: frozenset[Shape]
    """What everything fits under: room is kept for it."""
    exact: set[Shape] = field(default_factory=set)
    """Those that were given out as they came."""
    given: set[Shape] = field(default_factory=set)
    """All, the exact ones among them."""
    is_full: bool = False
    """Nothing new is given out, but what room is kept for."""
    _descending: list[Shape] = field(default_factory=list)

    @property
    def taken(self) -> int:
        """Of the room for what is rounded: what was given out, and what it is kept for."""
        return len((self.given - self.exact) | self.largest)

    def descending(self) -> list[Shape]:
        """All that were given out, by elements."""
        if len(self._descending) != len(self.given):
            self._descending = sorted(self.given, key=lambda sizes: (prod(sizes), sizes), reverse=True)
        return self._descending


class CallArrays:
    """What many calls are given, so far: each takes whatever is found that fits and has no more elements."""

    def __init__(self, rows: NDArray[np.intp], shapes: NDArray[np.intp]) -> None:
        self.rows = rows
        self.shapes = shapes
        self._elements = rows * shapes.prod(axis=1)

    def take(self, fitting: Truths, known: Shape, first: int) -> None:
        """A known shape, by those that fit. `first`: 1 where it begins with rows."""
        elements = prod(known)
        here = fitting & (elements <= self._elements)
        self.rows[here] = known[0] if first else 1
        self.shapes[here] = known[first:]
        self._elements[here] = elements

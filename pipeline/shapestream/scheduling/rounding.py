"""Which shapes calls are given where only so many different ones are allowed: learned from the traffic.

Every shape that a device meets leaves something behind in it (docs/strategies.md), so a model may have a cap on the
number of its call shapes. The first few run exactly as they come, since most models see few. Later ones are rounded up:
rows to a fixed set, every other dimension that may be padded to boundaries that cost least over the sizes that came
lately, worked out anew when the traffic has changed by enough to be worth it.

*The cap holds for good*, whatever comes. With C the cap:

- C // 4 shapes are for exact ones, C - C // 4 for the combinations of rows and boundaries.
- A boundary that some call was given stays, because the device keeps what it has for it anyway; one that none was given
  is dropped for nothing. New ones are paid for out of what is left: the first learning spends three quarters of it,
  each later one half. So the combinations of all times together never exceed their share, and when nothing is
  left nothing is learned any more.

Shapes that differ where they may not be rounded are different for good: each group of them has the cap for itself.
Static shapes are beside it: the dynamic model never meets them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np

from shapestream.scheduling.boundaries import Floats, Sizes, next_of
from shapestream.scheduling.boundary_learning import LearnedBoundaries
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.row_sizes import choose_row_sizes

__all__ = ["Seconds", "ShapeRounding"]

Shape: TypeAlias = tuple[int, ...]
Seconds: TypeAlias = Callable[[Sizes, Sizes], Floats]
"""`Surface.seconds`: of batches, by rows (n,) and shapes (n, d)."""

_REMEMBERED = 4096
"""Roundings remembered; when so many are known, all are forgotten."""
_MOST_GROUPS = 1024
"""Groups whose shapes are remembered; of more, those longest unused start anew."""


@dataclass(slots=True)
class _Group:
    """Shapes that may be rounded to each other."""

    exact: set[Shape] = field(default_factory=set)
    given: set[Shape] = field(default_factory=set)


class ShapeRounding:
    """Rounds the call shapes of one model with `max_shapes`. Deterministic: it counts requests, and reads no clock.

    Sizes without the batch axis are a "shape", as everywhere in the scheduler.
    """

    def __init__(self, profile: ModelProfile, seconds: Seconds | None = None) -> None:
        """`seconds` prices boundaries, by elements without. Raises `ValueError` without a cap, or an upper bound."""
        if profile.max_shapes is None or profile.max_shapes < 1:
            raise ValueError(f"model {profile.name!r} has no cap on shapes to round for")
        first = 1 if profile.has_batch else 0
        self._profile = profile
        self._seconds = seconds
        self._first = first
        self._exact = profile.max_shapes // 4
        self._combinations = profile.max_shapes - self._exact
        self._axes = tuple(
            axis for axis in range(len(profile.dimensions) - first) if profile.paddable[axis + first]
        )
        """Of a shape, those that are rounded."""
        self._fixed = tuple(axis for axis in range(len(profile.dimensions) - first) if axis not in self._axes)
        self._bounds = {axis: _bound(profile, axis + first) for axis in self._axes}
        self._rows = self._row_sizes()
        self._learned = LearnedBoundaries(self._bounds, self._combinations // len(self._rows), self._prices)
        self._groups: OrderedDict[Shape, _Group] = OrderedDict()
        self._remembered: dict[tuple[int, Shape], tuple[int, Shape]] = {}
        self.version = 0
        """Changes when shapes are rounded otherwise than before."""

    def _row_sizes(self) -> tuple[int, ...]:
        profile = self._profile
        if not profile.has_batch:
            return (1,)
        bound = _bound(profile, 0)
        spreads = [float(most) for most in self._bounds.values()]
        rows = choose_row_sizes(min(profile.max_batch, bound), self._combinations, spreads)
        # A single request may have more rows than a batch has.
        more = (bound,) if rows[-1] < bound and len(rows) < self._combinations else ()
        return (*rows, *more) if more or rows[-1] == bound else (*rows[:-1], bound)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The rows that late calls have."""
        return self._rows

    @property
    def boundaries(self) -> tuple[tuple[int, ...] | None, ...]:
        """Per dimension of a shape, the sizes that late calls have; None: any, as it may not be rounded."""
        count = len(self._profile.dimensions) - self._first
        return tuple(self._learned.per_axis.get(axis) for axis in range(count))

    @property
    def learned(self) -> int:
        """How often boundaries were learned."""
        return self._learned.learned

    @property
    def known(self) -> frozenset[Shape]:
        """All call sizes that were given out, rows first where there is a batch axis; static shapes are not among them."""
        return frozenset().union(*[group.given for group in self._groups.values()])

    def observe(self, sizes: Shape) -> None:
        """A request of these sizes has arrived. Now and then this learns, which takes about a millisecond."""
        weight = max(1, sizes[0]) if self._first else 1
        if self._learned.observe(sizes[self._first :], weight) and self._learned.look(self._used()):
            self.version += 1
            self._remembered.clear()

    def call_sizes(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        """What a call of such a batch would be given: no smaller, and the same wherever it may not be rounded.

        What was rounded stays as it is when it is rounded again. Nothing is counted: see `start`.
        """
        key = (rows, shape)
        given = self._remembered.get(key)
        if given is None:
            own_rows, own_shape = self.preview(np.array([rows], np.intp), np.array([shape], np.intp))
            given = int(own_rows[0]), tuple(own_shape[0].tolist())
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = given
        return given

    def start(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        """`call_sizes` of a call that is now started: from now on its shape counts under the cap."""
        group = self._group(tuple([shape[axis] for axis in self._fixed]))
        call_rows, call_shape = self.call_sizes(rows, shape)
        most = self._rows[-1]
        # More rows than one call has are divided: whole ones, and what is left.
        for each in {most, call_rows % most or most} if call_rows > most else {call_rows}:
            call = (each, *call_shape) if self._first else call_shape
            if call in group.given or call in self._profile.static_shapes:
                continue
            group.given.add(call)
            if call_rows <= most and len(group.exact) < self._exact:
                group.exact.add(call)
                if len(group.exact) == self._exact:
                    # From now on this group is rounded.
                    self.version += 1
                    self._remembered.clear()
        return call_rows, call_shape

    def _group(self, name: Shape) -> _Group:
        group = self._groups.get(name)
        if group is not None:
            self._groups.move_to_end(name)
            return group
        if len(self._groups) >= _MOST_GROUPS:
            self._groups.popitem(last=False)
            self._remembered.clear()
        group = self._groups[name] = _Group()
        return group

    def preview(self, rows: Sizes, shapes: Sizes) -> tuple[Sizes, Sizes]:
        """What calls of these rows (n,) and shapes (n, d) would be given, each by itself; none is counted."""
        if not len(rows):
            return rows, shapes
        if not self._fixed or (shapes[:, self._fixed] == shapes[0, self._fixed]).all():
            return self._preview_group(rows, shapes)
        out_rows, out_shapes = np.empty_like(rows), np.empty_like(shapes)
        _, which = np.unique(shapes[:, self._fixed], axis=0, return_inverse=True)
        for number in range(int(which.max()) + 1):
            own = which.reshape(-1) == number
            out_rows[own], out_shapes[own] = self._preview_group(rows[own], shapes[own])
        return out_rows, out_shapes

    def _preview_group(self, rows: Sizes, shapes: Sizes) -> tuple[Sizes, Sizes]:
        group = self._groups.get(tuple([int(shapes[0, axis]) for axis in self._fixed]))
        has_room = self._exact and (group is None or len(group.exact) < self._exact)
        as_they_come = rows <= self._rows[-1] if has_room else None
        if as_they_come is not None and as_they_come.all():
            return rows, shapes
        out_rows, out_shapes = self._rounded_rows(rows), shapes.copy()
        for axis, boundaries in self._learned.per_axis.items():
            out_shapes[:, axis] = next_of(boundaries, shapes[:, axis])
        for exact in group.exact if group is not None else ():
            self._take(rows, shapes, out_rows, out_shapes, exact, smaller=False)
        for static in self._profile.static_shapes:
            self._take(rows, shapes, out_rows, out_shapes, static, smaller=True)
        if as_they_come is not None:
            out_rows = np.where(as_they_come, rows, out_rows)
            out_shapes = np.where(as_they_come[:, None], shapes, out_shapes)
        return out_rows, out_shapes

    def _take(
        self,
        rows: Sizes,
        shapes: Sizes,
        out_rows: Sizes,
        out_shapes: Sizes,
        known: Shape,
        *,
        smaller: bool,
    ) -> None:
        """Calls that may run at `known` do: those of just that size, or (`smaller`) all that it fits no worse."""
        known_rows, known_shape = (known[0], known[1:]) if self._first else (1, known)
        if smaller:
            here = rows <= known_rows
            elements = known_rows * prod(known_shape)
            here &= elements <= out_rows * out_shapes.prod(axis=1)
        else:
            here = rows == known_rows
        for axis, size in enumerate(known_shape):
            here &= shapes[:, axis] <= size if smaller and axis in self._axes else shapes[:, axis] == size
        out_rows[here] = known_rows
        out_shapes[here] = known_shape

    def _rounded_rows(self, rows: Sizes) -> Sizes:
        most = self._rows[-1]
        if not self._first or not (rows > most).any():
            return next_of(self._rows, rows)
        whole, rest = np.divmod(rows, most)
        return whole * most + np.where((rest > 0) | (rows == 0), next_of(self._rows, rest), 0)

    def _used(self) -> dict[int, set[int]]:
        """Per axis that is rounded, the boundaries that some call was given."""
        given = [sizes for group in self._groups.values() for sizes in group.given - group.exact]
        return {axis: {sizes[axis + self._first] for sizes in given} for axis in self._axes}

    def _prices(self, axis: int, sizes: Sizes, usual: Mapping[int, int]) -> Floats:
        """What a request costs at each size along an axis, in the best company that it can have; it never falls."""
        plain = np.maximum(sizes, 1).astype(np.float64)
        if self._seconds is None:
            return plain
        fixed = dict(zip(self._fixed, next(reversed(self._groups), (1,) * len(self._fixed)), strict=True))
        shapes = np.empty((len(sizes), len(self._axes) + len(self._fixed)), np.intp)
        for other in range(shapes.shape[1]):
            shapes[:, other] = {**usual, **fixed}[other]
        shapes[:, axis] = sizes
        per_row = [
            self._seconds(np.full(len(sizes), rows, np.intp), shapes) / rows
            for rows in [rows for rows in self._rows if rows <= self._profile.max_batch] or self._rows
        ]
        costs: Floats = np.min(per_row, axis=0)
        return np.maximum.accumulate(costs) if np.isfinite(costs).all() else plain


def _bound(profile: ModelProfile, dimension: int) -> int:
    bound: Sequence[int | None] = profile.bounds
    most = bound[dimension] if dimension < len(bound) else None
    if most is None:
        name = profile.dimensions[dimension]
        raise ValueError(f"model {profile.name!r}: {name!r} has no upper bound to round up to")
    return max(1, most)

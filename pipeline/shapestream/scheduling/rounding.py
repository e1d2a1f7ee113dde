"""Which shapes calls are given where only so many different ones are allowed: learned from the traffic.

Every shape that a device meets leaves something behind in it (docs/strategies.md), so a model may have a cap on the
number of its call shapes. The first few run exactly as they come, since most models see few. Later ones are rounded up:
rows to a fixed set, every other dimension that may be padded to boundaries that cost least over the sizes that came
lately, worked out anew when the traffic has changed by enough to be worth it.

*The cap holds for good*, whatever comes. With C the cap:

- C // 4 shapes are for exact ones, the others for combinations of rows and boundaries.
- A shape that some call was given counts for ever, because the device keeps what it has for it. A boundary that no call
  was given is dropped for nothing when others are learned; the first learning spends three quarters of what is left,
  each later one half, taking it that a boundary will be met with all the rows that calls had so far.
- Where more come than that, until only what must be kept for the largest shapes is left, nothing new is given out any
  more: a call gets the smallest known shape that holds it.

Shapes that differ where they may not be rounded are different for good: each group of them has the cap for itself.
Rows are such a size unless the profile says that they may be filled up.
Static shapes are beside it: the dynamic model never meets them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import numpy as np

from shapestream.scheduling.boundaries import Floats, Sizes, next_of
from shapestream.scheduling.boundary_learning import LearnedBoundaries
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.known_shapes import CallArrays, KnownShapes, Truths
from shapestream.scheduling.row_sizes import choose_row_sizes

__all__ = ["Seconds", "ShapeRounding"]

Shape: TypeAlias = tuple[int, ...]
Seconds: TypeAlias = Callable[[Sizes, Sizes], Floats]
"""`Surface.seconds`: of batches, by rows (n,) and shapes (n, d)."""

_REMEMBERED = 4096
"""Roundings remembered; when so many are known, all are forgotten."""
_MOST_GROUPS = 1024
"""Groups whose shapes are remembered; of more, those longest unused start anew."""


class ShapeRounding:
    """Rounds the call shapes of one model with `max_shapes`. Deterministic: it counts requests, and reads no clock.

    Sizes without the batch axis are a "shape", as everywhere in the scheduler.
    """

    def __init__(self, profile: ModelProfile, seconds: Seconds | None = None) -> None:
        """`seconds` prices boundaries, by elements without. Raises `ValueError` without a cap, or an upper bound."""
        cap = profile.max_shapes
        if cap is None or cap < 1:
            raise ValueError(f"model {profile.name!r} has no cap on shapes to round for")
        self._rows_are_fixed = profile.has_batch and not profile.fills_rows
        if self._rows_are_fixed:
            # Then they are one more size of a shape, and each call has one "row" of it.
            profile = replace(profile, has_batch=False, paddable=(False, *profile.paddable[1:]))
            seconds = None if seconds is None else _by_first_size(seconds)
        first = 1 if profile.has_batch else 0
        self._profile = profile
        self._seconds = seconds
        self._first = first
        self._exact = cap // 4
        self._combinations = cap - self._exact
        self._axes = tuple(
            axis for axis in range(len(profile.dimensions) - first) if profile.paddable[axis + first]
        )
        """Of a shape, those that are rounded."""
        self._fixed = tuple(axis for axis in range(len(profile.dimensions) - first) if axis not in self._axes)
        self._bounds = {axis: _bound(profile, axis + first) for axis in self._axes}
        self._rows = self._row_sizes()
        self._learned = LearnedBoundaries(
            self._bounds, self._combinations // (4 * len(self._rows)), self._prices
        )
        self._groups: OrderedDict[Shape, KnownShapes] = OrderedDict()
        self._nothing = self._opened((1,) * len(self._fixed))
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
        per_axis = tuple(self._learned.per_axis.get(axis) for axis in range(count))
        return per_axis[1:] if self._rows_are_fixed else per_axis

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
        is_time = self._learned.observe(sizes[self._first :], weight)
        if is_time and self._learned.look(self._used(), self._spare()):
            self._changed()

    def call_sizes(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        """What a call of such a batch would be given: no smaller, and the same wherever it may not be rounded.

        What was rounded stays as it is when it is rounded again. Nothing is counted: see `start`.
        """
        if self._rows_are_fixed:
            _, sizes = self._call_sizes(1, (rows, *shape))
            return sizes[0], sizes[1:]
        return self._call_sizes(rows, shape)

    def _call_sizes(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        key = (rows, shape)
        given = self._remembered.get(key)
        if given is None:
            given = self._chosen(rows, shape)
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = given
        return given

    def start(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        """`call_sizes` of a call that is now started: from now on its shape counts under the cap."""
        if self._rows_are_fixed:
            _, sizes = self._start(1, (rows, *shape))
            return sizes[0], sizes[1:]
        return self._start(rows, shape)

    def _start(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        group = self._group(tuple([shape[axis] for axis in self._fixed]))
        call_rows, call_shape = self._call_sizes(rows, shape)
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
                    self._changed()  # from now on this group is rounded
        if not group.is_full and self._is_full(group):
            group.is_full = True
            self._changed()
        return call_rows, call_shape

    def _changed(self) -> None:
        self.version += 1
        self._remembered.clear()

    def _is_full(self, group: KnownShapes) -> bool:
        # One start gives out two shapes at most, where its rows are divided.
        step = 2 if self._first and self._profile.max_batch > self._rows[-1] else 1
        return group.taken + step > self._combinations

    def _group(self, name: Shape) -> KnownShapes:
        group = self._groups.get(name)
        if group is not None:
            self._groups.move_to_end(name)
            return group
        if len(self._groups) >= _MOST_GROUPS:
            self._groups.popitem(last=False)
            self._remembered.clear()
        group = self._groups[name] = self._opened(name)
        return group

    def _opened(self, name: Shape) -> KnownShapes:
        sizes = {**self._bounds, **dict(zip(self._fixed, name, strict=True))}
        shape = tuple([sizes[axis] for axis in range(len(sizes))])
        group = KnownShapes(frozenset([(rows, *shape)[1 - self._first :] for rows in self._rows]))
        group.is_full = self._is_full(group)
        return group

    def preview(self, rows: Sizes, shapes: Sizes) -> tuple[Sizes, Sizes]:
        """What calls of these rows (n,) and shapes (n, d) would be given, each by itself; none is counted."""
        if not len(rows):
            return rows, shapes
        if self._rows_are_fixed:
            _, sizes = self._preview(np.ones_like(rows), np.column_stack([rows, shapes]))
            return sizes[:, 0], sizes[:, 1:]
        return self._preview(rows, shapes)

    def _preview(self, rows: Sizes, shapes: Sizes) -> tuple[Sizes, Sizes]:
        if not self._fixed or (shapes[:, self._fixed] == shapes[0, self._fixed]).all():
            return self._preview_group(rows, shapes)
        out_rows, out_shapes = np.empty_like(rows), np.empty_like(shapes)
        _, which = np.unique(shapes[:, self._fixed], axis=0, return_inverse=True)
        for number in range(int(which.max()) + 1):
            own = which.reshape(-1) == number
            out_rows[own], out_shapes[own] = self._preview_group(rows[own], shapes[own])
        return out_rows, out_shapes

    def _preview_group(self, rows: Sizes, shapes: Sizes) -> tuple[Sizes, Sizes]:
        group = self._groups.get(tuple([int(shapes[0, axis]) for axis in self._fixed])) or self._nothing
        has_room = len(group.exact) < self._exact
        as_they_come = rows <= self._rows[-1] if has_room else None
        if as_they_come is not None and as_they_come.all():
            return rows, shapes
        rounded = shapes.copy()
        for axis, boundaries in self._learned.per_axis.items():
            rounded[:, axis] = boundaries[-1] if group.is_full else next_of(boundaries, shapes[:, axis])
        call = CallArrays(self._rounded_rows(rows), rounded)
        if group.is_full:
            # Of all that are known the smallest that fits: it comes last.
            for known in group.descending():
                call.take(self._fitting(rows, shapes, known), known, self._first)
        else:
            for exact in group.exact:
                own_rows, own_shape = (exact[0], exact[1:]) if self._first else (1, exact)
                call.take((rows == own_rows) & (shapes == own_shape).all(axis=1), exact, self._first)
        for static in self._profile.static_shapes:
            call.take(self._fitting(rows, shapes, static), static, self._first)
        if as_they_come is not None:
            call.rows = np.where(as_they_come, rows, call.rows)
            call.shapes = np.where(as_they_come[:, None], shapes, call.shapes)
        return call.rows, call.shapes

    def _chosen(self, rows: int, shape: Shape) -> tuple[int, Shape]:
        """The same of a single call, which is quicker without arrays."""
        group = self._groups.get(tuple([shape[axis] for axis in self._fixed])) or self._nothing
        sizes = (rows, *shape)[1 - self._first :]
        most = self._rows[-1]
        if (rows <= most and len(group.exact) < self._exact) or (not group.is_full and sizes in group.exact):
            return rows, shape
        call_rows = rows
        if self._first:
            whole, rest = divmod(rows, most)
            call_rows = whole * most + (_next(self._rows, rest) if rest or not rows else 0)
        call_shape = list(shape)
        for axis, boundaries in self._learned.per_axis.items():
            call_shape[axis] = boundaries[-1] if group.is_full else _next(boundaries, shape[axis])
        call = call_rows, tuple(call_shape)
        elements = call_rows * prod(call_shape)
        for known in (*(group.descending() if group.is_full else ()), *self._profile.static_shapes):
            if prod(known) <= elements and self._fits(sizes, known):
                call = (known[0], known[1:]) if self._first else (1, known)
                elements = prod(known)
        return call

    def _fits(self, sizes: Shape, known: Shape) -> bool:
        for number, (size, other) in enumerate(zip(sizes, known, strict=True)):
            if size != other and (size > other or number - self._first in self._fixed):
                return False
        return True

    def _fitting(self, rows: Sizes, shapes: Sizes, known: Shape) -> Truths:
        """Which of these could run as a call of a known shape."""
        fits = rows <= known[0] if self._first else np.ones(len(rows), np.bool_)
        for axis, size in enumerate(known[self._first :]):
            fits &= shapes[:, axis] <= size if axis in self._bounds else shapes[:, axis] == size
        return fits

    def _rounded_rows(self, rows: Sizes) -> Sizes:
        most = self._rows[-1]
        if not self._first or not (rows > most).any():
            return next_of(self._rows, rows)
        whole, rest = np.divmod(rows, most)
        return whole * most + np.where((rest > 0) | (rows == 0), next_of(self._rows, rest), 0)

    def _spare(self) -> float:
        """How many boundaries are left, if each is met with all the rows that calls had so far."""
        left = self._combinations - max(
            [known.taken for known in self._groups.values()], default=len(self._rows)
        )
        rows = np.array([call[0] for call in self.known] if self._first else [], np.intp)
        return left / max(1, len(np.unique(self._rounded_rows(rows))))

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


def _by_first_size(seconds: Seconds) -> Seconds:
    """The same of batches whose rows are the first size of their shapes."""
    return lambda rows, shapes: seconds(shapes[:, 0], shapes[:, 1:])


def _next(boundaries: Sequence[int], size: int) -> int:
    return boundaries[bisect_left(boundaries, size)]


def _bound(profile: ModelProfile, dimension: int) -> int:
    bound: Sequence[int | None] = profile.bounds
    most = bound[dimension] if dimension < len(bound) else None
    if most is None:
        name = profile.dimensions[dimension]
        raise ValueError(f"model {profile.name!r}: {name!r} has no upper bound to round up to")
    return max(1, most)

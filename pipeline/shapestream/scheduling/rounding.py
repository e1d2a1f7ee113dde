"""Shape rounding: which call shapes a device meets if the model has a cap on their number (`ShapeRounding`).

A device keeps compiled code or memory for every shape that it meets (docs/strategies.md). `max_prepared` caps their
number. A worker's calibration may use an eighth of it (`Strategy.calibration_shapes`). The remainder is the cap C here,
the profile's `max_shapes`. How C is spent:

- The first C // 4 shapes run exactly as they come, because most models see few shapes.
- All others are rounded up to combinations: rows to a fixed set, every other size that may be padded to `boundaries`. The
  boundaries form a geometric grid at first, and are learned from traffic later (boundaries.py).
- Room is kept for the largest shape of each number of rows, because every request fits under one of them. When only this
  room is left, no new shape is given out: a call gets the smallest known shape that holds it.

It promises that a device meets at most C shapes per group. A *group* has equal sizes in all dimensions that may not be
rounded. Rows are such a dimension unless the profile says that they may be filled up. A shape that was given to a call
counts for the model's life. A boundary that was never given to a call is replaced at no cost when others are learned.

It does not bound the number of groups, reads no clock, and leaves static shapes alone: these have models of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log, prod

import numpy as np

from shapestream.scheduling.boundaries import LearnedBoundaries, next_of
from shapestream.scheduling.cost_grid import Floats, Integers, Sizes
from shapestream.scheduling.events import ModelProfile

_REMEMBERED = 4096
"""Roundings remembered; when so many are known, all are forgotten."""
_MOST_GROUPS = 1024
"""Groups whose shapes are remembered. When there are more, the least recently used one starts anew."""
_LARGEST_TRIED = 256
"""Largest number of rows for which the loss of a set of row sizes is computed; beyond, the loss is the same."""


@dataclass(slots=True)
class _Group:
    """The shapes given out of one group."""

    largest: frozenset[Sizes]
    """The largest shape of each number of rows; room is kept for them."""
    exact: set[Sizes] = field(default_factory=set)
    """Shapes given out as they came."""
    given: set[Sizes] = field(default_factory=set)
    """All shapes given out, the exact ones among them."""
    is_full: bool = False
    """Nothing new is given out, except what room is kept for."""

    @property
    def taken(self) -> int:
        """Combinations in use or kept."""
        return len((self.given - self.exact) | self.largest)


class ShapeRounding:
    """Rounds the call shapes of one model with `max_shapes`. Deterministic: it counts requests, and reads no clock."""

    def __init__(
        self,
        profile: ModelProfile,
        seconds: Callable[[Integers, Integers], Floats] | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        """`seconds`: `WorkerClass.seconds`, which prices boundaries; without it they are priced by elements.

        `changed` is called when shapes are rounded otherwise than before.
        Raises `ValueError` for a model without a cap, or without an upper bound.
        """
        cap = profile.max_shapes
        if cap is None or cap < 1:
            raise ValueError(f"model {profile.name!r} has no cap on shapes to round for")
        self._profile = profile
        self._seconds = seconds
        self._exact = cap // 4
        self._combinations = cap - self._exact
        self._first = 0 if profile.has_batch else 1
        """Place of the first size that the model has, since those without a batch axis have no rows."""
        paddable = profile.paddable[1:] if profile.has_batch else profile.paddable
        self._rounds_rows = profile.fills_rows or not profile.has_batch
        self._rounded = np.array([self._rounds_rows, *paddable])
        """Per size, rows first, whether it may be rounded."""
        self._fixed = np.flatnonzero(~self._rounded)
        self._bounds = {
            axis: _bound(profile, axis - self._first)
            for axis in range(1, len(self._rounded))
            if self._rounded[axis]
        }
        self._rows = self._row_sizes() if profile.has_batch and self._rounds_rows else (1,)
        combinations = self._combinations // (4 * len(self._rows))
        self._learned = LearnedBoundaries(self._bounds, combinations, self._prices)
        self._groups: OrderedDict[Sizes, _Group] = OrderedDict()
        self._nothing = self._opened((1,) * len(self._fixed))
        self._remembered: dict[tuple[int, Sizes], tuple[int, Sizes]] = {}
        self._tell_changed = changed

    def _row_sizes(self) -> Sizes:
        bound = _bound(self._profile, 0)
        spreads = [float(most) for most in self._bounds.values()]
        rows = choose_row_sizes(min(self._profile.max_batch, bound), self._combinations, spreads)
        if rows[-1] == bound:
            return rows
        # A single request may have more rows than a batch has.
        return (*rows, bound) if len(rows) < self._combinations else (*rows[:-1], bound)

    @property
    def known(self) -> frozenset[Sizes]:
        """All call sizes given out, rows first where there is a batch axis, static shapes apart; for checks only."""
        return frozenset([sizes[self._first :] for group in self._groups.values() for sizes in group.given])

    @property
    def most_rows(self) -> int:
        """The most rows of a call that a batch of `max_batch` rows or fewer may become."""
        most = self._profile.max_batch
        if not self._rounds_rows or not self._profile.has_batch:
            return most
        filled = int(self._rounded_rows(np.array([most]))[0])
        return max(filled, self._rows[-1], *[sizes[0] for sizes in self._profile.static_shapes])

    # ------------------------------------------------------------ rounding

    def call_sizes(self, rows: int, shape: Sizes) -> tuple[int, Sizes]:
        """Return what a call of such a batch would be given: no smaller, and the same wherever it may not be rounded.

        What was rounded stays as it is when it is rounded again. Nothing is counted: see `start`.
        """
        given = self._remembered.get((rows, shape))
        if given is None:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            (own_rows, *own_shape) = self._previewed(np.array([(rows, *shape)], np.intp))[0].tolist()
            given = self._remembered[rows, shape] = own_rows, tuple(own_shape)
        return given

    def preview(self, rows: Integers, shapes: Integers) -> tuple[Integers, Integers]:
        """Return what calls of these rows (n,) and shapes (n, d) would be given, each by itself; none is counted."""
        sizes = np.column_stack([rows, shapes]) if len(rows) else np.zeros((0, len(self._rounded)), np.intp)
        given = np.empty_like(sizes)
        if (sizes[:, self._fixed] == sizes[:1, self._fixed]).all():
            given = self._previewed(sizes) if len(sizes) else sizes
        else:
            _, groups = np.unique(sizes[:, self._fixed], axis=0, return_inverse=True)
            for number in range(int(groups.max()) + 1):
                own = groups.reshape(-1) == number
                given[own] = self._previewed(sizes[own])
        return given[:, 0], given[:, 1:]

    def _previewed(self, sizes: Integers) -> Integers:
        """Round sizes (n, dimensions) of one group, rows first."""
        group = self._groups.get(tuple(sizes[0, self._fixed].tolist()), self._nothing)
        most = self._rows[-1]
        as_they_come = np.zeros(len(sizes), np.bool_)
        if len(group.exact) < self._exact:
            as_they_come = sizes[:, 0] <= most if self._rounds_rows else ~as_they_come
            if as_they_come.all():
                return sizes
        elif not group.is_full and group.exact:
            as_they_come = (sizes[:, None] == np.array(sorted(group.exact))).all(axis=2).any(axis=1)
        rounded = sizes.copy()
        if self._rounds_rows:
            rounded[:, 0] = self._rounded_rows(sizes[:, 0])
        for axis, boundaries in self._learned.per_axis.items():
            rounded[:, axis] = boundaries[-1] if group.is_full else next_of(boundaries, sizes[:, axis])
        known = [(1, *sizes)[1 - self._first :] for sizes in self._profile.static_shapes]
        known += sorted(group.given) if group.is_full else []
        if known:
            # The smallest that holds it, if it has no more elements than what was rounded to.
            known.sort(key=prod)
            candidates = np.array(known)
            larger = candidates >= sizes[:, None]
            larger &= self._rounded | (candidates == sizes[:, None])
            fits = larger.all(axis=2)
            fits &= (
                candidates.prod(axis=1, dtype=np.float64) <= rounded.prod(axis=1, dtype=np.float64)[:, None]
            )
            found = fits.any(axis=1)
            rounded[found] = candidates[fits[found].argmax(axis=1)]
        rounded[as_they_come] = sizes[as_they_come]
        return rounded

    def _rounded_rows(self, rows: Integers) -> Integers:
        """Round rows up. More rows than one call has are divided: whole calls, and what is left."""
        whole, rest = np.divmod(rows, self._rows[-1])
        return whole * self._rows[-1] + np.where((rest > 0) | (rows == 0), next_of(self._rows, rest), 0)

    # ------------------------------------------------------------ counting

    def observe(self, sizes: Sizes) -> None:
        """Take in the sizes of a request that has arrived. Now and then this learns, which takes about a millisecond."""
        sizes = (1,) * self._first + sizes
        weight = max(1, sizes[0]) if self._rounds_rows else 1
        if self._learned.observe(sizes, weight) and self._learned.look(self._used(), self._spare()):
            self._changed()

    def start(self, rows: int, shape: Sizes) -> tuple[int, Sizes]:
        """Return `call_sizes` of a call that is now started: from now on its shape counts under the cap."""
        call_rows, call_shape = self.call_sizes(rows, shape)
        sizes = (call_rows, *call_shape)
        group = self._group(tuple([sizes[axis] for axis in self._fixed.tolist()]))
        most = self._rows[-1]
        is_divided = self._rounds_rows and call_rows > most
        for each in {most, call_rows % most or most} if is_divided else {call_rows}:
            call = (each, *call_shape)
            if call in group.given or call[self._first :] in self._profile.static_shapes:
                continue
            group.given.add(call)
            if not is_divided and len(group.exact) < self._exact:
                group.exact.add(call)
                if len(group.exact) == self._exact:
                    self._changed()  # from now on this group is rounded
        if not group.is_full and self._is_full(group):
            group.is_full = True
            self._changed()
        return call_rows, call_shape

    def _changed(self) -> None:
        self._remembered.clear()
        if self._tell_changed is not None:
            self._tell_changed()

    def _is_full(self, group: _Group) -> bool:
        # One start gives out two shapes at most, where its rows are divided.
        step = 2 if self._rounds_rows and self._profile.max_batch > self._rows[-1] else 1
        return group.taken + step > self._combinations

    def _group(self, name: Sizes) -> _Group:
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= _MOST_GROUPS:
                self._groups.popitem(last=False)
                self._remembered.clear()
            group = self._groups[name] = self._opened(name)
        self._groups.move_to_end(name)
        return group

    def _opened(self, name: Sizes) -> _Group:
        sizes = {**self._bounds, **dict(zip(self._fixed.tolist(), name, strict=True))}
        largest = [
            (sizes.get(0, rows), *[sizes[axis] for axis in range(1, len(self._rounded))])
            for rows in self._rows
        ]
        group = _Group(frozenset(largest))
        group.is_full = self._is_full(group)
        return group

    # ------------------------------------------------------------ learning

    def _used(self) -> dict[int, set[int]]:
        """Return, per axis that is rounded, the boundaries that some call was given."""
        given = [sizes for group in self._groups.values() for sizes in group.given - group.exact]
        return {axis: {sizes[axis] for sizes in given} for axis in self._bounds}

    def _spare(self) -> float:
        """Return how many boundaries are left if each is met with all the rows that calls had so far."""
        taken = max([group.taken for group in self._groups.values()], default=len(self._rows))
        rows = (
            [sizes[0] for group in self._groups.values() for sizes in group.given]
            if self._rounds_rows
            else []
        )
        used = np.unique(self._rounded_rows(np.array(rows, np.intp)))
        return (self._combinations - taken) / max(1, len(used))

    def _prices(self, axis: int, sizes: Integers, usual: Mapping[int, int]) -> Floats:
        """Return the least cost of a request at each size along an axis, over all numbers of rows; it never falls."""
        plain = np.maximum(sizes, 1).astype(np.float64)
        if self._seconds is None:
            return plain
        name = next(reversed(self._groups), (1,) * len(self._fixed))
        own = {0: 1, **usual, **dict(zip(self._fixed.tolist(), name, strict=True))}
        calls = np.tile(
            np.array([own[number] for number in range(len(self._rounded))], np.intp), (len(sizes), 1)
        )
        calls[:, axis] = sizes
        costs = np.full(len(sizes), np.inf)
        for rows in [rows for rows in self._rows if rows <= self._profile.max_batch] or self._rows:
            if self._rounds_rows:
                calls[:, 0] = rows
            costs = np.minimum(costs, self._seconds(calls[:, 0], calls[:, 1:]) / rows)
        return np.maximum.accumulate(costs) if np.isfinite(costs).all() else plain


def _bound(profile: ModelProfile, dimension: int) -> int:
    most = profile.bounds[dimension] if dimension < len(profile.bounds) else None
    if most is None:
        name = profile.dimensions[dimension]
        raise ValueError(f"model {profile.name!r}: {name!r} has no upper bound to round up to")
    return max(1, most)


# ---------------------------------------------------------------- rows


def row_sizes(most: int, count: int) -> Sizes:
    """Return at most `count` numbers from 1 to `most`, each about the same factor larger than the one before."""
    if count >= most:
        return tuple(range(1, most + 1))
    if count == 1:
        return (most,)
    return tuple(sorted({round(most ** (step / (count - 1))) for step in range(count)}))


def choose_row_sizes(most: int, shapes: int, spreads: list[float]) -> Sizes:
    """Return the numbers of rows that calls have, each of which can be combined with shapes / count others.

    They are geometric from 1 row, so that a request alone is never filled up. `spreads`: the largest / the smallest of each
    other size that is rounded.
    """
    if not spreads:
        return row_sizes(most, shapes)
    counts = range(1, min(shapes, most) + 1)
    losses = {count: _loss(row_sizes(most, count), shapes / count, spreads) for count in counts}
    return row_sizes(most, min(losses, key=lambda count: (losses[count], count)))


def _loss(rows: Sizes, others: float, spreads: Iterable[float]) -> float:
    """Estimate what is computed / what was asked for: rows filled up or divided, times padding along the rest.

    A call's fixed part is taken to weigh as much as one request, as where costs are not known yet. Sizes are taken to be
    spread evenly, by their logarithm, over the middle half of what the bounds admit.
    """
    spreads = list(spreads)
    padding = 1.0
    for spread in spreads:
        factor = spread ** (0.5 / max(1.0, others ** (1 / len(spreads))))
        padding *= 1.0 if factor < 1.0001 else (factor - 1) / log(factor)
    # The mean over the numbers of rows that a batch may have; small ones count more, as there are more of them.
    most = min(rows[-1], _LARGEST_TRIED)
    least, weights, losses = [0.0], 0.0, 0.0
    for target in range(1, most + 1):
        least.append(min([1 + size + least[max(0, target - size)] for size in rows]))
        weights += 1 / target
        losses += least[target] / (1 + target) / target
    return padding * losses / weights

"""Tolerances: the largest distance of two equal results, per element type, and the comparison of results.

The number of rows of a call decides the order of sums, and so their rounding. A neighbour or padding that reaches a result
moves it by a part of the usual difference between results. So the bound is

    |alone - in company| <= of_spread * spread + of_magnitude * largest

`spread` is the standard deviation of the output over the proof's inputs. `largest` is the largest absolute value in the
result. Both are taken at each index of each axis (a class, a position) with enough results: a large value in one column
allows nothing in another column.

*Distributions*: if every row of every result is one (no element negative, sum 1), `largest` is that of the row too. The
rounding of one logit moves all classes of a softmax, rare ones as well, whose columns hold tiny values only. Nothing else
gets this: a box's coordinate of 1,000 would allow a score beside it an error of 1e-2.

Requests with large values allow nothing to requests with small values. For a request of known magnitude, `spread` is
limited to the standard deviation over requests of that magnitude, or to the spread that allows the rounding of its largest
input.

*Marks* are values that stand for something, such as the lowest float of a banned class. They count for no other element.
Integers and truth values must be equal.

*Movement* tells how far the result of one request moves when it runs again with changes as small as rounding.

Tolerances come from the proof's inputs. In service, inputs may be a million times larger, or their terms may cancel. Then
rounding alone exceeds the tolerance. So the request itself runs again, alone, in two ways:

- *changed*: each float input grows or shrinks at random by the factor `of_magnitude` of the tolerance.
  Rounding inside the model is no larger, unless the model magnifies it; then the model magnifies the change as well.
- *beside copies of itself*: the call has more rows, so sums have another order, and holds no other request's data.
  This also moves results of integers, which are never changed: they may be ids, classes or masks.

A difference counts as rounding if, at each element, it is no larger than the tolerance plus the largest movement. A change
of inputs cannot hide a model that mixes rows. Copies could, if every larger call is wrong. So their movement is capped at
`of_spread` times the standard deviation of the result, and does not count for exact outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shapestream_engine.arrays import arrays_of
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

ENOUGH_ROWS = 8
"""Smallest number of values with a meaningful standard deviation."""
_MOST_INDICES = 4096
"""Longest axis whose spreads are sent: a message holds arrays of this length."""
_MARK_GAP = 1e3
"""Smallest ratio of a mark to every ordinary value. Beyond it, f32's rounding of the mark is below a hundredth of
the ordinary values."""

_MOST_SHOWN = 40
"""Characters of a string in a message."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The two factors of one element type."""

    of_spread: float
    of_magnitude: float


TOLERANCES: Mapping[str, Tolerance] = {
    "f64": Tolerance(1e-6, 1e-12),
    "f32": Tolerance(1e-3, 1e-5),
    "f16": Tolerance(2e-2, 4e-3),
    "bf16": Tolerance(5e-2, 2e-2),
}
"""The tolerance per element type; results of all other types must be equal."""


def coarser(element_type: str, computed_in: str | None) -> Tolerance | None:
    """Return the tolerance of an output that the engine computes in `computed_in`; None: results must be equal."""
    own = TOLERANCES.get(element_type)
    other = TOLERANCES.get(computed_in or "")
    if own is None or other is None:
        return own
    return max(own, other, key=lambda tolerance: tolerance.of_spread)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and squared deviation of some values; they can be merged."""

    count: int
    mean: float
    squares: float
    """Sum of squared deviations from the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputTolerance:
    """The tolerance of one output of one model."""

    tolerance: Tolerance | None
    spreads: tuple[tuple[int, Array], ...] = ()
    """Pairs of axis and spread per index; infinite at an index with too few results."""
    overall: float = 0.0
    mark: float = math.inf
    """Smallest absolute value of a mark; infinite if there are no marks."""
    classes: int | None = None
    """The axis along which each row of every result is a distribution; None if there is none."""
    margins: str = ""
    """Of the classes that a step chose: the output with their values, which decide where a class can be judged."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `from_dict`; None stands for infinity. Axes longer than `_MOST_INDICES` are left out."""
        if self.tolerance is None:
            return {"margins": self.margins} if self.margins else {}
        return {
            "of_spread": self.tolerance.of_spread,
            "of_magnitude": self.tolerance.of_magnitude,
            "spreads": [
                [axis, [_finite(value) for value in spread.tolist()]]
                for axis, spread in self.spreads
                if len(spread) <= _MOST_INDICES
            ],
            "overall": self.overall,
            "mark": _finite(self.mark),
            "classes": self.classes,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> OutputTolerance:
        """Return the tolerance that `plain`, data of any origin, describes; raises `EngineError` for other data."""
        if not plain:
            return cls(None)
        if isinstance(plain, Mapping) and plain.keys() == {"margins"}:
            return cls(None, margins=str(plain["margins"]))
        try:
            spreads = [
                (int(axis), np.array([math.inf if value is None else float(value) for value in spread]))
                for axis, spread in plain["spreads"]
            ]
            numbers = [float(plain[key]) for key in ("of_spread", "of_magnitude", "overall")]
            mark = math.inf if plain["mark"] is None else float(plain["mark"])
            classes = None if plain["classes"] is None else int(plain["classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"no tolerance of an output: {error!r}") from error
        return cls(Tolerance(*numbers[:2]), tuple(spreads), numbers[2], mark, classes)

    @classmethod
    def of(cls, tolerance: Tolerance | None, references: Sequence[Array]) -> OutputTolerance:
        """Return the tolerance learned from results of requests that ran alone."""
        if tolerance is None:
            return cls(None)
        results = [reference.astype(np.float64) for reference in references if reference.size]
        if not results:
            return cls(tolerance)
        together = np.concatenate([result.reshape(-1) for result in results])
        mark = _smallest_mark(together)
        spreads = [
            (axis, _spread_at_each(results, axis, mark))
            for axis in range(results[0].ndim)
            if any(result.shape[axis] != 1 for result in results)
        ]
        classes = [
            axis
            for axis in range(results[0].ndim)
            if all(
                result.shape[axis] > 1 and _are_distributions(result, axis, tolerance) for result in results
            )
        ]
        overall = float(_std(together[:, None], mark)[0])
        return cls(tolerance, tuple(spreads), overall, mark, max(classes, default=None))

    @property
    def spread(self) -> float | None:
        """The standard deviation over all results; None if results must be equal."""
        return None if self.tolerance is None else self.overall

    def moments(self, result: Array) -> Moments:
        """Return the moments of one result's finite values, marks excluded."""
        own = result.astype(np.float64).reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            kept = own[np.abs(own) < self.mark]
            mean = float(kept.mean()) if kept.size else 0.0
            return Moments(kept.size, mean, float(((kept - mean) ** 2).sum()))

    def narrowed(self, alike: Sequence[Moments], largest_input: float) -> OutputTolerance:
        """Return the tolerance for requests of one magnitude, whose inputs reach `largest_input`.

        `alike` has the moments of their results. The spread is limited to theirs, but allows the rounding of sums of such
        inputs.
        """
        numbers = sum(each.count for each in alike)
        if self.tolerance is None or numbers < ENOUGH_ROWS:
            return self
        mean = sum(each.count * each.mean for each in alike) / numbers
        squares = sum(each.squares + each.count * (each.mean - mean) ** 2 for each in alike)
        rounding = self.tolerance.of_magnitude / self.tolerance.of_spread * largest_input
        return replace(self, overall=min(self.overall, max(math.sqrt(squares / numbers), rounding)))

    def allowed(self, reference: Array) -> Array | float:
        """Return the allowed distance of each element; `reference` has 64-bit floats."""
        if self.tolerance is None or not reference.size:
            return 0.0
        allowed = self._allowed_at_each(self.tolerance, reference)
        if self.classes is None or not _are_distributions(reference, self.classes, self.tolerance):
            return allowed
        likeliest: Array = reference.max(axis=self.classes, keepdims=True)
        return np.asarray(np.maximum(allowed, self.tolerance.of_magnitude * likeliest))

    def _allowed_at_each(self, tolerance: Tolerance, reference: Array) -> Array:
        """Return the allowed distance of each element by the numbers at its own indices."""
        largest: Array = tolerance.of_magnitude * self._largest(reference)
        return tolerance.of_spread * self._spread(reference) + largest

    def own(self, reference: Array) -> float:
        """Return `of_spread` times the standard deviation within one result; 0.0 for few values and exact outputs."""
        if self.tolerance is None or reference.size < ENOUGH_ROWS:
            return 0.0
        return self.tolerance.of_spread * float(
            _std(reference.astype(np.float64).reshape(-1, 1), self.mark)[0]
        )

    def hides(self, reference: Array) -> bool:
        """Tell whether the tolerance of some element exceeds its spread: equality then shows nothing.

        The rare classes of a distribution may: only if all classes do, nothing shows.
        """
        if self.tolerance is None or not reference.size:
            return False
        own = reference.astype(np.float64)
        spread = self._spread(own)
        with np.errstate(invalid="ignore"):
            counts = (np.abs(own) < self.mark) & (spread > 0.0)
        if (counts & (self._allowed_at_each(self.tolerance, own) > spread)).any():
            return True
        return self.classes is not None and not (counts & (self.allowed(own) <= spread)).any()

    def _spread(self, reference: Array) -> Array | float:
        spread: Array | float = self.overall
        for axis, per_index in self.spreads:
            own = _of_size(per_index, reference.shape[axis])
            spread = np.minimum(spread, _along(own, axis, reference.ndim))
        return spread

    def _largest(self, reference: Array) -> Array:
        """Return the largest value at each element's indices, the element included."""
        own = np.abs(reference)
        with np.errstate(invalid="ignore"):
            ordinary = np.where(own < self.mark, own, 0.0)
        largest: Array = np.asarray(ordinary.max())
        for axis, per_index in self.spreads:
            is_known = np.isfinite(_of_size(per_index, reference.shape[axis]))
            at_each = np.where(is_known, _columns(ordinary, axis).max(axis=0), math.inf)
            largest = np.minimum(largest, _along(at_each, axis, reference.ndim))
        return np.maximum(largest, np.where(np.isfinite(own), own, 0.0))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _are_distributions(result: Array, axis: int, tolerance: Tolerance) -> bool:
    """Tell whether each row along the axis is a distribution: no element negative, sum 1 within rounding."""
    with np.errstate(invalid="ignore"):
        off = np.abs(result.sum(axis=axis) - 1.0)
        return bool((result >= 0.0).all() and (off <= tolerance.of_magnitude).all())


def _smallest_mark(values: Array) -> float:
    """Return the smallest mark; infinite if there is none. A mark occurs at least twice with equal bits, which is rare for
    the largest result of arithmetic, and lies far above the next value."""
    sizes, counts = np.unique(np.abs(values[np.isfinite(values) & (values != 0)]), return_counts=True)
    mark = math.inf
    for place in range(len(sizes) - 1, 0, -1):
        if counts[place] < 2 or sizes[place] <= _MARK_GAP * sizes[place - 1]:
            break
        mark = float(sizes[place])
    return mark


def _spread_at_each(results: Sequence[Array], axis: int, mark: float) -> Array:
    columns = [_columns(result, axis) for result in results]
    spread = np.full(max(each.shape[1] for each in columns), math.inf)
    for index in range(len(spread)):
        found = np.concatenate([each[:, index] for each in columns if each.shape[1] > index])
        if len(found) >= ENOUGH_ROWS:
            spread[index] = _std(found[:, None], mark)[0]
    return spread


def _of_size(per_index: Array, size: int) -> Array:
    own = np.full(size, math.inf)
    own[: len(per_index)] = per_index[:size]
    return own


def _columns(result: Array, axis: int) -> Array:
    return np.moveaxis(result, axis, -1).reshape(-1, result.shape[axis])


def _along(per_index: Array, axis: int, rank: int) -> Array:
    shape = [1] * rank
    shape[axis] = -1
    return per_index.reshape(shape)


def _std(columns: Array, mark: float) -> Array:
    """Return standard deviation of each column's finite values, marks excluded; 0 without values."""
    with np.errstate(invalid="ignore"):
        kept: Any = np.ma.masked_where(~(np.abs(columns) < mark), columns)
    # The mean of equal numbers may differ from the numbers in its last bit.
    differ = np.ma.filled(kept.max(axis=0) != kept.min(axis=0), False)
    return np.where(differ, np.ma.filled(kept.std(axis=0), 0.0), 0.0)


def spread_of(values: Array) -> float:
    """Return the standard deviation of the finite values, marks excluded; 0 if there are none."""
    own = values.astype(np.float64).reshape(-1)
    return float(_std(own[:, None], _smallest_mark(own))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of one output; `amount` is infinite if the results cannot be subtracted."""

    amount: float
    allowed: float
    """The allowed distance at the element with the largest ratio."""
    words: str = ""
    """The difference as text, if a number does not describe it."""

    @property
    def within(self) -> bool:
        """Tell whether the two results count as equal."""
        return self.amount <= self.allowed

    @property
    def excess(self) -> float:
        """The ratio amount / allowed, by which differences are ranked."""
        if self.amount == 0:
            return 0.0
        return math.inf if self.allowed == 0 or math.isinf(self.amount) else self.amount / self.allowed


def compare(alone: Array, together: Array, tolerance: OutputTolerance) -> Difference:
    """Compare two results: the element with the largest ratio of distance to allowed distance.

    NaN equals NaN, and each infinity equals itself.
    """
    if alone.shape != together.shape:
        words = f"its shape is {list(together.shape)}, alone it was {list(alone.shape)}"
        return Difference(amount=math.inf, allowed=0.0, words=words)
    if alone.size == 0:
        return Difference(amount=0.0, allowed=0.0)
    if tolerance.tolerance is None:
        return _exact(alone, together)
    first, second = alone.astype(np.float64), together.astype(np.float64)
    off = distances(alone, together)
    allowed = np.broadcast_to(tolerance.allowed(first), off.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        ranked = np.where(off == 0, 0.0, off / allowed)
    worst = np.unravel_index(int(ranked.argmax()), ranked.shape)
    amount, limit = float(off[worst]), float(allowed[worst])
    words = f"{second[worst]:g} where it was {first[worst]:g} alone" if math.isinf(amount) else ""
    return Difference(amount=amount, allowed=limit, words=words)


def distances(one: Array, other: Array) -> Array:
    """Return the absolute difference of each element; infinite if two elements cannot be subtracted, as unequal strings."""
    if one.dtype == object:
        return np.where(np.not_equal(one, other).astype(bool), np.inf, 0.0)
    if one.dtype.kind in "iu":
        # As unsigned numbers, because no signed type holds every difference of two others of its size.
        off = np.asarray(np.maximum(one, other) - np.minimum(one, other))
        return off.view(f"u{one.itemsize}").astype(np.float64)
    first, second = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(first - second)
    same = (one == other) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def without_ties(
    names: Sequence[str],
    tolerances: Mapping[str, OutputTolerance],
    alone: Sequence[Array],
    other: Sequence[Array],
) -> list[Array]:
    """Return the outputs `other` with the classes of `alone` where ties make classes that nothing can judge.

    A class is judged where its value differs from its neighbours', among the values by their size, by more than both may
    move. What comes after the last value is not known, so the last class is not judged.
    """
    settled = list(other)
    for number, name in enumerate(names):
        tolerance = tolerances.get(name)
        if tolerance is None or not tolerance.margins or settled[number].shape != alone[number].shape:
            continue
        values = alone[names.index(tolerance.margins)]
        is_clear = _clear(values, tolerances[tolerance.margins])
        if values.ndim > alone[number].ndim:  # only the first of them has its class told
            is_clear = is_clear[..., 0]
        settled[number] = np.where(is_clear, other[number], alone[number])
    return settled


def worst_difference(
    names: Sequence[str], tolerances: Mapping[str, OutputTolerance], alone: Tensors, other: Tensors
) -> tuple[str, Difference]:
    """Return the output that differs most, in proportion to its tolerance, and its difference.

    Outputs without a tolerance are left out: the proof could not judge them.
    """
    before = arrays_of(alone)
    after = without_ties(names, tolerances, before, arrays_of(other))
    differences = [
        (name, compare(one, two, tolerances[name]))
        for name, one, two in zip(names, before, after, strict=True)
        if name in tolerances
    ]
    return max(differences, key=lambda found: found[1].excess)


def _clear(values: Array, tolerance: OutputTolerance) -> Array:
    """Tell which values, by their size along the last axis, keep their place when each moves as far as it may."""
    wide = values.astype(np.float64)
    allowed = np.broadcast_to(tolerance.allowed(wide), wide.shape)
    with np.errstate(invalid="ignore"):
        apart = wide[..., :-1] - wide[..., 1:] > allowed[..., :-1] + allowed[..., 1:]
    is_clear = np.ones(wide.shape, bool)
    is_clear[..., :-1] &= apart
    is_clear[..., 1:] &= apart
    is_clear[..., -1] = False
    return is_clear


def _shown(string: Any) -> str:
    shown = repr(string)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


def _exact(alone: Array, together: Array) -> Difference:
    off = distances(alone, together)
    place = int(off.argmax())
    largest = float(off.flat[place])
    if alone.dtype == object:
        words = f"{_shown(together.flat[place])} where it was {_shown(alone.flat[place])} alone"
        return Difference(amount=largest, allowed=0.0, words=words if largest else "")
    if alone.tobytes() == together.tobytes():
        return Difference(amount=0.0, allowed=0.0)
    # The bits may differ where no number shows it: zeros of other sign, or NaNs with other bits.
    words = "" if 0 < largest < math.inf else "other bits"
    return Difference(amount=largest or math.inf, allowed=0.0, words=words)


# ---------------------------------------------------------------- movement

RUNS = 8
"""Runs with changed inputs before a difference counts as a mismatch. Of 20,000 differences by rounding (products of
4,096 terms that cancel), one run left 29 % unexplained, two runs 1.3 %, three 0.07 %, four none. Eight leave a
margin."""
_MOSTLY = 0.5
"""An input stays unchanged if a larger share of its nonzero values is whole: they may be ids."""


class Movements:
    """The movements of all outputs of one request; outputs without a tolerance are left out."""

    def __init__(
        self,
        alone: Sequence[Array],
        answer: Sequence[Array],
        tolerances: Sequence[OutputTolerance | None],
    ) -> None:
        self._known = {
            number: Movement(alone[number], answer[number], tolerance)
            for number, tolerance in enumerate(tolerances)
            if tolerance is not None
        }

    def changed(self, results: Sequence[Array]) -> bool:
        """Add the results of changed inputs; returns True once rounding explains every difference."""
        for number, movement in self._known.items():
            movement.changed(results[number])
        return self._explain()

    def beside_copies(self, results: Sequence[Array]) -> bool:
        """Add the results beside copies; returns True once rounding explains every difference."""
        for number, movement in self._known.items():
            movement.beside_copies(results[number])
        return self._explain()

    def _explain(self) -> bool:
        return all(movement.explains for movement in self._known.values())


class Movement:
    """The largest movement of one output at each element, and its answer's excess over the tolerance."""

    def __init__(
        self, alone: Array, answer: Array, tolerance: OutputTolerance, *, in_steps: bool = False
    ) -> None:
        """`in_steps`: values are places or classes, and any change of an element explains any other value of it."""
        self._alone = alone
        self._in_steps = in_steps
        self._answer_shape = answer.shape
        self._most = np.zeros(alone.shape)
        self._cap = tolerance.own(alone)
        self.explains = False
        """True once rounding explains the whole difference."""
        if answer.shape == alone.shape:
            numbers = np.zeros(0) if alone.dtype == object else alone.astype(np.float64)  # strings are exact
            self._excess = distances(alone, answer) - tolerance.allowed(numbers)
            self.explains = not (self._excess > 0.0).any()

    def differing(self) -> Array:
        """Return the indices of the elements that differ by more than the tolerance; none if the shapes differ."""
        same_shape = self._answer_shape == self._alone.shape
        return np.argwhere(self._excess > 0.0) if same_shape else np.zeros((0, self._alone.ndim), np.int64)

    def changed(self, result: Array) -> None:
        """Add the result of changed inputs. A result of the answer's shape explains an answer of another shape."""
        if result.shape == self._alone.shape:
            moved = distances(self._alone, result)
            self._moved(np.where(moved > 0.0, np.inf, 0.0) if self._in_steps else moved)
        else:
            self.explains |= result.shape == self._answer_shape

    def beside_copies(self, result: Array) -> None:
        """Add the result beside copies; movements beyond the cap are ignored."""
        if result.shape == self._alone.shape:
            moved = distances(self._alone, result)
            self._moved(np.where(moved <= self._cap, moved, 0.0))

    def _moved(self, distance: Array) -> None:
        self._most = np.maximum(self._most, distance)
        if self._answer_shape == self._alone.shape:
            self.explains = not (self._excess > self._most).any()


def change_of(tolerances: Mapping[str, OutputTolerance]) -> float:
    """Return the relative change of a model's inputs; exact outputs are ignored."""
    known = [each.tolerance.of_magnitude for each in tolerances.values() if each.tolerance is not None]
    return max(known, default=TOLERANCES["f32"].of_magnitude)


def changed(tensors: Tensors, signature: ModelSignature, by: float, number: int) -> Tensors | None:
    """Return the request with its floats changed by a factor of 1 ± `by`, at random; every `number` differs.

    None if nothing would change: masks, integers, and types that cannot hold so small a change.
    """
    random = np.random.default_rng(number)
    buffers = list(tensors.buffers)
    is_changed = False
    for place, (index, element_type, _) in enumerate(tensors.layout):
        if element_type in TOLERANCES and not signature.inputs[index].may_lack:
            values = np.frombuffer(buffers[place], dtype_of(element_type))
            other = changed_values(values, by, random)
            is_changed |= other.tobytes() != values.tobytes()
            buffers[place] = other.tobytes()
    return Tensors(layout=tensors.layout, buffers=buffers) if is_changed else None


def changed_values(values: Array, by: float, random: np.random.Generator) -> Array:
    """Change floats by a factor of 1 ± `by`, at random; arrays of mostly whole numbers stay unchanged."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values.astype(np.float64)
        is_whole = wide == np.round(wide)  # infinities count as whole; NaN stays NaN
        if (is_whole & (wide != 0)).sum() > _MOSTLY * (wide != 0).sum():
            return values
        factors = 1.0 + by * (2.0 * random.integers(0, 2, size=wide.shape) - 1.0)
        return np.where(is_whole, values, (wide * factors).astype(values.dtype))

"""Movement: how far the result of one request moves when it runs again with changes as small as rounding.

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

from collections.abc import Mapping, Sequence

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.tolerances import TOLERANCES, OutputTolerance, distances
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

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
        if element_type in TOLERANCES and signature.inputs[index].mask_of is None:
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

"""Movement: how far the result of a request alone moves when it is run again with changes as small as rounding.

Tolerances are learned from the probe's inputs. A live request may be a million times larger, or its terms may cancel: then
rounding alone exceeds them. What such a request may be off, only it can tell. So it runs again, alone,

- *changed*: each float input is, at random, a little larger or smaller, by the part of itself that the tolerance allows
  results (`of_magnitude`). Rounding inside the model does no more, unless the model magnifies it: then it magnifies this
  as well.
- *beside copies of itself*: the call has more rows, so that sums are made in another order, and no stranger's data. This
  also moves the results of whole numbers, which are never changed: they may be ids, classes or masks.

A difference is rounding where at each element it is at most the tolerance plus the largest movement. A change of inputs
says nothing of company or padding, so it excuses no model that mixes rows. Copies might: of a model that is wrong in every
larger call. Their movement counts up to `of_spread` of what the result's own values differ by, and not at all for exact
outputs.
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
"""Runs with changed inputs before a difference is called one of company. Of 20,000 differences by rounding (products of
4,096 terms that cancel), one run left 29 % unexplained, two 1.3 %, three 0.07 %, four none; twice as many make sure."""
_MOSTLY = 0.5
"""An input stays as it is where a larger part of its values, zeros left out, are whole numbers: they may be ids."""


class Movements:
    """The movements of all outputs of a request whose answer differed. Outputs without a tolerance are left out."""

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
        """Take in the results of changed inputs. Whether rounding now explains all that the answer differs by."""
        for number, movement in self._known.items():
            movement.changed(results[number])
        return self._explain()

    def beside_copies(self, results: Sequence[Array]) -> bool:
        """Take in the results in company of copies; returns as `changed` does."""
        for number, movement in self._known.items():
            movement.beside_copies(results[number])
        return self._explain()

    def _explain(self) -> bool:
        return all(movement.explains for movement in self._known.values())


class Movement:
    """How far one output of a request moved, at each element, beside what its answer in company is off."""

    def __init__(self, alone: Array, answer: Array, tolerance: OutputTolerance) -> None:
        self._alone = alone
        self._answer_shape = answer.shape
        self._most = np.zeros(alone.shape)
        self._cap = tolerance.own(alone)
        self.explains = False
        """Whether rounding explains all that the answer is off."""
        if answer.shape == alone.shape:
            self._excess = distances(alone, answer) - tolerance.allowed(alone.astype(np.float64))
            self.explains = not (self._excess > 0.0).any()

    def changed(self, result: Array) -> None:
        """Take in the result of changed inputs. One of another shape explains an answer of that shape."""
        if result.shape == self._alone.shape:
            self._moved(distances(self._alone, result))
        else:
            self.explains |= result.shape == self._answer_shape

    def beside_copies(self, result: Array) -> None:
        """Take in the result in company of copies: nothing beyond the cap."""
        if result.shape == self._alone.shape:
            moved = distances(self._alone, result)
            self._moved(np.where(moved <= self._cap, moved, 0.0))

    def _moved(self, distance: Array) -> None:
        self._most = np.maximum(self._most, distance)
        if self._answer_shape == self._alone.shape:
            self.explains = not (self._excess > self._most).any()


def change_of(tolerances: Mapping[str, OutputTolerance]) -> float:
    """The part of itself by which an input of a model is changed; outputs that are exact say nothing of it."""
    known = [each.tolerance.of_magnitude for each in tolerances.values() if each.tolerance is not None]
    return max(known, default=TOLERANCES["f32"].of_magnitude)


def changed(tensors: Tensors, signature: ModelSignature, by: float, number: int) -> Tensors | None:
    """A request whose float inputs are larger or smaller by a part of themselves; each `number` is another one.

    None where nothing would change: masks, whole numbers, and types that cannot hold so small a change.
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
    """Floats that are larger or smaller by a part of themselves, at random; the same where they may have a meaning."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values.astype(np.float64)
        is_whole = wide == np.round(wide)  # so is an infinity; a NaN stays one
        if (is_whole & (wide != 0)).sum() > _MOSTLY * (wide != 0).sum():
            return values
        factors = 1.0 + by * (2.0 * random.integers(0, 2, size=wide.shape) - 1.0)
        return np.where(is_whole, values, (wide * factors).astype(values.dtype))

"""How far two results may lie apart and still be called equal: per element type, written down.

The same sum in another order comes out a little differently, and how many rows a call has decides the order. A result
that saw a neighbour or the padding is off by a part of what makes results differ at all, so that is the yardstick:

    |alone - in company| <= of_spread * spread + of_magnitude * largest

`spread` is the standard deviation of the output over the probe's inputs (of that column or channel, where it has any),
`largest` its largest absolute value in the result. Whole numbers and truth values are compared exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapestream_engine.probing.values import Array

__all__ = ["TOLERANCES", "OutputTolerance", "Tolerance", "coarser"]

_ENOUGH_ROWS = 8
"""Numbers from which a standard deviation is worth anything."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Both factors of one element type."""

    of_spread: float
    of_magnitude: float


TOLERANCES: Mapping[str, Tolerance] = {
    "f64": Tolerance(1e-6, 1e-12),
    "f32": Tolerance(1e-3, 1e-5),
    "f16": Tolerance(2e-2, 4e-3),
    "bf16": Tolerance(5e-2, 2e-2),
}
"""Every other element type is exact."""


def coarser(element_type: str, computed_in: str | None) -> Tolerance | None:
    """The tolerance of an output that the engine computes in `computed_in`; None: exact."""
    own = TOLERANCES.get(element_type)
    other = TOLERANCES.get(computed_in or "")
    if own is None or other is None:
        return own
    return max(own, other, key=lambda tolerance: tolerance.of_spread)


@dataclass(frozen=True, slots=True, eq=False)
class OutputTolerance:
    """The tolerance of one output of one model."""

    tolerance: Tolerance | None
    spreads: tuple[tuple[int, Array], ...]
    """Per axis of fixed size: the spread at each index of it."""
    overall: float

    @classmethod
    def of(cls, tolerance: Tolerance | None, references: Sequence[Array]) -> OutputTolerance:
        """From the results that the probe's inputs gave, each alone."""
        if tolerance is None:
            return cls(None, (), 0.0)
        results = [reference.astype(np.float64) for reference in references if reference.size]
        if not results:
            return cls(tolerance, (), 0.0)
        together = np.concatenate([result.reshape(-1) for result in results])
        spreads = []
        for axis in range(results[0].ndim):
            sizes = {result.shape[axis] for result in results}
            if len(sizes) != 1 or sizes == {1}:
                continue
            columns = np.concatenate([_columns(result, axis) for result in results])
            if len(columns) >= _ENOUGH_ROWS:
                spreads.append((axis, _std(columns)))
        return cls(tolerance, tuple(spreads), float(_std(together[:, None])[0]))

    def allowed(self, reference: Array) -> Array | float:
        """How far each element of a result may be off; `reference` is as 64-bit floats."""
        if self.tolerance is None or not reference.size:
            return 0.0
        spread: Array | float = self.overall
        for axis, per_index in self.spreads:
            if reference.shape[axis] == len(per_index):
                shape = [1] * reference.ndim
                shape[axis] = -1
                spread = np.minimum(spread, per_index.reshape(shape))
        finite = np.abs(reference[np.isfinite(reference)])
        largest = float(finite.max()) if finite.size else 0.0
        return self.tolerance.of_spread * spread + self.tolerance.of_magnitude * largest


def _columns(result: Array, axis: int) -> Array:
    return np.moveaxis(result, axis, -1).reshape(-1, result.shape[axis])


def _std(columns: Array) -> Array:
    """Per column, of what is finite in it."""
    kept: Any = np.ma.masked_invalid(columns)
    return np.asarray(np.ma.filled(kept.std(axis=0), 0.0), np.float64)

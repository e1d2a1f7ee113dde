"""Two results of one request, alone and in company: equal as far as the element type can tell, or by how much not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shapestream_engine.probing.tolerances import OutputTolerance
from shapestream_engine.probing.values import Array

__all__ = ["Difference", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one output differs. `amount` is infinite where the two cannot be subtracted."""

    amount: float
    allowed: float
    """At the element that is worst in proportion."""
    words: str = ""
    """What is wrong, where it is not just a number."""

    @property
    def within(self) -> bool:
        """Whether they count as equal."""
        return self.amount <= self.allowed

    @property
    def excess(self) -> float:
        """Amount / allowed, by which differences are ranked."""
        if self.amount == 0:
            return 0.0
        return math.inf if self.allowed == 0 or math.isinf(self.amount) else self.amount / self.allowed


def compare(alone: Array, together: Array, tolerance: OutputTolerance) -> Difference:
    """The worst element, in proportion to what it may be off. NaN equals NaN, and an infinity itself."""
    if alone.shape != together.shape:
        words = f"its shape is {list(together.shape)}, alone it was {list(alone.shape)}"
        return Difference(amount=math.inf, allowed=0.0, words=words)
    if alone.size == 0:
        return Difference(amount=0.0, allowed=0.0)
    if tolerance.tolerance is None:
        return _exact(alone, together)
    first, second = alone.astype(np.float64), together.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    off = np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))
    allowed = np.broadcast_to(tolerance.allowed(first), off.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        ranked = np.where(off == 0, 0.0, off / allowed)
    worst = np.unravel_index(int(ranked.argmax()), ranked.shape)
    amount, limit = float(off[worst]), float(allowed[worst])
    words = f"{second[worst]:g} where it was {first[worst]:g} alone" if math.isinf(amount) else ""
    return Difference(amount=amount, allowed=limit, words=words)


def _exact(alone: Array, together: Array) -> Difference:
    if alone.tobytes() == together.tobytes():
        return Difference(amount=0.0, allowed=0.0)
    if alone.dtype.kind not in "biu":
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(together.astype(np.float64) - alone.astype(np.float64))
        same = np.isnan(apart) & ((alone == together) | (np.isnan(alone) & np.isnan(together)))
        largest = float(np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart)).max())
        # Zeros of either sign, or NaNs of other bits: no number says how far apart they are, and they are.
        words = "" if 0 < largest < math.inf else "other bits"
        return Difference(amount=largest or math.inf, allowed=0.0, words=words)
    # Python's integers: the difference of two u64 fits no type of NumPy.
    off = np.abs(together.astype(object) - alone.astype(object))
    return Difference(amount=float(off.max()), allowed=0.0)

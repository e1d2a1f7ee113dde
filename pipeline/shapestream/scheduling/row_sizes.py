"""Which numbers of rows the calls of a model have, where only so many different shapes are allowed.

A planner fills such calls as far as requests go, and divides what is left, so a few numbers do: geometric, from 1 row,
so that a request alone is never filled up.
"""

from __future__ import annotations

from math import log

__all__ = ["choose_row_sizes", "row_sizes"]

_LARGEST_TRIED = 256
"""Rows up to which the loss is worked out; beyond it is alike."""


def row_sizes(most: int, count: int) -> tuple[int, ...]:
    """At most `count` numbers from 1 to `most`, each about the same factor larger than the one before."""
    if count >= most:
        return tuple(range(1, most + 1))
    if count == 1:
        return (most,)
    steps = {round(most ** (step / (count - 1))) for step in range(count)}
    return tuple(sorted(steps))


def choose_row_sizes(most: int, shapes: int, spreads: list[float]) -> tuple[int, ...]:
    """The numbers of rows, of which each can be combined with shapes / count others; see `_loss`.

    `spreads`: of each dimension that is rounded too, the largest size / the smallest.
    """
    if not spreads:
        return row_sizes(most, shapes)
    counts = range(1, min(shapes, most) + 1)
    losses = {count: _loss(row_sizes(most, count), shapes / count, spreads) for count in counts}
    return row_sizes(most, min(losses, key=lambda count: (losses[count], count)))


def _loss(rows: tuple[int, ...], others: float, spreads: list[float]) -> float:
    """What is computed / what was asked for, about: rows filled up or divided, times padding along the rest.

    Rows by the prior of the cost model, where a call's fixed part weighs as much as one average request; padding for
    sizes spread evenly, by their logarithm, over the middle half of what the bounds admit.
    """
    per_dimension = others ** (1 / len(spreads))
    padding = 1.0
    for spread in spreads:
        factor = spread ** (0.5 / max(1.0, per_dimension))
        padding *= 1.0 if factor < 1.0001 else (factor - 1) / log(factor)
    return _row_loss(rows) * padding


def _row_loss(rows: tuple[int, ...]) -> float:
    """The mean over the numbers of rows that a batch may have, small ones counting more, as there are more of them."""
    most = min(rows[-1], _LARGEST_TRIED)
    least = [0.0]
    for target in range(1, most + 1):
        least.append(min([1 + size + least[max(0, target - size)] for size in rows]))
    weights = [1 / target for target in range(1, most + 1)]
    losses = [weight * least[place] / (1 + place) for place, weight in enumerate(weights, 1)]
    return sum(losses) / sum(weights)

"""Chooses the call shapes that a calibration measures: a coarse grid, then finer points, small calls first.

A call costs a fixed part plus a part per element, so sizes have equal ratios. A grid has every combination of sizes;
beyond a few dimensions, all sizes grow together along one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod

from shapestream_engine.cost_table import MAX_ELEMENTS
from shapestream_engine.element_types import dtype_of
from shapestream_engine.shapes import Dimension
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import nbytes_of

Sizes = tuple[int, ...]

DEFAULT_MAX_BATCH = 64
"""Rows per call if neither the caller nor the model bounds them."""
FIRST = 8
"""Start of a ladder's geometric part; below, the fixed part is nearly the whole cost."""
COARSE = 4
"""Ratio of neighbours in the coarse grid, or its root; finer points lie halfway between."""
UNBOUNDED = 1 << 14
"""Largest size of a ladder if the model states no bound; time and bytes usually end it earlier."""
MOST_POINTS = 64
"""Largest number of points, without static shapes; each shape keeps engine memory before serving begins."""
MOST_ALLOWED = 1024
"""Largest number of combinations of a strategy's sizes; each may run in service, so more are worth measuring."""
MOST_GRID_DIMENSIONS = 4
"""Largest number of grid dimensions beside the rows. Three sizes of each of five dimensions would be 243 points per
number of rows."""
MOST_NBYTES = 64 << 20
"""Largest size of a call's inputs in bytes; the engine would keep the memory of a larger call."""


def most_rows(signature: ModelSignature, max_batch: int | None) -> int:
    """Return the rows of the largest call to measure; 1 without a batch axis."""
    if not signature.has_batch:
        return 1
    allowed = signature.strategy.sizes.get(signature.dimensions[0])
    bound = signature.bounds[0].maximum
    wanted = max_batch or (allowed[-1] if allowed else bound or DEFAULT_MAX_BATCH)
    return wanted if bound is None else min(wanted, bound)


def stages(signature: ModelSignature, max_batch: int | None) -> list[list[Sizes]]:
    """Return two lists of call shapes, ascending by elements: static shapes with the coarse grid, then the points between.

    If a strategy allows certain sizes only, they are the grid. Under a cap on shapes only a few are measured, because
    engines never free their memory.
    """
    static = [sizes for sizes in signature.static_sizes if prod(sizes) <= MAX_ELEMENTS]
    allowed = signature.allowed
    coarse = _coarse(signature, allowed, max_batch)
    fine = [own if sizes is not None else _halfway(own) for own, sizes in zip(coarse, allowed, strict=True)]
    first = _affordable(signature, _points(signature, coarse), ())
    second = _affordable(signature, _points(signature, fine), first)[: max(0, MOST_POINTS - len(first))]
    most = signature.strategy.calibration_shapes
    if most is not None:
        first, second = first[:: -(-len(first) // most)] if first and most else [], []
    return [list(dict.fromkeys([*sorted(static, key=prod), *first])), second]


def _coarse(
    signature: ModelSignature, allowed: Sequence[Sizes | None], max_batch: int | None
) -> list[list[int]]:
    """Choose the coarse grid's sizes of each dimension, few enough to list their combinations."""
    factor = COARSE
    axes = list(_axes(signature, allowed, max_batch, factor))
    while _number(signature, axes) > MOST_POINTS and factor < UNBOUNDED:
        factor *= COARSE
        axes = list(_axes(signature, allowed, max_batch, factor))
    most = MOST_POINTS if all(sizes is None for sizes in allowed) else MOST_ALLOWED
    while _number(signature, axes) > most:
        longest = max(range(len(axes)), key=lambda number: len(axes[number]))
        axes[longest] = sorted({*axes[longest][::2], axes[longest][-1]})
    return axes


def _number(signature: ModelSignature, axes: Sequence[Sequence[int]]) -> int:
    rows, others = _parted(signature, axes)
    return len(rows) * (max(map(len, others)) if _is_line(others) else prod(map(len, others)))


def _points(signature: ModelSignature, axes: Sequence[Sequence[int]]) -> Iterator[Sizes]:
    """Yield every combination of sizes; with many dimensions, the combinations at equal positions of all axes."""
    rows, others = _parted(signature, axes)
    if not _is_line(others):
        yield from product(*axes)
        return
    steps = max(map(len, others))
    line = [
        tuple(axis[step * (len(axis) - 1) // max(1, steps - 1)] for axis in others) for step in range(steps)
    ]
    for count, sizes in product(rows, dict.fromkeys(line)):
        yield (count, *sizes) if signature.has_batch else sizes


def _parted(
    signature: ModelSignature, axes: Sequence[Sequence[int]]
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """Return the numbers of rows, and the sizes of each other dimension."""
    return (axes[0], axes[1:]) if signature.has_batch else ((1,), axes)


def _is_line(others: Sequence[Sequence[int]]) -> bool:
    return len(others) > MOST_GRID_DIMENSIONS


def _axes(
    signature: ModelSignature, allowed: Sequence[Sizes | None], max_batch: int | None, factor: int
) -> Iterator[list[int]]:
    """Yield the coarse grid's sizes of each dimension."""
    for number, (bounds, sizes) in enumerate(zip(signature.bounds, allowed, strict=True)):
        if sizes is not None:
            yield list(sizes)
        elif signature.has_batch and number == 0:
            yield _ladder(bounds, first=1, last=most_rows(signature, max_batch), factor=factor)
        elif number in signature.table.strings:
            # The bound of strings is a limit against abuse, not a length that is usual.
            yield _ladder(
                bounds, first=FIRST, last=min(bounds.maximum or UNBOUNDED, UNBOUNDED), factor=factor
            )
        else:
            yield _ladder(bounds, first=FIRST, last=bounds.maximum or UNBOUNDED, factor=factor)


def call_nbytes(signature: ModelSignature, sizes: Sizes) -> int:
    """Return the size in bytes of all inputs of a call."""
    shapes = zip(signature.inputs, signature.sent_shapes(sizes), strict=True)
    return sum(
        nbytes_of(shape) if port.is_string else prod(shape) * dtype_of(port.element_type).itemsize
        for port, shape in shapes
    )


def _affordable(signature: ModelSignature, shapes: Iterable[Sizes], known: Sequence[Sizes]) -> list[Sizes]:
    taken = set(known)
    within = [
        sizes
        for sizes in shapes
        if sizes not in taken and prod(sizes) <= MAX_ELEMENTS and call_nbytes(signature, sizes) <= MOST_NBYTES
    ]
    return sorted(within, key=prod)


def _ladder(bounds: Dimension, *, first: int, last: int, factor: int) -> list[int]:
    """Return the smallest size, then `first` times powers of `factor`, then the largest."""
    smallest = max(1, bounds.minimum)
    sizes = [smallest]
    size = first
    while size < last:
        if size > smallest:
            sizes.append(size)
        size *= factor
    if len(sizes) > 1 and last < 1.5 * sizes[-1]:
        sizes.pop()  # too near to the end
    return list(dict.fromkeys([*sizes, max(smallest, last)]))


def _halfway(sizes: Sequence[int]) -> list[int]:
    """Add the geometric mean of each pair of neighbours."""
    between = [round((low * high) ** 0.5) for low, high in pairwise(sizes)]
    return sorted({*sizes, *between})

"""The start of a proof: inputs and sizes on which the model, alone, gives results that would show a difference.

Inputs without a description are tried by element type, sizes by the usual ladders; the first combination under which
every output tells something is taken, else the one under which most do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shapestream_engine.ports import Shared
from shapestream_engine.probing.bench import Bench
from shapestream_engine.probing.inputs import Samples, Values, default_values, spell_sizes
from shapestream_engine.probing.pool import Pool
from shapestream_engine.probing.tolerances import ENOUGH_ROWS, OutputTolerance, coarser
from shapestream_engine.shapes import Dimension
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

_LADDERS = (
    (3, 5, 8, 17, 33),
    (24, 40, 64, 96, 128),
    (32, 64, 96, 128, 160),
    (224, 256, 320, 288, 192),
    (1, 2, 4, 6, 7),
)
_SETS = 3
"""Sets of sizes per ladder that the baseline is tried on."""
_SAMPLES = 3
"""Requests per set of sizes."""
_MOST_STARTS = 14
_MOST_ELEMENTS = 1 << 22
"""Elements of all inputs of one request together."""


@dataclass(frozen=True, slots=True)
class Start:
    """One combination to try: which of the default values, and what sizes."""

    values: Mapping[str, Values]
    sizes: tuple[tuple[int, ...], ...]
    """One request's sizes each, with the fewest rows that the model takes."""
    ladder: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Baseline:
    """The requests, their results alone, and the tolerances that every case is compared by."""

    pool: Pool
    sizes: list[tuple[int, ...]]
    """Sets of sizes that the model took."""
    ladder: tuple[int, ...]
    blank: dict[int, str]
    """Outputs that tell nothing here, and why."""
    tolerances: list[OutputTolerance]

    def look_again(self, signature: ModelSignature) -> None:
        """Try all contents on outputs that tell nothing: a threshold may lie where no typical request comes near."""
        for sizes in self.sizes:
            if not self.blank:
                return
            for number in range(self.pool.contents):
                self.pool.content(sizes, number)
            found = {each: blank_reason(self.pool, signature, each, contents=True) for each in self.blank}
            self.blank = {output: why for output, why in found.items() if why}

    def is_discrete(self, signature: ModelSignature, output: int) -> bool:
        """Tell whether an output has whole values only, so that few requests of many show that its threshold has moved."""
        if isinstance(signature.outputs[output].rule, Shared):
            return False
        if self.tolerances[output].tolerance is None:
            return True
        # Whole floats that lie closer than what counts as equal are like any numbers.
        floats = [r.astype(np.float64) for _, r in self.pool.all_results(output) if r.size]
        return all(
            bool((r == np.rint(r)).all() and np.all(self.tolerances[output].allowed(r) < 1)) for r in floats
        )


def find_baseline(
    bench: Bench, given: Mapping[str, Values], *, seed: int, computed_in: str | None, skip: frozenset[str]
) -> tuple[Baseline | None, str]:
    """The best start, or None with the model's complaint. `skip`: phases that have ended a process before."""
    best: Baseline | None = None
    complaint = ""
    for turn, start in enumerate(starts(bench.signature, given)):
        bench.phase = f"alone/{turn}"
        if bench.phase in skip:
            continue
        pool = Pool(
            bench,
            start.values,
            declared=frozenset(given),
            seed=seed,
            computed_in=computed_in,
            skip=skip,
        )
        taken = [
            sizes
            for sizes in start.sizes
            if all(pool.typical(sizes, number) is not None for number in range(_SAMPLES))
        ]
        complaint = complaint or pool.complaint
        if not taken:
            continue
        found = _baseline(bench, pool, taken, start.ladder, computed_in)
        if best is None or len(found.blank) < len(best.blank):
            best = found
        if not found.blank:
            break
    return best, complaint


def starts(signature: ModelSignature, given: Mapping[str, Values]) -> Iterator[Start]:
    """Every combination worth trying, likely ones first."""
    defaults = {port.name: default_values(port.element_type) for port in signature.inputs}
    variants = max((len(values) for name, values in defaults.items() if name not in given), default=1)
    seen: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
    for variant in range(variants):
        values = {
            name: given.get(name, known[min(variant, len(known) - 1)]) for name, known in defaults.items()
        }
        own = _sizes_of_samples(signature, given)
        for ladder in _LADDERS:
            for tied in (False, True):
                sizes = own or tuple(dict.fromkeys(_size_sets(signature, ladder, tied=tied)))
                own = ()
                if sizes and (variant, sizes) not in seen and len(seen) < _MOST_STARTS:
                    seen.append((variant, sizes))
                    yield Start(values, sizes, ladder)


def rungs(bounds: Dimension, ladder: Sequence[int]) -> list[int]:
    """The ladder's sizes within the bounds; the smallest ones that there are where it has fewer than two."""
    within = [size for size in ladder if size in bounds]
    if len(within) >= 2:
        return within
    first = max(1, bounds.minimum)
    return list(dict.fromkeys(within + [size for size in (first, first + 1, first + 4) if size in bounds]))


def is_affordable(signature: ModelSignature, sizes: tuple[int, ...]) -> bool:
    """Tell whether one request of these sizes is small enough to be tried many times."""
    return sum(int(np.prod(shape)) for shape in signature.input_shapes(sizes)) <= _MOST_ELEMENTS


def _size_sets(signature: ModelSignature, ladder: Sequence[int], *, tied: bool) -> Iterator[tuple[int, ...]]:
    free = [
        (number, rungs(bounds, ladder))
        for number, bounds in enumerate(signature.bounds)
        if not (signature.has_batch and number == 0)
    ]
    if any(not known for _, known in free):
        return
    for turn in range(_SETS):
        sizes = [max(1, bounds.minimum) for bounds in signature.bounds]
        for place, (number, known) in enumerate(free):
            sizes[number] = known[(turn if tied else turn + place) % len(known)]
        if is_affordable(signature, tuple(sizes)):
            yield tuple(sizes)


def _sizes_of_samples(signature: ModelSignature, given: Mapping[str, Values]) -> tuple[tuple[int, ...], ...]:
    """The sizes that real inputs have, if there are any: the first few, with the fewest rows."""
    sets = []
    for row in range(_SETS):
        sizes = [max(1, bounds.minimum) for bounds in signature.bounds]
        for port, axes in zip(signature.inputs, signature.table.axes, strict=True):
            values = given.get(port.name)
            if not isinstance(values, Samples):
                continue
            shape = values.rows[row % len(values.rows)].shape
            for axis, number in enumerate(axes[: len(shape)]):
                if number is not None and axis != values.batch_axis:
                    sizes[number] = shape[axis]
        within = all(size in bounds for size, bounds in zip(sizes, signature.bounds, strict=True))
        if within and is_affordable(signature, tuple(sizes)):
            sets.append(tuple(sizes))
    has_samples = any(isinstance(values, Samples) for values in given.values())
    return tuple(dict.fromkeys(sets)) if has_samples else ()


def _baseline(
    bench: Bench, pool: Pool, taken: list[tuple[int, ...]], ladder: tuple[int, ...], computed_in: str | None
) -> Baseline:
    # Enough of them that each index of an output shows how much it differs by itself.
    for number in range(_SAMPLES, -(-ENOUGH_ROWS // len(taken))):
        for sizes in taken:
            pool.typical(sizes, number)
    blank: dict[int, str] = {}
    tolerances = []
    for number, port in enumerate(bench.signature.outputs):
        results = [result for _, result in pool.all_results(number)]
        tolerances.append(OutputTolerance.of(coarser(port.element_type, computed_in), results))
        if why := blank_reason(pool, bench.signature, number):
            blank[number] = why
    return Baseline(pool, taken, ladder, blank, tolerances)


def tells(result: Array) -> bool:
    """Tell whether a result has elements that a neighbour or padding could change visibly: infinities are none."""
    return bool(result.size) and (
        result.dtype.kind in "iub" or bool(np.isfinite(result.astype(np.float64)).any())
    )


def blank_reason(pool: Pool, signature: ModelSignature, output: int, *, contents: bool = False) -> str:
    """The reason why the results of different inputs tell nothing; empty if they tell something."""
    results = pool.all_results(output, contents=contents)
    if not any(result.size for _, result in results):
        return f"it was empty in all of {len(results)} results"
    telling = [(sizes, result) for sizes, result in results if tells(result)]
    if not telling:
        return f"it was not finite in any of {len(results)} results"
    if isinstance(signature.outputs[output].rule, Shared):
        return ""
    first: dict[tuple[int, ...], Array] = {}
    for sizes, result in telling:
        if not _equal(first.setdefault(sizes, result), result):
            return ""
    return f"it never changed over {len(telling)} different requests"


def spelled(signature: ModelSignature, sizes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """The sets of sizes in words."""
    return tuple(spell_sizes(signature.dimensions, each) for each in sizes)


def _equal(one: Array, other: Array) -> bool:
    if one.dtype.kind in "iub":
        return np.array_equal(one, other)
    return np.array_equal(one.astype(np.float64), other.astype(np.float64), equal_nan=True)

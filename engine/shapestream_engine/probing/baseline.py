"""The baseline of a proof: requests that ran alone, and sizes and values on which a difference would show.

Inputs without a description are tried by element type, and sizes by the ladders below. The first combination wins under
which every output can show a difference; otherwise the one with the most such outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shapestream_engine.arrays import sent_array
from shapestream_engine.output_rules import Shared
from shapestream_engine.probing.inputs import Samples, Values, default_values, given_texts
from shapestream_engine.probing.model_calls import DirectCalls
from shapestream_engine.probing.probe_requests import ProbeRequests
from shapestream_engine.probing.tolerances import ENOUGH_ROWS, OutputTolerance, coarser, distances
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
"""Sets of sizes per ladder."""
_SAMPLES = 3
"""Requests per set of sizes."""
_MOST_STARTS = 14
_MOST_ELEMENTS = 1 << 22
"""Largest number of elements of one request, over all inputs; of strings the bytes."""


@dataclass(frozen=True, slots=True)
class Start:
    """One combination to try: values per input, and sets of sizes."""

    values: Mapping[str, Values]
    sizes: tuple[tuple[int, ...], ...]
    """Each entry has the sizes of one request, with the fewest rows that the model takes."""
    ladder: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Baseline:
    """The requests of a proof with their results alone, and the tolerance of each output."""

    requests: ProbeRequests
    sizes: list[tuple[int, ...]]
    """Sets of sizes that the model took."""
    ladder: tuple[int, ...]
    blank: dict[int, str]
    """Numbers of the outputs that can show no difference, with the reason of each."""
    tolerances: list[OutputTolerance]
    phase: str = ""
    """Phase in which its requests ran; a child that ends in the phase makes the next one skip this baseline."""

    @property
    def signature(self) -> ModelSignature:
        """The signature that the requests are made for."""
        return self.requests.signature

    def look_again(self) -> None:
        """Run all contents for outputs that never changed: a threshold may lie far from every typical request."""
        for sizes in self.sizes:
            if not self.blank:
                return
            for number in range(self.requests.contents):
                self.requests.content(sizes, number)
            found = {each: blank_reason(self.requests, each, contents=True) for each in self.blank}
            self.blank = {output: why for output, why in found.items() if why}

    def is_discrete(self, output: int) -> bool:
        """Tell whether all values of an output are whole: then only requests near a threshold show that it moved."""
        if isinstance(self.signature.outputs[output].rule, Shared):
            return False
        if self.signature.outputs[output].is_string or self.tolerances[output].tolerance is None:
            return True
        # Whole floats within one tolerance of each other are treated as ordinary floats.
        floats = [r.astype(np.float64) for _, r in self.requests.all_results(output) if r.size]
        return all(
            bool((r == np.rint(r)).all() and np.all(self.tolerances[output].allowed(r) < 1)) for r in floats
        )


def find_baseline(
    calls: DirectCalls,
    given: Mapping[str, Values],
    *,
    seed: int,
    computed_in: str | None,
    skip: frozenset[str],
    variant: int = 0,
) -> tuple[Baseline | None, str]:
    """Return the best baseline, or None, and the model's first error. `skip`: phases that ended an earlier child.

    All its requests have the same common inputs, those of this `variant`.
    """
    best: Baseline | None = None
    complaint = ""
    for turn, start in enumerate(starts(calls.signature, given)):
        phase = f"alone/{turn}" if not variant else f"alone with other common inputs/{variant}/{turn}"
        if phase in skip:
            continue
        requests = ProbeRequests(
            calls,
            start.values,
            declared=frozenset(given),
            seed=seed,
            computed_in=computed_in,
            skip=skip,
            variant=variant,
        )
        with calls.phase(phase):
            taken = [
                sizes
                for sizes in start.sizes
                if all(requests.typical(sizes, number) is not None for number in range(_SAMPLES))
            ]
            complaint = complaint or requests.complaint
            if not taken:
                continue
            found = _baseline(requests, taken, start.ladder, computed_in)
        found.phase = phase
        if best is None or len(found.blank) < len(best.blank):
            best = found
        if not found.blank:
            break
    return best, complaint


def starts(signature: ModelSignature, given: Mapping[str, Values]) -> Iterator[Start]:
    """Yield the combinations of values and sizes to try, the most likely first."""
    defaults = {port.name: default_values(signature, port) for port in signature.inputs}
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
    """Return the ladder's sizes within the bounds; if there are fewer than two, the smallest sizes are added."""
    within = [size for size in ladder if size in bounds]
    if len(within) >= 2:
        return within
    first = max(1, bounds.minimum)
    return list(dict.fromkeys(within + [size for size in (first, first + 1, first + 4) if size in bounds]))


def is_affordable(signature: ModelSignature, sizes: tuple[int, ...]) -> bool:
    """Tell whether a request of these sizes is small enough to run many times."""
    shapes = zip(signature.inputs, signature.sent_shapes(sizes), strict=True)
    return sum(shape[-1] if port.is_string else prod(shape) for port, shape in shapes) <= _MOST_ELEMENTS


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
    """Return the sizes of the real inputs, up to `_SETS` sets with the fewest rows; empty without real inputs."""
    sets = []
    for row in range(_SETS):
        sizes = [max(1, bounds.minimum) for bounds in signature.bounds]
        table = signature.table
        for port, axes, strings in zip(signature.inputs, table.axes, table.strings, strict=True):
            values = given.get(port.name)
            if not isinstance(values, Samples):
                continue
            shape = values.rows[row % len(values.rows)].shape
            for axis, number in enumerate(axes[: len(shape)]):
                if number is not None and axis != values.batch_axis:
                    sizes[number] = shape[axis]
            if strings is not None:
                texts = given_texts(port.element_type, values.rows[row % len(values.rows)], None)
                (*_, nbytes), _ = sent_array(port.element_type, texts)
                sizes[strings] = max(1, -(-nbytes // texts.size))
        within = all(size in bounds for size, bounds in zip(sizes, signature.bounds, strict=True))
        if within and is_affordable(signature, tuple(sizes)):
            sets.append(tuple(sizes))
    has_samples = any(isinstance(values, Samples) for values in given.values())
    return tuple(dict.fromkeys(sets)) if has_samples else ()


def _baseline(
    requests: ProbeRequests, taken: list[tuple[int, ...]], ladder: tuple[int, ...], computed_in: str | None
) -> Baseline:
    # Enough requests that each index of an output has a standard deviation.
    for number in range(_SAMPLES, -(-ENOUGH_ROWS // len(taken))):
        for sizes in taken:
            requests.typical(sizes, number)
    blank: dict[int, str] = {}
    tolerances = []
    for number, port in enumerate(requests.signature.outputs):
        results = [result for _, result in requests.all_results(number)]
        tolerances.append(OutputTolerance.of(coarser(port.element_type, computed_in), results))
        if why := blank_reason(requests, number):
            blank[number] = why
    return Baseline(requests, taken, ladder, blank, tolerances)


def tells(result: Array) -> bool:
    """Tell whether a result has elements in which a neighbour or padding could show: finite or whole ones."""
    return bool(result.size) and (
        result.dtype.kind in "iubO" or bool(np.isfinite(result.astype(np.float64)).any())
    )


def blank_reason(requests: ProbeRequests, output: int, *, contents: bool = False) -> str:
    """Return the reason why an output cannot show a difference; empty if it can."""
    results = requests.all_results(output, contents=contents)
    if not any(result.size for _, result in results):
        return f"it was empty in all of {len(results)} results"
    telling = [(sizes, result) for sizes, result in results if tells(result)]
    if not telling:
        return f"it was not finite in any of {len(results)} results"
    if isinstance(requests.signature.outputs[output].rule, Shared):
        return ""
    first: dict[tuple[int, ...], Array] = {}
    for sizes, result in telling:
        # Strings of other lengths are other values, not another shape.
        shape = requests.signature.shape_of_tensors(sizes)
        other = first.setdefault(shape, result)
        if other.shape != result.shape or distances(other, result).any():
            return ""
    return f"it never changed over {len(telling)} different requests"

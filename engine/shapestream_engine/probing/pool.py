"""The requests of a proof, each run alone once: typical ones, many contents, hostile neighbours, and near thresholds.

An output of few values (a truth value, a class, a position) hardly ever shows that padding moved its threshold. So the
way between two requests whose results differ is halved, towards the greater change, until two requests that are nearly
equal still differ: whatever shifts the threshold by more than that changes one of them. No kind of output needs another
search, and a float that jumps is found the same way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from time import monotonic
from typing import Any

import numpy as np

from shapestream_engine.errors import EngineError, RuleError
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.bench import Bench, Sample, Service, arrays_of
from shapestream_engine.probing.contents import MOST_ID, content_request, domains, has_ids, recipes
from shapestream_engine.probing.inputs import (
    Extreme,
    Values,
    extreme_request,
    filled,
    held,
    make_request,
    spell_sizes,
)
from shapestream_engine.probing.tolerances import Moments, OutputTolerance, Tolerance, coarser, compare
from shapestream_engine.tensor import Array

_HALVINGS = 24
"""Halvings of a way, at most: from a thousand to a thousandth of a tenth."""
_NUDGES = 3
"""Ways in which rounding is imitated."""
_MOST_NBYTES = 256 << 20
"""Bytes of the contents that are kept; beyond them there are no more."""


class Pool:
    """Samples by sizes. One that the model refuses alone is None: it would be no fair neighbour.

    `declared` are the inputs whose values a user has described. `skip`: phases that have ended a process before.
    """

    def __init__(
        self,
        bench: Bench | Service,
        values: Mapping[str, Values],
        *,
        declared: frozenset[str],
        seed: int,
        computed_in: str | None,
        skip: frozenset[str],
    ) -> None:
        self._bench = bench
        self.values = dict(values)
        self.declared = declared
        self._seed = seed
        self._computed_in = computed_in
        self._skip = skip
        self._know(largest_ids={})
        self._made: dict[tuple[Any, ...], Sample | None] = {}
        self._known: dict[tuple[Any, ...], Sample | None] = {}
        """Contents by layout and bytes."""
        self._alike: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
        """Contents by magnitude."""
        self._largest: defaultdict[tuple[int, int], float] = defaultdict(float)
        """Their largest input."""
        self._moments: dict[tuple[Sample, int], Moments] = {}
        self._tolerances: dict[tuple[Any, ...], OutputTolerance] = {}
        self._kept_nbytes = 0
        self.ends_at = math.inf
        """Time from which on no further contents are made, nor requests near thresholds."""
        self._near: dict[tuple[Any, ...], tuple[Sample, ...]] = {}
        self.complaint = ""
        """The error of the last sample that failed."""
        self.misfit = ""
        """The error of an ordinary request whose outputs broke a rule although it was alone."""

    def look_for_ids(self, sizes: tuple[int, ...]) -> None:
        """Let contents have all ids that the model takes alone: embeddings jump, so each may lie near a threshold."""
        known = {
            port.name: self._largest_id(number, sizes)
            for number, port in enumerate(self._bench.signature.inputs)
            if has_ids(port, self.declared)
        }
        self._know(largest_ids=known)

    def tried(self, number: int) -> str:
        """The values of an input in words, and the range of the contents that the model took, where that is wider."""
        values = self.values[self._bench.signature.inputs[number].name]
        found = [
            array
            for sample in self._known.values()
            if sample is not None
            for (index, *_), array in zip(sample.tensors.layout, arrays_of(sample.tensors), strict=True)
            if index == number and array.size
        ]
        low, high = values.range()
        least = min((float(array.min()) for array in found), default=low)
        most = max((float(array.max()) for array in found), default=high)
        return str(values) + (f", contents {least:.4g}..{most:.4g}" if least < low or most > high else "")

    @property
    def contents(self) -> int:
        """Requests of one size: one of each recipe. As many again mix the recipes of several inputs, or any ids."""
        mixes = len(self._domains) > 1 or any(domain.is_whole for domain in self._domains.values())
        return len(self._recipes) * (1 + mixes)

    def typical(self, sizes: tuple[int, ...], number: int) -> Sample | None:
        """An ordinary request; each `number` is another one."""
        key = (sizes, number)
        if key not in self._made:
            signature = self._bench.signature
            tensors = make_request(signature, self.values, sizes, number=number, seed=self._seed)
            self._made[key] = self._alone(tensors, f"inputs no. {number}", ordinary=True)
        return self._made[key]

    def extreme(self, sizes: tuple[int, ...], kind: Extreme) -> Sample | None:
        """A request whose inputs are all at one end; None too where no input knows that kind."""
        key = (sizes, kind)
        if key not in self._made:
            tensors = extreme_request(self._bench.signature, self.values, sizes, kind)
            self._made[key] = None if tensors is None else self._made_up(tensors, f"{kind} values", kind)
        return self._made[key]

    def content(self, sizes: tuple[int, ...], number: int) -> Sample | None:
        """A request of the kind of that number; beyond `contents`, of random kinds. Equal requests are one."""
        key = (sizes, "content", number)
        if key not in self._made:
            if self._kept_nbytes > _MOST_NBYTES or monotonic() > self.ends_at:
                return None
            tensors, recipe = content_request(
                self._bench.signature,
                self.values,
                self._domains,
                self._recipes,
                sizes,
                number=number,
                seed=self._seed,
            )
            known = (tensors.layout, *tensors.buffers)
            if known not in self._known:
                words = "random contents" if recipe is None else str(recipe)
                self._known[known] = sample = self._made_up(tensors, words, "contents")
                if sample is not None and recipe is not None:
                    sample.magnitude = recipe.magnitude
                    self._alike[recipe.magnitude].append(sample)
                    self._largest[recipe.magnitude] = max(self._largest[recipe.magnitude], _largest(sample))
                self._kept_nbytes += sum(len(buffer) for buffer in tensors.buffers)
            self._made[key] = self._known[known]
        return self._made[key]

    def near(
        self, sizes: tuple[int, ...], output: int, tolerance: OutputTolerance, number: int
    ) -> tuple[Sample, ...]:
        """Two nearly equal requests between which that output changes most; each `number` is another way to find them.

        None where no two of the requests of these sizes that were made so far differ in it.
        """
        key = (sizes, output, number)
        if key not in self._near:
            if monotonic() > self.ends_at:
                return ()
            ends = self._differing(sizes, output, tolerance, number)
            self._near[key] = () if ends is None else self._halved(*ends, output, tolerance)
        return self._near[key]

    def hangs_on_rounding(
        self, sample: Sample, output: int, tolerance: OutputTolerance, excess: float
    ) -> bool:
        """Tell whether a change of the inputs as small as rounding moves that output about as far: a tie, or a cancellation.

        `excess` is how far it was moved. As far: a part of that, as rounding is of what counts as near.
        """
        assert sample.results is not None
        parts = [part for _, kind, _ in sample.tensors.layout if (part := self._part(kind)) is not None]
        if not parts:
            return False
        ample = min(part.of_spread / part.of_magnitude for part in parts)
        for number in range(_NUDGES):
            other = self._made_up(self._nudged(sample.tensors, number), "rounded otherwise", "contents")
            if other is None or other.results is None:
                return True
            if compare(sample.results[output], other.results[output], tolerance).excess * ample >= excess:
                return True
        return False

    def tolerance_of(self, sample: Sample, output: int, tolerance: OutputTolerance) -> OutputTolerance:
        """The tolerance of one request: its spread is at most that over the requests of its magnitude.

        Otherwise numbers up to a million would excuse any answer to numbers below ten.
        """
        if sample.magnitude is None or tolerance.tolerance is None:
            return tolerance
        alike = self._alike[sample.magnitude]
        key = (sample.magnitude, output, len(alike))
        if key not in self._tolerances:
            moments = [self._moments_of(each, output, tolerance) for each in alike]
            self._tolerances[key] = tolerance.narrowed(moments, self._largest[sample.magnitude])
        return self._tolerances[key]

    def all_results(self, output: int, *, contents: bool = False) -> list[tuple[tuple[int, ...], Array]]:
        """The results of ordinary requests alone, with the sizes of each; `contents`: of those as well."""
        return [
            (sample.sizes, sample.results[output])
            for key, sample in self._made.items()
            if sample is not None
            and sample.results is not None
            and (isinstance(key[1], int) or (contents and key[1] == "content"))
        ]

    def _know(self, largest_ids: Mapping[str, int]) -> None:
        self._domains = domains(self._bench.signature, self.values, self.declared, largest_ids)
        self._recipes = recipes(self._domains)

    def _moments_of(self, sample: Sample, output: int, tolerance: OutputTolerance) -> Moments:
        key = (sample, output)
        if key not in self._moments:
            assert sample.results is not None
            self._moments[key] = tolerance.moments(sample.results[output])
        return self._moments[key]

    def _largest_id(self, number: int, sizes: tuple[int, ...]) -> int:
        """The largest id that the model takes, in that input alone, between the ordinary ones and `MOST_ID`."""
        signature = self._bench.signature
        port, shape = signature.inputs[number], signature.input_shapes(sizes)[number]
        usual = make_request(signature, self.values, sizes, seed=self._seed)
        least, refused = int(self.values[port.name].range()[1]), MOST_ID + 1
        tried = MOST_ID
        while refused - least > 1 and monotonic() <= self.ends_at:
            own = filled(tried, port.element_type, shape).tobytes()
            buffers = [
                own if index == number else buffer
                for (index, *_), buffer in zip(usual.layout, usual.buffers, strict=True)
            ]
            tensors = Tensors(layout=usual.layout, buffers=buffers)
            if self._made_up(tensors, f"ids of {tried}", "ids") is None:
                refused = tried
            else:
                least = tried
            tried = (least + refused) // 2
        return least

    def _differing(
        self, sizes: tuple[int, ...], output: int, tolerance: OutputTolerance, number: int
    ) -> tuple[Sample, Sample] | None:
        found = [
            sample
            for key, sample in self._made.items()
            if key[0] == sizes
            and isinstance(key[-1], int)
            and sample is not None
            and sample.results is not None
        ]
        random = np.random.default_rng([self._seed, number, output, *sizes])
        order = random.permutation(len(found))
        for place, first in enumerate(order):
            for second in order[:place]:
                one, other = found[int(second)], found[int(first)]
                if one.tensors.layout == other.tensors.layout and (_apart(one, other, output, tolerance) > 1):
                    return one, other
        return None

    def _halved(
        self, one: Sample, other: Sample, output: int, tolerance: OutputTolerance
    ) -> tuple[Sample, ...]:
        low, high = 0.0, 1.0
        start, end = one.tensors, other.tensors
        for _ in range(_HALVINGS):
            if self._is_near(one.tensors, other.tensors):
                break
            if monotonic() > self.ends_at:
                return ()
            middle = (low + high) / 2
            tensors = _between(start, end, middle)
            if _same(tensors, one.tensors) or _same(tensors, other.tensors):
                break
            between = self._made_up(tensors, "near a threshold", "contents")
            if between is None:
                return ()
            if _apart(one, between, output, tolerance) >= _apart(between, other, output, tolerance):
                other, high = between, middle
            else:
                one, low = between, middle
        if _apart(one, other, output, tolerance) > 1:
            for sample in (one, other):
                sample.near |= {output}
        return one, other

    def _part(self, element_type: str) -> Tolerance | None:
        """Parts of a float that count as near and as rounding; None for whole numbers. Engines may compute f64 in f32."""
        return coarser("f32" if element_type == "f64" else element_type, self._computed_in)

    def _is_near(self, one: Tensors, other: Tensors) -> bool:
        for (_, element_type, _), first, second in zip(
            one.layout, arrays_of(one), arrays_of(other), strict=True
        ):
            part = self._part(element_type)
            if part is None and not np.array_equal(first, second):
                return False
            if part is not None and first.size:
                floats = first.astype(np.float64)
                if np.abs(floats - second.astype(np.float64)).max() > part.of_spread * np.abs(floats).max():
                    return False
        return True

    def _nudged(self, tensors: Tensors, number: int) -> Tensors:
        """The request with its floats changed as rounding would."""
        random = np.random.default_rng([number, 2])
        changed = []
        for (port, element_type, _), array in zip(tensors.layout, arrays_of(tensors), strict=True):
            part = self._part(element_type)
            if part is not None and array.size:
                floats = array.astype(np.float64)
                # The model's own numbers are made for ordinary values, and round like those.
                ordinary = self.values[self._bench.signature.inputs[port].name].range()
                largest = max(float(np.abs(floats).max()), *map(abs, ordinary))
                changes = part.of_magnitude * largest * random.uniform(-1, 1, array.shape)
                array = held(floats + changes, array.dtype)
            changed.append(array)
        return Tensors(layout=tensors.layout, buffers=[array.tobytes() for array in changed])

    def _made_up(self, tensors: Tensors, words: str, kind: str) -> Sample | None:
        """A request as no user may send it: a model that crashes on it alone is another matter than one whose batches do."""
        phase = f"neighbours/{kind}"
        if phase in self._skip:
            return None
        before, self._bench.phase = self._bench.phase, phase
        sample = self._alone(tensors, words)
        self._bench.phase = before
        return sample

    def _alone(self, tensors: Tensors, words: str, *, ordinary: bool = False) -> Sample | None:
        try:
            # Larger than any size that the strategy runs it at, it is refused here.
            sample = Sample(tensors, self._bench.signature.resolve(tensors.layout), words)
            sample.words = f"{spell_sizes(self._bench.signature.dimensions, sample.sizes)}, {words}"
            (sample.results,) = self._bench.run(sample.sizes, [sample], f"alone: {sample.words}")
        except (EngineError, RuntimeError) as error:
            self.complaint = str(error)
            if ordinary and isinstance(error, RuleError):
                self.misfit = self.misfit or f"{words}: {error}"
            return None
        return sample


def _largest(sample: Sample) -> float:
    return max(
        float(np.abs(array.astype(np.float64)).max(initial=0.0)) for array in arrays_of(sample.tensors)
    )


def _apart(one: Sample, other: Sample, output: int, tolerance: OutputTolerance) -> float:
    assert one.results is not None
    assert other.results is not None
    first, second = one.results[output], other.results[output]
    return 0.0 if same_bits(first, second) else compare(first, second, tolerance).excess


def same_bits(one: Array, other: Array) -> bool:
    """Tell whether two results are equal to the bit, which most are: comparing them takes twenty times as long."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _between(one: Tensors, other: Tensors, share: float) -> Tensors:
    """A request on the way from one to another of the same layout: floats all together, whole numbers one by one."""
    mixed = []
    for number, (first, second) in enumerate(zip(arrays_of(one), arrays_of(other), strict=True)):
        start = first.astype(np.float64)
        way = start + (second.astype(np.float64) - start) * share
        if first.dtype.kind in "biu":
            # Each at its own point of the way, so that neighbours on it differ in one number.
            way = np.floor(way + np.random.default_rng(number).random(first.shape))
        mixed.append(held(way, first.dtype))
    return Tensors(layout=one.layout, buffers=[array.tobytes() for array in mixed])


def _same(one: Tensors, other: Tensors) -> bool:
    return all(
        bytes(first) == bytes(second) for first, second in zip(one.buffers, other.buffers, strict=True)
    )

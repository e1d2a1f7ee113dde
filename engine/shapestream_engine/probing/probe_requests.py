"""The requests of a proof: typical ones, many contents, extreme neighbours, and requests near thresholds.

Each request runs alone once, and keeps its results.

An output with few values (a truth value, a class, a position) rarely shows that padding moved its threshold. So the proof
searches for the threshold by bisection. It takes two requests with different results, and halves the way between them
until both requests are nearly equal and their results still differ. A shift of the threshold by more than their distance
changes one of the two results. The search is the same for every kind of output, and also finds floats that jump.

Requests that the proof makes up run in phases of their own, because the model may crash on them. Values that nobody
declared have another phase than ordinary ones: after a crash on a million, contents within the ordinary values still run.
What such a crash leaves out of the ordinary values is counted (`skipped`), because it is evidence that the proof lacks.

A difference is judged by `doubt_about`: the request runs again, alone, with changes as small as rounding
(`tolerances.py`). A careful model may refuse them. Then changes that keep whole numbers whole are tried, then copies of the
request beside it. If all are refused, nobody can tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shapestream_engine.arrays import arrays_of, sent_array
from shapestream_engine.errors import EngineError, RuleError
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort
from shapestream_engine.probing.contents import MOST_ID, content_request, domains, has_ids, recipes
from shapestream_engine.probing.evidence import Doubt
from shapestream_engine.probing.inputs import (
    Extreme,
    Texts,
    Values,
    alike_array,
    extreme_request,
    filled,
    held,
    is_alike,
    make_request,
)
from shapestream_engine.probing.model_calls import ModelCalls, ProbeRequest
from shapestream_engine.probing.tolerances import (
    RUNS,
    Moments,
    Movement,
    OutputTolerance,
    Tolerance,
    coarser,
    compare,
)
from shapestream_engine.string_arrays import STRING_TYPES
from shapestream_engine.tensor import Array

_HALVINGS = 24
"""Most steps of a bisection: from a thousand to a ten-thousandth."""
_REFUSALS = 3
"""Changes that the model refuses before no more are tried."""
_COPIES = (2, 3)
"""Copies of a request in one call, where no change of it can be tried."""
_NEAR = "near"
_CONTENTS = "contents"
_NUDGES = "nudges"
_BEYOND = " beyond"
"""Ending of the phases of values that exceed the ordinary ones."""
_TEXTS = 24
"""Contents of a model that takes only strings: there are no values to lie above or below."""
_MOST_NBYTES = 256 << 20
"""Bytes of the contents that are kept; when the limit is reached, no more are made."""


class ProbeRequests:
    """Makes and remembers the requests of a proof. A request that the model refuses alone is None.

    `declared` has the inputs whose values the user described. `skip` has the phases that ended an earlier child.
    """

    def __init__(
        self,
        calls: ModelCalls,
        values: Mapping[str, Values],
        *,
        declared: frozenset[str],
        seed: int,
        computed_in: str | None,
        skip: frozenset[str],
        variant: int = 0,
    ) -> None:
        """`variant`: that of the common inputs, which all requests of this pool have alike."""
        self._calls = calls
        self._variant = variant
        self.signature = calls.signature
        self.values = dict(values)
        self.declared = declared
        self._seed = seed
        self.computed_in = computed_in
        """The float type of the engine's arithmetic; None: that of the tensors."""
        self._skip = skip
        # After a crash on wider contents, all stay within the ordinary values.
        self._is_narrow = _phase(_CONTENTS, is_beyond=True) in skip
        self._know(largest_ids={})
        self._made: dict[tuple[Any, ...], ProbeRequest | None] = {}
        self._known: dict[tuple[Any, ...], ProbeRequest | None] = {}
        """Requests by layout and bytes."""
        self._alike: defaultdict[tuple[int, int], list[ProbeRequest]] = defaultdict(list)
        """Requests by magnitude."""
        self._largest: defaultdict[tuple[int, int], float] = defaultdict(float)
        """The largest absolute input value of each magnitude."""
        self._moments: dict[tuple[ProbeRequest, int], Moments] = {}
        self._tolerances: dict[tuple[Any, ...], OutputTolerance] = {}
        self._elsewhere: list[ProbeRequests] = []
        self._kept_nbytes = 0
        self.has_time: Callable[[], bool] = lambda: True
        """Tells whether there is time for requests near thresholds and for ids."""
        self.may_make: Callable[[], bool] = lambda: True
        """Tells whether further contents may be made."""
        self._near: dict[tuple[Any, ...], tuple[ProbeRequest, ...]] = {}
        self._changed: dict[tuple[ProbeRequest, int], list[Array] | None] = {}
        """Results of requests that ran again, changed; None if the model refused that."""
        self._beside: dict[tuple[ProbeRequest, int], list[Array] | None] = {}
        """Results of requests beside copies of themselves; None if there is no such call."""
        self.refused = 0
        """Contents of ordinary values that the model refused."""
        self.skipped = 0
        """Requests of ordinary values that were not made, because a crash ended others of their kind."""
        self.complaint = ""
        """The error of the last request that failed."""
        self.misfit = ""
        """The error of an ordinary request that broke an output's rule although it ran alone."""

    def elsewhere(self, calls: ModelCalls) -> ProbeRequests:
        """Return a pool that makes the same requests, and runs them by other calls."""
        other = ProbeRequests(
            calls,
            self.values,
            declared=self.declared,
            seed=self._seed,
            computed_in=self.computed_in,
            skip=self._skip,
            variant=self._variant,
        )
        other._domains, other._recipes = self._domains, self._recipes
        self._elsewhere.append(other)
        return other

    def alike(self) -> tuple[bytes, ...]:
        """Return the bytes of the inputs that all requests of this pool have alike."""
        signature = self.signature
        return tuple(
            self._alike_array(port).tobytes() for port in signature.inputs if is_alike(signature, port)
        )

    def also(self, other: ProbeRequests) -> None:
        """Note a pool with other common inputs, for the description of what was tried."""
        self._elsewhere.append(other)

    def _alike_array(self, port: InputPort) -> Array:
        return alike_array(port, self.values[port.name], self._variant)

    def look_for_ids(self, sizes: tuple[int, ...]) -> None:
        """Find the largest id that the model takes, and use all ids up to it: embeddings jump between ids."""
        known = {
            port.name: self._largest_id(number, sizes)
            for number, port in enumerate(self.signature.inputs)
            if has_ids(self.signature, port, self.declared)
        }
        self._know(largest_ids=known)

    def tried(self, number: int) -> str:
        """Describe the values of an input, and the range of the contents if it is wider."""
        port = self.signature.inputs[number]
        values = self.values[port.name]
        if is_alike(self.signature, port):
            tried = [pool._alike_array(port) for pool in (self, *self._elsewhere)]
            return ", ".join(dict.fromkeys(f"{array.flat[0]:g}" for array in tried if array.size))
        found = [
            array
            for pool in (self, *self._elsewhere)
            for request in pool._known.values()
            if request is not None
            for (index, *_), array in zip(request.tensors.layout, arrays_of(request.tensors), strict=True)
            if index == number and array.size
        ]
        if isinstance(values, Texts) or port.is_string:
            return str(values)
        low, high = values.range()
        least = min((float(array.min()) for array in found), default=low)
        most = max((float(array.max()) for array in found), default=high)
        return str(values) + (f", contents {least:.4g}..{most:.4g}" if least < low or most > high else "")

    @property
    def contents(self) -> int:
        """Number of contents per size: one per recipe, and as many mixtures where there are several inputs or ids.

        Where all inputs are strings, `_TEXTS`.
        """
        if not self._domains:
            return _TEXTS
        mixes = len(self._domains) > 1 or any(domain.is_whole for domain in self._domains.values())
        return len(self._recipes) * (1 + mixes)

    def typical(self, sizes: tuple[int, ...], number: int) -> ProbeRequest | None:
        """Return an ordinary request; every `number` gives a different one."""
        key = (sizes, number)
        if key not in self._made:
            signature = self.signature
            tensors = make_request(
                signature, self.values, sizes, number=number, seed=self._seed, variant=self._variant
            )
            self._made[key] = self._alone(tensors, f"inputs no. {number}", ordinary=True)
        return self._made[key]

    def extreme(self, sizes: tuple[int, ...], kind: Extreme) -> ProbeRequest | None:
        """Return a request whose inputs all have one extreme value; None if the model refuses it, or no input has such a
        value."""
        key = (sizes, kind)
        if key not in self._made:
            tensors = extreme_request(self.signature, self.values, sizes, kind, variant=self._variant)
            self._made[key] = None if tensors is None else self._made_up(tensors, f"{kind} values", kind)
        return self._made[key]

    def content(self, sizes: tuple[int, ...], number: int) -> ProbeRequest | None:
        """Return the request of recipe `number`; beyond the recipes, a random mixture. Equal requests are made once."""
        key = (sizes, "content", number)
        if key not in self._made:
            if self._kept_nbytes > _MOST_NBYTES or not self.may_make():
                return None
            tensors, recipe = content_request(
                self.signature,
                self.values,
                self._domains,
                self._recipes,
                sizes,
                number=number,
                seed=self._seed,
                variant=self._variant,
            )
            known = (tensors.layout, *tensors.buffers)
            if known not in self._known:
                words = "random contents" if recipe is None else str(recipe)
                beyond = any(domain.is_beyond(recipe) for domain in self._domains.values())
                self._known[known] = request = self._made_up(tensors, words, _CONTENTS, is_beyond=beyond)
                if request is None and not beyond:
                    if _phase(_CONTENTS, is_beyond=False) in self._skip:
                        self.skipped += 1
                    else:
                        self.refused += 1
                if request is not None and recipe is not None:
                    request.magnitude = recipe.magnitude
                    self._alike[recipe.magnitude].append(request)
                    self._largest[recipe.magnitude] = max(self._largest[recipe.magnitude], _largest(request))
                self._kept_nbytes += sum(len(buffer) for buffer in tensors.buffers)
            self._made[key] = self._known[known]
        return self._made[key]

    def near(
        self, sizes: tuple[int, ...], output: int, tolerance: OutputTolerance, number: int
    ) -> tuple[ProbeRequest, ...]:
        """Return two nearly equal requests whose results in `output` differ most; every `number` starts elsewhere.

        Empty if no two requests of these sizes differ in that output so far.
        """
        key = (sizes, output, number)
        if key not in self._near:
            if not self.has_time():
                return ()
            if _phase(_NEAR, is_beyond=False) in self._skip:
                self.skipped += 2
                self._near[key] = ()
                return ()
            ends = self._differing(sizes, output, tolerance, number)
            self._near[key] = () if ends is None else self._halved(*ends, output, tolerance)
        return self._near[key]

    def doubt_about(self, request: ProbeRequest, output: int, movement: Movement) -> Doubt | None:
        """Return why a difference in company cannot be judged; None if only the company explains it.

        `movement` has the result of the request alone, the result in company, and their tolerance. Integers and strings are
        never changed: no rounding changes them. A model of such inputs alone can only be tried beside copies.
        """
        can_change = any(self._part(kind) is not None for _, kind, _ in request.tensors.layout)
        ran = 0
        for number in range(RUNS) if can_change else ():
            again = self._changed_alone(request, number)
            if again is not None:
                ran += 1
                movement.changed(again[output])
            elif not ran and number + 1 >= _REFUSALS:
                break
            if movement.explains:
                return Doubt.EXPLAINED
        for copies in () if ran else _COPIES:
            beside = self.beside_copies(request, copies)
            if beside is not None:
                movement.beside_copies(beside[output])
                if movement.explains:
                    return Doubt.EXPLAINED
        if ran or not can_change:
            return None
        skipped = _phase(_NUDGES, is_beyond=request.is_beyond) in self._skip
        return Doubt.SKIPPED if skipped else Doubt.REFUSED

    def beside_copies(self, request: ProbeRequest, copies: int) -> list[Array] | None:
        """Return the results of the first of so many copies of a request in one call; None if the call fails."""
        key = (request, copies)
        if key not in self._beside:
            self._beside[key] = None
            phase = _phase(_NUDGES, is_beyond=request.is_beyond)
            rows = copies * request.shape.rows
            signature = self.signature
            if signature.has_batch and rows in signature.bounds[0] and phase not in self._skip:
                try:
                    with self._calls.phase(phase):
                        sizes = (rows, *request.sizes[1:])
                        words = f"{copies} copies of {request.words}"
                        self._beside[key], *_ = self._calls.run(sizes, [request] * copies, words)
                except (EngineError, RuntimeError) as error:
                    self.complaint = str(error)
        return self._beside[key]

    def tolerance_of(self, request: ProbeRequest, output: int, tolerance: OutputTolerance) -> OutputTolerance:
        """Return the tolerance of one request, with the spread limited to the requests of its magnitude.

        Otherwise results up to a million would allow any error in results below ten.
        """
        if request.magnitude is None or tolerance.tolerance is None:
            return tolerance
        alike = self._alike[request.magnitude]
        key = (request.magnitude, output, len(alike))
        if key not in self._tolerances:
            moments = [self._moments_of(each, output, tolerance) for each in alike]
            self._tolerances[key] = tolerance.narrowed(moments, self._largest[request.magnitude])
        return self._tolerances[key]

    def all_results(self, output: int, *, contents: bool = False) -> list[tuple[tuple[int, ...], Array]]:
        """Return the sizes and results of the ordinary requests, each alone; with `contents` also of the contents."""
        return [
            (request.sizes, request.results[output])
            for key, request in self._made.items()
            if request is not None and (isinstance(key[1], int) or (contents and key[1] == "content"))
        ]

    def _know(self, largest_ids: Mapping[str, int]) -> None:
        self._domains = domains(
            self.signature, self.values, self.declared, largest_ids, is_narrow=self._is_narrow
        )
        self._recipes = recipes(self._domains)

    def _moments_of(self, request: ProbeRequest, output: int, tolerance: OutputTolerance) -> Moments:
        key = (request, output)
        if key not in self._moments:
            self._moments[key] = tolerance.moments(request.results[output])
        return self._moments[key]

    def _largest_id(self, number: int, sizes: tuple[int, ...]) -> int:
        """Return the largest id that the model takes in one input, found by bisection between the ordinary ids and
        `MOST_ID`."""
        signature = self.signature
        port, shape = signature.inputs[number], signature.input_shapes(sizes)[number]
        usual = make_request(signature, self.values, sizes, seed=self._seed, variant=self._variant)
        values = self.values[port.name]
        assert not isinstance(values, Texts)  # the input may hold ids
        least, refused = int(values.range()[1]), MOST_ID + 1
        tried = MOST_ID
        while refused - least > 1 and self.has_time():
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
    ) -> tuple[ProbeRequest, ProbeRequest] | None:
        found = [
            request
            for key, request in self._made.items()
            if key[0] == sizes and isinstance(key[-1], int) and request is not None
        ]
        if _phase(_NEAR, is_beyond=True) in self._skip:
            found = [request for request in found if not request.is_beyond]
        random = np.random.default_rng([self._seed, number, output, *sizes])
        order = random.permutation(len(found))
        for place, first in enumerate(order):
            for second in order[:place]:
                one, other = found[int(second)], found[int(first)]
                alike = _tensor_shapes(one.tensors) == _tensor_shapes(other.tensors)
                if alike and _apart(one, other, output, tolerance) > 1:
                    return one, other
        return None

    def _halved(
        self, one: ProbeRequest, other: ProbeRequest, output: int, tolerance: OutputTolerance
    ) -> tuple[ProbeRequest, ...]:
        low, high = 0.0, 1.0
        start, end = one.tensors, other.tensors
        is_beyond = one.is_beyond or other.is_beyond
        keep_whole = False
        for _ in range(2 * _HALVINGS):
            if not keep_whole and self._is_near(one.tensors, other.tensors):
                break
            if not self.has_time():
                return ()
            middle = (low + high) / 2
            tensors = _between(start, end, middle, keep_whole=keep_whole)
            if _same(tensors, one.tensors) or _same(tensors, other.tensors):
                break
            between = self._made_up(tensors, "near a threshold", _NEAR, is_beyond=is_beyond)
            if between is None and not keep_whole:
                # A careful model may take whole numbers only.
                keep_whole = True
                continue
            if between is None:
                return ()
            if _apart(one, between, output, tolerance) >= _apart(between, other, output, tolerance):
                other, high = between, middle
            else:
                one, low = between, middle
        if _apart(one, other, output, tolerance) > 1:
            for request in (one, other):
                request.near |= {output}
        return one, other

    def _part(self, element_type: str) -> Tolerance | None:
        """Return relative changes of a float that count as near and as rounding; None for integers. Engines may compute
        f64 in f32."""
        return coarser("f32" if element_type == "f64" else element_type, self.computed_in)

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

    def _changed_alone(self, request: ProbeRequest, number: int) -> list[Array] | None:
        """Return the results of the request with a change as small as rounding; None if the model refuses each such
        change, or none can be made. Every `number` is another change."""
        key = (request, number)
        if key not in self._changed:
            self._changed[key] = None
            for keep_whole in (False, True):
                tensors = self._nudged(request.tensors, number, keep_whole=keep_whole)
                if _same(tensors, request.tensors):
                    continue
                again = self._made_up(tensors, "rounded otherwise", _NUDGES, is_beyond=request.is_beyond)
                if again is not None:
                    self._changed[key] = again.results
                    break
        return self._changed[key]

    def _nudged(self, tensors: Tensors, number: int, *, keep_whole: bool) -> Tensors:
        """Return the request with each float changed by about one rounding error; with `keep_whole`, not whole ones."""
        random = np.random.default_rng([number, 2])
        changed = []
        for (port, element_type, _), array in zip(tensors.layout, arrays_of(tensors), strict=True):
            part = self._part(element_type)
            if part is not None and array.size and self.signature.inputs[port].value is None:
                floats = array.astype(np.float64)
                # The model's weights fit ordinary values, and round at their magnitude.
                values = self.values[self.signature.inputs[port].name]
                assert not isinstance(values, Texts)
                ordinary = values.range()
                largest = max(float(np.abs(floats).max()), *map(abs, ordinary))
                moved = floats + part.of_magnitude * largest * random.uniform(-1, 1, array.shape)
                if keep_whole:
                    moved = np.where(floats == np.rint(floats), floats, moved)
                array = held(moved, array.dtype)
            changed.append(array)
        return _with_arrays(tensors, changed)

    def _made_up(
        self, tensors: Tensors, words: str, kind: str, *, is_beyond: bool = False
    ) -> ProbeRequest | None:
        """Run a request that users may never send, in a phase of its own: if the model crashes on it alone, no
        treatment is to blame. `is_beyond`: its values exceed the ordinary ones, which nobody declared."""
        phase = _phase(kind, is_beyond=is_beyond)
        if phase in self._skip:
            return None
        with self._calls.phase(phase):
            request = self._alone(tensors, words)
        if request is not None:
            request.is_beyond = is_beyond
        return request

    def _alone(self, tensors: Tensors, words: str, *, ordinary: bool = False) -> ProbeRequest | None:
        try:
            # Raises `ShapeError` for sizes beyond the strategy's largest.
            request = ProbeRequest(tensors, self.signature.resolve(tensors.layout), words)
            request.words = f"{self.signature.spell(request.sizes)}, {words}"
            (request.results,) = self._calls.run(request.sizes, [request], f"alone: {request.words}")
        except (EngineError, RuntimeError) as error:
            self.complaint = str(error)
            if ordinary and isinstance(error, RuleError):
                self.misfit = self.misfit or f"{words}: {error}"
            return None
        return request


def _phase(kind: str, *, is_beyond: bool) -> str:
    """Return the phase of made-up requests of this kind."""
    return f"neighbours/{kind}{_BEYOND if is_beyond else ''}"


def _largest(request: ProbeRequest) -> float:
    numbers = [array for array in arrays_of(request.tensors) if array.dtype != object]
    return max(float(np.abs(array.astype(np.float64)).max(initial=0.0)) for array in numbers)


def _apart(one: ProbeRequest, other: ProbeRequest, output: int, tolerance: OutputTolerance) -> float:
    first, second = one.results[output], other.results[output]
    return 0.0 if same_bits(first, second) else compare(first, second, tolerance).excess


def same_bits(one: Array, other: Array) -> bool:
    """Tell whether two results are equal to the bit. Most are, and a comparison with tolerances takes 20 times as
    long."""
    if one.dtype == object:
        return np.array_equal(one, other)
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _tensor_shapes(tensors: Tensors) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return the layout without the bytes of strings: between two requests that are equal in it others can be made."""
    return [
        (port, element_type, shape[:-1] if element_type in STRING_TYPES else shape)
        for port, element_type, shape in tensors.layout
    ]


def _between(one: Tensors, other: Tensors, share: float, *, keep_whole: bool) -> Tensors:
    """Interpolate between two requests of the same shapes; `share` 0.0 is the first, 1.0 the second.

    With `keep_whole`, floats between whole numbers are whole.
    """
    mixed = []
    for number, (first, second) in enumerate(zip(arrays_of(one), arrays_of(other), strict=True)):
        if first.dtype == object:
            # As integers do, each string steps at a random point.
            steps = np.random.default_rng(number).random(first.shape)
            mixed.append(np.where(steps < share, second, first))
            continue
        start = first.astype(np.float64)
        way = start + (second.astype(np.float64) - start) * share
        if first.dtype.kind in "biu" or (keep_whole and _is_whole(first) and _is_whole(second)):
            # Each integer steps at a random point, so that two neighbours on the way differ in one number.
            way = np.floor(way + np.random.default_rng(number).random(first.shape))
        mixed.append(held(way, first.dtype))
    return _with_arrays(one, mixed)


def _is_whole(array: Array) -> bool:
    return bool((array == np.rint(array)).all())


def _with_arrays(tensors: Tensors, arrays: Sequence[Array]) -> Tensors:
    """Return a request of the same inputs with other arrays; the bytes of strings may differ."""
    layout, buffers = [], []
    for (port, element_type, _), array in zip(tensors.layout, arrays, strict=True):
        shape, buffer = sent_array(element_type, array)
        layout.append((port, element_type, shape))
        buffers.append(buffer)
    return Tensors(layout=tuple(layout), buffers=buffers)


def _same(one: Tensors, other: Tensors) -> bool:
    return all(
        bytes(first) == bytes(second) for first, second in zip(one.buffers, other.buffers, strict=True)
    )

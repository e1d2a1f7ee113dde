"""A model's answers beside those of another engine, on the same requests: an engine that computes wrongly agrees with
itself.

The proof compares an engine with itself alone, so it cannot see an operator that this engine computes in another way than
ONNX says, or values that grow beyond the type in which it computes. Here requests run alone on both engines: ordinary ones
of the proof, and those in which every input has its smallest or its largest value.

Which of the two is right, nobody can tell here. So a difference is told, and nothing follows from it. Two engines add in
other orders, and a rare class has a spread below their rounding: values are compared by the spread of their whole output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from shapestream_engine.arrays import arrays_of
from shapestream_engine.batch_axis import with_shared_rules
from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.model import ModelSpec, compile_model
from shapestream_engine.probing.baseline import Baseline, find_baseline
from shapestream_engine.probing.inputs import Extreme, Values
from shapestream_engine.probing.model_calls import Announce, Budget, DirectCalls, ProbeRequest
from shapestream_engine.probing.tolerances import compare, distances
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

BUDGET_S = 5.0
"""Seconds of computation after which no further request runs, as long as the measurements of speed take."""
_ORDINARY = 8
"""Ordinary requests of each set of sizes: as many as give each index of an output a spread (`ENOUGH_ROWS`)."""
_EXTREMES: tuple[Extreme, ...] = ("smallest", "largest")
"""The extremes that are tried: the ends of the declared ranges. No request has values beyond them (huge ones, NaN)."""
_MOST_FLIPS = 0.01
"""Share of the whole numbers of an output that may differ: rounding decides near ties, such as those of two labels."""
_SHOWN = 6
"""Values of an input that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDifference:
    """One output whose values differ beyond its tolerance; the request where they differ most."""

    output: str
    request: str
    """Sizes and kind of the request: `batch 1, n 5, largest values`."""
    inputs: Mapping[str, str]
    """The first values of each input."""
    index: tuple[int, ...] = ()
    own: str
    """The value of the engine that serves, or what is wrong with its answer."""
    other: str

    def words(self, engine: str, other: str) -> str:
        """Return the difference as text."""
        given = ", ".join(f"{name} = {values}" for name, values in self.inputs.items())
        place = f" at {list(self.index)}" if self.index else ""
        return (
            f"output {self.output!r}: {engine} answers {self.own}{place} and {other} {self.other} "
            f"({self.request}; {given})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesReport:
    """The comparison of two engines."""

    engine: str
    other: str
    requests: int = 0
    """Requests that both answered."""
    refused: int = 0
    """Requests that the other engine refused."""
    differences: tuple[EngineDifference, ...] = field(default=())
    why_not: str = ""
    """Why nothing was compared; empty if something was."""

    def lines(self) -> Iterator[str]:
        """Yield what a person reads."""
        if self.why_not:
            yield f"beside {self.other}: not compared: {self.why_not}"
            return
        count = len(self.differences)
        told = {0: "no output differs", 1: "1 output differs"}.get(count, f"{count} outputs differ")
        refused = f", {self.refused} that it refuses" if self.refused else ""
        yield f"beside {self.other}: {told} beyond its tolerance on {self.requests} requests{refused}"

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> EnginesReport:
        """Return the report that `asdict` made plain data of."""
        found = [EngineDifference(**{**each, "index": tuple(each["index"])}) for each in plain["differences"]]
        return cls(**{**plain, "differences": tuple(found)})


def compare_engines(
    spec: ModelSpec,
    model: CompiledModel,
    other: str,
    given: Mapping[str, Values],
    *,
    seed: int,
    computed_in: str | None,
    threads: int | None,
    announce: Announce,
) -> EnginesReport:
    """Run requests on the model, and on another engine, each alone, and compare the results by their outputs' names.

    `spec` is the model's; its properties are the first engine's own. `given` has the realistic values of inputs.
    """
    report = EnginesReport(engine=model.engine, other=other)
    try:
        plain = replace(spec, engine=other, outputs={}, properties={})
        beside, _ = with_shared_rules(plain, lambda each: compile_model(each, slots=1, threads=threads))
        judge = _OtherEngine(model.signature, beside)
    except EngineError as error:
        return replace(report, why_not=str(error))
    calls = DirectCalls(model, model.signature, announce)
    baseline, complaint = find_baseline(calls, given, seed=seed, computed_in=computed_in, skip=frozenset())
    if baseline is None:
        return replace(report, why_not=f"the model refuses every request that was tried: {complaint}")
    compared = _Compared(baseline)
    budget = Budget(BUDGET_S, threads)
    requests = refused = 0
    for request in _requests(baseline):
        if requests and budget.spent_s() > BUDGET_S:
            break
        announce("beside", request.words)
        try:
            results = judge.answer(request)
        except (EngineError, RuntimeError):
            refused += 1
            continue
        requests += 1
        compared.add(request, results)
    if not requests:
        return replace(report, refused=refused, why_not=f"{other} refuses every request that was tried")
    return replace(report, requests=requests, refused=refused, differences=tuple(compared.differences()))


def _requests(baseline: Baseline) -> Iterator[ProbeRequest]:
    requests = baseline.requests
    for sizes, kind in product(baseline.sizes, _EXTREMES):
        if (request := requests.extreme(sizes, kind)) is not None:
            yield request
    for number, sizes in product(range(_ORDINARY), baseline.sizes):
        if (request := requests.typical(sizes, number)) is not None:
            yield request


class _OtherEngine:
    """The model on the other engine: takes the first one's requests, and answers by the order of its outputs."""

    def __init__(self, signature: ModelSignature, model: CompiledModel) -> None:
        """Raise `EngineError` if the two do not have the same ports."""
        ours, theirs = signature, model.signature
        for kind, own, others in (
            ("input", ours.inputs, theirs.inputs),
            ("output", ours.outputs, theirs.outputs),
        ):
            if {port.name for port in own} != {port.name for port in others}:
                names = [", ".join(sorted(port.name for port in ports)) for ports in (own, others)]
                raise EngineError(f"its {kind}s are {names[1]}, and those of the model {names[0]}")
        numbers = {port.name: number for number, port in enumerate(theirs.inputs)}
        self._inputs = [numbers[port.name] for port in ours.inputs]
        numbers = {port.name: number for number, port in enumerate(theirs.outputs)}
        self._outputs = [numbers[port.name] for port in ours.outputs]
        self._signature = theirs
        self._assembly, self._divided = Assembly(theirs), Assembly(ours)
        self._request = model.create_infer_request()

    def answer(self, request: ProbeRequest) -> list[Array]:
        """Return the results, divided by the first engine's rules. Where its shape breaks them, an output is as it came."""
        layout = tuple(
            (self._inputs[number], element_type, shape)
            for number, element_type, shape in request.tensors.layout
        )
        tensors = Tensors(layout=layout, buffers=request.tensors.buffers)
        shape = self._signature.resolve(layout)
        self._assembly.gather(shape.sizes, [tensors], [shape], self._request.input_tensors)
        self._request.infer()
        given = self._request.outputs()
        outputs = [np.array(given[number]) for number in self._outputs]
        try:
            (result,) = self._divided.split(request.sizes, [request.shape], outputs)
        except EngineError:
            return outputs
        return arrays_of(result)


class _Compared:
    """The differences so far, by output."""

    def __init__(self, baseline: Baseline) -> None:
        self._signature = baseline.signature
        self._tolerances = [replace(tolerance, spreads=()) for tolerance in baseline.tolerances]
        self._worst: dict[int, tuple[float, EngineDifference]] = {}
        self._flips: dict[int, tuple[int, int]] = {}
        """Values that differ, and all that were compared, of the outputs whose values must be equal."""

    def add(self, request: ProbeRequest, results: list[Array]) -> None:
        """Compare one answer."""
        for number, (own, other) in enumerate(zip(request.results, results, strict=True)):
            found = compare(own, other, self._tolerances[number])
            if self._tolerances[number].tolerance is None and own.shape == other.shape:
                flips, values = self._flips.get(number, (0, 0))
                self._flips[number] = (flips + int((distances(own, other) > 0).sum()), values + own.size)
            if not found.within and found.excess >= self._worst.get(number, (0.0, None))[0]:
                self._worst[number] = (found.excess, self._described(number, request, own, other))

    def differences(self) -> Iterator[EngineDifference]:
        """Yield the difference of each output that differs."""
        for number, (_, difference) in sorted(self._worst.items()):
            flips, values = self._flips.get(number, (1, 1))
            if flips > _MOST_FLIPS * values or not difference.index:
                yield difference

    def _described(self, number: int, request: ProbeRequest, own: Array, other: Array) -> EngineDifference:
        names = [self._signature.inputs[index].name for index, *_ in request.tensors.layout]
        inputs = {name: _shown(array) for name, array in zip(names, arrays_of(request.tensors), strict=True)}
        port = self._signature.outputs[number]
        common: dict[str, Any] = {"output": port.name, "request": request.words, "inputs": inputs}
        if own.shape != other.shape:
            return EngineDifference(
                own=f"the shape {list(own.shape)}", other=str(list(other.shape)), **common
            )
        off = distances(own, other)
        allowed = np.broadcast_to(
            0.0
            if (kept := self._tolerances[number]).tolerance is None
            else kept.allowed(own.astype(np.float64)),
            off.shape,
        )
        worst = np.unravel_index(int((off - allowed).argmax()), off.shape)
        index = tuple(int(place) for place in worst)
        return EngineDifference(index=index, own=_value(own[worst]), other=_value(other[worst]), **common)


def _value(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, np.floating) else str(value)


def _shown(array: Array) -> str:
    values = array.reshape(-1)
    more = ", …" if values.size > _SHOWN else ""
    return f"[{', '.join(_value(value) for value in values[:_SHOWN])}{more}]"

"""The examination of a model: each treatment that the configuration allows is tried on the live model.

1. `find_baseline` looks for inputs and sizes on which the results differ enough to show a defect. Each request of the
baseline runs alone; its results are the reference.
2. One request runs twice. A model that does not repeat its results cannot be compared, and nothing is proved.
3. Each treatment (batching, padding, the strategy, static shapes, batch invariance) has cases. A case is one call;
its requests are known to run alone.
4. `Evidence` compares the results of a case with the reference, within the tolerance, and settles the verdict per
output: proved, refuted or unproved.

The proof promises no more than it tried: a model that mixes rows only at other values or sizes passes. Time is limited by
a budget, and each treatment has a share. Only the cases that `ProbeOptions.budget_s` names run beyond the budget.

`shapestream_engine.probe` runs the examination in a child process, because a model may crash or hang. The child announces
each call with its phase. The parent attributes a crash to the last announced phase and starts another child, which skips
that phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.calibration_shapes import call_nbytes
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.ports import InputPort
from shapestream_engine.probing.baseline import Baseline, find_baseline, tells
from shapestream_engine.probing.cases import (
    Case,
    batching_cases,
    crowds,
    grid_cases,
    invariance_cases,
    most_rows,
    padding_cases,
    static_cases,
    strategy_cases,
)
from shapestream_engine.probing.inputs import Samples, Values, read_samples
from shapestream_engine.probing.model_calls import Announce, DirectCalls, ModelCalls, ProbeRequest, SlotCalls
from shapestream_engine.probing.probe_requests import ProbeRequests, same_bits
from shapestream_engine.probing.report import Finding, Treatment, Verdict, refuted, unproved
from shapestream_engine.probing.tolerances import Difference, OutputTolerance, compare
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

MOST_CROWD_NBYTES = 256 << 20
"""Largest size in bytes of the inputs of one call in the proof."""
_GRID = "call sizes of a calibration"
"""Phase in which requests of the calibration's sizes run alone."""
_FIRST = 2
"""Cases of a treatment before its largest calls: small calls show a defect more clearly."""
_SERVED = frozenset({"strategy", "static", "invariance"})
"""Kinds of treatment that run through a slot, as in service."""
_VARIED = frozenset({"batching", "padding", "strategy"})
"""Kinds of treatment that run requests of many contents."""
EVERY_INPUT = "*"
"""Stands for all inputs in `ProbeOptions`."""
ENOUGH = 3
"""Results that can show a difference; with fewer results, nothing is proved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Inputs and time limits of a proof.

    ProbeOptions(values={"ids": Integers(0, 30_000)}, max_batch=16, budget_s=10.0)
    """

    values: Mapping[str, Values] = field(default_factory=dict)
    """Realistic values per input; other inputs get defaults by element type."""
    samples: Mapping[str, Path] = field(default_factory=dict)
    """Path of an .npz of real inputs, by input name, or under `*` for all inputs. Samples win over `values`."""
    max_batch: int | None = None
    """Largest number of rows per call; None: the bound of the signature. With 1, batching is not tried."""
    batch_invariant: bool = False
    """True if results must be equal to the bit in every batch; each call then has a fixed number of rows."""
    budget_s: float = 30.0
    """Seconds for the proof, counted from the first request, after compilation.

    Three cases run even when the budget is spent: the first `ENOUGH` results of each output, the largest calls that may be
    served, and each static shape. No such call is tried if it would take half of the budget. Calls of the calibration's
    sizes take a twentieth of the budget together.
    """
    hang_s: float = 30.0
    """Seconds after which a call counts as hanging; compilation may take 20 times as long."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """The inputs and sizes that were tried, and the dimension that each output axis follows."""

    inputs: dict[str, str] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    follows: dict[str, str] = field(default_factory=dict)
    tolerances: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`OutputTolerance.to_dict` by output; empty for a model that does not repeat its results."""


def treatments(signature: ModelSignature, options: ProbeOptions) -> list[Treatment]:
    """Return the treatments of requests that the configuration allows."""
    found = []
    if most_rows(signature, options.max_batch) > 1:
        found.append(Treatment(kind="batching"))
    padded = [
        name
        for number, (name, may) in enumerate(zip(signature.dimensions, signature.paddable, strict=True))
        if may and number not in signature.table.strings
    ]
    found += [Treatment(kind="padding", dimensions=(name,)) for name in padded]
    if len(padded) > 1:
        found.append(Treatment(kind="padding", dimensions=tuple(padded)))
    if signature.strategy.sizes:
        found.append(Treatment(kind="strategy", name=signature.strategy.name))
    if signature.static_sizes:
        found.append(Treatment(kind="static"))
    if options.batch_invariant:
        found.append(Treatment(kind="invariance"))
    return found


def examine(
    model: CompiledModel,
    options: ProbeOptions,
    emit: Callable[[Sequence[Finding]], None],
    *,
    served: CompiledModel | None = None,
    announce: Announce = lambda phase, words: None,
    skip: frozenset[str] = frozenset(),
) -> Outcome:
    """Try each treatment that is not in `skip`, and hand its findings to `emit`.

    `model` takes every shape. `served` is the same model with a strategy; None if it has no strategy.
    """
    ends_at = monotonic() + options.budget_s
    signature = model.signature if served is None else served.signature
    calls = DirectCalls(model, signature, announce)
    wanted = [treatment for treatment in treatments(signature, options) if str(treatment) not in skip]
    precision = computed_in(model.properties)
    baseline, complaint = find_baseline(
        calls, values_of(signature, options), seed=options.seed, computed_in=precision, skip=skip
    )
    outcome = Outcome()
    why = f"the model took none of the probe's inputs: {complaint}"
    if baseline is not None:
        why = _unrepeatable(calls, baseline)
        outcome.sizes = tuple(map(baseline.spell, baseline.sizes))
        if not why:
            baseline.requests.ends_at = min(ends_at, monotonic() + options.budget_s / 10)
            baseline.requests.look_for_ids(max(baseline.sizes, key=math.prod))
            baseline.look_again()
    if baseline is None or why:
        emit([unproved(treatment, why) for treatment in wanted])
    else:
        served_calls = calls if served is None else SlotCalls(served, announce)
        _TreatmentRun(calls, served_calls, baseline, options, skip).run(wanted, emit, ends_at)
        outcome.tolerances = {
            port.name: tolerance.to_dict()
            for number, (port, tolerance) in enumerate(
                zip(signature.outputs, baseline.tolerances, strict=True)
            )
            if number not in baseline.blank or tolerance.tolerance is None
        }
    if baseline is not None:
        outcome.inputs = _words_of_inputs(signature, baseline)
    outcome.follows = followed(signature, calls.shapes)
    return outcome


class _TreatmentRun:
    """Runs the cases of one treatment after another, within the budget."""

    def __init__(
        self,
        calls: DirectCalls,
        served: ModelCalls,
        baseline: Baseline,
        options: ProbeOptions,
        skip: frozenset[str],
    ) -> None:
        self._calls = calls
        self._served = served
        self._baseline = baseline
        self._options = options
        self._skip = skip
        self._rows = most_rows(calls.signature, options.max_batch)

    def run(
        self, wanted: Sequence[Treatment], emit: Callable[[Sequence[Finding]], None], ends_at: float
    ) -> None:
        """Try each treatment; one with enough evidence ends when its share of the time is over."""
        for number, treatment in enumerate(wanted):
            share_s = (ends_at - monotonic()) / (len(wanted) - number)
            # Cases are made as they are needed, so requests that run alone for a case belong to the phase as well.
            with self._calls.phase(str(treatment)), self._served.phase(str(treatment)):
                emit(list(self._try_treatment(treatment, share_s).findings()))

    def _try_treatment(self, treatment: Treatment, share_s: float) -> Evidence:
        baseline = self._baseline
        if treatment.kind == "invariance" and self._served is not self._calls:
            baseline = self._served_baseline()
        evidence = Evidence(treatment, self._calls.signature, baseline)
        # Each static shape has a compiled model, and each of them is tried before it is served.
        until = math.inf if treatment.kind == "static" else monotonic() + share_s
        baseline.requests.ends_at = monotonic() + share_s
        self._try(evidence, islice(cases := self._cases(treatment, baseline), _FIRST), treatment, until)
        self._try_largest(evidence, treatment, baseline)
        self._try(evidence, cases, treatment, until)
        if treatment.kind == "padding":
            # Padded to a size at which the rule happens to hold, the request would lose some of its own results.
            evidence.misfit = baseline.requests.misfit
        return evidence

    def _try_largest(self, evidence: Evidence, treatment: Treatment, baseline: Baseline) -> None:
        """Try the largest calls that may be served, whatever the budget."""
        if treatment.kind not in ("batching", "padding", "strategy") or self._rows < 2:
            return
        signature, options = self._calls.signature, self._options
        padded = [signature.dimensions.index(name) for name in treatment.dimensions]
        cases = crowds(baseline, padded, self._rows)
        tried, why = self._try_crowds(evidence, cases, treatment)
        if why:
            evidence.stop(tried, f"calls of more rows, up to {self._rows}, were not tried: {why}")
        elif treatment.kind == "batching" and _GRID not in self._skip:
            self._try_grid(evidence, grid_cases(baseline, options.max_batch), treatment)

    def _try_crowds(self, evidence: Evidence, cases: Iterator[Case], treatment: Treatment) -> tuple[int, str]:
        """Try larger and larger calls. Returns the rows of the last call, and the reason why larger calls were not
        tried, or ""."""
        limit_s = self._options.budget_s / 2
        last: Case | None = None
        rows = 1  # a request that runs alone needs no proof
        seconds_per_byte = 0.0
        for case in cases:
            if evidence.is_settled:
                break
            nbytes = self._nbytes(case, treatment)
            if nbytes > MOST_CROWD_NBYTES:
                return rows, f"their inputs take more than {MOST_CROWD_NBYTES >> 20} MiB"
            if last is not None and case.sizes[0] > rows and seconds_per_byte * nbytes > limit_s:
                # The first call of a shape may include preparation, so the last call is timed again.
                seconds_per_byte = self._try_one(evidence, last, treatment) / self._nbytes(last, treatment)
                if seconds_per_byte * nbytes > limit_s:
                    return rows, f"one would take longer than {limit_s:g} s"
            seconds_per_byte = self._try_one(evidence, case, treatment) / nbytes
            last, rows = case, case.sizes[0]
        return rows, ""

    def _try_grid(self, evidence: Evidence, cases: Iterator[Case], treatment: Treatment) -> None:
        """Try calls of the calibration's sizes until their share of the budget is spent."""
        ends_at = monotonic() + self._options.budget_s / 20
        seconds_per_byte = 0.0
        while not evidence.is_settled:
            with self._calls.phase(_GRID):
                case = next(cases, None)
            if case is None:
                return
            nbytes = self._nbytes(case, treatment)
            if monotonic() + seconds_per_byte * nbytes > ends_at:
                return
            seconds_per_byte = self._try_one(evidence, case, treatment) / nbytes

    def _try(self, evidence: Evidence, cases: Iterator[Case], treatment: Treatment, ends_at: float) -> None:
        while not evidence.is_settled and not (evidence.is_enough and monotonic() > ends_at):
            case = next(cases, None)
            if case is None:
                return
            self._try_one(evidence, case, treatment)

    def _try_one(self, evidence: Evidence, case: Case, treatment: Treatment) -> float:
        """Run one case; returns its duration in seconds."""
        runner = self._served if treatment.kind in _SERVED else self._calls
        began = monotonic()
        try:
            evidence.add(case, runner.run(case.sizes, case.members, case.words))
        except (EngineError, RuntimeError) as error:
            evidence.fail(case, str(error))
        return monotonic() - began

    def _nbytes(self, case: Case, treatment: Treatment) -> int:
        """Return the bytes of the inputs of the case's largest call."""
        signature = self._calls.signature
        if treatment.kind in _SERVED:
            calls = CallPlanner(signature).plan(case.sizes)
            return max(1, *[call_nbytes(signature, call.sizes) for call in calls])
        return max(1, call_nbytes(signature, case.sizes))

    def _served_baseline(self) -> Baseline:
        """Return a baseline of the served model, compared to the bit."""
        exact = [OutputTolerance.of(None, ())] * len(self._served.signature.outputs)
        known = self._baseline.requests
        requests = ProbeRequests(
            self._served,
            known.values,
            declared=known.declared,
            seed=self._options.seed,
            computed_in=None,
            skip=self._skip,
        )
        return replace(self._baseline, requests=requests, tolerances=exact)

    def _cases(self, treatment: Treatment, baseline: Baseline) -> Iterator[Case]:
        signature, rows = self._calls.signature, self._rows
        if treatment.kind == "batching":
            return batching_cases(baseline, rows)
        if treatment.kind == "strategy":
            return strategy_cases(baseline, rows)
        if treatment.kind == "static":
            return static_cases(baseline)
        if treatment.kind == "invariance":
            return invariance_cases(baseline)
        padded = [signature.dimensions.index(name) for name in treatment.dimensions]
        return padding_cases(baseline, padded, rows)


_NO_DIFFERENCE = Difference(amount=0.0, allowed=0.0)


@dataclass(slots=True)
class _Worst:
    difference: Difference
    case: str


class Evidence:
    """The results of one treatment's cases so far, per output, and their verdict."""

    def __init__(self, treatment: Treatment, signature: ModelSignature, baseline: Baseline) -> None:
        self._treatment = treatment
        self._signature = signature
        self._baseline = baseline
        self._cases = [0] * len(signature.outputs)
        self._requests: list[set[ProbeRequest]] = [set() for _ in signature.outputs]
        self._hidden = [0] * len(signature.outputs)
        self._ties: list[set[ProbeRequest]] = [set() for _ in signature.outputs]
        """Requests whose difference is ignored, because rounding may have caused it."""
        self._hides: dict[tuple[ProbeRequest, int], bool] = {}
        self._worst: list[_Worst | None] = [None] * len(signature.outputs)
        self._failure: tuple[str, str] | None = None
        self._rows = 0
        self._stopped: tuple[int, str] | None = None
        self.misfit = ""
        """The error of a request that broke an output's rule although it ran alone: the rule is wrong."""

    def add(self, case: Case, results: Sequence[Sequence[Array]]) -> None:
        """Compare the results of a case with the results that each member got alone."""
        self._rows = max(self._rows, sum(member.shape.rows for member in case.members))
        for place, (member, got) in enumerate(zip(case.members, results, strict=True)):
            if member in case.guests:
                continue
            for number in range(len(got)):
                alone = member.results[number]
                tolerance = self._tolerance_of(member, number)
                is_same = same_bits(alone, got[number])
                difference = _NO_DIFFERENCE if is_same else compare(alone, got[number], tolerance)
                if self._shows_nothing(member, number, difference):
                    self._hidden[number] += 1
                    continue
                if tells(alone) and number not in self._baseline.blank:
                    self._cases[number] += 1
                    self._requests[number].add(member)
                worst = self._worst[number]
                if worst is None or difference.excess > worst.difference.excess:
                    own = self._baseline.spell(member.sizes)
                    words = f"request {place + 1} of {len(case.members)}, of {own}: {case.words}"
                    self._worst[number] = _Worst(difference, words if len(case.members) > 1 else case.words)

    def _tolerance_of(self, member: ProbeRequest, number: int) -> OutputTolerance:
        baseline = self._baseline
        return baseline.requests.tolerance_of(member, number, baseline.tolerances[number])

    def _shows_nothing(self, member: ProbeRequest, number: int, difference: Difference) -> bool:
        """Tell whether the comparison can show no difference, or whether rounding decides it."""
        tolerance = self._tolerance_of(member, number)
        if difference.within:
            key = (member, number)
            if key not in self._hides:
                self._hides[key] = tolerance.hides(member.results[number])
            return self._hides[key]
        # Batch invariance promises equal bits, even where two scores are equal.
        if self._treatment.kind == "invariance" or not self._baseline.requests.hangs_on_rounding(
            member, number, tolerance, difference.excess
        ):
            return False
        self._ties[number].add(member)
        return True

    def fail(self, case: Case, message: str) -> None:
        """Record that a call failed although each of its members runs alone."""
        self._failure = self._failure or (message, case.words)

    def stop(self, rows: int, why: str) -> None:
        """Record the reason why calls of more than `rows` rows were not tried."""
        self._stopped = rows, why

    @property
    def is_settled(self) -> bool:
        """Tell whether the verdict of every output is final."""
        return self._failure is not None or all(
            worst is not None and not worst.difference.within for worst in self._worst
        )

    @property
    def is_enough(self) -> bool:
        """Tell whether every output that can be proved has enough cases."""
        return all(
            cases + hidden >= ENOUGH or number in self._baseline.blank
            for number, (cases, hidden) in enumerate(zip(self._cases, self._hidden, strict=True))
        )

    def findings(self) -> Iterator[Finding]:
        """Yield a verdict per output; one verdict for all outputs where a call failed."""
        if self.misfit:
            yield refuted(self._treatment, f"a request alone breaks the rule of an output: {self.misfit}")
        elif self._failure is not None:
            message, case = self._failure
            why = f"the call fails, while each of its requests runs alone: {message}"
            yield refuted(self._treatment, why, case)
        else:
            for number, port in enumerate(self._signature.outputs):
                yield self._finding(number, port.name)

    def _finding(self, number: int, name: str) -> Finding:
        verdict, why = self._verdict(number)
        worst = self._worst[number]
        numbers = worst is not None and math.isfinite(worst.difference.amount)
        return Finding(
            treatment=self._treatment,
            output=name,
            verdict=verdict,
            cases=self._cases[number],
            requests=len(self._requests[number]),
            rows=self._rows if self._stopped is None else self._stopped[0],
            is_short=self._stopped is not None and why == self._stopped[1],
            largest=worst.difference.amount if worst is not None and numbers else None,
            allowed=worst.difference.allowed if worst is not None and numbers else None,
            why=why,
            case=worst.case if worst is not None and verdict == "refuted" else "",
        )

    def _verdict(self, number: int) -> tuple[Verdict, str]:
        worst = self._worst[number]
        if worst is not None and not worst.difference.within:
            return "refuted", worst.difference.words
        if number in self._baseline.blank:
            return "unproved", self._baseline.blank[number]
        if self._hidden[number] and self._cases[number] < ENOUGH:
            return "unproved", "results differ by less than rounding is allowed to change them"
        if self._cases[number] < ENOUGH:
            return "unproved", f"only {self._cases[number]} results would have shown anything"
        if self._treatment.kind in _VARIED and self._baseline.is_discrete(number):
            near = sum(number in request.near for request in self._requests[number])
            if near < ENOUGH:
                return "unproved", f"only {near} requests were near a change of its values"
            # Where all values are equal, a threshold looks like a tie.
            if (ties := len(self._ties[number])) >= ENOUGH:
                return "unproved", f"{ties} requests lie where rounding decides, and got other results"
        if self._stopped is not None:
            return "unproved", self._stopped[1]
        return "proved", ""


def values_of(signature: ModelSignature, options: ProbeOptions) -> dict[str, Values]:
    """Return the values of the inputs that the options describe; raises `SignatureError` for samples that do not fit the
    model."""
    axes = {
        port.name: port.axis_names.index("batch") if signature.has_batch else None
        for port in signature.inputs
    }
    values, samples = dict(options.values), dict(options.samples)
    for_all, samples_of_all = values.pop(EVERY_INPUT, None), samples.pop(EVERY_INPUT, None)
    known: dict[str, Values] = {}
    with EngineError.about("probe"):
        if unknown := sorted((values.keys() | samples.keys()) - axes.keys()):
            raise SignatureError(f"no input {', '.join(unknown)}; the model has {', '.join(axes)}")
        if samples_of_all is not None:
            known |= read_samples(samples_of_all, axes)
        if for_all is not None:
            numbers = [port.name for port in signature.inputs if not port.is_string]
            known |= dict.fromkeys(numbers, for_all)
        known |= values
        for name, path in samples.items():
            known |= read_samples(path, axes, only=name)
        for port in signature.inputs:
            _check_kind(port, known.get(port.name))
    return known


def _check_kind(port: InputPort, values: Values | None) -> None:
    """Raise `SignatureError` for numbers of an input of strings, and for strings of an input of numbers."""
    if values is None:
        return
    are_strings = isinstance(values, Samples) and values.rows[0].dtype.kind in "SUT"
    if port.is_string != are_strings:
        remedy = "give samples, an .npz of strings, or leave it out" if port.is_string else "give numbers"
        raise SignatureError(f"input {port.name!r} is {port.element_type}, and {values} are not; {remedy}")


def computed_in(properties: Mapping[str, object]) -> str | None:
    """Return the float type of the engine's arithmetic; None: the element type of the tensors."""
    hint = str(properties.get("INFERENCE_PRECISION_HINT", "")).lower()
    return {"bf16": "bf16", "bfloat16": "bf16", "f16": "f16", "float16": "f16"}.get(hint)


def _words_of_inputs(signature: ModelSignature, baseline: Baseline) -> dict[str, str]:
    return {
        port.name: "made by the server, or all ones"
        if port.mask_of is not None
        else baseline.requests.tried(number)
        for number, port in enumerate(signature.inputs)
    }


def _unrepeatable(calls: DirectCalls, baseline: Baseline) -> str:
    """Return the reason why results cannot be compared, if the model does not repeat its results; otherwise ""."""
    request = baseline.requests.typical(baseline.sizes[0], 0)
    assert request is not None  # every request of a baseline ran alone
    try:
        with calls.phase(baseline.phase):
            (again,) = calls.run(request.sizes, [request], f"again: {request.words}")
    except (EngineError, RuntimeError) as error:
        return f"the same request failed when it was repeated: {error}"
    for port, first, second, tolerance in zip(
        calls.signature.outputs, request.results, again, baseline.tolerances, strict=True
    ):
        if not compare(first, second, tolerance).within:
            return f"output {port.name!r} differs when the same request is repeated"
    return ""


def followed(
    signature: ModelSignature, calls: Sequence[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]
) -> dict[str, str]:
    """Return the axes of each output, as text: the dimension that the axis followed in every call, a constant size, or
    `?`.

    A dimension that was tried in one size cannot be told from a constant. Two dimensions that were always equal are both
    named.
    """
    found = {}
    for number, port in enumerate(signature.outputs):
        shapes = [
            (sizes, outputs[number]) for sizes, outputs in calls if len(outputs[number]) == port.shape.rank
        ]
        if shapes and port.shape.rank:
            found[port.name] = ", ".join(_axis(signature, shapes, axis) for axis in range(port.shape.rank))
    return found


def _axis(
    signature: ModelSignature, calls: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], axis: int
) -> str:
    own = {shape[axis] for _, shape in calls}
    names = [
        name
        for number, name in enumerate(signature.dimensions)
        if len({sizes[number] for sizes, _ in calls}) > 1
        and all(sizes[number] == shape[axis] for sizes, shape in calls)
    ]
    if names:
        return " or ".join(names)
    return str(own.pop()) if len(own) == 1 else "?"

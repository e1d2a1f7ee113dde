"""The examination of a model: each treatment that the configuration allows is tried on the live model.

1. `find_baseline` looks for inputs and sizes on which the results differ enough to show a defect. Each request of the
baseline runs alone; its results are the reference. Batch invariance has another reference: the same requests alone in
calls as they are served, filled up with copies.
2. One request runs twice. A model that does not repeat its results cannot be compared, and nothing is proved.
3. Each treatment (batching, padding, the strategy, static shapes, batch invariance) has cases. A case is one call;
its requests are known to run alone.
4. The results of a case are compared with the reference, element by element. `Evidence` counts them for each output: for,
against, or not judged. The verdict follows from these counts (`evidence.py`).

The proof promises no more than it tried: a model that mixes rows only at other values or sizes passes. Time is limited by
a budget (`model_calls.py`), and each treatment has a share. Only the cases that `ProbeOptions.budget_s` names run beyond it.

`shapestream_engine.probe` runs the examination in a child process, because a model may crash or hang. The child announces
each call with its phase. The parent attributes a crash to the last announced phase and starts another child, which skips
that phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.calibration_shapes import call_nbytes
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.ports import InputPort
from shapestream_engine.probing.baseline import (
    Baseline,
    find_baseline,
    tells,
)
from shapestream_engine.probing.cases import (
    Case,
    batching_cases,
    crowds,
    doublings,
    filling_pairs,
    grid_cases,
    invariance_cases,
    most_rows,
    padding_cases,
    row_counts,
    static_cases,
    strategy_cases,
)
from shapestream_engine.probing.evidence import (
    ENOUGH,
    LEAST_REQUESTS,
    Evidence,
    Finding,
    OutputEvidence,
    Treatment,
    refuted,
    unjudged,
)
from shapestream_engine.probing.inputs import Samples, Values, read_samples
from shapestream_engine.probing.model_calls import (
    WALL,
    Announce,
    Budget,
    DirectCalls,
    ModelCalls,
    ProbeRequest,
    SlotCalls,
)
from shapestream_engine.probing.probe_requests import same_bits
from shapestream_engine.probing.tolerances import Difference, Movement, OutputTolerance, compare
from shapestream_engine.shapes import BATCH
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

MOST_CROWD_NBYTES = 256 << 20
"""Largest size in bytes of the inputs of one call in the proof."""
_GRID = "call sizes of a calibration"
"""Phase in which requests of the calibration's sizes run alone."""
_FIRST = 2
"""Cases of a treatment before its largest calls: small calls show a defect more clearly."""
_MOST_VALUES = 8
"""Values of the common inputs that are tried: as many as `COMMON_VALUES` has."""
_PER_VALUE = 8
"""Cases of a treatment at each of them: pairs in both orders, a crowd around another, and extreme neighbours."""
_SERVED = frozenset({"strategy", "static", "invariance"})
"""Kinds of treatment that run through a slot, as in service."""
_VARIED = frozenset({"batching", "padding", "strategy", "invariance"})
"""Kinds of treatment that run requests of many contents: whole values need requests near their steps."""
_FLOORED = frozenset({"batching", "padding", "invariance"})
"""Kinds of treatment with enough contents for `LEAST_REQUESTS`."""
_ROWS_SHARE = 0.5
"""Share of a treatment's time for calls of many rows."""
_CALLS_PER_REQUEST = 2.5
"""Calls that another request takes: one alone, and its part of those in company."""
EVERY_INPUT = "*"
"""Stands for all inputs in `ProbeOptions`."""


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
    """Seconds of work for the proof, counted from the first request, after compilation (`model_calls.seconds_of_work`): at
    least a quarter of the wall-clock time.

    Two kinds of cases run beyond the budget, until four times as many wall-clock seconds have passed: those that each
    output lacks of `LEAST_REQUESTS` requests, and each static shape. Calls of many rows take half of a treatment's share, or
    less if the wall-clock time would not suffice for these requests; calls of the calibration's sizes take a twentieth of
    the budget together. No call is tried if it would take half of the budget.
    """
    hang_s: float = 30.0
    """Wall-clock seconds after which a call counts as hanging; compilation may take 20 times as long."""
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
    """Return the treatments of requests that the configuration allows.

    With `batch_invariant`, a request alone runs in a call that is filled up. So neither the number of rows nor the filling
    is a treatment: no other call is served.
    """
    found = []
    if most_rows(signature, options.max_batch) > 1 and not options.batch_invariant:
        found.append(Treatment(kind="batching"))
    padded = [
        name
        for number, (name, may) in enumerate(zip(signature.dimensions, signature.paddable, strict=True))
        if may and number not in signature.table.strings
    ]
    found += [Treatment(kind="padding", dimensions=(name,)) for name in padded]
    if len(padded) > 1:
        found.append(Treatment(kind="padding", dimensions=tuple(padded)))
    only_rows = options.batch_invariant and set(signature.strategy.sizes) == {BATCH}
    if signature.strategy.sizes and not only_rows:
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
    threads: int | None = None,
) -> Outcome:
    """Try each treatment that is not in `skip`, and hand its findings to `emit`.

    `model` takes every shape. `served` is the same model with a strategy; None if it has no strategy. `threads`: those that
    the model computes with; None: one per CPU.
    """
    budget = Budget(options.budget_s, threads)
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
        outcome.sizes = tuple(map(baseline.signature.spell, baseline.sizes))
        if not why:
            until = budget.spent_s() + options.budget_s / 10
            baseline.requests.has_time = lambda: budget.spent_s() < until
            baseline.requests.may_make = baseline.requests.has_time
            baseline.requests.look_for_ids(max(baseline.sizes, key=math.prod))
            baseline.look_again()
    if baseline is None or why:
        emit([unjudged(treatment, why) for treatment in wanted])
    else:
        served_calls = calls if served is None else SlotCalls(served, announce)
        _TreatmentRun(calls, served_calls, baseline, options, skip, budget).run(wanted, emit)
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
        budget: Budget,
    ) -> None:
        self._calls = calls
        self._served = served
        self._baseline = baseline
        self._options = options
        self._skip = skip
        self._budget = budget
        self._rows = most_rows(calls.signature, options.max_batch)

    def run(self, wanted: Sequence[Treatment], emit: Callable[[Sequence[Finding]], None]) -> None:
        """Try each treatment; one with enough evidence ends when its share of the time is over."""
        for number, treatment in enumerate(wanted):
            share_s = (self._options.budget_s - self._budget.spent_s()) / (len(wanted) - number)
            # Cases are made as they are needed, so requests that run alone for a case belong to the phase as well.
            with self._calls.phase(str(treatment)), self._served.phase(str(treatment)):
                emit(list(self._try_treatment(treatment, share_s)))

    def _try_treatment(self, treatment: Treatment, share_s: float) -> Iterator[Finding]:
        baseline, budget = self._baseline, self._budget
        if treatment.kind == "invariance":
            baseline = self._served_baseline()
            if (finding := self._changed_by_filling(treatment, baseline)) is not None:
                yield finding
                return
        trials = _Trials(treatment, self._calls.signature, baseline)
        evidence, requests = trials.evidence, baseline.requests
        least = trials.least
        # Each static shape has a compiled model, and each of them is tried before it is served.
        until = math.inf if treatment.kind == "static" else budget.spent_s() + max(0.0, share_s)
        requests.has_time = lambda: budget.spent_s() < until and self._has_room(evidence, least)

        def may_go_on() -> bool:
            return budget.spent_s() < until or (evidence.missing(least) > 0 and not budget.is_over)

        requests.may_make = may_go_on
        self._try(trials, islice(cases := self._cases(treatment, baseline), _FIRST), may_go_on)
        if treatment.kind in ("batching", "padding"):
            self._try_other_values(trials, may_go_on)
        self._try_largest(trials, budget.spent_s() + _ROWS_SHARE * max(0.0, share_s))
        is_complete = self._try(trials, cases, may_go_on)
        if treatment.kind in _VARIED:
            evidence.skipped = requests.skipped
        if treatment.kind in _FLOORED:
            are_all = is_complete and requests.refused == requests.skipped == 0
            evidence.least = ENOUGH if are_all else least
            evidence.call_s = self._call_s if budget.is_over else None
        if treatment.kind == "padding" and requests.misfit:
            # Padded to a size at which the rule happens to hold, the request would lose some of its own results.
            yield refuted(treatment, f"a request alone breaks the rule of an output: {requests.misfit}")
        else:
            yield from evidence.findings()

    def _try_other_values(self, trials: _Trials, may_go_on: Callable[[], bool]) -> None:
        """Try a few cases at each other value of the inputs that requests have in common.

        A model may compute otherwise by a flag or a rate, so what is proved with one says little of another.
        """
        requests = trials.baseline.requests
        seen = {requests.alike()}
        for variant in range(1, _MOST_VALUES):
            if seen == {()} or not may_go_on():
                return
            other, _ = find_baseline(
                self._calls,
                values_of(self._calls.signature, self._options),
                seed=self._options.seed,
                computed_in=requests.computed_in,
                skip=self._skip,
                variant=variant,
            )
            if other is None or other.requests.alike() in seen:
                continue
            seen.add(other.requests.alike())
            requests.also(other.requests)
            other.requests.has_time, other.requests.may_make = requests.has_time, requests.may_make
            cases = self._cases(trials.treatment, other)
            self._try(trials.at(other), islice(cases, _PER_VALUE), may_go_on)

    def _has_room(self, evidence: Evidence, least: int) -> bool:
        """Tell whether there is time for more than the requests that the evidence lacks: of slow models there is little."""
        missing_s = evidence.missing(least) * _CALLS_PER_REQUEST * self._call_s
        return self._budget.wall_s() + missing_s < WALL * self._options.budget_s

    @property
    def _call_s(self) -> float:
        """The mean of the calls so far, in wall-clock seconds."""
        runners = {self._calls, self._served}
        return self._budget.wall_s() / max(1, sum(runner.number for runner in runners))

    def _try_largest(self, trials: _Trials, until: float) -> None:
        """Try calls of more and more rows, up to the most that may be served."""
        treatment, baseline = trials.treatment, trials.baseline
        if treatment.kind == "static" or self._rows < 2:
            return
        signature, options = self._calls.signature, self._options
        padded = [signature.dimensions.index(name) for name in treatment.dimensions]
        if treatment.kind == "batching":
            counts = row_counts(signature, options.max_batch, self._rows, self._budget.threads)
        else:
            counts = doublings(signature, self._rows)
        cases = crowds(baseline, padded, counts, trials.evidence.judged_at)
        tried, why = self._try_crowds(trials, cases, until)
        if why:
            trials.evidence.stop(counts, tried, why)
        elif treatment.kind == "batching" and _GRID not in self._skip:
            self._try_grid(trials, grid_cases(baseline, options.max_batch))

    def _try_crowds(self, trials: _Trials, cases: Iterator[Case], until: float) -> tuple[int, str]:
        """Try larger and larger calls. Returns the rows up to which each call was judged, and the reason why larger calls
        were not, or ""."""
        limit_s = self._options.budget_s / 2
        last: Case | None = None
        rows = judged = 1  # a request that runs alone needs no proof
        seconds_per_byte = 0.0
        for case in cases:
            if trials.evidence.is_settled:
                break
            if case.sizes[0] > rows > 1 and not trials.evidence.judged_at(rows):
                return judged, f"no result in a call of {rows} rows could be judged"
            judged = rows
            nbytes = self._nbytes(case, trials.treatment)
            if nbytes > MOST_CROWD_NBYTES:
                return rows, f"their inputs take more than {MOST_CROWD_NBYTES >> 20} MiB"
            if last is not None and case.sizes[0] > rows and seconds_per_byte * nbytes > limit_s:
                # The first call of a shape may include preparation, so the last call is timed again.
                seconds_per_byte = self._try_one(trials, last) / self._nbytes(last, trials.treatment)
                if seconds_per_byte * nbytes > limit_s:
                    return rows, f"one would take longer than {limit_s:g} s"
            is_over = self._budget.spent_s() + seconds_per_byte * nbytes > until
            if case.sizes[0] > rows and (is_over or not self._has_room(trials.evidence, trials.least)):
                return rows, "their share of the time is over"
            seconds_per_byte = self._try_one(trials, case) / nbytes
            last, rows = case, case.sizes[0]
        return rows, ""

    def _try_grid(self, trials: _Trials, cases: Iterator[Case]) -> None:
        """Try calls of the calibration's sizes until their share of the budget is spent."""
        until = self._budget.spent_s() + self._options.budget_s / 20
        seconds_per_byte = 0.0
        while not trials.evidence.is_settled:
            with self._calls.phase(_GRID):
                case = next(cases, None)
            if case is None:
                return
            nbytes = self._nbytes(case, trials.treatment)
            if self._budget.spent_s() + seconds_per_byte * nbytes > until:
                return
            seconds_per_byte = self._try_one(trials, case) / nbytes

    def _try(self, trials: _Trials, cases: Iterator[Case], may_go_on: Callable[[], bool]) -> bool:
        """Try cases while there is time, until every verdict is settled. Returns True if none is left."""
        while not trials.evidence.is_settled and may_go_on():
            case = next(cases, None)
            if case is None:
                return True
            self._try_one(trials, case)
        return False

    def _try_one(self, trials: _Trials, case: Case) -> float:
        """Run one case; returns its duration in seconds of the budget."""
        runner = self._served if trials.treatment.kind in _SERVED else self._calls
        began = self._budget.spent_s()
        try:
            results = runner.run(case.sizes, case.members, case.words)
        except (EngineError, RuntimeError) as error:
            trials.evidence.fail(str(error), case.words)
        else:
            trials.compare(case, results)
        return self._budget.spent_s() - began

    def _nbytes(self, case: Case, treatment: Treatment) -> int:
        """Return the bytes of the inputs of the case's largest call."""
        signature = self._calls.signature
        if treatment.kind in _SERVED:
            calls = CallPlanner(signature).plan(case.sizes)
            return max(1, *[call_nbytes(signature, call.sizes) for call in calls])
        return max(1, call_nbytes(signature, case.sizes))

    def _served_baseline(self) -> Baseline:
        """Return the baseline with requests that run alone as in service, in a call that is filled up with copies."""
        return replace(self._baseline, requests=self._baseline.requests.elsewhere(self._served))

    def _changed_by_filling(self, treatment: Treatment, served: Baseline) -> Finding | None:
        """Return a refuted finding if ordinary requests get other floats in a call of exactly their rows than in service;
        otherwise None.

        Both runs are of the request alone, so rounding decides where scores are equal: whole values are not compared.
        """
        plain = self._baseline
        for request, filled in filling_pairs(plain, served):
            if filled is None:
                return refuted(treatment, f"a call that is filled up fails: {served.requests.complaint}")
            for number, port in enumerate(self._calls.signature.outputs):
                alone, result = request.results[number], filled.results[number]
                tolerance = plain.tolerances[number]
                if plain.is_discrete(number) or same_bits(alone, result):
                    continue
                difference = compare(alone, result, tolerance)
                movement = Movement(alone, result, tolerance)
                if difference.within or plain.requests.doubt_about(request, number, movement) is not None:
                    continue
                (rows,) = self._calls.signature.strategy.sizes[BATCH]
                why = f"in calls of {rows} rows, as they are served, the request alone gets other results"
                words = f"{why}, {difference.words}" if difference.words else why
                return Finding(
                    treatment=treatment,
                    output=port.name,
                    verdict="refuted",
                    against=1,
                    largest=difference.amount if math.isfinite(difference.amount) else None,
                    allowed=difference.allowed,
                    why=words,
                    case=request.words,
                )
        return None

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
_EXACT = OutputTolerance.of(None, ())


class _Trials:
    """Compares the results of one treatment's cases with those of the requests alone, for its evidence."""

    def __init__(self, treatment: Treatment, signature: ModelSignature, baseline: Baseline) -> None:
        self.treatment = treatment
        self.baseline = baseline
        self.least = LEAST_REQUESTS if treatment.kind in _FLOORED else 0
        """Different requests that are enough if others are left out."""
        self._padded = [signature.dimensions.index(name) for name in treatment.dimensions]
        self._axes = [
            port.shape.names.index(BATCH) if BATCH in port.shape.names else None for port in signature.outputs
        ]
        self._hides: dict[tuple[ProbeRequest, int], bool] = {}
        is_varied = treatment.kind in _VARIED
        self._in_steps = [baseline.is_discrete(number) for number in range(len(signature.outputs))]
        self.evidence = Evidence(
            treatment,
            [
                OutputEvidence(
                    port.name,
                    blank=baseline.blank.get(number, ""),
                    is_whole=is_varied and self._in_steps[number],
                    spread=baseline.tolerances[number].spread,
                )
                for number, port in enumerate(signature.outputs)
            ],
        )

    def at(self, baseline: Baseline) -> _Trials:
        """Return the trials of other requests, for the same evidence."""
        other = copy(self)
        other.baseline = baseline
        other._hides = {}
        other._in_steps = [baseline.is_discrete(number) for number in range(len(self._in_steps))]
        return other

    def compare(self, case: Case, results: Sequence[Sequence[Array]]) -> None:
        """Compare the results of a case with the results that each member got alone."""
        self.evidence.ran(sum(member.shape.rows for member in case.members))
        for place, (member, got) in enumerate(zip(case.members, results, strict=True)):
            if member in case.guests:
                continue
            own = self.baseline.signature.spell(member.sizes)
            words = f"request {place + 1} of {len(case.members)}, of {own}: {case.words}"
            for number, result in enumerate(got):
                self._compare(case, member, number, result, words if len(case.members) > 1 else case.words)

    def _compare(self, case: Case, member: ProbeRequest, number: int, result: Array, words: str) -> None:
        alone, evidence = member.results[number], self.evidence.outputs[number]
        tolerance = self._tolerance_of(member, number)
        difference = _NO_DIFFERENCE if same_bits(alone, result) else compare(alone, result, tolerance)
        if difference.within:
            if not (tells(alone) and self._could_differ(case, member)):
                return
            if self._hides_all(member, number, tolerance):
                evidence.hidden.add(member)
                return
            evidence.agrees(
                member,
                rows=case.judged_rows,
                shape=self._of_row(number, alone.shape),
                difference=difference,
                case=words,
                is_near=number in member.near,
            )
            return
        # Batch invariance promises equal bits, even where two scores are equal.
        if self.treatment.kind == "invariance":
            evidence.differs(difference, words)
            return
        movement = Movement(alone, result, tolerance, in_steps=self._in_steps[number])
        elements = movement.differing()
        doubt = self.baseline.requests.doubt_about(member, number, movement)
        if doubt is None:
            evidence.differs(difference, words, by_rows=self._follows_rows(case, member, number, result))
            return
        evidence.cannot_tell(
            member,
            doubt,
            shape=self._of_row(number, alone.shape),
            elements=[self._of_row(number, tuple(element)) for element in elements.tolist()],
        )

    def _follows_rows(self, case: Case, member: ProbeRequest, number: int, result: Array) -> bool:
        """Tell whether copies of the request in place of the others give it the same result, to the bit.

        Only whole values are asked: floats that the number of rows moves beyond rounding are wrong in any company.
        """
        evidence = self.evidence.outputs[number]
        if (
            self.treatment.kind != "batching"
            or not self._in_steps[number]
            or evidence.by_rows < evidence.against
        ):
            return False
        copies, more = divmod(case.sizes[0], member.shape.rows)
        beside = None if more else self.baseline.requests.beside_copies(member, copies)
        return beside is not None and same_bits(beside[number], result)

    def _could_differ(self, case: Case, member: ProbeRequest) -> bool:
        """Tell whether the request had company in this case: another request, or padding."""
        if self.treatment.kind == "batching":
            return any(other is not member for other in case.members)
        if self.treatment.kind == "padding":
            return any(case.sizes[number] > member.sizes[number] for number in self._padded)
        return True

    def _of_row(self, number: int, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape, or an index, without the batch axis of this output."""
        axis = self._axes[number]
        return index if axis is None else index[:axis] + index[axis + 1 :]

    def _tolerance_of(self, member: ProbeRequest, number: int) -> OutputTolerance:
        if self.treatment.kind == "invariance":
            return _EXACT
        baseline = self.baseline
        return baseline.requests.tolerance_of(member, number, baseline.tolerances[number])

    def _hides_all(self, member: ProbeRequest, number: int, tolerance: OutputTolerance) -> bool:
        """Tell whether the tolerance of the request exceeds the spread of its results."""
        key = (member, number)
        if key not in self._hides:
            self._hides[key] = tolerance.hides(member.results[number])
        return self._hides[key]


def values_of(signature: ModelSignature, options: ProbeOptions) -> dict[str, Values]:
    """Return the values of the inputs that the options describe; raises `SignatureError` for samples that do not fit the
    model."""
    axes = {
        port.name: port.axis_names.index("batch")
        if signature.has_batch and BATCH in port.axis_names
        else None
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

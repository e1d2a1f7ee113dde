"""The test of a model before it is served, and the consequences of its result. Every command loads a model this way.

1. Output rules that the configuration leaves out are inferred by running the model (`compile_with_rules`).
2. If the configuration names no batch axis, the axis that the file names is used, or else the first axis of every input.
3. The engine tries to prove that batching and padding change no result (docs/safety.md). `judge` decides by its findings:

   refuted    the model is refused, with the output, the difference and a remedy
   unjudged   nobody can tell: such padding is switched off, and without batching each request runs alone. Both give a
              warning
   unproved   an output is constant, empty or not finite: padding is switched off. Batching stays on, but no rows are
              filled up. Both give a warning
   proved     the model is served as configured

   If larger calls could be served than were tested, calls have at most the rows that were; a warning names them. A model
   whose configuration needs what is switched off is refused.

4. If batching along an axis that no user wrote is not proved, each request runs alone, and a warning says why.

`trust: true` serves the model as configured, without a proof. No step here guarantees more than the tests that ran: they
are samples, on this machine, with as many threads as one slot has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from shapestream.settings import Location, ModelSettings, ProbeSettings
from shapestream_engine.backends.registry import EngineChoice
from shapestream_engine.batch_axis import (
    NoBatchAxis,
    states_batch,
    why_no_batch,
    with_batch_axis,
    with_second_axis,
    without_batch_axis,
    without_rules,
)
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError, RuleMissing
from shapestream_engine.model import ModelSpec, compile_model
from shapestream_engine.output_rules import List, Shared
from shapestream_engine.probe import (
    EVERY_OUTPUT,
    UNWATCHED,
    Finding,
    ProbeOptions,
    ProbeReport,
    ProofCache,
    Watch,
    choose,
    complete_rules,
    prove,
)
from shapestream_engine.probing.examination import EVERY_INPUT
from shapestream_engine.probing.inputs import Integers, Uniform, Values
from shapestream_engine.shapes import BATCH
from shapestream_engine.signature import ModelSignature

_Problem: TypeAlias = tuple[Location, str]
"""A place below the model in the YAML, and a sentence about it."""

_PROBE = "describe realistic inputs by `probe`"
_FASTER = "give the process more `threads`, describe smaller inputs by `probe`"
_VOUCH = "vouch for it by trust: true"
_EQUAL_ROWS = "set batching: {batch_invariant: true}"
_ALONE = "every request runs alone: "
MEANT = "batching: {max_batch: 1} says that this is meant"


class _ProofRefusal(NamedTuple):
    """A reason to refuse a model: the place below it in the YAML, the problem, and its remedy."""

    place: Location
    what: str
    remedy: str

    def problem(self, *, trusted: bool) -> _Problem:
        """Return the refusal as a sentence: with its remedy, or, for a trusted model, as a warning."""
        return self.place, f"{self.what} ({'served nevertheless: trust' if trusted else self.remedy})"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The consequences of a report of the proof."""

    refused: tuple[_Problem, ...] = ()
    warnings: tuple[_Problem, ...] = ()
    padding_off: frozenset[str] = field(default_factory=frozenset)
    """Dimensions that are not padded, although the configuration allows it."""
    exact_rows: bool = False
    """Batching is unproved: calls have only the rows of requests, and none are filled up."""
    most_rows: int | None = None
    """Largest number of rows of a call that requests share, because others were not tried; 1: each request runs alone.
    None: no limit beside the configuration's."""


def probe_options(model: ModelSettings) -> ProbeOptions:
    """Return the configuration's description of realistic inputs, for the engine."""
    values = {name: known for name, probe in model.probe.items() if (known := _values(probe)) is not None}
    samples = {name: Path(probe.samples) for name, probe in model.probe.items() if probe.samples is not None}
    return ProbeOptions(
        values=values,
        samples=samples,
        max_batch=rows_together(model),
        batch_invariant=model.batching.invariant_rows is not None,
    )


def rows_together(model: ModelSettings) -> int | None:
    """Return the largest number of rows of a shared call. 1: each request runs alone. None: as many as the model takes."""
    return model.batching.max_batch if model.idempotent else 1


def may_share(model: ModelSettings) -> bool:
    """Tell whether the configuration lets requests share calls of a model that has a batch axis.

    A tokenizer, and a function that returns a list of arrays, have none.
    """
    returns_lists = model.tokenizer is not None or any(
        output.rule == List.NAME for output in model.outputs.values()
    )
    return rows_together(model) != 1 and not returns_lists


def threads_of_slot(engine: str, slots: int, threads: int | None) -> int | None:
    """Return the threads that compute a call of one slot, as the engine divides those of a process; None: it chooses.

    How many threads add a sum up decides its last bits, so the proof calls the model as a slot does.
    """
    if threads is None or engine not in ("openvino", "onnxruntime", "torch"):
        return threads
    # Slots of ONNX Runtime share one pool, and each computes in its own thread besides.
    return max(1, threads - slots + 1 if engine == "onnxruntime" else threads // slots)


def probe_model(
    model: ModelSettings,
    spec: ModelSpec,
    compiled: CompiledModel,
    *,
    threads: int | None,
    watch: Watch = UNWATCHED,
) -> ProbeReport:
    """Test the model, or read an earlier result from the cache. Raises `EngineError` if it cannot be tested."""
    cache = ProofCache.of_environment()
    return prove(spec, compiled, probe_options(model), threads=threads, cache=cache, watch=watch)


def chosen_engine(spec: ModelSpec, watch: Watch = UNWATCHED) -> EngineChoice:
    """Return the engine that runs the model, as it was tried in a child process. Raises `EngineError` if none does."""
    return choose(spec, cache=ProofCache.of_environment(), watch=watch)


def compile_with_rules(
    model: ModelSettings, spec: ModelSpec, *, slots: int, threads: int | None, watch: Watch = UNWATCHED
) -> tuple[ModelSpec, CompiledModel, Mapping[str, Mapping[str, Any]]]:
    """Compile the model, with inferred output rules where the configuration leaves them out.

    Returns the completed specification, the compiled model and the inferred rules by output. Raises `EngineError`;
    `RuleMissing` if a rule is not certain, or if `trust: true` forbids tests.
    """
    try:
        return spec, compile_model(spec, slots=slots, threads=threads), {}
    except RuleMissing as error:
        if model.trust:
            raise
        complete, rules, unruled = complete_rules(
            spec, probe_options(model), threads=threads, cache=ProofCache.of_environment(), watch=watch
        )
        if error.output not in rules:
            why = unruled.get(error.output, unruled.get(EVERY_OUTPUT))
            if why is None:
                raise
            raise RuleMissing(f"{error}; {why}", output=error.output) from error
        return complete, compile_model(complete, slots=slots, threads=threads), rules


def judge(model: ModelSettings, signature: ModelSignature, report: ProbeReport) -> Judgement:
    """Decide what follows from a report. `trust: true` turns refusals into warnings."""
    refused = [_refusal(model, finding) for finding in report.of("refuted")]
    shared = sorted(port.name for port in signature.outputs if isinstance(port.rule, Shared))
    warnings: list[_Problem] = []
    off: frozenset[str] = frozenset()
    limits: list[int] = []
    doubtful = [*report.of("unproved"), *report.of("unjudged")]
    for finding in doubtful:
        if needed := list(_needed(model, finding, shared)):
            refused += needed
            continue
        off |= frozenset(finding.treatment.dimensions)
        warnings.append(_doubt(model, finding))
        if finding.verdict == "unjudged" and finding.treatment.kind == "batching":
            limits.append(1)
    for finding in report.findings:
        if finding.is_short and BATCH in signature.strategy.sizes:
            refused.append(_too_large(model, finding))
        elif finding.is_short:
            limits.append(finding.rows)
            warnings.append(_limited(model, finding))
    if min(limits, default=2) > 1:
        warnings += _about_common(model, signature, report)
    problems = tuple(refusal.problem(trusted=model.trust) for refusal in refused)
    if model.trust:
        return Judgement(warnings=(*problems, *warnings))
    exact_rows = any(finding.treatment.kind == "batching" for finding in doubtful)
    return Judgement(
        refused=problems,
        warnings=tuple(warnings),
        padding_off=off,
        exact_rows=exact_rows,
        most_rows=min(limits, default=None),
    )


def without_padding(spec: ModelSpec, dimensions: frozenset[str]) -> ModelSpec:
    """Return the model without padding of these dimensions."""
    inputs = {
        name: replace(port, pad={each: value for each, value in port.pad.items() if each not in dimensions})
        for name, port in spec.inputs.items()
    }
    return replace(spec, inputs=inputs)


def _values(probe: ProbeSettings) -> Values | None:
    match probe:
        case ProbeSettings(integers=(low, high)):
            return Integers(low, high)
        case ProbeSettings(uniform=(lowest, highest)):
            return Uniform(lowest, highest)
        case _:
            return None


def _refusal(model: ModelSettings, finding: Finding) -> _ProofRefusal:
    vouch = "trust: true serves it nevertheless"
    treatment = finding.treatment
    # "strategy bucketed changes ...", or "padding of seq (strategy native) changes ...".
    strategy = "" if treatment.kind in ("strategy", "static") else f" (strategy {model.shapes.strategy})"
    what = f"{finding.subject}: {treatment}{strategy} changes the results: {finding.evidence}"
    match treatment.kind:
        case "invariance":
            return _ProofRefusal(
                ("batching", "batch_invariant"),
                f"{finding.subject}: the results depend on the rest of the call: {finding.evidence}",
                "batch_invariant: 1 computes each row alone; without the key, equal within tolerances is enough",
            )
        case "static":
            return _ProofRefusal(("shapes", "static"), what, f"remove that shape; {vouch}")
        case "strategy":
            return _ProofRefusal(("shapes",), what, f"choose another strategy; {vouch}")
    if treatment.dimensions:
        wanted = ", ".join(treatment.dimensions)
        remedy = f"remove {wanted} from `pad`, or add a mask that the model uses, by mask_of; {vouch}"
        return _ProofRefusal(_pad_place(model, treatment.dimensions), what, remedy)
    alone = "set batching.max_batch to 1, or give that axis another name: every request then runs alone"
    if model.batching.max_batch == 1:
        alone = "remove sizes of batch from shapes, and batch_invariant: such calls divide requests and fill them up"
    alone = f"{_equal_rows(model, finding)}{alone}"
    return _ProofRefusal(_output_place(model, finding.output), what, f"{alone}; {vouch}")


def _equal_rows(model: ModelSettings, finding: Finding) -> str:
    """Return the advice to give each call the same number of rows, if that decides the results and is allowed; or ""."""
    helps = finding.follows_rows and model.idempotent and not model.shapes.stated
    return f"{_EQUAL_ROWS}, because the number of rows decides; or " if helps else ""


def _needed(model: ModelSettings, finding: Finding, shared: Sequence[str]) -> Iterator[_ProofRefusal]:
    """Yield a refusal if the configuration needs the treatment of a doubtful finding; none if it can be switched off, or
    goes on.

    `shared`: names of the outputs with the rule `shared`.
    """
    treatment, shapes = finding.treatment, model.shapes
    doubt = _doubt_words(finding)
    needed = [name for name in treatment.dimensions if name in shapes.sizes]
    if treatment.kind == "batching":
        for name in shared:
            if finding.output in (None, name):
                what = (
                    f"output {name!r}: the rule shared needs an output that is the same in every batch, and that {doubt}: "
                    f"{finding.why}"
                )
                yield _ProofRefusal(("outputs", name), what, _VOUCH)
        if finding.verdict == "unjudged" and BATCH in shapes.sizes and not shared:
            what = f"{finding.subject}: {treatment} {doubt}: {finding.why}; the sizes of batch need it"
            yield _ProofRefusal(("shapes", BATCH), what, f"{_remedy(finding)}, or {_VOUCH}")
    elif treatment.kind == "invariance":
        what = f"{finding.subject}: batch_invariant {doubt}: {finding.why}"
        yield _ProofRefusal(("batching", "batch_invariant"), what, f"{_remedy(finding)}, or {_VOUCH}")
    elif treatment.kind == "strategy":
        what = f"{finding.subject}: {treatment} needs padding that is proved harmless, and it {doubt}: {finding.why}"
        yield _ProofRefusal(("shapes",), what, f"{_remedy(finding)}, choose the strategy native, or {_VOUCH}")
    elif treatment.kind == "static" and finding.verdict == "unjudged":
        what = f"{finding.subject}: {treatment} {doubt}: {finding.why}"
        yield _ProofRefusal(("shapes", "static"), what, f"{_remedy(finding)}, remove that shape, or {_VOUCH}")
    elif needed:
        what = (
            f"{finding.subject}: {treatment} {doubt}: {finding.why}; the strategy {shapes.strategy} needs it"
        )
        yield _ProofRefusal(("shapes", needed[0]), what, f"{_remedy(finding)}, or {_VOUCH}")


def _remedy(finding: Finding) -> str:
    """Return the advice that may turn a doubtful finding into a proof."""
    return _PROBE if finding.call_s is None else _FASTER


def _doubt_words(finding: Finding) -> str:
    """Return the doubt as a verb phrase."""
    return "cannot be judged" if finding.verdict == "unjudged" else "is unproved"


def _too_large(model: ModelSettings, finding: Finding) -> _ProofRefusal:
    """Return the refusal of sizes of batch, which the user states, beyond the rows that were tried."""
    what = f"{finding.subject}: {finding.treatment} was not tried beyond {finding.rows} rows: {finding.why}"
    if model.batching.invariant_rows is not None:
        remedy = f"set batch_invariant to {finding.rows} or less, or {_VOUCH}"
        return _ProofRefusal(("batching", "batch_invariant"), what, remedy)
    return _ProofRefusal(("shapes", BATCH), what, f"leave out the larger sizes, or {_VOUCH}")


def _limited(model: ModelSettings, finding: Finding) -> _Problem:
    """Return the warning that calls have at most the rows that were tried."""
    remedy = f"set batching.max_batch to {finding.rows}"
    if model.shapes.strategy == "native" and model.shapes.max_prepared is not None:
        # Calls are filled up to the bound of the dimension, not to `max_batch`.
        remedy = f"bound batch by {finding.rows} in the shape of an input, or remove shapes.max_prepared"
    what = f"{finding.subject}: {finding.treatment} was not tried beyond {finding.rows} rows: {finding.why}"
    consequence = f"calls have at most {finding.rows} rows" if finding.rows > 1 else "each request runs alone"
    return ("batching", "max_batch"), f"{what}; {consequence} ({remedy}, or {_VOUCH})"


def _doubt(model: ModelSettings, finding: Finding) -> _Problem:
    advice = f"{_remedy(finding)}, or {_VOUCH}"
    about = f"{finding.subject}: {finding.treatment} {_doubt_words(finding)}: {finding.why}"
    if finding.treatment.kind == "static":
        return ("shapes", "static"), f"{about}; it is served nevertheless ({advice})"
    if dimensions := finding.treatment.dimensions:
        return _pad_place(model, dimensions), f"{about}; {', '.join(dimensions)} is not padded ({advice})"
    if finding.verdict == "unjudged":
        return _output_place(model, finding.output), f"{about}; each request runs alone ({advice})"
    return _output_place(model, finding.output), f"{about}; requests share calls nevertheless ({advice})"


def _about_common(model: ModelSettings, signature: ModelSignature, report: ProbeReport) -> Iterator[_Problem]:
    """Yield a warning for each input that requests have in common, and whose values nobody described."""
    for port in signature.inputs:
        described = port.value is not None or not {port.name, EVERY_INPUT}.isdisjoint(model.probe)
        if described or not signature.is_common(port) or port.name not in report.inputs:
            continue
        what = (
            f"requests share calls where input {port.name!r} is equal, tried with {report.inputs[port.name]}"
        )
        always = f"inputs: {{{port.name}: {{value: NUMBER}}}}"
        yield (
            ("inputs", port.name) if port.name in model.inputs else (),
            f"{what} (if all requests have the same, write {always}; else say by `probe` which values it has)",
        )


def _about_states(compiled: CompiledModel) -> tuple[_Problem, ...]:
    """Return a warning about a model that keeps a state between calls; none for other models."""
    if not compiled.states:
        return ()
    names = ", ".join(compiled.states)
    what = (
        f"the model keeps a state from call to call ({names}), but every call here begins with the initial state "
        "(for sequences, export it with the state as an input and an output)"
    )
    return ((("path",), what),)


def _pad_place(model: ModelSettings, dimensions: tuple[str, ...]) -> Location:
    for name, port in model.inputs.items():
        for dimension in dimensions:
            if dimension in port.pad:
                return ("inputs", name, "pad", dimension)
    return ()


def _output_place(model: ModelSettings, output: str | None) -> Location:
    return ("outputs", output) if output in model.outputs and output is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedModel:
    """The compiled model and the findings. It still has the padding that the judgement forbids."""

    spec: ModelSpec
    compiled: CompiledModel
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Output rules that were inferred by running the model."""
    proof: ProbeReport
    judgement: Judgement


def try_model(
    model: ModelSettings,
    spec: ModelSpec,
    *,
    slots: int,
    threads: int | None,
    prove_trusted: bool = False,
    watch: Watch = UNWATCHED,
) -> TriedModel:
    """Compile and test the model. Raises `EngineError` if it cannot be served, whatever the proof says.

    `spec` is the model as the configuration describes it. A model with `trust: true` is tested only with `prove_trusted`,
    and no batch axis is guessed for it. `watch` is for the children that prove it.
    """
    trial = _SpecificationTrial(model, slots, threads, watch, prove_trusted=prove_trusted)
    if not may_share(model):
        return trial.of(spec)
    if states_batch(spec):
        tried = trial.of(spec)
        signature = tried.compiled.signature
        if signature.has_batch:
            return tried
        tried.compiled.close()
    else:
        signature = without_rules(spec)
    if signature.has_batch:
        return trial.guess(spec, spec, signature, "the axis that the model file calls batch", named=True)
    guess = with_batch_axis(spec, signature)
    if isinstance(guess, ModelSpec):
        if model.function is None and not model.trust:
            return trial.first_that_shares([guess, with_second_axis(spec, signature)], spec, signature)
        reason = "no axis is called batch"
        if model.function is None:
            reason = "the first axis of every input may be the batch, but trust: true forbids to try it"
        guess = NoBatchAxis(reason=reason, shapes=_guessed_shapes(guess, signature))
    return trial.warned(trial.of(spec), _why_alone(guess))


def why_alone(signatures: Iterable[ModelSignature]) -> Iterator[str]:
    """Yield a warning, with its remedy, for each model whose requests run alone though the user did not say so."""
    for signature in signatures:
        if (found := why_no_batch(signature)) is not None:
            yield f"model {signature.name!r}: every request runs alone: {_why_alone(found)}"


class _SpecificationTrial:
    """Tests of one model, with different specifications of its batch axis."""

    def __init__(
        self, model: ModelSettings, slots: int, threads: int | None, watch: Watch, *, prove_trusted: bool
    ) -> None:
        self._model = model
        self._slots = slots
        self._threads = threads
        self._watch = watch
        self._proves = prove_trusted or not model.trust

    def of(self, spec: ModelSpec) -> TriedModel:
        """Test the model as `spec` describes it. Raises `EngineError`."""
        complete, compiled, rules = compile_with_rules(
            self._model, spec, slots=self._slots, threads=self._threads, watch=self._watch
        )
        proof, judgement = ProbeReport(model=self._model.name, findings=()), Judgement()
        if self._proves:
            try:
                threads = threads_of_slot(compiled.engine, self._slots, self._threads)
                proof = probe_model(self._model, complete, compiled, threads=threads, watch=self._watch)
            except EngineError:
                compiled.close()
                raise
            proof = replace(proof, rules=rules)
            judgement = judge(self._model, compiled.signature, proof)
        judgement = replace(judgement, warnings=(*_about_states(compiled), *judgement.warnings))
        return TriedModel(spec=complete, compiled=compiled, rules=rules, proof=proof, judgement=judgement)

    def warned(self, tried: TriedModel, why: str) -> TriedModel:
        """Add the warning that its requests run alone."""
        place = ("inputs",) if self._model.inputs else ()
        warnings = ((place, f"{_ALONE}{why}"), *tried.judgement.warnings)
        return replace(tried, judgement=replace(tried.judgement, warnings=warnings))

    def first_that_shares(
        self, guesses: Sequence[ModelSpec | None], spec: ModelSpec, signature: ModelSignature
    ) -> TriedModel:
        """Test the model with one batch axis after the other; return the first under which requests share calls.

        If there is none, it is returned as tested without one, with a warning that has the reason for each.
        """
        whys: list[_Problem] = []
        for number, guess in enumerate(guesses):
            if guess is None:
                continue
            words = f"the {('first', 'second')[number]} axis of every input as batch"
            tried = self.guess(guess, spec, signature, words, named=False)
            if tried.compiled.signature.has_batch:
                return tried
            first, *others = tried.judgement.warnings
            whys.append(first)
            last = tried, others
            if number + 1 < len(guesses) and guesses[number + 1] is not None:
                tried.compiled.close()
        tried, others = last
        place, words = whys[0]
        words = "; ".join((words, *(why.removeprefix(_ALONE) for _, why in whys[1:])))
        return replace(tried, judgement=replace(tried.judgement, warnings=((place, words), *others)))

    def guess(
        self, guess: ModelSpec, spec: ModelSpec, signature: ModelSignature, axis: str, *, named: bool
    ) -> TriedModel:
        """Test the model with a batch axis that no user wrote. If that fails, test it without one, with a warning.

        `axis` names it. `named`: the model file itself calls it `batch`; then the test need not prove that batching is safe,
        but must not refute it. Raises `EngineError` if the model cannot be compiled either way.
        """
        try:
            tried = self.of(guess)
        except EngineError as error:
            alone = self._without_batch(spec, signature)
            if alone is None:
                raise
            words = str(error).removeprefix(f"model {self._model.name!r}: ")
            return self.warned(alone, f"with {axis}, {words}; {MEANT}")
        doubt = None if self._model.trust else _axis_doubt(tried, named=named)
        if doubt is None:
            return tried
        advice = _equal_rows(self._model, doubt)
        why = f"with {axis}, {_axis_words(doubt, guess, signature, advice)}"
        alone = self._without_batch(spec, signature)
        if alone is None:
            # The allowed shapes need a batch axis.
            refused = tried.judgement.refused or ((("shapes",), why),)
            return replace(tried, judgement=replace(tried.judgement, refused=refused))
        tried.compiled.close()
        return self.warned(alone, why)

    def _without_batch(self, spec: ModelSpec, signature: ModelSignature) -> TriedModel | None:
        try:
            return self.of(without_batch_axis(spec, signature))
        except EngineError:
            return None


def _axis_doubt(tried: TriedModel, *, named: bool) -> Finding | None:
    """Return the finding that forbids shared calls along an axis that no user wrote, or None."""
    batching = [finding for finding in tried.proof.findings if finding.treatment.kind == "batching"]
    for finding in batching:
        if finding.verdict in ("refuted", "unjudged") or (finding.is_short and finding.rows < 2):
            return finding
    unproved = [finding for finding in batching if finding.verdict == "unproved"]
    return unproved[0] if unproved and (not named or tried.judgement.refused) else None


def _axis_words(doubt: Finding, guess: ModelSpec, signature: ModelSignature, advice: str) -> str:
    about = f"{doubt.subject}: {doubt.treatment}"
    if doubt.verdict == "refuted":
        return f"{about} changes the results: {doubt.evidence} ({advice}{MEANT})"
    if doubt.is_short:
        return f"{about} was not tried: {doubt.why} ({MEANT})"
    found = NoBatchAxis(reason="", shapes=_guessed_shapes(guess, signature))
    write = f", or add {found.yaml} to the model" if found.shapes else ""
    return f"{about} {_doubt_words(doubt)}: {doubt.why} ({_remedy(doubt)}{write}; else {MEANT})"


def _guessed_shapes(guess: ModelSpec, signature: ModelSignature) -> dict[str, str]:
    """Return the guessed shapes by input; empty if the file names the batch axis."""
    if signature.has_batch:
        return {}
    return {port.name: guess.inputs[port.name].shape or "" for port in signature.inputs}


def _why_alone(found: NoBatchAxis) -> str:
    if found.is_named:
        return f"{found.reason} (if one axis holds rows that do not depend on each other, name it batch; else {MEANT})"
    if not found.shapes:
        return f"{found.reason} (export it with a dynamic first axis of every input; or {MEANT})"
    return (
        f"{found.reason} (if rows do not depend on each other, add {found.yaml} to the model; else {MEANT})"
    )

"""A model as it may be served, and what was tried to find that out: the one way that all commands load a model.

Rules that the configuration leaves out are looked for on the model. Where the configuration names no batch axis, the
one that the file names is taken, or the first axis under a usual name. The proof then decides: where it does not hold
with an axis that no user wrote, requests run alone, and a warning says why and what would help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shapestream.settings import ModelSettings
from shapestream_engine.batch_axis import (
    NoBatchAxis,
    states_batch,
    why_no_batch,
    with_batch_axis,
    without_batch_axis,
    without_rules,
)
from shapestream_engine.errors import EngineError
from shapestream_engine.model import CompiledModel, ModelSpec
from shapestream_engine.probe import Finding, ProbeReport
from shapestream_engine.signature import ModelSignature
from shapestream_workers.proof import Judgement, compile_seeing, judge, probe_model

__all__ = ["TriedModel", "may_share", "try_model", "why_alone"]

MEANT = "batching: {max_batch: 1} says that this is meant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedModel:
    """The compiled model, with what was found; padding that the judgement forbids is still in it."""

    spec: ModelSpec
    compiled: CompiledModel
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Those that the configuration leaves out, as seen on the model."""
    proof: ProbeReport
    judgement: Judgement


def may_share(model: ModelSettings) -> bool:
    """Whether the configuration lets requests share calls, if the model has an axis for that."""
    return model.batching.max_batch != 1 and model.idempotent


def try_model(
    model: ModelSettings, spec: ModelSpec, *, slots: int, threads: int | None, prove_trusted: bool = False
) -> TriedModel:
    """Compile and try the model; raises `EngineError` where it cannot be served whatever the proof says.

    `spec` is the model as the configuration describes it. With `trust: true` nothing is proved unless
    `prove_trusted`, and no axis is guessed.
    """
    trial = _Trial(model, slots, threads, prove_trusted=prove_trusted)
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
        return trial.guess(spec, spec, signature, named=True)
    guess = with_batch_axis(spec, signature)
    if isinstance(guess, NoBatchAxis):
        return trial.alone(spec, _why(guess))
    if model.function is not None:
        return trial.alone(
            spec, _why(NoBatchAxis(reason="no axis is called batch", shapes=_shapes(guess, signature)))
        )
    if model.trust:
        reason = "the first axis of every input may be the batch, and trust: true lets nothing be tried"
        return trial.alone(spec, _why(NoBatchAxis(reason=reason, shapes=_shapes(guess, signature))))
    return trial.guess(guess, spec, signature, named=False)


def why_alone(signatures: Iterable[ModelSignature]) -> Iterator[str]:
    """Per model of a running server whose requests run alone, though nothing was said of that: why, and what would help."""
    for signature in signatures:
        if (found := why_no_batch(signature)) is not None:
            yield f"model {signature.name!r}: every request runs alone: {_why(found)}"


class _Trial:
    """Tries specifications of one model."""

    def __init__(self, model: ModelSettings, slots: int, threads: int | None, *, prove_trusted: bool) -> None:
        self._model = model
        self._slots = slots
        self._threads = threads
        self._proves = prove_trusted or not model.trust

    def of(self, spec: ModelSpec) -> TriedModel:
        """The model as `spec` describes it; raises `EngineError`."""
        complete, compiled, rules = compile_seeing(
            self._model, spec, slots=self._slots, threads=self._threads
        )
        if not self._proves:
            proof = ProbeReport(model=self._model.name, findings=())
            return TriedModel(spec=complete, compiled=compiled, proof=proof, judgement=Judgement())
        try:
            proof = replace(probe_model(self._model, complete, compiled, threads=self._threads), rules=rules)
        except EngineError:
            compiled.close()
            raise
        judgement = judge(self._model, compiled.signature, proof)
        return TriedModel(spec=complete, compiled=compiled, rules=rules, proof=proof, judgement=judgement)

    def alone(self, spec: ModelSpec, why: str) -> TriedModel:
        """The model as `spec` describes it, which has no batch axis, with a warning."""
        return self.warned(self.of(spec), why)

    def warned(self, tried: TriedModel, why: str) -> TriedModel:
        """The same with the warning that its requests run alone."""
        place = ("inputs",) if self._model.inputs else ()
        warnings = ((place, f"every request runs alone: {why}"), *tried.judgement.warnings)
        return replace(tried, judgement=replace(tried.judgement, warnings=warnings))

    def guess(
        self, guess: ModelSpec, spec: ModelSpec, signature: ModelSignature, *, named: bool
    ) -> TriedModel:
        """The model with a batch axis that no user wrote, or, where that does not hold, without one and with a warning.

        `named`: the model file itself calls the axis `batch`, which counts as much as a user's word where nothing could
        be proved. Raises `EngineError` where the model cannot be compiled either way.
        """
        axis = (
            "the axis that the model file calls batch" if named else "the first axis of every input as batch"
        )
        try:
            tried = self.of(guess)
        except EngineError as error:
            alone = self._without_batch(spec, signature)
            if alone is None:
                raise
            words = str(error).removeprefix(f"model {self._model.name!r}: ")
            return self.warned(alone, f"with {axis}, {words}; {MEANT}")
        doubt = None if self._model.trust else _doubt(tried, named=named)
        if doubt is None:
            return tried
        why = f"with {axis}, {_spell(doubt, guess, signature)}"
        alone = self._without_batch(spec, signature)
        if alone is None:
            # Allowed shapes ask for sizes of the batch, so there is no way around it.
            refused = tried.judgement.refused or ((("shapes",), why),)
            return replace(tried, judgement=replace(tried.judgement, refused=refused))
        tried.compiled.close()
        return self.warned(alone, why)

    def _without_batch(self, spec: ModelSpec, signature: ModelSignature) -> TriedModel | None:
        try:
            return self.of(without_batch_axis(spec, signature))
        except EngineError:
            return None


def _doubt(tried: TriedModel, *, named: bool) -> Finding | None:
    """The finding for which requests must not share calls along an axis that no user wrote."""
    batching = [finding for finding in tried.proof.findings if finding.treatment.kind == "batching"]
    for finding in batching:
        if finding.verdict == "refuted" or finding.is_short:
            return finding
    unproved = [finding for finding in batching if finding.verdict == "unproved"]
    return unproved[0] if unproved and (not named or tried.judgement.refused) else None


def _spell(doubt: Finding, guess: ModelSpec, signature: ModelSignature) -> str:
    about = f"{doubt.subject}: {doubt.treatment}"
    if doubt.verdict == "refuted":
        return f"{about} changes the results: {doubt.evidence} ({MEANT})"
    if doubt.is_short:
        words = f"{about} is unproved beyond {doubt.rows} rows: {doubt.why}"
        return (
            f"{words} (with batching: {{max_batch: {doubt.rows}}} requests share calls)"
            if doubt.rows > 1
            else words
        )
    found = NoBatchAxis(reason="", shapes=_shapes(guess, signature))
    write = f", or add {found.yaml} to the model" if found.shapes else ""
    return f"{about} is unproved: {doubt.why} (say by `probe` what realistic inputs are{write}; else {MEANT})"


def _shapes(guess: ModelSpec, signature: ModelSignature) -> dict[str, str]:
    """Per input the shape that was guessed; none where the file says it itself."""
    if signature.has_batch:
        return {}
    return {port.name: guess.inputs[port.name].shape or "" for port in signature.inputs}


def _why(found: NoBatchAxis) -> str:
    if not found.shapes:
        return f"{found.reason} (export it with a dynamic first axis of every input; or {MEANT})"
    return (
        f"{found.reason} (if rows do not depend on each other, add {found.yaml} to the model; else {MEANT})"
    )

"""Advice of `check` and `tune`, tried on this machine: padding that a configuration does not allow, bf16, other slots.

*Padding* that would let more requests share calls: `check` allows the padding of every dynamic dimension with `PAD_VALUE`,
and tests that by the proof. Dimensions whose padding is proved one by one are then proved together, because together they
are advised.

*Speed*: bf16 and another number of slots are compared with the model as it would be served, by calls of the calibration's
shapes in turns. What would take longer than its time is left out, and the advice says so.

Nothing of this is served: the user writes the lines, or does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, cast

import yaml

from shapestream.loading.proof import TriedModel, probe_model, probe_options
from shapestream.settings import InProcessSettings, ModelSettings, Settings, WorkerGroupSettings
from shapestream_engine.backends.registry import load_backend
from shapestream_engine.comparison import (
    AnswerDistance,
    Gain,
    Speeds,
    Variant,
    compare_answers,
    compare_speed,
)
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError
from shapestream_engine.model import InputSpec, ModelSpec, compile_model, engine_of
from shapestream_engine.ports import InputPort
from shapestream_engine.probe import UNWATCHED, Finding, Watch
from shapestream_engine.probing.examination import values_of
from shapestream_engine.shapes import BATCH, NamedShape
from shapestream_engine.signature import ModelSignature

PAD_VALUE = 0
"""The usual padding of tokens, masks and pictures. Only the user can know other values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingAdvice:
    """Dimensions that are not padded, and the results of tests with padding."""

    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`inputs` of the model's YAML that allow the padding that was proved; empty where none was."""
    proved: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """The evidence against the others, or the reason why they could not be tested, by dimension."""

    def lines(self) -> Iterator[str]:
        """Yield lines for people; those of the YAML are separate."""
        for dimension, why in self.refused.items():
            yield f"padding of {dimension} with {PAD_VALUE} was tried for advice, and is not advised: {why}"
        if self.proved:
            names = " and ".join(self.proved)
            yield (
                f"padding of {names} with {PAD_VALUE} was tried for advice, and proved: requests of different sizes share "
                "calls with these lines in the model"
            )
            yield from (
                f"  {line}"
                for line in yaml.safe_dump(
                    self.to_yaml(), sort_keys=False, default_flow_style=None
                ).splitlines()
            )

    def to_yaml(self) -> dict[str, Any]:
        """Return the lines as plain data."""
        return {"inputs": {name: dict(port) for name, port in self.inputs.items()}}


def advise_padding(
    settings: ModelSettings, tried: TriedModel, *, slots: int, threads: int, watch: Watch = UNWATCHED
) -> PaddingAdvice:
    """Try the padding that this model's configuration does not allow; empty where it would change nothing."""
    signature = tried.compiled.signature
    left = _never_padded(signature)
    if tried.judgement.refused or tried.proof.notes or settings.batching.invariant_rows is not None:
        left = ()
    refused: dict[str, str] = {}
    while left:
        inputs = _allowing(signature, left)
        findings = _tried(settings, _with(tried.spec, inputs), slots, threads, watch)
        if isinstance(findings, str):
            return PaddingAdvice(refused={**refused, **dict.fromkeys(left, findings)})
        names = _names(signature, left)
        against = {
            dimension: finding
            for dimension, name in names.items()
            if (finding := _against(findings, (name,))) is not None
        }
        together = _against(findings, tuple(names.values()))
        if not against and together is not None:
            against = {left[-1]: together}  # each may be padded alone, but not all of them
        if not against:
            return PaddingAdvice(inputs=inputs, proved=tuple(names.values()), refused=refused)
        refused |= {names[dimension]: _words(finding) for dimension, finding in against.items()}
        left = tuple(dimension for dimension in left if dimension not in against)
    return PaddingAdvice(refused=refused)


def _never_padded(signature: ModelSignature) -> tuple[str, ...]:
    """Return the dimensions of which requests share calls only at the same size, but those of strings: none is padded."""
    if not signature.has_batch or signature.strategy.alone:
        return ()
    of_strings = {name for port in signature.inputs if port.is_string for name in port.axis_names}
    return tuple(
        name
        for name, may in zip(signature.dimensions, signature.paddable, strict=True)
        if not (may or name == BATCH or name in of_strings) and signature.strategy.words(name) is None
    )


def _names(signature: ModelSignature, dimensions: Sequence[str]) -> dict[str, str]:
    """Return the names to write for these dimensions: their own, or a new one, where the file gives them none."""
    own = {name for port in signature.inputs for name in port.shape.names if name is not None}
    return {
        dimension: dimension if dimension in own else f"size{signature.dimensions.index(dimension)}"
        for dimension in dimensions
    }


def _allowing(signature: ModelSignature, dimensions: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the inputs of the YAML that allow to pad these dimensions, beside what it allows already."""
    names = _names(signature, dimensions)
    inputs: dict[str, dict[str, Any]] = {}
    for port in signature.inputs:
        wanted = [name for name in port.axis_names if name in names and not port.pads(name)]
        if not wanted:
            continue
        inputs[port.name] = {"pad": {**port.pad, **{names[name]: PAD_VALUE for name in wanted}}}
        if any(names[name] != name for name in wanted):
            inputs[port.name] = {"shape": _named(port, names), **inputs[port.name]}
    return inputs


def _named(port: InputPort, names: Mapping[str, str]) -> str:
    """Return the shape of the input with names for the axes that have none."""
    axes = zip(port.shape.names, port.axis_names, strict=True)
    return str(NamedShape(tuple(names.get(name or "", own) for own, name in axes), port.shape.dimensions))


def _with(spec: ModelSpec, inputs: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
    return replace(
        spec,
        inputs={
            **spec.inputs,
            **{name: replace(spec.inputs.get(name, InputSpec()), **port) for name, port in inputs.items()},
        },
    )


def _tried(
    settings: ModelSettings, spec: ModelSpec, slots: int, threads: int, watch: Watch
) -> tuple[Finding, ...] | str:
    """Return the findings of a proof of this model, or why there is none."""
    try:
        with closing(compile_model(spec, slots=slots, threads=threads)) as compiled:
            return probe_model(settings, spec, compiled, threads=threads, watch=watch).findings
    except EngineError as error:
        return str(error)


def _against(findings: Sequence[Finding], dimensions: tuple[str, ...]) -> Finding | None:
    """Return the finding for which these dimensions must not be padded; a refutation rather than a doubt."""
    found = [
        finding
        for finding in findings
        if finding.treatment.dimensions == dimensions and finding.verdict != "proved"
    ]
    return min(found, key=lambda finding: finding.verdict != "refuted", default=None)


def _words(finding: Finding) -> str:
    if finding.verdict == "refuted":
        return f"{finding.subject} changes: {finding.evidence}"
    return f"{finding.subject}: {finding.why}"


# ---------------------------------------------------------------- speed

SPEED_SHARE = 0.7
"""Part of a measurement's time for the speed; the rest is for the answers."""
MOST_WAITED = 0.1
"""Part of the time that threads may wait for a CPU; beyond it the figures say little."""
LEAST_GAIN = 0.05
"""Relative: a smaller gain is within the noise of so short a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAdvice:
    """What bf16 would give; without a gain, `why` it was not measured."""

    properties: Mapping[str, str]
    gain: Gain | None = None
    distance: AnswerDistance | None = None
    waited: float = 0.0
    """Part of the time that the threads waited for a CPU."""
    why: str = ""

    def lines(self) -> Iterator[str]:
        """Describe it, for people."""
        ((key, name),) = self.properties.items()
        if self.gain is None or self.distance is None:
            yield f"{name}: not measured: {self.why}"
        elif self.gain.mean < 1 + LEAST_GAIN:
            yield f"{name}: {self.gain} as fast; nothing to gain{_doubt(self.waited)}"
        else:
            yield (
                f"{name}: {self.gain} as fast ({self.gain.least:.2f} to {self.gain.most:.2f} x by call shape); "
                f"{self.distance.words()}: set properties: {{{key}: {name}}}{_doubt(self.waited)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsAdvice:
    """The slots of a process, and what another number of them would give."""

    place: str
    """`in_process`, `workers`, or `workers[1]` where the YAML has such an entry: what is to be changed."""
    slots: int
    threads: int
    auto: bool
    """True if the number of slots was not given."""
    other: int | None = None
    """Another number of slots on the same threads; None if there is none to try."""
    rate: Gain | None = None
    """Calls per second of all slots of the other number / of those here; None if it was not measured."""
    lone: Gain | None = None
    """Speed of a call without others beside it, likewise."""
    waited: float = 0.0
    """Part of the time that the threads waited for a CPU."""
    why: str = ""

    def lines(self) -> Iterator[str]:
        """Describe it, for people."""
        chosen = "chosen by auto" if self.auto else "as given"
        yield f"slots: {_placed(self.slots, self.threads)}, {chosen}{self._change()}"

    def _change(self) -> str:
        if self.other is None:
            return ""
        counts = f"{{slots: {self.other}, threads: {self.threads}}}"
        line = f"workers: [{counts}]" if self.place == "workers" else f"{self.place}: {counts}"
        if self.rate is None or self.lone is None:
            return f"; others are not measured: {self.why}; to change them: {line}"
        return (
            f"; {_placed(self.other, self.threads)}: {self.rate} the calls per second under load, and a lone call takes "
            f"{1 / self.lone.mean:.2f} x as long: {line}{_doubt(self.waited)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAdvice:
    """Both, for one model."""

    slots: SlotsAdvice
    precision: PrecisionAdvice | None = None
    """None where the device has no faster precision, or the configuration names one."""

    def lines(self) -> Iterator[str]:
        """Describe it, for people."""
        yield from self.slots.lines()
        if self.precision is not None:
            yield from self.precision.lines()


def advise_speed(
    settings: Settings, model: ModelSettings, tried: TriedModel, *, slots: int, threads: int, budget_s: float
) -> SpeedAdvice:
    """Measure for `budget_s` seconds and the compilations; with a budget of 0 tell only what is chosen."""
    chosen = _chosen(settings, model, slots, threads)
    if budget_s <= 0.0 or tried.judgement.refused or tried.proof.notes:
        return SpeedAdvice(slots=replace(chosen, why="that takes --measure SECONDS"))
    measured = _Bench(model, tried, slots, threads, budget_s / 2).measured_slots(chosen)
    precision = advise_precision(model, tried, slots=slots, threads=threads, budget_s=budget_s / 2)
    return SpeedAdvice(slots=measured, precision=precision)


def advise_precision(
    model: ModelSettings, tried: TriedModel, *, slots: int, threads: int, budget_s: float
) -> PrecisionAdvice | None:
    """Measure a faster precision for `budget_s` seconds and its compilations; None if there is none."""
    properties = faster_precision(tried.spec)
    if not properties:
        return None
    return _Bench(model, tried, slots, threads, budget_s).measured_precision(properties)


def faster_precision(spec: ModelSpec) -> Mapping[str, str]:
    """Return the properties of a faster precision; empty if engine and device have none, or the spec names one."""
    ask = getattr(load_backend(engine_of(spec).engine), "faster_precision", None)
    return {} if ask is None else cast("Mapping[str, str]", ask(spec))


def _chosen(settings: Settings, model: ModelSettings, slots: int, threads: int) -> SlotsAdvice:
    place: str
    counts: InProcessSettings | WorkerGroupSettings
    if settings.in_process is not None:
        place, counts = "in_process", settings.in_process
    else:
        groups = [
            (f"workers[{number}]", group)
            for number, group in enumerate(settings.workers or ())
            if group.models is None or model.name in group.models
        ]
        place, counts = next(iter(groups), ("workers", WorkerGroupSettings()))
    other = None
    if model.device == "CPU" and model.only_engine not in ("function", "tokenizer"):
        other = other_slots(slots, threads)
    return SlotsAdvice(place=place, slots=slots, threads=threads, auto=counts.slots == "auto", other=other)


def other_slots(slots: int, threads: int) -> int | None:
    """Return the number of slots to compare with: one per thread, or half as many where it is so already; None on one
    thread."""
    if threads == 1:
        return None
    return threads if slots < threads else -(-threads // 2)


class _TooLong(EngineError):
    """A measurement that would take longer than its time."""


class _Bench:
    """Measurements of one model."""

    def __init__(
        self, model: ModelSettings, tried: TriedModel, slots: int, threads: int, budget_s: float
    ) -> None:
        self._model = model
        self._tried = tried
        self._slots = slots
        self._threads = threads
        self._budget_s = budget_s
        self._values = values_of(tried.compiled.signature, probe_options(model))

    def measured_precision(self, properties: Mapping[str, str]) -> PrecisionAdvice:
        """Return what these properties give."""
        now, answers_s = self._tried.compiled, (1 - SPEED_SHARE) * self._budget_s
        try:
            with closing(self._compiled(properties, self._slots, requests=self._slots)) as other:
                speeds = self._speeds([Variant(now, self._slots), Variant(other, self._slots)])
                before, after = speeds.seconds
                distance = compare_answers(
                    (now, other), list(before), values=self._values, budget_s=answers_s
                )
                gain = Gain.of(before, after)
        except EngineError as error:
            return PrecisionAdvice(properties=properties, why=str(error))
        return PrecisionAdvice(properties=properties, gain=gain, distance=distance, waited=speeds.waited)

    def measured_slots(self, chosen: SlotsAdvice) -> SlotsAdvice:
        """Return what the other number of slots gives."""
        if chosen.other is None:
            return chosen
        requests = chosen.slots + chosen.other
        try:
            with closing(self._compiled({}, chosen.other, requests=requests)) as other:
                variants = [Variant(self._tried.compiled, chosen.slots), Variant(other, chosen.other)]
                # One slot at work is measured by itself where the process has several.
                alone = [each if each.at_once == 1 else Variant(each.model) for each in variants]
                speeds = self._speeds([*variants, *alone])
        except EngineError as error:
            return replace(chosen, why=str(error))
        before, after, lone_before, lone_after = speeds.seconds
        rate = Gain.of(before, after, at_once=chosen.other / chosen.slots)
        return replace(chosen, rate=rate, lone=Gain.of(lone_before, lone_after), waited=speeds.waited)

    def _compiled(self, properties: Mapping[str, str], slots: int, *, requests: int) -> CompiledModel:
        """Return the model with these properties. Raises `EngineError`, also if so many compilations take too long."""
        spec = self._tried.spec
        began = monotonic()
        compiled = compile_model(
            replace(spec, properties={**spec.properties, **properties}), slots=slots, threads=self._threads
        )
        each_s = monotonic() - began
        if each_s * requests > self._budget_s:
            compiled.close()
            raise _TooLong(f"it takes {requests} compilations of {each_s:.1f} s (see --measure)")
        return compiled

    def _speeds(self, variants: list[Variant]) -> Speeds:
        found = compare_speed(
            variants,
            values=self._values,
            max_batch=self._model.batching.max_batch,
            budget_s=SPEED_SHARE * self._budget_s,
        )
        if not found.seconds[0]:
            raise _TooLong("calls take too long (see --measure)")
        return found


def _doubt(waited: float) -> str:
    if waited <= MOST_WAITED:
        return ""
    return f" (doubtful: the threads waited for a CPU {waited:.0%} of the time; repeat it without other load)"


def _placed(slots: int, threads: int) -> str:
    each = max(1, threads // slots)
    return f"{slots} of {each} thread{'s' if each > 1 else ''}"

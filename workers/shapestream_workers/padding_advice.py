"""Advice on padding that a configuration does not allow and that would let more requests share calls.

`check` allows the padding of every dynamic dimension with `PAD_VALUE`, and tests that by the proof. Dimensions whose
padding is proved one by one are then proved together, because together they are advised. Nothing of this is served: the
user decides about the lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from shapestream.settings import ModelSettings
from shapestream_engine.errors import EngineError
from shapestream_engine.model import InputSpec, ModelSpec, compile_model
from shapestream_engine.ports import InputPort
from shapestream_engine.probe import Finding
from shapestream_engine.shapes import BATCH, NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_workers.proof import TriedModel, probe_model

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


def advise_padding(settings: ModelSettings, tried: TriedModel, *, slots: int, threads: int) -> PaddingAdvice:
    """Try the padding that this model's configuration does not allow; empty where it would change nothing."""
    signature = tried.compiled.signature
    left = _never_padded(signature)
    if tried.judgement.refused or tried.proof.notes or settings.batching.invariant_rows is not None:
        left = ()
    refused: dict[str, str] = {}
    while left:
        inputs = _allowing(signature, left)
        findings = _tried(settings, _with(tried.spec, inputs), slots, threads)
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


def _tried(settings: ModelSettings, spec: ModelSpec, slots: int, threads: int) -> tuple[Finding, ...] | str:
    """Return the findings of a proof of this model, or why there is none."""
    try:
        compiled = compile_model(spec, slots=slots, threads=threads)
    except EngineError as error:
        return str(error)
    try:
        return probe_model(settings, spec, compiled, threads=threads).findings
    except EngineError as error:
        return str(error)
    finally:
        compiled.close()


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

"""`shapestream check`: what `serve` would do with a YAML, tried without opening a port.

Each model is compiled, its batching and padding are put to the proof, and it is run on made-up inputs: a request alone
at the smallest sizes and at middling ones, and, where there is a batch axis, two in one call, divided again by the
rules. That finds a file that does not load, a shape that does not fit, a rule that does not hold, and a model
that does not keep requests apart.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shapestream.errors import ConfigurationError
from shapestream.settings_loader import LoadedSettings
from shapestream.settings_models import ModelSettings
from shapestream_engine.batching.plan import merge_sizes
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.model import CompiledModel
from shapestream_engine.probe import ProbeReport
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.pool import make_request
from shapestream_engine.probing.values import Values, default_values
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.shapes import Dimension
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Report, Slot, Work
from shapestream_workers.model_trust import require_trusted
from shapestream_workers.models import model_spec, problem_of
from shapestream_workers.proof import compile_seeing, judge, probe_model, probe_options
from shapestream_workers.security import server_security

__all__ = ["CheckReport", "ModelReport", "check_configuration"]

# Sizes of open dimensions in the second run: large enough to be different, small enough for any model.
TYPICAL_SIZE = 16
TYPICAL_ROWS = 3
# A model that takes longer than this over made-up inputs of these sizes is stuck.
RUN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """One model: what it takes and gives, the engine's effective properties, and the calls that were tried."""

    signature: ModelSignature
    properties: dict[str, str]
    calls: tuple[str, ...]
    proof: ProbeReport


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """What was found."""

    models: list[ModelReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Lines that start with file:line:column."""
    warnings: list[str] = field(default_factory=list)

    def lines(self, shown: LoadedSettings | None) -> Iterator[str]:
        """For a person; `shown` are settings to print too, each with its origin."""
        if shown is not None:
            for value in shown.effective_values():
                yield f"{value.key} = {value.value!r}  ({value.origin})"
            yield ""
        for model in self.models:
            yield from model.signature.describe()
            if shown is not None:
                yield from (
                    f"  {name} = {value}  (engine)" for name, value in sorted(model.properties.items())
                )
            yield from (f"  {line}" for line in model.proof.lines())
            yield from (f"  ran {call}" for call in model.calls)
        if not self.problems:
            yield f"ok: {len(self.models)} model{'s' if len(self.models) != 1 else ''} compiled and run"

    def to_dict(self, shown: LoadedSettings | None) -> dict[str, Any]:
        """For a script."""
        plain: dict[str, Any] = {
            "ok": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "models": [
                {
                    "signature": model.signature.to_dict(),
                    "properties": model.properties,
                    "calls": list(model.calls),
                    "proof": model.proof.to_dict(),
                }
                for model in self.models
            ],
        }
        if shown is not None:
            plain["settings"] = [
                {"key": value.key, "value": value.value, "origin": value.origin}
                for value in shown.effective_values()
            ]
        return plain


def check_configuration(loaded: LoadedSettings) -> CheckReport:
    """Compiles and tries every model; what is wrong is in the report, nothing is raised for it."""
    report = CheckReport()
    if loaded.settings.in_process is not None:
        report.warnings.append(
            loaded.problem(
                ("in_process",), "a crash of a model ends the server, and memory cannot be given back"
            )
        )
    try:
        server_security(loaded)
    except ConfigurationError as error:
        report.problems += error.problems
    for index, settings in enumerate(loaded.settings.models):
        try:
            _check_model(loaded, index, settings, report)
        except EngineError as error:
            report.problems.append(problem_of(loaded, settings, error))
    return report


def _check_model(loaded: LoadedSettings, index: int, settings: ModelSettings, report: CheckReport) -> None:
    require_trusted(settings)
    spec, compiled, rules = compile_seeing(settings, model_spec(settings), slots=1, threads=None)
    try:
        proof = replace(probe_model(settings, spec, compiled, threads=None), rules=rules)
        judgement = judge(settings, compiled.signature, proof)
        place = ("models", index)
        report.problems += [loaded.problem((*place, *where), words) for where, words in judgement.refused]
        report.warnings += [loaded.problem((*place, *where), words) for where, words in judgement.warnings]
        calls: list[str] = []
        # What has ended a process of its own before is not tried in this one.
        if not proof.notes:
            calls, problems = _try_model(settings, compiled)
            report.problems += [loaded.problem(place, problem) for problem in problems]
        report.models.append(
            ModelReport(
                signature=compiled.signature,
                properties=dict(compiled.properties),
                calls=tuple(calls),
                proof=proof,
            )
        )
    finally:
        compiled.close()


def _try_model(settings: ModelSettings, compiled: CompiledModel) -> tuple[list[str], list[str]]:
    """What ran, and what did not."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    slot = Slot("check", {settings.name: RequestPool(compiled, 1)}, reports.put)
    values = _values(settings, compiled.signature)
    calls: list[str] = []
    problems: list[str] = []
    hangs = False
    try:
        for number, rows in enumerate(_plans(compiled.signature)):
            members = [make_request(compiled.signature, values, sizes) for sizes in rows]
            report = _run(slot, reports, settings.name, number, compiled.signature, members)
            call = (
                f"{_spell(compiled.signature, rows[0])}{f' x {len(rows)} requests' if len(rows) > 1 else ''}"
            )
            if report is None:
                hangs = True
                problems.append(f"no answer within {RUN_TIMEOUT_S:g} s for {call}")
                break
            if report.error_code is not None:
                hint = (
                    "" if settings.probe else " (say by `probe` what realistic inputs are, if these are not)"
                )
                problems.append(f"failed on made-up inputs, {call}: {report.message}{hint}")
                continue
            assert report.outputs is not None  # it ran
            calls.append(f"{call}: {_spell_outputs(compiled.signature, report.outputs[0])}")
    finally:
        # One that hangs would never end; its thread ends with the process.
        if not hangs:
            slot.close()
    return calls, problems


def _plans(signature: ModelSignature) -> Iterator[list[tuple[int, ...]]]:
    """Sizes of the requests of each call: one small request, one middling one, and several together."""
    small = tuple(_clamped(1, bounds) for bounds in signature.bounds)
    typical = tuple(
        _clamped(TYPICAL_ROWS if name == "batch" else TYPICAL_SIZE, bounds)
        for name, bounds in zip(signature.dimensions, signature.bounds, strict=True)
    )
    yield [small]
    if typical != small:
        yield [typical]
    most = signature.bounds[0].maximum if signature.has_batch else 0
    if signature.has_batch and (most is None or most >= 2 * small[0]):
        yield [small, small]


def _clamped(size: int, bounds: Dimension) -> int:
    size = max(size, bounds.minimum)
    return size if bounds.maximum is None else min(size, bounds.maximum)


def _values(settings: ModelSettings, signature: ModelSignature) -> dict[str, Values]:
    """What the configuration calls realistic, and the first of the defaults where it is silent."""
    given = values_of(signature, probe_options(settings))
    first = {port.name: default_values(port.element_type)[0] for port in signature.inputs}
    return {**first, **given}


def _run(
    slot: Slot,
    reports: queue.SimpleQueue[Report],
    model: str,
    number: int,
    signature: ModelSignature,
    members: list[Tensors],
) -> Report | None:
    shapes = [signature.resolve(member.layout) for member in members]
    slot.start(
        Work(
            batch=number,
            model=model,
            sizes=merge_sizes(signature, [shape.sizes for shape in shapes]),
            members=tuple(members),
            shapes=tuple(shapes),
            start_before=(None,) * len(members),
        )
    )
    try:
        return reports.get(timeout=RUN_TIMEOUT_S)
    except queue.Empty:
        return None


def _spell(signature: ModelSignature, sizes: tuple[int, ...]) -> str:
    said = ", ".join(f"{name} {size}" for name, size in zip(signature.dimensions, sizes, strict=True))
    return said or "the only shape"


def _spell_outputs(signature: ModelSignature, outputs: Tensors | None) -> str:
    assert outputs is not None  # without a deadline nobody is left out
    return ", ".join(f"{signature.outputs[number].name} {list(shape)}" for number, _, shape in outputs.layout)

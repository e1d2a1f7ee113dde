"""The proof of safety: whether a model gives each request, batched and padded, the same results as alone.

Padding can change results, batching can mix them, and both can crash a model. So before a model is served, it is tried in
a separate process, on realistic inputs and beside extreme neighbours. `probing/examination.py` describes the proof,
docs/safety.md its use.

    report = prove(ModelSpec(name="minilm", path=Path("minilm.xml"), inputs=...), model, ProbeOptions())
    for finding in report.of("refuted"): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from shapestream_engine.backends.registry import EngineChoice
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.model import ModelSpec, OutputSpec, engine_of, with_engine
from shapestream_engine.model_files import is_whole
from shapestream_engine.output_rules import rule_to_dict
from shapestream_engine.ports import OutputPort
from shapestream_engine.probing.beside import EnginesReport
from shapestream_engine.probing.cache import ProofCache
from shapestream_engine.probing.child import UNWATCHED, Heard, Task, Watch, blamed, compilation_by, run_child
from shapestream_engine.probing.evidence import Finding, ProbeReport, Treatment, unjudged, without_jumps
from shapestream_engine.probing.examination import ProbeOptions, treatments

__all__ = [
    "UNWATCHED",
    "EnginesReport",
    "Finding",
    "ProbeOptions",
    "ProbeReport",
    "ProofCache",
    "Treatment",
    "Watch",
    "choose",
    "compare_beside",
    "complete_rules",
    "prove",
]

EVERY_OUTPUT = "*"
"""Stands for all outputs without a rule, where the search for rules did not end."""
_MOST_CHILDREN = 8
"""Largest number of child processes of one proof."""


def choose(spec: ModelSpec, *, cache: ProofCache | None = None, watch: Watch = UNWATCHED) -> EngineChoice:
    """Return the engine that runs the model: the only one, or the first that is installed, reads, computes and compiles it.

    Where there are several, each is tried in a child process, since a reader of files or a compiler may crash; the choice is
    kept. Only file, device and properties count. Raises `EngineMissing`, and `EngineError` if none takes the model.
    """
    if len(spec.engines) == 1 or spec.path is None or not is_whole(spec.path):
        return engine_of(spec)
    bare = ModelSpec(name=spec.name, path=spec.path, device=spec.device, properties=spec.properties)
    task = Task(spec=bare, options=ProbeOptions(), threads=1, choose=True)
    with watch.waiting():
        known = (cache or ProofCache(None)).kept(task, None, lambda: _chosen(task, watch))
    return EngineChoice(engine=known.engine, passed_over=known.passed_over)


def prove(
    spec: ModelSpec,
    model: CompiledModel,
    options: ProbeOptions,
    *,
    threads: int | None = None,
    cache: ProofCache | None = None,
    watch: Watch = UNWATCHED,
) -> ProbeReport:
    """Prove the model of `spec` in child processes, or return the kept report.

    `model` is the compiled model; only its signature is used. A model in memory cannot be passed to another process: a
    file or an importable function is needed. Raises `SignatureError` for samples that do not fit.
    """
    if spec.model is not None:
        raise SignatureError(
            f"model {spec.name!r} is in memory: only a file or a function can be tried elsewhere"
        )
    wanted = treatments(model.signature, options)
    if not wanted:
        return ProbeReport(model=spec.name, findings=())
    task = Task(spec=with_engine(spec).judged, options=options, threads=threads)
    with watch.waiting():
        return (cache or ProofCache(None)).kept(task, model.signature, lambda: _prove(task, wanted, watch))


def complete_rules(
    spec: ModelSpec,
    options: ProbeOptions,
    *,
    threads: int | None = None,
    cache: ProofCache | None = None,
    watch: Watch = UNWATCHED,
) -> tuple[ModelSpec, dict[str, Mapping[str, Any]], dict[str, str]]:
    """Return the specification completed by rules that the live model shows with certainty, these rules, and for other
    outputs what was tried, in words.

    Uncertain rules are left out; compilation then reports them as missing. The result still needs `prove`.
    """
    task = Task(spec=with_engine(spec).judged, options=options, threads=threads, guess=True)
    with watch.waiting():
        known = (cache or ProofCache(None)).kept(task, None, lambda: _guess(task, watch))
    outputs = {**spec.outputs}
    for name, shape in known.follows.items():
        stated = outputs.get(name, OutputSpec())
        outputs[name] = replace(stated, rule=dict(known.rules[name]), shape=shape)
    return replace(spec, outputs=outputs), dict(known.rules), dict(known.unruled)


def compare_beside(
    spec: ModelSpec, other: str, options: ProbeOptions, *, threads: int | None = None
) -> EnginesReport:
    """Compare the model's answers with those of the engine `other`, in a child process, since either may crash.

    `spec` has a rule for each output. Nothing is raised for a model that cannot be compared: the report says why.
    """
    task = Task(spec=with_engine(spec).judged, options=options, threads=threads, beside=other)
    heard = run_child(task, options.hang_s)
    if heard.outcome is not None:
        return EnginesReport.from_dict(heard.outcome)
    why = str(heard.error) if heard.error is not None else f"{heard.end} ({heard.case})"
    return EnginesReport(engine=task.spec.engine or "", other=other, why_not=why)


def _children(task: Task, watch: Watch) -> Iterator[Heard]:
    """Yield the messages of each child, until one finishes. The next one skips the phase that ended it, and what was found.

    Raises the error of a model that cannot be compiled.
    """
    skip = task.skip
    for _ in range(_MOST_CHILDREN):
        heard = run_child(replace(task, skip=skip), task.options.hang_s, watch)
        if heard.error is not None:
            raise heard.error
        yield heard
        if heard.end is None or heard.phase == "compile":
            return
        skip |= {heard.phase, *[str(finding.treatment) for finding in heard.findings]}


def _chosen(task: Task, watch: Watch) -> ProbeReport:
    ended: dict[str, str] = {}
    for heard in _children(task, watch):
        for engine in task.spec.engines:
            if heard.end is not None and heard.phase == compilation_by(engine):
                ended[engine] = heard.end
    outcome = heard.outcome
    if outcome is None:
        raise ModelLoadError(f"model {task.spec.name!r}: no engine can be tried: {heard.end} ({heard.case})")
    return ProbeReport(
        model=task.spec.name,
        findings=(),
        engine=outcome["engine"],
        passed_over={**outcome["passed_over"], **ended},
        conclusive=not ended,
    )


def _guess(task: Task, watch: Watch) -> ProbeReport:
    for crashes, heard in enumerate(_children(task, watch)):  # noqa: B007 - the last one counts
        if heard.phase == "rules":
            break
    found = {
        name: OutputPort.from_dict(port) for name, port in (heard.outcome or {}).get("ports", {}).items()
    }
    return ProbeReport(
        model=task.spec.name,
        findings=(),
        rules={name: rule_to_dict(port.rule) for name, port in found.items()},
        follows={name: str(port.shape) for name, port in found.items()},
        unruled=(heard.outcome or {}).get("unruled", {})
        or (
            {}
            if heard.end is None
            else {EVERY_OUTPUT: f"the search for a rule ended: {heard.end} ({heard.case})"}
        ),
        conclusive=heard.end is None and not crashes,
    )


def _prove(task: Task, wanted: list[Treatment], watch: Watch) -> ProbeReport:
    started = monotonic()
    findings: list[Finding] = []
    notes: list[str] = []
    for heard in _children(task, watch):
        findings += heard.findings
        if heard.end is not None and (verdict := blamed(heard, wanted)) is not None:
            findings.append(verdict)
        elif heard.end is not None:
            notes.append(f"{heard.phase}: {heard.end} ({heard.case})")
        if {finding.treatment for finding in findings}.issuperset(wanted):
            break
    said = {finding.treatment for finding in findings}
    why = f"the model could not be tried: {notes[-1]}" if notes else "the model could not be tried"
    findings += [unjudged(treatment, why) for treatment in wanted if treatment not in said]
    findings = without_jumps(findings)
    findings.sort(key=lambda finding: (finding.treatment.kind, len(finding.treatment.dimensions)))
    # What a crash left out is no evidence, so a proof despite it would hold without it. Other verdicts may follow from a
    # crash that does not happen again.
    despite = all(finding.verdict == "proved" for finding in findings)
    crashed = any(finding.output is None and finding.verdict == "refuted" for finding in findings)
    short = any(finding.is_short for finding in findings)
    undisturbed = heard.end is None and not crashed and (despite or not notes)
    outcome = heard.outcome or {}
    return ProbeReport(
        model=task.spec.name,
        findings=tuple(findings),
        inputs=outcome.get("inputs", {}),
        sizes=tuple(outcome.get("sizes", ())),
        follows=outcome.get("follows", {}),
        tolerances=outcome.get("tolerances", {}),
        notes=tuple(notes),
        conclusive=undisturbed and not short,
        ran_short=undisturbed and short,
        seconds=round(monotonic() - started, 3),
    )

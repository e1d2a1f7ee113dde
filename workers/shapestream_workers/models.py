"""From the settings of a model to a compiled one, with errors that point into the YAML."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import structlog

from shapestream.errors import ConfigurationError
from shapestream.settings_loader import LoadedSettings
from shapestream.settings_models import ModelSettings, ShapesSettings
from shapestream.yaml_source import Location
from shapestream_engine.batching.padded import Padded
from shapestream_engine.batching.strategies import parse_strategy
from shapestream_engine.batching.strategy import Strategy
from shapestream_engine.dimension_table import BATCH
from shapestream_engine.errors import EngineError, EngineMissing, ModelLoadError
from shapestream_engine.model import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.prepared import PreparedLimits
from shapestream_engine.read_model import read_model
from shapestream_engine.signature import ModelSignature
from shapestream_workers.model_trust import Distrusted, require_trusted
from shapestream_workers.proof import Judgement, compile_seeing, judge, probe_model, without_padding

__all__ = ["available_cpus", "compile_models", "model_spec", "problem_of", "read_signatures"]

log = structlog.get_logger()


def available_cpus() -> int:
    """The CPUs that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def model_spec(model: ModelSettings) -> ModelSpec:
    """The model as the engine wants it described, with all the padding that the configuration allows.

    Where results must not depend on the company, every call has the same number of rows, and nothing is padded.
    """
    rows = model.batching.invariant_rows
    spec = ModelSpec(
        name=model.name,
        path=None if model.path is None else Path(model.path),
        function=model.function,
        engine=model.effective_engine,
        device=model.device,
        inputs={
            name: InputSpec(
                shape=port.shape,
                element_type=port.element_type,
                pad=port.pad,
                mask_of=port.mask_of,
            )
            for name, port in model.inputs.items()
        },
        outputs={
            name: OutputSpec(rule=port.rule_arguments(), shape=port.shape, element_type=port.element_type)
            for name, port in model.outputs.items()
        },
        properties=model.properties,
        strategy=_strategy(model.shapes),
        prepared=_limits(model.shapes),
    )
    if rows is None:
        return spec
    padded = frozenset(name for port in model.inputs.values() for name in port.pad)
    return replace(without_padding(spec, padded), strategy=Padded({BATCH: (rows,)}))


def _strategy(shapes: ShapesSettings) -> Strategy:
    if shapes.strategy == "native":
        return parse_strategy({"max_prepared": shapes.max_prepared, "static": shapes.static})
    return parse_strategy({"strategy": shapes.strategy, **shapes.sizes})


def _limits(shapes: ShapesSettings) -> PreparedLimits:
    limits = PreparedLimits(max_prepared_bytes=shapes.max_prepared_bytes, warm_up=shapes.warm_up)
    return limits if shapes.max_prepared is None else replace(limits, max_prepared=shapes.max_prepared)


def compile_models(
    loaded: LoadedSettings, models: Iterable[ModelSettings], *, slots: int, threads: int | None
) -> dict[str, CompiledModel]:
    """Compiles and tries the models; raises `ConfigurationError` with a line for all that cannot be served."""
    compiled: dict[str, CompiledModel] = {}
    problems: list[str] = []
    for model in models:
        try:
            require_trusted(model)
            compiled[model.name], judgement = _compile(model, slots, threads)
        except EngineError as error:
            problems.append(problem_of(loaded, model, error))
            continue
        place = ("models", loaded.settings.models.index(model))
        problems += [loaded.problem((*place, *where), words) for where, words in judgement.refused]
        for where, words in judgement.warnings:
            log.warning("configuration", what=loaded.problem((*place, *where), words))
        log.info(
            "model compiled",
            model=model.name,
            device=model.device,
            properties=dict(compiled[model.name].properties),
            signature=compiled[model.name].signature.describe()[1:],
        )
    if problems:
        for unused in compiled.values():
            unused.close()
        raise ConfigurationError(problems)
    return compiled


def read_signatures(loaded: LoadedSettings) -> list[ModelSignature]:
    """What the models take and give, as their files and the configuration say together; nothing is tried.

    Raises `ConfigurationError` with a line for each that cannot be read.
    """
    signatures: list[ModelSignature] = []
    problems: list[str] = []
    for model in loaded.settings.models:
        try:
            require_trusted(model)
            signatures.append(read_model(model_spec(model)).signature)
        except EngineError as error:
            problems.append(problem_of(loaded, model, error))
    if problems:
        raise ConfigurationError(problems)
    return signatures


def _compile(model: ModelSettings, slots: int, threads: int | None) -> tuple[CompiledModel, Judgement]:
    """The model as it may be served, and what follows from its proof."""
    spec, ready, rules = compile_seeing(model, model_spec(model), slots=slots, threads=threads)
    for output, rule in rules.items():
        log.info("rule seen on the model", model=model.name, output=output, rule=dict(rule))
    if model.trust:
        log.warning("model is served without proof", model=model.name, why="trust: true")
        return ready, Judgement()
    try:
        report = probe_model(model, spec, ready, threads=threads)
    except EngineError:
        ready.close()
        raise
    log.info(
        "model tried", model=model.name, seconds=report.seconds, findings=list(map(str, report.findings))
    )
    judgement = judge(model, ready.signature, report)
    if judgement.padding_off and not judgement.refused:
        ready.close()
        ready = compile_model(without_padding(spec, judgement.padding_off), slots=slots, threads=threads)
    return ready, judgement


def problem_of(loaded: LoadedSettings, model: ModelSettings, error: EngineError) -> str:
    """The engine's complaint as a line that points into the YAML."""
    return loaded.problem(_location(loaded, model, error), str(error).removeprefix("probe: "))


def _location(loaded: LoadedSettings, model: ModelSettings, error: EngineError) -> Location:
    """The setting that the engine's complaint is about, as far as the kind of the error and its words tell."""
    location: Location = ("models", loaded.settings.models.index(model))
    if model.batching.invariant_rows is not None and "strategy padded: 'batch'" in str(error):
        return (*location, "batching", "batch_invariant")
    if isinstance(error, EngineMissing):
        return (*location, "engine")
    if isinstance(error, Distrusted):
        return (*location, error.key)
    if isinstance(error, ModelLoadError):
        return (*location, "path" if model.function is None else "function")
    if str(error).startswith("probe:"):
        return (*location, "probe")
    if "strategy native: static" in str(error):
        return (*location, "shapes", "static")
    for name in (*model.shapes.sizes, "max_prepared"):
        if f"strategy {model.shapes.strategy}: {name!r}" in str(error):
            return (*location, "shapes", name)
    if f"strategy {model.shapes.strategy}" in str(error):
        return (*location, "shapes")
    for key, ports in (("inputs", model.inputs), ("outputs", model.outputs)):
        for name in ports:
            if f"{key[:-1]} {name!r}" in str(error):
                return (*location, key, name)
    return location

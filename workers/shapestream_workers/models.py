"""From the settings of a model to a compiled one, with errors that point into the YAML."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from shapestream.errors import ConfigurationError
from shapestream.settings import ModelSettings
from shapestream.settings_loader import LoadedSettings
from shapestream.yaml_source import Location
from shapestream_engine.errors import EngineError, EngineMissing, ModelLoadError, SignatureError
from shapestream_engine.model import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.rules import Shared
from shapestream_engine.signature import ModelSignature

__all__ = ["available_cpus", "compile_models", "model_spec"]

log = structlog.get_logger()


def available_cpus() -> int:
    """The CPUs that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def model_spec(model: ModelSettings) -> ModelSpec:
    """The model as the engine wants it described. Padding without `trust` stays off (`check` warns of it)."""
    return ModelSpec(
        name=model.name,
        path=None if model.path is None else Path(model.path),
        function=model.function,
        engine=model.effective_engine,
        device=model.device,
        inputs={
            name: InputSpec(
                shape=port.shape,
                element_type=port.element_type,
                pad=port.pad if model.trust else {},
                mask_of=port.mask_of,
            )
            for name, port in model.inputs.items()
        },
        outputs={
            name: OutputSpec(rule=port.rule_arguments(), shape=port.shape, element_type=port.element_type)
            for name, port in model.outputs.items()
        },
        properties=model.properties,
    )


def compile_models(
    loaded: LoadedSettings, models: Iterable[ModelSettings], *, slots: int, threads: int | None
) -> dict[str, CompiledModel]:
    """Compiles the models; raises `ConfigurationError` with a line for each one that cannot be."""
    compiled: dict[str, CompiledModel] = {}
    problems: list[str] = []
    for model in models:
        try:
            ready = compile_model(model_spec(model), slots=slots, threads=threads)
            compiled[model.name] = ready
            if not model.trust:
                _refuse_unproved(ready.signature)
        except EngineError as error:
            problems.append(loaded.problem(_location(loaded, model, error), str(error)))
            continue
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


def _refuse_unproved(signature: ModelSignature) -> None:
    """Nothing in a batch shows that an output is shared, so it takes proof, or the user's word."""
    for port in signature.outputs:
        if isinstance(port.rule, Shared):
            raise SignatureError(
                f"output {port.name!r}: the rule shared holds only where the output is the same whatever else is in "
                "the batch, and nothing has proved that (trust: true vouches for it)"
            )


def _location(loaded: LoadedSettings, model: ModelSettings, error: EngineError) -> Location:
    """The setting that the engine's complaint is about, as far as the kind of the error and its words tell."""
    location: Location = ("models", loaded.settings.models.index(model))
    if isinstance(error, EngineMissing):
        return (*location, "engine")
    if isinstance(error, ModelLoadError):
        return (*location, "path" if model.function is None else "function")
    for key, ports in (("inputs", model.inputs), ("outputs", model.outputs)):
        for name in ports:
            if f"{key[:-1]} {name!r}" in str(error):
                return (*location, key, name)
    return location

"""The whole configuration file, its short sections, and the contradictions between its sections.

The long sections are in server_settings.py and model_settings.py; docs/configuration.md is the page for users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from shapestream.errors import did_you_mean
from shapestream.settings.chain_settings import ChainSettings
from shapestream.settings.model_settings import ModelSettings
from shapestream.settings.model_sources import AUTO_ENGINE
from shapestream.settings.server_settings import ServerSettings
from shapestream.settings.values import (
    COUNT,
    TEXT,
    Finding,
    Section,
    below,
    describe,
    read_bytes,
    wrong,
)
from shapestream.settings.version_settings import names_meant, names_of, served_name, versions_of
from shapestream.settings.version_settings import problems as problems_of_versions
from shapestream.settings.yaml_source import Location
from shapestream.versions import Versions, canaries, parted, versioned
from shapestream_engine.errors import ModelLoadError
from shapestream_engine.machine import MAX_SLOTS
from shapestream_engine.model_files import files_of_model

DISAGREEMENT = "disagreement"
"""Kind of the pydantic error for settings that are valid one by one and contradict each other."""

MAX_THREADS = 1024
"""Threads of the engine in one process, at most: no machine gives more CPUs to one process."""
MIN_MEMORY_LIMIT = 64 << 20
"""Least memory limit in bytes: a Python process with NumPy and one small model takes more."""


def read_memory_limit(value: Any) -> int:
    """Read a size in which a process can run. A bare 2 or 2048 was meant in another unit."""
    if type(value) is int and 0 < value < MIN_MEMORY_LIMIT:
        raise wrong(f'{value} bytes is less than any process takes (name the unit: "{value} MiB"?)')
    try:
        limit = read_bytes(value)
    except PydanticCustomError:
        raise wrong(f'expected a size, got {describe(value)} (write "2 GiB", or remove the key)') from None
    if limit < MIN_MEMORY_LIMIT:
        raise wrong(f"{describe(value)} is less than any process takes (at least 64 MiB)")
    return limit


def read_auto(value: Any, most: int) -> Any:
    """Read a count up to `most`, or `auto`."""
    if value == "auto" or (type(value) is int and 1 <= value <= most):
        return value
    hint = (
        "remove the quotes" if isinstance(value, str) and value.isdigit() else f"write auto, or 1 to {most}"
    )
    raise wrong(f"expected auto or a count, got {describe(value)} ({hint})")


def read_wide(value: Any) -> Any:
    """Read `auto`, or whether."""
    if value == "auto" or isinstance(value, bool):
        return value
    hint = "remove the quotes" if value in ("true", "false") else "write auto, true or false"
    raise wrong(f"expected auto, true or false, got {describe(value)} ({hint})")


def _auto_schema(most: int) -> dict[str, Any]:
    return {"anyOf": [{**COUNT, "maximum": most}, {"const": "auto"}]}


MemoryLimit: TypeAlias = Annotated[
    int,
    BeforeValidator(read_memory_limit),
    WithJsonSchema({"anyOf": [{**COUNT, "minimum": 64 << 20}, {**TEXT, "examples": ["2 GiB"]}]}),
]
SlotCount: TypeAlias = Annotated[
    Any, BeforeValidator(partial(read_auto, most=MAX_SLOTS)), WithJsonSchema(_auto_schema(MAX_SLOTS))
]
ThreadCount: TypeAlias = Annotated[
    Any, BeforeValidator(partial(read_auto, most=MAX_THREADS)), WithJsonSchema(_auto_schema(MAX_THREADS))
]


Wide: TypeAlias = Annotated[
    Literal["auto"] | bool, BeforeValidator(read_wide), WithJsonSchema({"enum": ["auto", True, False]})
]


class ProcessSettings(Section):
    """A process with slots."""

    slots: SlotCount = "auto"
    """Inference calls at a time in one process."""
    threads: ThreadCount = "auto"
    """Threads that the engine may use in one process."""
    memory_limit: MemoryLimit | None = None
    """Resident memory at which a worker is replaced, with nothing lost, and at which the server warns. Default: none."""
    wide: Wide = False
    """Whether a lone request runs on all threads of its process, by a compiled form of its own that takes the memory of one
    more slot. `auto`: if that is measured to be faster."""


class WorkerGroupSettings(ProcessSettings):
    """A group of worker processes with equal settings."""

    count: int = Field(default=1, ge=1, le=256)
    """Number of processes."""
    models: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    """Names of the models that each process serves. Default: all."""
    device: str | None = Field(default=None, min_length=1)
    """Device of the models with a `path`; `{index}` is the process's number in this group, from 0. Default: the models'."""

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str | None) -> str | None:
        if device is not None and {"{", "}"} & set(device.replace("{index}", "")):
            raise wrong(f'{describe(device)} has other braces than {{index}} (write "cuda:{{index}}")')
        return device


class InProcessSettings(ProcessSettings):
    """Slots in the server process: for development and trusted models, since a crash ends the server."""


def _read_in_process(value: Any) -> Any:
    if isinstance(value, bool):
        return InProcessSettings() if value else None
    return value


class LoggingSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written; at `debug` each request and batch can be followed by its number."""
    format: Literal["auto", "json", "pretty"] = "auto"
    """Format of a line. `auto`: pretty on a terminal, JSON elsewhere."""


class Settings(Section):
    """The whole file."""

    # Validated like a section that is there: its default address, too, starts at the folder of the file.
    server: ServerSettings = Field(default_factory=cast(Any, dict), validate_default=True)
    models: tuple[ModelSettings, ...] = Field(default=(), strict=False)
    """The models to serve; may be empty only for a server whose workers all dial in."""
    chains: tuple[ChainSettings, ...] = Field(default=(), strict=False)
    """Chains of these models: each is one request for its client."""
    workers: tuple[WorkerGroupSettings, ...] | None = Field(default=None, strict=False)
    """Groups of worker processes. Default: one worker with all models. `[]`: none, workers dial in."""
    in_process: Annotated[
        InProcessSettings | None,
        BeforeValidator(_read_in_process, json_schema_input_type=bool | InProcessSettings | None),
    ] = None
    """Run the models in the server instead of in workers: `true`, or {slots, threads}."""
    logging: LoggingSettings = LoggingSettings()

    @property
    def worker_groups(self) -> tuple[WorkerGroupSettings, ...]:
        """The groups of processes to start, with the default applied."""
        if self.in_process is not None or (self.workers is None and not self.models):
            return ()
        return (WorkerGroupSettings(),) if self.workers is None else self.workers

    @property
    def models_by_name(self) -> dict[str, ModelSettings]:
        """The models by name."""
        return {model.name: model for model in self.models}

    @property
    def versions(self) -> dict[str, Versions]:
        """The versions of each name that has several, or that states one."""
        return versions_of(self.models) | versions_of(self.chains)

    def named(self) -> Settings:
        """Return these settings as the program takes them: each version is a model called `embeddings@4`."""
        known = self.versions
        if not known:
            return self
        models = tuple(
            self.models[index].model_copy(update={"name": name})
            for index, name in names_of(self.models).items()
        )
        chains = tuple(
            self.chains[index].model_copy(update={"name": name})
            for index, name in names_of(self.chains).items()
        )
        named = self.model_copy(update={"models": models, "chains": chains})
        if self.in_process is not None or not self.worker_groups:
            return named
        return named.model_copy(update={"workers": named._groups_of_versions(versions_of(self.models))})

    def _groups_of_versions(self, known: Mapping[str, Versions]) -> tuple[WorkerGroupSettings, ...]:
        """Return the groups with the names of versions, and one process more for each canary that no group names.

        The canaries that are stages of one version of a chain share a process.
        """
        rests = canaries(known)
        listed = {name for group in self.worker_groups for name in group.models or ()}
        by_default = tuple(model.name for model in self.models if model.name not in rests)
        groups = [
            group.model_copy(
                update={
                    "models": by_default
                    if group.models is None
                    else tuple(dict.fromkeys(served_name(name, known) for name in group.models))
                }
            )
            for group in self.worker_groups
        ]
        stages = {stage.model: chain.name for chain in self.chains for stage in chain.stages}
        together: dict[str, list[str]] = {}
        for canary in rests:
            if canary not in listed:
                together.setdefault(stages.get(canary, canary), []).append(canary)
        for own in together.values():
            beside = next((group for group in groups if rests[own[0]] in (group.models or ())), None)
            if beside is not None:
                groups.append(beside.model_copy(update={"models": tuple(own), "count": 1}))
        return tuple(groups)

    @property
    def names(self) -> list[str]:
        """The names that may be asked for: of models, then of chains, each with those of its versions."""
        return names_meant(self.models) + names_meant(self.chains)

    def meant_by(self, name: str) -> ModelSettings:
        """Return the model of a name: of one with versions the version with the rest."""
        return self.models_by_name[served_name(name, self.versions)]

    def chain_meant_by(self, name: str) -> ChainSettings | None:
        """Return the chain of a name, likewise; None if it is none."""
        meant = served_name(name, self.versions)
        return next((chain for chain in self.chains if chain.name == meant), None)

    def models_asked_by(self, name: str) -> list[ModelSettings]:
        """Return the model of a name, or those of a chain, in the order of their names."""
        chain = self.chain_meant_by(name)
        asked = [name] if chain is None else [stage.model for stage in chain.stages]
        return [self.meant_by(model) for model in sorted({served_name(one, self.versions) for one in asked})]

    def effective(self) -> Settings:
        """Return these settings with the derived values: engines, audits and the default worker."""
        models = tuple(
            model.model_copy(
                update={
                    "name": parted(model.name)[0],
                    "engine": model.only_engine or AUTO_ENGINE,
                    "audit": model.effective_audit,
                }
            )
            for model in self.models
        )
        chains = tuple(chain.model_copy(update={"name": parted(chain.name)[0]}) for chain in self.chains)
        return self.model_copy(update={"models": models, "chains": chains, "workers": self.worker_groups})

    def models_of(self, group: WorkerGroupSettings, index: int = 0) -> tuple[ModelSettings, ...]:
        """Return the models that a process of a group serves, on its device. `index`: its number in the group, from 0."""
        served = [model for model in self.models if group.models is None or model.name in group.models]
        if group.device is None:
            return tuple(served)
        device = {"device": group.device.replace("{index}", str(index))}
        return tuple(model if model.path is None else model.model_copy(update=device) for model in served)

    def first_served(self) -> tuple[ModelSettings, ...]:
        """Return the models, each as the first process that serves it has it."""
        placed = {
            model.name: model for group in reversed(self.worker_groups) for model in self.models_of(group)
        }
        return tuple(placed.get(model.name, model) for model in self.models)

    def place_of(self, model: ModelSettings) -> Location:
        """Return the place of a model in the file, by its name: the process that serves it may have changed the rest."""
        return ("models", [other.name for other in self.models].index(model.name))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Raise an error with all contradictions between settings that are valid one by one."""
        found = [
            InitErrorDetails(
                type=PydanticCustomError(DISAGREEMENT, "{message}", {"message": message}),
                loc=place,
                input=None,
            )
            for place, message in self.problems()
        ]
        if found:
            raise ValidationError.from_exception_data("Settings", found)
        return self

    def problems(self) -> Iterator[Finding]:
        """Yield each contradiction between settings, with the place of the one to change."""
        yield from below(("models",), problems_of_versions(self.models))
        yield from below(("chains",), problems_of_versions(self.chains))
        for index, model in enumerate(self.models):
            yield from below(("models", index), model.problems())
            if (words_of_path := self._outside_model_root(model)) is not None:
                key = "path" if model.tokenizer is None else "tokenizer"
                yield ("models", index, key), words_of_path
            hang_after_s = model.batching.hang_limit_s
            if (words_of_hang := self.server.too_short_for_hangs(hang_after_s)) is not None:
                yield ("models", index, "batching", "hang_after_s"), words_of_hang
        names = names_meant(self.models)
        models = {parted(model.name)[0] for model in self.models}
        for index, chain in enumerate(self.chains):
            if parted(chain.name)[0] in models:
                yield (
                    ("chains", index, "name"),
                    f'"{chain.name}" is the name of another model (names must be unique)',
                )
            yield from below(("chains", index), chain.problems(names))
        yield from below(("server",), self.server.problems())
        if self.server.http is not None:
            asked = names + names_meant(self.chains)
            for place, name in self.server.http.services():
                if name not in asked:
                    yield (
                        ("server", "http", *place),
                        f'there is no model or chain "{name}" {did_you_mean(name, asked)}',
                    )
        yield from self._problems_of_workers()

    def _problems_of_workers(self) -> Iterator[Finding]:
        dial_in, in_process = self.server.worker_listen is not None, self.in_process
        if in_process is not None and self.workers:
            yield ("in_process",), 'both "in_process" and "workers" are given (remove one)'
        if not self.models and (in_process is not None or self.workers or not dial_in):
            yield ("models",), "no models (add one; only a server with worker_listen needs none)"
        if self.workers == () and in_process is None and not dial_in:
            yield ("workers",), "no workers, and server.worker_listen is not set (add a worker, or set it)"
        names, known = names_meant(self.models), versions_of(self.models)
        groups = self.workers or ()
        for index, group in enumerate(groups):
            for position, name in enumerate(group.models or ()):
                if name not in names:
                    where = ("workers", index, "models", position)
                    yield where, f'there is no model "{name}" {did_you_mean(name, names)}'
        served = {served_name(name, known) for group in groups for name in group.models or names}
        rests = canaries(known)
        yield from self._problems_of_shadows(known)
        if groups and not dial_in and in_process is None:
            for index, name in names_of(self.models).items():
                if name not in served and rests.get(name) not in served:
                    yield (
                        ("models", index, "name"),
                        f'no worker serves "{name}" (add it to a group of workers)',
                    )

    def _problems_of_shadows(self, known: Mapping[str, Versions]) -> Iterator[Finding]:
        """Yield the places where a version that is compared cannot be, or could cost others their process."""
        names = names_of(self.models)
        by_name = {name: self.models[index] for index, name in names.items()}
        shadows = {versioned(one.name, version): one for one in known.values() for version in one.shadows}
        for index, name in names.items():
            if (versions := shadows.get(name)) is None:
                continue
            both = by_name[name], by_name[versioned(versions.name, versions.rest)]
            if not all(model.idempotent for model in both):
                words = "a shadow runs requests twice, which idempotent: false forbids (remove one of them)"
                yield ("models", index, "shadow"), words
            if self.in_process is not None:
                words = (
                    "a shadow needs a process of its own, and in_process has one for all (remove one of them)"
                )
                yield ("models", index, "shadow"), words
        for number, group in enumerate(self.workers or ()):
            served = {served_name(name, known): place for place, name in enumerate(group.models or ())}
            if served.keys() - shadows.keys():
                for name in sorted(served.keys() & shadows.keys()):
                    words = f'"{name}" is a shadow, which shares no process with traffic (leave it out of this group)'
                    yield ("workers", number, "models", served[name]), words

    def _outside_model_root(self, model: ModelSettings) -> str | None:
        """Return the problem of a model with a file outside of `model_root`, weights included; links are followed."""
        if self.server.model_root is None or model.file is None:
            return None
        try:
            files = files_of_model(Path(model.file))
        except (OSError, ModelLoadError):
            files = [Path(model.file)]  # the loader of the model reports that it cannot be read
        for file in files:
            # For links in a circle resolve() raises RuntimeError, or OSError from Python 3.13 on.
            try:
                real = file.resolve()
            except (OSError, RuntimeError) as error:
                return f"{file} is a broken link: {error}"
            if not real.is_relative_to(root := Path(self.server.model_root)):
                return f"{real} is not in server.model_root, {root} (move it there, or change that folder)"
        return None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the file, for editors."""
    schema = {**Settings.model_json_schema(), "title": "shapestream configuration"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

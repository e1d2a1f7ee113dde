"""What the YAML may say, as frozen models: names, types, ranges and defaults of every setting.

Here are the whole file and its short sections; the long ones are in `settings_server.py` and `settings_models.py`.
`settings_loader.py` reads a file into `Settings`, or says what is wrong with it; docs/configuration.md is
the page for users. A setting that one value cannot be judged by alone (two models of one name, a worker for a
model that is not there) is checked in `settings_checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from shapestream.settings_models import ModelSettings
from shapestream.settings_section import COUNT, TEXT, Section
from shapestream.settings_server import ServerSettings
from shapestream.settings_values import read_auto, read_memory_limit

__all__ = ["InProcessSettings", "LoggingSettings", "Settings", "WorkerGroupSettings"]

MemoryLimit: TypeAlias = Annotated[
    int,
    BeforeValidator(read_memory_limit),
    WithJsonSchema({"anyOf": [{**COUNT, "minimum": 64 << 20}, {**TEXT, "examples": ["2 GiB"]}]}),
]
AutoCount: TypeAlias = Annotated[
    Any, BeforeValidator(read_auto), WithJsonSchema({"anyOf": [COUNT, {"const": "auto"}]})
]


class WorkerGroupSettings(Section):
    """Worker processes that are alike."""

    count: int = Field(default=1, ge=1, le=256)
    """Processes."""
    models: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    """The models that each of them serves. Default: all."""
    slots: AutoCount = "auto"
    """Inference calls at a time in one process."""
    threads: AutoCount = "auto"
    """Threads that the engine may use in one process."""
    memory_limit: MemoryLimit | None = None
    """Resident memory at which a process is replaced by a fresh one, with nothing lost. Default: none."""


class InProcessSettings(Section):
    """Slots in the server process itself: for development and trusted models (a crash ends the server)."""

    slots: AutoCount = "auto"
    """Inference calls at a time."""
    threads: AutoCount = "auto"
    """Threads that the engine may use."""
    memory_limit: MemoryLimit | None = None
    """Resident memory of the server at which it warns. Default: none."""
    refuse_new_shapes: bool = False
    """While the server holds more than `memory_limit`: answer requests of shapes that it has not met `unavailable`."""


def _read_in_process(value: Any) -> Any:
    if isinstance(value, bool):
        return InProcessSettings() if value else None
    return value


class LoggingSettings(Section):
    """Lines on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """At `debug` every request and batch can be followed by its id."""
    format: Literal["auto", "json", "pretty"] = "auto"
    """`auto`: pretty on a terminal, JSON elsewhere."""


class Settings(Section):
    """The whole file."""

    # Validated like a section that is there: its default address, too, starts at the folder of the file.
    server: ServerSettings = Field(default_factory=cast(Any, dict), validate_default=True)
    models: tuple[ModelSettings, ...] = Field(default=(), strict=False)
    """May be empty only for a server whose workers all dial in."""
    workers: tuple[WorkerGroupSettings, ...] | None = Field(default=None, strict=False)
    """Default: one worker with all models. `[]`: none, they dial in."""
    in_process: Annotated[InProcessSettings | None, BeforeValidator(_read_in_process)] = None
    """`true`, or {slots, threads}: run the models in the server instead of in workers."""
    logging: LoggingSettings = LoggingSettings()

    @property
    def worker_groups(self) -> tuple[WorkerGroupSettings, ...]:
        """The groups of processes to start, defaults applied."""
        if self.in_process is not None or (self.workers is None and not self.models):
            return ()
        return (WorkerGroupSettings(),) if self.workers is None else self.workers

    def effective(self) -> Settings:
        """The same with what is chosen by the rest of the file written out: engines, and the default worker."""
        models = tuple(model.model_copy(update={"engine": model.effective_engine}) for model in self.models)
        return self.model_copy(update={"models": models, "workers": self.worker_groups})

    def models_of(self, group: WorkerGroupSettings) -> tuple[ModelSettings, ...]:
        """The models that a group serves."""
        if group.models is None:
            return self.models
        return tuple(model for model in self.models if model.name in group.models)

"""The configuration that a candidate is measured with: the user's file, cut down to one model, in a folder of its own.

Everything else stays as the user has it (queue bounds, batching, probe, device properties), so that what is measured
is what will be served.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from shapestream.settings import LoadedSettings, ModelSettings, WorkerGroupSettings
from shapestream_engine.resources import divide_cpus
from shapestream_workers.lab.tune_candidates import Candidate, Placement, ShapeChoice, edits_of
from shapestream_workers.lab.tune_edited_file import apply_edits, relocated

__all__ = ["Subject", "subject_of"]

MOST_CALIBRATION_S = 2.0
"""Of each server that is measured: the rest of what it has to know, the warm-up teaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is tuned, in its file."""

    loaded: LoadedSettings
    model: int
    """Its place in `models`."""
    group: int | None
    """The entry of `workers` that serves it; None: in process, or the one worker there is by default."""
    dimensions: tuple[str, ...]
    cpus: int

    @property
    def settings(self) -> ModelSettings:
        """Of the model."""
        return self.loaded.settings.models[self.model]

    @property
    def in_process(self) -> bool:
        """Whether it runs in the server."""
        return self.loaded.settings.in_process is not None

    @property
    def is_alone(self) -> bool:
        """Whether the CPUs are this model's: only then can tuning it divide them."""
        return len(self.loaded.settings.models) == 1 and len(self.loaded.settings.worker_groups) <= 1

    def baseline(self) -> Candidate:
        """The file as it is."""
        settings = self.loaded.settings
        if settings.in_process is not None:
            slots, threads = divide_cpus(self.cpus, 1, settings.in_process.slots, settings.in_process.threads)
            place = Placement(processes=None, slots=slots, threads=threads)
        else:
            groups = settings.worker_groups
            group = groups[self.group] if self.group is not None and groups else WorkerGroupSettings()
            processes = sum(each.count for each in groups) or 1
            slots, threads = divide_cpus(self.cpus, processes, group.slots, group.threads)
            place = Placement(processes=group.count, slots=slots, threads=threads)
        return Candidate(placement=place, shapes=self._shapes(), is_baseline=True)

    def _shapes(self) -> ShapeChoice:
        said = dict(self._values()["models"][self.model].get("shapes") or {})
        strategy = said.pop("strategy", "native")
        static = said.pop("static", None) or []
        max_prepared = said.pop("max_prepared", None)
        sizes = {
            name: tuple(value) if isinstance(value, list) else (value,)
            for name in list(said)
            if name in self.dimensions and (value := said.pop(name)) is not None
        }
        return ShapeChoice(
            strategy=strategy,
            sizes=sizes,
            max_prepared=max_prepared,
            static=tuple(sizes for shape in static for sizes in _spread(shape, self.dimensions)),
            others=said,
        )

    def edits(self, candidate: Candidate) -> dict[tuple[str | int, ...], Any]:
        """Of the user's file, for this candidate."""
        edits = edits_of(candidate, model=self.model, group=self.group, dimensions=self.dimensions)
        if self.is_alone:
            return edits
        return {where: value for where, value in edits.items() if where[0] == "models"}

    def write(self, candidate: Candidate, folder: Path) -> Path:
        """A file in `folder` that serves this model alone, at `s.sock` there, with this candidate's settings."""
        values = self._values()
        relocated(values, self.loaded.path.parent, None)
        values["models"] = [values["models"][self.model]]
        server = {key: value for key, value in (values.get("server") or {}).items() if key != "worker_listen"}
        server.pop("record_trace", None)
        server.pop("security", None)  # for addresses that this server does not have
        values["server"] = {**server, "listen": [f"ipc://{folder}/s.sock"], "grace_s": 1.0}
        values["logging"] = {"level": "info", "format": "json"}
        if not self.in_process:
            groups = values.get("workers") or [{}]
            group = dict(groups[self.group or 0])
            group.pop("models", None)
            values["workers"] = [group]
        # The counts are written out even where they are the user's: cut down, `auto` could mean another number.
        # Otherwise a server would spend more of the budget on starting than on serving.
        calibration_s = min(self.settings.calibration_s, MOST_CALIBRATION_S)
        values["models"][0] = {**values["models"][0], "calibration_s": calibration_s}
        explicit = Candidate(placement=candidate.placement, shapes=candidate.shapes)
        apply_edits(values, edits_of(explicit, model=0, group=0, dimensions=self.dimensions))
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return path

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = copy.deepcopy(self.loaded.source.values)
        return values


def _spread(shape: Mapping[str, Any], dimensions: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """All shapes of an entry of `static`, whose sizes may be lists."""
    return product(*(said if isinstance(said := shape[name], list) else [said] for name in dimensions))


def subject_of(loaded: LoadedSettings, model: int, dimensions: tuple[str, ...], cpus: int) -> Subject:
    """The model of that number, and the group of workers that serves it."""
    name = loaded.settings.models[model].name
    serving = [
        number
        for number, group in enumerate(loaded.settings.workers or ())
        if group.models is None or name in group.models
    ]
    return Subject(
        loaded=loaded,
        model=model,
        group=serving[0] if serving else None,
        dimensions=dimensions,
        cpus=cpus,
    )

"""The model to tune in its YAML file, and the two files made from it: one to be measured, and the tuned one.

Both are changed by `apply_candidate`, so that the tuned file says what was measured.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from os.path import relpath
from pathlib import Path
from typing import Any

import yaml

from shapestream.errors import ConfigurationError
from shapestream.settings.loader import LoadedSettings, leaves, load_settings
from shapestream.settings.model_settings import ModelSettings
from shapestream_workers.lab.candidates import Candidate, Placement
from shapestream_workers.models import slots_and_threads

MOST_CALIBRATION_S = 1.0
"""Calibration of each server, which would take most of the budget otherwise; the warm-up replaces the rest."""
_IPC = "ipc://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to tune, in its file."""

    loaded: LoadedSettings
    model: int
    """Index of the model in `models`."""

    @property
    def settings(self) -> ModelSettings:
        """Settings of the model."""
        return self.loaded.settings.models[self.model]

    @property
    def group(self) -> int:
        """The entry of `workers` that serves the model; 0 also for the one worker that there is by default."""
        groups = enumerate(self.loaded.settings.workers or ())
        serving = (n for n, group in groups if group.models is None or self.settings.name in group.models)
        return next(serving, 0)

    @property
    def in_process(self) -> bool:
        """True if the model runs in the server."""
        return self.loaded.settings.in_process is not None

    @property
    def is_alone(self) -> bool:
        """True if no other model or worker shares the CPUs, so that tuning may divide them."""
        return len(self.loaded.settings.models) == 1 and len(self.loaded.settings.worker_groups) <= 1

    def baseline(self) -> Candidate:
        """Return the file as it is."""
        settings = self.loaded.settings
        slots, threads = slots_and_threads(settings, self.settings.name)
        processes = None if self.in_process else settings.worker_groups[self.group].count
        place = Placement(processes=processes, slots=slots, threads=threads)
        shapes = self.loaded.source.values["models"][self.model].get("shapes") or {}
        return Candidate(placement=place, shapes=shapes, is_baseline=True)

    def write(self, candidate: Candidate, folder: Path) -> Path:
        """Write a file in `folder` that serves this model alone, at `s.sock` there, as this candidate.

        All other settings stay (queue bounds, batching, probe, device properties).
        """
        values: dict[str, Any] = copy.deepcopy(self.loaded.source.values)
        relocated(values, self.loaded, None)
        model = values["models"][self.model]
        calibration_s = min(self.settings.calibration_s, MOST_CALIBRATION_S)
        values["models"] = [{**model, "calibration_s": calibration_s}]
        values.pop("chains", None)  # a chain has other models
        # Other addresses, their keys and the trace belong to the server that users talk to.
        unwanted = ("worker_listen", "record_trace", "security", "admin", "tracing", "http", "grpc")
        server = {key: said for key, said in (values.get("server") or {}).items() if key not in unwanted}
        values["server"] = {**server, "listen": [f"ipc://{folder}/s.sock"], "grace_s": 1.0}
        values["logging"] = {"level": "info", "format": "json"}
        if not self.in_process:
            group = dict((values.get("workers") or [{}])[self.group])
            group.pop("models", None)
            values["workers"] = [group]
        # Counts are written even where they are the user's: `auto` could mean another number in a file cut down.
        apply_candidate(values, candidate, model=0, group=0)
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return path

    def write_tuned(self, candidate: Candidate, target: Path, header: str) -> None:
        """Write `target`: a comment of `header`, then the user's file as this candidate; then load it.

        Raises `ConfigurationError` if the written file cannot be used.
        """
        source = self.loaded.path

        def change(values: Any) -> None:
            if not candidate.is_baseline:
                apply_candidate(
                    values, in_flow(candidate), model=self.model, group=self.group, placed=self.is_alone
                )
            if source.parent.resolve() != target.parent.resolve():
                relocated(values, self.loaded, target.parent)

        body = edited_text(source.read_text(), change)
        comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
        # Editors look for the schema in the first line.
        first, separator, rest = body.partition("\n")
        has_schema = first.startswith("# yaml-language-server:")
        target.write_text(first + separator + comment + rest if has_schema else comment + body)
        load_settings(target)


def apply_candidate(
    values: Any, candidate: Candidate, *, model: int, group: int, placed: bool = True
) -> None:
    """Change the values of a file to this candidate, in place; without `placed`, not to its slots and threads."""
    if candidate.shapes:
        values["models"][model]["shapes"] = candidate.shapes
    else:
        values["models"][model].pop("shapes", None)
    if candidate.properties:
        values["models"][model].setdefault("properties", {}).update(candidate.properties)
    if not placed:
        return
    place = candidate.placement
    counts = {"slots": place.slots, "threads": place.threads}
    if place.processes is None:
        if not isinstance(values.get("in_process"), MutableMapping):
            values["in_process"] = {}
        values["in_process"].update(counts)
    else:
        if not values.get("workers"):
            values["workers"] = [{}]
        values["workers"][group].update({"count": place.processes, **counts})


def relocated(values: Any, loaded: LoadedSettings, new: Path | None) -> None:
    """Rewrite paths that start at the folder of `loaded`, whose values these are: relative to `new`, or absolute.

    A path is a text that the settings made absolute.
    """
    folder = loaded.path.parent.absolute()
    for location, meant in leaves(loaded.settings.model_dump(by_alias=True)):
        written = loaded.source.written(location)
        said = reduce(getitem, written, loaded.source.values)
        if not isinstance(said, str) or not isinstance(meant, str) or said == meant:
            continue
        path = folder / said.removeprefix(_IPC)
        if meant.removeprefix(_IPC) in (str(path), str(path.resolve())):
            moved = str(path.resolve()) if new is None else relpath(path.resolve(), new.resolve())
            prefix = _IPC if said.startswith(_IPC) else ""
            reduce(getitem, written[:-1], values)[written[-1]] = prefix + moved


def edited_text(text: str, change: Callable[[Any], object]) -> str:
    """Return the YAML `text` after `change` of its values, in place; comments and the order of keys stay."""
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 1 << 16  # lines stay as long as they were
    _, sequence, offset = load_yaml_guess_indent(text)
    editor.indent(mapping=2, sequence=sequence or 4, offset=2 if offset is None else offset)
    values = editor.load(text)
    change(values)
    written = io.StringIO()
    editor.dump(values, written)
    return written.getvalue()


def in_flow(candidate: Candidate) -> Candidate:
    """Return the candidate with shapes that are written in flow style, `{strategy: native, max_prepared: 16}`."""
    from ruamel.yaml import YAML

    return replace(candidate, shapes=YAML().load(json.dumps(candidate.shapes)))


def require_editor() -> None:
    """Raise `ConfigurationError` unless files can be edited; called before anything is measured."""
    try:
        import ruamel.yaml  # noqa: F401 - whether it is there
    except ImportError as error:
        message = (
            "tune writes YAML with ruamel.yaml, which is not installed (pip install 'shapestream[tune]')"
        )
        raise ConfigurationError([message]) from error

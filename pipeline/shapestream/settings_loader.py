"""From a YAML file to `Settings`, or to all that is wrong: `file:line:column: key: problem (what to do)`.

Three passes feed one list: the text (yaml_source.py), the values (settings.py, through pydantic), and what
they say about each other (settings_checks.py). What one pass found fault with is left alone by the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shapestream.errors import ConfigurationError
from shapestream.settings import Settings
from shapestream.settings_checks import cross_check
from shapestream.settings_messages import explain
from shapestream.settings_paths import outside_model_root
from shapestream.settings_words import describe
from shapestream.yaml_source import MAX_BYTES, Location, Place, YamlSource, read_yaml

__all__ = ["EffectiveValue", "LoadedSettings", "load_models", "load_settings", "spell_location"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One setting as it takes effect: `key` as error messages spell it, and the place that it comes from."""

    key: str
    value: Any
    origin: str
    """`file:line`, or `default`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Settings with their origin, so that later findings can still point into the file."""

    settings: Settings
    path: Path
    source: YamlSource

    def problem(self, location: Location, message: str) -> str:
        """A line for something found later, such as a model file that contradicts its settings."""
        return _line(self.path, self.source.place_of(location), location, message)

    def with_server(self, **changes: Any) -> LoadedSettings:
        """The same with other values in `server`, which a command line gave; they are not checked again."""
        server = self.settings.server.model_copy(update=changes)
        return replace(self, settings=self.settings.model_copy(update={"server": server}))

    def effective_values(self) -> Iterator[EffectiveValue]:
        """Every setting, in the order of the schema, with its origin (for `shapestream check --show`)."""
        for location, value in _leaves(self.settings.effective(), ()):
            place = self.source.places.get(location)
            if place is None and location[:-1] in self.source.places and isinstance(location[-1], int):
                place = self.source.places[location[:-1]]
            origin = "default" if place is None else f"{self.path}:{place.line}"
            yield EffectiveValue(key=spell_location(location), value=value, origin=origin)


def load_settings(path: str | Path, *, files_must_exist: bool = True) -> LoadedSettings:
    """Read `path`; raises `ConfigurationError` with every problem found, in the order of the file."""
    path = Path(path)
    return _loaded(path, _source(path), files_must_exist=files_must_exist)


def load_models(path: str | Path) -> LoadedSettings:
    """Read only the models of `path`, with defaults for all else: for trying them though other sections are faulty.

    Raises `ConfigurationError`, as `load_settings` does.
    """
    path = Path(path)
    source = _source(path)
    if isinstance(source.values, dict):
        source.values = {key: value for key, value in source.values.items() if key == "models"}
    return _loaded(path, source, files_must_exist=True)


def _source(path: Path) -> YamlSource:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # of a device, or a model that was named by mistake, no more
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigurationError([f"{path}: {reason}"]) from error
    return read_yaml(data)


def _loaded(path: Path, source: YamlSource, *, files_must_exist: bool) -> LoadedSettings:
    findings = _Findings(source)
    settings = _validate(source, findings, {"base": path.parent, "files_must_exist": files_must_exist})
    if findings.found or settings is None:
        findings.found.sort(key=lambda finding: finding[0] or Place(0, 0))
        raise ConfigurationError([_line(path, *finding) for finding in findings.found])
    return LoadedSettings(settings=settings, path=path, source=source)


class _Findings:
    """What is wrong so far. A faulty value is not complained about again, nor what is in it."""

    def __init__(self, source: YamlSource) -> None:
        self._source = source
        self.found = [(problem.place, problem.location, problem.message) for problem in source.problems]
        self._faulty = {problem.location for problem in source.problems if problem.location}

    def add(self, location: Location, message: str, *, follows: bool = False) -> None:
        """Notes a finding; one that `follows` from comparing settings does not hide others at its place."""
        if any(location[:length] in self._faulty for length in range(1, len(location) + 1)):
            return
        self.found.append((self._source.place_of(location), location, message))
        if not follows:
            self._faulty.add(location)


def _validate(source: YamlSource, findings: _Findings, context: dict[str, Any]) -> Settings | None:
    values = source.values
    if not isinstance(values, dict):
        if values is not None:
            findings.add((), f"expected a mapping, got {describe(values)} (start with models:)")
        elif not findings.found:
            findings.add((), "the file is empty (start with models:)")
        return None
    settings: Settings | None = None
    try:
        # The default of `listen` is relative to this file, so even an absent server is validated.
        settings = Settings.model_validate({"server": {}, **values}, context=context)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            location, message = explain(detail)
            if message:
                findings.add(location, message)
    if settings is not None:
        for location, message in outside_model_root(settings):
            findings.add(location, message)
    for location, message in cross_check(values):
        findings.add(location, message, follows=True)
    return settings


def spell_location(location: Location) -> str:
    """`models[0].inputs["a.b"].shape`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part and all(character.isalnum() or character in "_-" for character in part):
            text += f".{part}" if text else part
        else:
            text += f'["{part}"]'
    return text


def _line(path: Path, place: Place | None, location: Location, message: str) -> str:
    where = f"{path}:{place.line}:{place.column}" if place is not None else f"{path}"
    key = spell_location(location)
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _leaves(value: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    if isinstance(value, BaseModel):
        fields = [(name, getattr(value, name)) for name in type(value).model_fields]
        fields += (value.model_extra or {}).items()
        for name, inner in fields:
            yield from _leaves(inner, (*location, name))
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*location, key))
    elif isinstance(value, tuple) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*location, index))
    else:
        yield location, value

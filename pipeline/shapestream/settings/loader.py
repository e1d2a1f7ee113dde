"""Read a YAML file into `Settings`, or report all its problems as `file:line:column: key: problem (what to do)`.

Findings come from the text (yaml_source.py) and from the values (pydantic, with the sections' validators). Settings
that contradict each other are found when each is valid by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shapestream.errors import ConfigurationError, closest
from shapestream.settings.chain_settings import ChainSettings
from shapestream.settings.document import DISAGREEMENT, Settings
from shapestream.settings.folders import expand_folders
from shapestream.settings.model_settings import ModelSettings
from shapestream.settings.text_folder import TextFolder
from shapestream.settings.values import Section, address_meant, describe
from shapestream.settings.yaml_source import MAX_BYTES, Location, Place, YamlSource, read_yaml

_EXPECTED: Mapping[str, str] = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


_TEXTS = "write texts: NAME, or a list of names, or true for all folders of texts"
_POOLING = 'write pooling: mean, or pooling: "mean, normalize" for vectors of length 1'
_BY_HAND = "a gateway that is started by hand has it as an option: shapestream gateway --help"
REMOVED: Mapping[str, str] = {
    "server.hang_min_s": "it is 10 s, or 2 x worker_silence_s; a model's own limit is batching.hang_after_s",
    "server.hang_grace_s": "a worker whose batch hangs is ended 5 s after the batch was cancelled",
    "server.quarantine_requests": "1024 requests that killed workers are refused; a restart forgets them",
    "server.quarantine_s": "a request that killed workers is refused for 600 s; a restart forgets it",
    "server.kept_bytes": "64 MiB of replies are kept; remove the key",
    "server.kept_s": "replies are kept for 60 s; remove the key",
    "server.max_outbox_bytes": "peers may leave 512 MiB unread, then the one with most is cut off; remove the key",
    "server.prefetch": "a batch is queued behind the running one wherever that pays; remove the key",
    "server.windows_per_key": "one key has 8 credits: give each client its own key, or raise window_requests",
    "server.max_queued_s": "give requests deadlines: what would wait too long is refused; or lower max_queued_requests",
    "server.record_trace": "start the server with --record-trace FILE",
    "server.security.mode": "write security: network, or keys without a mode",
    "server.http.default_priority_level": f"requests have the level 1, and p is the priority 1 - p; {_BY_HAND}",
    "server.grpc.default_priority_level": f"requests have the level 1, and p is the priority 1 - p; {_BY_HAND}",
    "server.http.openai": f"{_TEXTS}",
    "server.http.tei": f"{_TEXTS}; TEI's clients get the first",
    "server.http.processes": "write count, as for workers",
    "server.grpc.processes": "write count, as for workers",
    "chains.stages.in": "write inputs, as for models",
    "server.grpc.max_message": "write max_body, as for http",
    "server.grpc.max_calls": f"a process has 128 calls at a time: raise count; {_BY_HAND}",
    "models.tokenizer.lower_case": "tokenizer.json lowers texts by its normalizer; a folder's files are read for it",
    "models.tokenizer.pairs": "pairs are made for a folder whose model scores texts: write path: FOLDER",
    "models.tokenizer.add_special_tokens": "special tokens are those of tokenizer.json: change its post_processor",
    "models.pooling.mode": f"{_POOLING}",
    "models.pooling.normalize": f"{_POOLING}",
    "models.pooling.of": "the output is found: last_hidden_state, token_embeddings or the only one; remove the key",
    "models.pooling.mask": "the mask is the input attention_mask: rename the input in the model's file",
    "models.probe.*.normal": "write uniform: [low, high], or samples: FILE.npz; numbers without a probe are normal",
    "models.shapes.max_prepared_bytes": "bytes follow from the number of prepared shapes: lower max_prepared",
}
"""Keys that files of earlier releases may have, without indices; `*` is a name. What holds now, or what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One setting in effect: `key` as error messages spell it, and its origin."""

    key: str
    value: Any
    origin: str
    """`file:line`, or `default`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Settings with their origin, so that later findings can point into the file."""

    settings: Settings
    path: Path
    source: YamlSource
    folders: tuple[TextFolder, ...] = ()
    """The folders with a model, and what was read in them."""

    def problem(self, location: Location, message: str) -> str:
        """Return the line for a problem that is found later, such as a model file that contradicts its settings."""
        return _line(self.path, self.source.place_of(location), self.source.origin(location), message)

    def with_server(self, **changes: Any) -> LoadedSettings:
        """Return these settings with other values of `server`, which are not checked."""
        server = self.settings.server.model_copy(update=changes)
        return replace(self, settings=self.settings.model_copy(update={"server": server}))

    def effective_values(self) -> Iterator[EffectiveValue]:
        """Yield every setting, in the order of the schema, with its origin."""
        for location, value in leaves(self.settings.effective().model_dump()):
            written = self.source.origin(location)
            place = self.source.places.get(written)
            if place is None and written[:-1] in self.source.places and isinstance(written[-1], int):
                place = self.source.places[written[:-1]]
            if place is None and self.source.holds(location):  # made of a folder
                place = self.source.place_of(written)
            origin = "default" if place is None else f"{self.path}:{place.line}"
            yield EffectiveValue(key=spell_location(location), value=value, origin=origin)


def load_settings(path: str | Path, *, files_must_exist: bool = True, serves: bool = True) -> LoadedSettings:
    """Read `path`. Raises `ConfigurationError` with every problem, in the order of the file.

    `files_must_exist`: named files and folders must exist. `serves`: the files of the server's keys, too.
    """
    path = Path(path)
    return _loaded(path, _source(path), files_must_exist=files_must_exist, serves=serves)


def load_models(path: str | Path) -> LoadedSettings:
    """Read only the models of `path`, with defaults for the other sections, which may have errors.

    Raises `ConfigurationError`, as `load_settings` does.
    """
    path = Path(path)
    source = _source(path)
    if isinstance(source.values, dict):
        source.values = {key: value for key, value in source.values.items() if key == "models"}
    return _loaded(path, source, files_must_exist=True, serves=True)


def settings_of(
    models: Sequence[ModelSettings | Mapping[str, Any]],
    chains: Sequence[ChainSettings | Mapping[str, Any]] = (),
) -> LoadedSettings:
    """Return the settings of models and chains that a program states, as objects or as in a YAML.

    Relative paths start at the working folder. Raises `ConfigurationError` with every problem.
    """
    values = {
        key: [dict(one) if isinstance(one, Mapping) else one for one in stated]
        for key, stated in (("models", models), ("chains", chains))
    }
    return _loaded(Path("in Python"), YamlSource(values=values), files_must_exist=True, serves=False)


def _source(path: Path) -> YamlSource:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # it may be a device, or a model that was named by mistake
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        meant = address_meant(str(path)) if path.suffix not in (".yaml", ".yml") else None
        hint = (
            ""
            if meant is None
            else f" (an address has its scheme: write {meant}, where the server listens for clients)"
        )
        raise ConfigurationError([f"{path}: {reason}{hint}"]) from error
    return read_yaml(data)


def _loaded(path: Path, source: YamlSource, *, files_must_exist: bool, serves: bool) -> LoadedSettings:
    folders = expand_folders(source, path.parent, files_must_exist=files_must_exist)
    findings = _Findings(source)
    for location in source.places:
        if (words := _removed(location)) is not None:
            findings.add(location, f"this key was removed ({words})")
            findings.told.add(location[:-1])
    for location, text in source.spellings.items():
        if location[:1] == ("models",) and location[2:] == ("version",):
            findings.add(location, f'{text} is a number in YAML (put the version in quotes: "{text}")')
    context = {
        "base": path.parent,
        "files_must_exist": files_must_exist,
        "keys_must_exist": files_must_exist and serves,
    }
    settings = _validate(source, findings, context)
    if findings.found or settings is None:
        findings.found.sort(key=lambda finding: finding[0] or Place(0, 0))
        # Of an entry that was made into several, each finds what is wrong with it.
        raise ConfigurationError([*dict.fromkeys(_line(path, *finding) for finding in findings.found)])
    return LoadedSettings(settings=settings.named(), path=path, source=source, folders=folders)


def _removed(location: Location) -> str | None:
    """Return what holds instead of a key that was removed; None for any other key."""
    names = [part for part in location if isinstance(part, str)]
    return REMOVED.get(".".join(names)) or REMOVED.get(".".join([*names[:2], "*", *names[3:]]))


class _Findings:
    """The problems found so far. A faulty value is reported once, together with all that is inside it."""

    def __init__(self, source: YamlSource) -> None:
        self._source = source
        self.found = [(problem.place, problem.location, problem.message) for problem in source.problems]
        self._faulty = {problem.location for problem in source.problems if problem.location}
        self._faulty |= source.refused
        self.told: set[Location] = set()
        """Sections whose own form is not judged: they have keys that were removed, maybe since they are one value now."""

    def add(self, location: Location, message: str, *, follows: bool = False) -> None:
        """Add a problem. One that `follows` from a comparison of settings does not hide others at its place."""
        origin = self._source.origin(location)
        if origin in self.told or any(
            location[:length] in self._faulty for length in range(1, len(location) + 1)
        ):
            return
        self.found.append((self._source.place_of(location), origin, message))
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
        # The default of `listen` is relative to this file, so an absent server is validated too.
        settings = Settings.model_validate({"server": {}, **values}, context=context)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            location, message = _explain(detail)
            if message:
                findings.add(location, message, follows=detail["type"] == DISAGREEMENT)
    return settings


def spell_location(location: Location) -> str:
    """Return the spelling of a location: `models[0].inputs["a.b"].shape`."""
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


def leaves(value: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield each single value of dumped settings, in the order of the schema, with its location."""
    if not isinstance(value, dict | tuple) or not value:
        yield location, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, (*location, key))


def _explain(detail: ErrorDetails) -> tuple[Location, str]:
    """Return the place of a pydantic error, and a sentence with the problem and its remedy.

    The sentence is empty for an error that follows from others: a list that is too short because items are invalid.
    """
    location: Location = detail["loc"]
    kind, given, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return location, _unknown_key(location, given)
    if kind == "missing":
        return location[:-1], f'missing "{location[-1]}"'
    if kind == "too_short" and given:
        return location, ""
    if kind in _EXPECTED:
        of_groups = location[:1] == ("workers",) and len(location) < 3
        hint = _group_hint(given, is_list=len(location) == 1) if of_groups else ""
        return location, f"expected {_EXPECTED[kind]}, got {describe(given)}{hint or _hint(kind, given)}"
    if kind == "literal_error":
        return location, f"expected {context['expected']}, got {describe(given)}".replace("'", '"')
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return location, f"must be {words} {context[key]}, got {describe(given)}"
    if kind in ("too_short", "too_long", "missing_positional_argument") or kind.startswith("string_"):
        return location, f"{_plain(detail['msg'])}, got {describe(given)}"
    return location, _plain(detail["msg"])


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]


def _hint(kind: str, given: Any) -> str:
    if given is None:
        return " (fill it in, or remove the key)"
    if kind in ("int_type", "float_type") and isinstance(given, str):
        return " (remove the quotes)" if _reads_as_number(given, int if kind == "int_type" else float) else ""
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f" (write {int(given)})"
    if kind == "bool_type" and isinstance(given, str):
        word = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
        return f" (write {word[given.lower()]})" if given.lower() in word else ""
    if kind == "string_type" and isinstance(given, (bool, int, float)):
        return " (put it in quotes)"
    if kind == "tuple_type" and not isinstance(given, dict):
        meant = address_meant(given)
        return f" (write [{given}])" if meant is None else f' (write ["{meant}"])'
    return ""


def _group_hint(given: Any, *, is_list: bool) -> str:
    """Return the hint for `workers` that are no list, or a group that is no mapping: a number is taken for a count."""
    if isinstance(given, dict):
        return " (a list of groups: write [{count: 1}])"
    group = f"{{count: {given if _reads_as_number(str(given), int) else 1}}}"
    return f" (write {f'[{group}]' if is_list else group})"


def _reads_as_number(text: str, kind: Callable[[str], float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _unknown_key(location: Location, given: Any) -> str:
    known = _known_keys(location[:-1])
    word = str(location[-1])
    if (close := closest(word, known)) is not None:
        return f'unknown key (did you mean "{close}"?)'
    # A shape without quotes in {...} ends at its first comma; YAML reads the rest as keys without values.
    if ".." in word or ("shape" in known and (given is None or ":" in word)):
        return 'unknown key (put a shape that holds commas in quotes: "batch, 4")'
    return f"unknown key (known: {', '.join(known)})"


def _known_keys(location: Location) -> list[str]:
    """Return the keys of the section at this location. Indices, and keys that the user chooses, lead to no other section."""
    section: type[Section] = Settings
    for part in location:
        field = section.model_fields.get(str(part))
        section = (field and _section_in(field.annotation)) or section
    return section.file_keys()


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section in the type of a field, such as `ModelSettings` in `tuple[ModelSettings, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)

"""Edits of a YAML file by key: of its plain values, to run it elsewhere, and of its text, which keeps its comments.

The same edits serve both, so that the tuned file says what was measured.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from os.path import relpath
from pathlib import Path
from typing import Any

from shapestream.errors import ConfigurationError
from shapestream.settings import Location, is_public_key, load_settings

_IPC = "ipc://"


def apply_edits(values: MutableMapping[str, Any], edits: Mapping[Location, Any]) -> None:
    """Set each key of `edits`, in place; None removes the key. Missing parents are made.

    A parent that holds no keys, such as `in_process: true`, becomes a mapping.
    """
    for location, value in edits.items():
        *way, last = location
        if value is None and not _leads_to(values, location):
            continue
        inner: Any = values
        for here, below in zip(way, location[1:], strict=True):
            inner = _entered(inner, here, [] if isinstance(below, int) else {})
        if value is None:
            del inner[last]
        elif isinstance(inner, MutableSequence) and last == len(inner):
            inner.append(value)
        else:
            inner[last] = value


def _leads_to(values: Any, location: Location) -> bool:
    for part in location:
        if isinstance(part, int) and isinstance(values, MutableSequence):
            if part >= len(values):
                return False
        elif not isinstance(values, MutableMapping) or part not in values:
            return False
        values = values[part]
    return True


def _entered(values: Any, part: str | int, empty: Any) -> Any:
    """`values[part]`, made where it is missing or holds no keys."""
    if isinstance(values, MutableSequence):
        if part == len(values):
            values.append(empty)
    elif not isinstance(values.get(part), MutableMapping | MutableSequence):
        values[part] = empty
    return values[part]


def relocated(values: MutableMapping[str, Any], old: Path, new: Path | None) -> None:
    """Rewrite paths relative to the folder `old`, in place: relative to `new`, or absolute."""

    def moved(path: str) -> str:
        if Path(path).is_absolute() or path.startswith("~"):
            return path
        target = (old / path).resolve()
        return str(target) if new is None else relpath(target, new.resolve())

    for model in values.get("models") or ():
        if isinstance(model.get("path"), str):
            model["path"] = moved(model["path"])
        probe = model.get("probe")
        if isinstance(probe, str):
            model["probe"] = moved(probe)
        elif probe:
            for each in probe.values():
                if isinstance(each.get("samples"), str):
                    each["samples"] = moved(each["samples"])
    server = values.get("server") or {}
    listen = server.get("listen") or []
    for number, address in enumerate(listen):
        listen[number] = _moved_address(address, moved)
    if isinstance(server.get("worker_listen"), str):
        server["worker_listen"] = _moved_address(server["worker_listen"], moved)
    for key in ("model_root", "record_trace"):
        if isinstance(server.get(key), str):
            server[key] = moved(server[key])
    if isinstance(security := server.get("security"), dict):
        _relocate_keys(security, moved)
    if isinstance(admin := server.get("admin"), dict) and isinstance(admin.get("token_file"), str):
        admin["token_file"] = moved(admin["token_file"])


def _relocate_keys(security: MutableMapping[str, Any], moved: Callable[[str], str]) -> None:
    """Rewrite `server.security`: the server's key, and per role a folder, or a list of files and keys."""

    def file(text: str) -> str:
        return text if is_public_key(text) else moved(text)

    for role in ("key", "clients", "admins", "workers"):
        said = security.get(role)
        if isinstance(said, str):
            security[role] = file(said)
        elif isinstance(said, list):
            security[role] = [file(each) for each in said]


def _moved_address(address: str, moved: Any) -> str:
    path = address.removeprefix(_IPC)
    return _IPC + moved(path) if address.startswith(_IPC) else address


def edited_text(text: str, edits: Mapping[Location, Any], *, moved: tuple[Path, Path] | None = None) -> str:
    """The YAML `text` with these edits; comments and the order of keys stay. `moved`: from folder to folder.

    Raises `ConfigurationError` naming the extra where the library for that is not installed.
    """
    yaml = _round_trip(text)
    values = yaml.load(text)
    apply_edits(values, {location: _in_flow(value) for location, value in edits.items()})
    if moved is not None and moved[0].resolve() != moved[1].resolve():
        relocated(values, *moved)
    written = io.StringIO()
    yaml.dump(values, written)
    return written.getvalue()


def require_editor() -> None:
    """Raise `ConfigurationError` unless files can be edited; called before anything is measured."""
    try:
        import ruamel.yaml  # noqa: F401 - whether it is there
    except ImportError as error:
        message = (
            "tune writes YAML with ruamel.yaml, which is not installed (pip install 'shapestream[tune]')"
        )
        raise ConfigurationError([message]) from error


def _round_trip(text: str) -> Any:
    require_editor()
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 16  # lines stay as long as they were
    _, sequence, offset = load_yaml_guess_indent(text)
    yaml.indent(mapping=2, sequence=sequence or 4, offset=2 if offset is None else offset)
    return yaml


def _in_flow(value: Any) -> Any:
    """The value in flow style, `{strategy: native, max_prepared: 16}`, as in the examples."""
    if value is None or not isinstance(value, dict | list):
        return value
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(value, dict):
        mapping = CommentedMap({key: _in_flow(inner) for key, inner in value.items()})
        mapping.fa.set_flow_style()
        return mapping
    sequence = CommentedSeq([_in_flow(inner) for inner in value])
    sequence.fa.set_flow_style()
    return sequence


def write_tuned(source: Path, target: Path, edits: Mapping[Location, Any], header: str) -> None:
    """Write `target`: a comment of `header`, then the file `source` with these edits; then load it.

    Raises `ConfigurationError` if it would overwrite `source`, or if the written file cannot be used.
    """
    if target.exists() and target.samefile(source):
        raise ConfigurationError(
            [f"{target}: is the input, which is never overwritten (choose another --out)"]
        )
    body = edited_text(source.read_text(), edits, moved=(source.parent, target.parent))
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    # Editors look for the schema in the first line.
    first, separator, rest = body.partition("\n")
    has_schema = first.startswith("# yaml-language-server:")
    target.write_text(first + separator + comment + rest if has_schema else comment + body)
    load_settings(target)

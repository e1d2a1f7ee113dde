"""What one setting cannot be judged by alone: names that must agree, and things that exclude each other.

Works on the *raw* values of the file, and takes nothing for granted about their types: a file with a mistyped
number still gets its unknown model name reported in the same run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shapestream.yaml_source import Location

__all__ = ["closest", "cross_check", "did_you_mean"]

Finding: TypeAlias = tuple[Location, str]


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`(did you mean "x"?)`, or what there is to choose from; never empty-handed."""
    if (close := closest(word, known)) is not None:
        return f'(did you mean "{close}"?)'
    return f"(known: {', '.join(dict.fromkeys(known))})" if known else "(none is known)"


def cross_check(values: Any) -> Iterator[Finding]:
    """Every disagreement between settings, each with the place of the one to change."""
    top = _mapping(values)
    models = _sequence(top.get("models"))
    names = [name for model in models if isinstance(name := _mapping(model).get("name"), str)]
    yield from _models(models)
    for index, model in enumerate(models):
        yield from _model(("models", index), _mapping(model))
    yield from _workers(top, names)
    yield from _server(_mapping(top.get("server")))


def _models(models: Sequence[Any]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, model in enumerate(models):
        name = _mapping(model).get("name")
        if isinstance(name, str) and first.setdefault(name, index) != index:
            message = f'models[{first[name]}] is called "{name}" too (names are unique)'
            yield ("models", index, "name"), message


def _model(location: Location, model: Mapping[str, Any]) -> Iterator[Finding]:
    path, function, engine = model.get("path"), model.get("function"), model.get("engine")
    if path is None and function is None:
        yield location, 'neither "path" nor "function" (one of them says what to run)'
    elif path is not None and function is not None:
        yield (*location, "function"), 'both "path" and "function" are given (remove one)'
    elif (function is not None and engine == "openvino") or (path is not None and engine == "function"):
        kind = "function" if function is not None else "path"
        yield (
            (*location, "engine"),
            f'engine "{engine}" does not take a "{kind}" (remove the engine; it is chosen by the kind)',
        )
    inputs, outputs = _mapping(model.get("inputs")), _mapping(model.get("outputs"))
    if function is not None and path is None:
        yield from _function_ports(location, inputs, outputs)
    for name, port in inputs.items():
        followed = _mapping(port).get("mask_of")
        where = (*location, "inputs", name, "mask_of")
        if followed == name:
            yield where, "an input cannot be the mask of itself"
        elif isinstance(followed, str) and path is None and followed not in inputs:
            yield where, f'there is no input "{followed}" {did_you_mean(followed, list(inputs))}'
    for name, port in outputs.items():
        yield from _rule((*location, "outputs", name), _mapping(port))
    for name, probe in _mapping(model.get("probe")).items():
        yield from _probe((*location, "probe", name), _mapping(probe))


def _function_ports(
    location: Location, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Iterator[Finding]:
    for key, ports in (("inputs", inputs), ("outputs", outputs)):
        if not ports:
            yield location, f'a function needs "{key}" (nothing else says what they are)'
        for name, port in ports.items():
            missing = [field for field in ("shape", "element_type") if _mapping(port).get(field) is None]
            if missing:
                yield (*location, key, name), f"a function's port needs {' and '.join(missing)}"


def _rule(location: Location, port: Mapping[str, Any]) -> Iterator[Finding]:
    rule = port.get("rule")
    if rule == "with" and port.get("output") is None:
        yield location, 'the rule "with" needs the output that it runs parallel to (add output: NAME)'
    for field, wanted in (("column", "index_column"), ("output", "with")):
        if port.get(field) is not None and rule != wanted:
            yield (*location, field), f'only the rule "{wanted}" has a "{field}" (remove it)'


def _probe(location: Location, probe: Mapping[str, Any]) -> Iterator[Finding]:
    if len(probe.keys() & {"integers", "floats"}) != 1:
        yield location, "write either integers: [low, high] or floats: [low, high]"
    for kind in ("integers", "floats"):
        match probe.get(kind):
            case [int() | float() as low, int() | float() as high] if low > high:
                yield (*location, kind), f"the low end {low} lies above the high end {high}"


def _workers(top: Mapping[str, Any], names: list[str]) -> Iterator[Finding]:
    workers, in_process = top.get("workers"), top.get("in_process")
    runs_in_process = in_process is True or isinstance(in_process, dict)
    dial_in = _mapping(top.get("server")).get("worker_listen") is not None
    if runs_in_process and workers:
        yield ("in_process",), 'both "in_process" and "workers" are given (remove one)'
    if not _sequence(top.get("models")) and (runs_in_process or workers or not dial_in):
        yield ("models",), "no models (add one; only a server with worker_listen can do without)"
    if workers == [] and not runs_in_process and not dial_in:
        yield ("workers",), "no workers, and server.worker_listen is not set (nothing could run a model)"
    served: set[str] = set()
    for index, group in enumerate(_sequence(workers)):
        chosen = _mapping(group).get("models")
        if chosen is None:
            served.update(names)
        for position, name in enumerate(_sequence(chosen)):
            if isinstance(name, str) and name not in names:
                where = ("workers", index, "models", position)
                yield where, f'there is no model "{name}" {did_you_mean(name, names)}'
            elif isinstance(name, str):
                served.add(name)
    if workers and not dial_in and not runs_in_process:
        for index, model in enumerate(_sequence(top.get("models"))):
            name = _mapping(model).get("name")
            if isinstance(name, str) and name not in served:
                yield ("models", index, "name"), f'no worker serves "{name}" (add it to a group of workers)'


def _server(server: Mapping[str, Any]) -> Iterator[Finding]:
    beat = server.get("heartbeat_s", 1.0)
    for key, default in (("client_silence_s", 10.0), ("worker_silence_s", 3.0)):
        silence = server.get(key, default)
        if _is_number(beat) and _is_number(silence) and silence < 2 * beat:
            where = ("server", key if key in server else "heartbeat_s")
            yield where, f"{key} ({silence}) must be at least twice heartbeat_s ({beat})"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []

"""What one setting cannot be judged by alone: names that must agree, and things that exclude each other.

Works on the *raw* values of the file, and takes nothing for granted about their types: a file with a mistyped
number still gets its unknown model name reported in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.settings_once import once_findings
from shapestream.settings_shapes import shapes_findings
from shapestream.settings_words import did_you_mean
from shapestream.yaml_source import Location

__all__ = ["cross_check"]

Finding: TypeAlias = tuple[Location, str]


class _Follower(NamedTuple):
    """A rule that names another output."""

    meaning: str
    follows: tuple[str, ...]
    """The rules that the other output may have."""


_FOLLOWERS = {
    "with": _Follower("that it runs parallel to", ("index_column", "counts")),
    "counts": _Follower("that counts its rows", ("rows",)),
    "padded_counts": _Follower("that counts its rows", ("rows",)),
    "recount": _Follower("whose rows it counts", ("index_column", "with", "counts", "padded_counts")),
}


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
    yield from _hangs(_mapping(top.get("server")), _sequence(top.get("models")))


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
    elif (function is not None and engine in _SUFFIXES) or (path is not None and engine == "function"):
        kind = "function" if function is not None else "path"
        yield (
            (*location, "engine"),
            f'engine "{engine}" does not take a "{kind}" (remove the engine; it is chosen by the kind)',
        )
    elif function is not None and model.get("sha256") is not None:
        yield (*location, "sha256"), "a function is no file (remove it)"
    elif isinstance(path, str) and path:
        yield from _suffix((*location, "path"), path, engine)
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
    yield from _rules(location, outputs, complete=path is None)
    yield from shapes_findings((*location, "shapes"), model)
    yield from _invariance(location, model)
    yield from once_findings(location, model)
    for name, probe in _mapping(model.get("probe")).items():
        yield from _probe((*location, "probe", name), _mapping(probe))


def _invariance(location: Location, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Calls that are all alike leave nothing for `shapes` to choose."""
    invariant = _mapping(model.get("batching")).get("batch_invariant")
    if invariant is None or invariant is False:
        return
    shapes = _mapping(model.get("shapes"))
    for key, value in shapes.items():
        if value not in ("native", None, [], False):
            message = (
                "batch_invariant runs exact shapes, in calls of a fixed number of rows (remove one of them)"
            )
            yield (*location, "shapes", key), message


def _suffix(location: Location, path: str, engine: Any) -> Iterator[Finding]:
    """Whether a file is of a kind that its engine reads. What engines of others read is not known here."""
    suffix = PurePath(path).suffix
    if engine is None and not any(suffix in suffixes for suffixes in _SUFFIXES.values()):
        known = ", ".join(f"{what} ({suffix})" for suffix, what in _KINDS.items())
        yield location, f'"{path}" is of no kind that is known: {known} (write the engine that reads it)'
    elif isinstance(engine, str) and suffix not in _SUFFIXES.get(engine, (suffix,)):
        yield location, f'engine "{engine}" reads {" and ".join(_SUFFIXES[engine])}, not "{path}"'


_SUFFIXES = {"openvino": (".xml", ".onnx"), "onnxruntime": (".onnx",), "torch": (".pt2",)}
_KINDS = {".xml": "IR", ".onnx": "ONNX", ".pt2": "torch.export"}


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


def _rules(location: Location, outputs: Mapping[str, Any], *, complete: bool) -> Iterator[Finding]:
    """`complete`: the model has no outputs but these, and no other names for them."""
    for name, port in outputs.items():
        where, rule = (*location, "outputs", name), _mapping(port).get("rule")
        column, followed = _mapping(port).get("column"), _mapping(port).get("output")
        if column is not None and rule != "index_column":
            yield (*where, "column"), 'only the rule "index_column" has a "column" (remove it)'
        known = rule if isinstance(rule, str) else None
        follower = _FOLLOWERS.get(known or "")
        if follower is None:
            if followed is not None:
                having = ", ".join(f'"{each}"' for each in _FOLLOWERS)
                yield (*where, "output"), f'only the rules {having} have an "output" (remove it)'
        elif followed is None:
            yield where, f'the rule "{rule}" needs the output {follower.meaning} (add output: NAME)'
        elif followed == name:
            yield (*where, "output"), "an output cannot follow itself"
        elif isinstance(followed, str) and followed in outputs:
            led_by = _mapping(outputs[followed]).get("rule") or "rows"
            if led_by not in follower.follows:
                wanted = " or ".join(f'"{each}"' for each in follower.follows)
                message = (
                    f'"{followed}" has the rule "{led_by}" ("{rule}" follows one with the rule {wanted})'
                )
                yield (*where, "output"), message
        elif isinstance(followed, str) and complete:
            message = f'there is no output "{followed}" {did_you_mean(followed, list(outputs))}'
            yield (*where, "output"), message


_PROBES = ("integers", "uniform", "normal", "samples")


def _probe(location: Location, probe: Mapping[str, Any]) -> Iterator[Finding]:
    if len(probe) != 1 and not probe.keys() - set(_PROBES):
        advice = "integers: [low, high], uniform: [low, high], normal: [mean, std] or samples: FILE.npz"
        yield location, f"write one of {advice}"
    for kind in ("integers", "uniform"):
        match probe.get(kind):
            case [int() | float() as low, int() | float() as high] if low > high:
                yield (*location, kind), f"the low end {low} lies above the high end {high}"
    match probe.get("normal"):
        case [_, int() | float() as std] if std < 0:
            yield (*location, "normal"), f"the standard deviation {std} is negative"


def _workers(top: Mapping[str, Any], names: list[str]) -> Iterator[Finding]:
    workers, in_process = top.get("workers"), top.get("in_process")
    runs_in_process = in_process is True or isinstance(in_process, dict)
    dial_in = _mapping(top.get("server")).get("worker_listen") is not None
    if runs_in_process and workers:
        yield ("in_process",), 'both "in_process" and "workers" are given (remove one)'
    if (
        _mapping(in_process).get("refuse_new_shapes") is True
        and _mapping(in_process).get("memory_limit") is None
    ):
        message = '"refuse_new_shapes" says what happens above "memory_limit", which is not set (add it)'
        yield ("in_process", "refuse_new_shapes"), message
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
    yield from _security(server)


def _hangs(server: Mapping[str, Any], models: Sequence[Any]) -> Iterator[Finding]:
    """Where a network may break, a silent worker must count as lost before what it runs counts as hanging."""
    if server.get("worker_listen") is None:
        return
    beat, silence = server.get("heartbeat_s", 1.0), server.get("worker_silence_s", 3.0)
    if not (_is_number(beat) and _is_number(silence)):
        return
    limits: list[tuple[Location, Any]] = [
        (
            ("models", index, "batching", "hang_after_s"),
            _mapping(_mapping(model).get("batching")).get("hang_after_s"),
        )
        for index, model in enumerate(models)
    ]
    limits.append((("server", "hang_min_s"), server.get("hang_min_s")))
    for where, limit in limits:
        if _is_number(limit) and limit < silence + beat:
            yield (
                where,
                (
                    f"a batch hangs after {limit:g} s, which must not be less than worker_silence_s + heartbeat_s "
                    f"({silence + beat:g}) where workers dial in: else a broken connection passes for a request that hangs"
                ),
            )


def _security(server: Mapping[str, Any]) -> Iterator[Finding]:
    """An address that other machines reach needs keys, or a word that the network is safe."""
    security = server.get("security")
    listens = [
        (("server", "listen", index), address)
        for index, address in enumerate(_sequence(server.get("listen")))
    ]
    dials_in = server.get("worker_listen")
    if security is None:
        for where, address in [*listens, (("server", "worker_listen"), dials_in)]:
            if isinstance(address, str) and is_beyond_loopback(address):
                yield where, f'"{address}" is open to other machines ({_HOW_TO_BE_SAFE})'
        return
    keys, where = _mapping(security), ("server", "security")
    if not isinstance(security, dict):
        return
    if (mode := keys.get("mode", "keys")) != "keys":
        for role in ("key", "clients", "admins", "workers"):
            if mode == "network" and keys.get(role) is not None:
                yield (*where, role), 'the mode "network" asks nobody for a key (remove one of them)'
        return
    if keys.get("key") is None:
        yield where, 'missing "key" (the server\'s secret key: shapestream keys new server)'
    protected = [address for _, address in listens if isinstance(address, str) and is_protectable(address)]
    if protected and not keys.get("clients") and not keys.get("admins"):
        yield where, f'nobody could use "{protected[0]}" (list public keys in clients, or in admins)'
    if isinstance(dials_in, str) and is_protectable(dials_in) and not keys.get("workers"):
        yield where, f'no worker could use "{dials_in}" (list public keys in workers)'


_HOW_TO_BE_SAFE = (
    "add security: {key: ..., clients: ...} as docs/security.md shows, or security: network where the network itself "
    "keeps strangers away, or listen on tcp://127.0.0.1:PORT or ipc://PATH"
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []

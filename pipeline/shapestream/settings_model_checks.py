"""What settings of one model cannot be judged by alone: ports and rules that must agree, things that exclude each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from shapestream.settings_once import once_findings
from shapestream.settings_raw import Finding, mapping
from shapestream.settings_shapes import shapes_findings
from shapestream.settings_words import did_you_mean
from shapestream.yaml_source import Location

__all__ = ["model_findings"]


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


def model_findings(location: Location, model: Mapping[str, Any]) -> Iterator[Finding]:
    """What one model's settings disagree about among themselves."""
    path, function, engine = model.get("path"), model.get("function"), model.get("engine")
    engine = engine if isinstance(engine, str | None) else ""  # of no known kind, which is said elsewhere
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
    inputs, outputs = mapping(model.get("inputs")), mapping(model.get("outputs"))
    if function is not None and path is None:
        yield from _function_ports(location, inputs, outputs)
    for name, port in inputs.items():
        followed = mapping(port).get("mask_of")
        where = (*location, "inputs", name, "mask_of")
        if followed == name:
            yield where, "an input cannot be the mask of itself"
        elif isinstance(followed, str) and path is None and followed not in inputs:
            yield where, f'there is no input "{followed}" {did_you_mean(followed, list(inputs))}'
    yield from _rules(location, outputs, complete=path is None)
    yield from shapes_findings((*location, "shapes"), model)
    yield from _invariance(location, model)
    yield from once_findings(location, model)
    for name, probe in mapping(model.get("probe")).items():
        yield from _probe((*location, "probe", name), mapping(probe))


def _invariance(location: Location, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Calls that are all alike leave nothing for `shapes` to choose."""
    invariant = mapping(model.get("batching")).get("batch_invariant")
    if invariant is None or invariant is False:
        return
    shapes = mapping(model.get("shapes"))
    for key, value in shapes.items():
        if value not in ("native", None, [], False):
            message = (
                "batch_invariant runs exact shapes, in calls of a fixed number of rows (remove one of them)"
            )
            yield (*location, "shapes", key), message


def _suffix(location: Location, path: str, engine: str | None) -> Iterator[Finding]:
    """Whether a file is of a kind that its engine reads. What engines of others read is not known here."""
    suffix = PurePath(path).suffix
    if engine is None and not any(suffix in suffixes for suffixes in _SUFFIXES.values()):
        known = ", ".join(f"{what} ({suffix})" for suffix, what in _KINDS.items())
        yield location, f'"{path}" is of no kind that is known: {known} (write the engine that reads it)'
    elif engine is not None and suffix not in _SUFFIXES.get(engine, (suffix,)):
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
            missing = [field for field in ("shape", "element_type") if mapping(port).get(field) is None]
            if missing:
                yield (*location, key, name), f"a function's port needs {' and '.join(missing)}"


def _rules(location: Location, outputs: Mapping[str, Any], *, complete: bool) -> Iterator[Finding]:
    """`complete`: the model has no outputs but these, and no other names for them."""
    for name, port in outputs.items():
        where, rule = (*location, "outputs", name), mapping(port).get("rule")
        column, followed = mapping(port).get("column"), mapping(port).get("output")
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
            led_by = mapping(outputs[followed]).get("rule") or "rows"
            if led_by not in follower.follows:
                wanted = " or ".join(f'"{each}"' for each in follower.follows)
                message = (
                    f'"{followed}" has the rule "{led_by}" ("{rule}" follows one with the rule {wanted})'
                )
                yield (*where, "output"), message
        elif isinstance(followed, str) and complete:
            message = f'there is no output "{followed}" {did_you_mean(followed, list(outputs))}'
            yield (*where, "output"), message


_MOST = sys.float_info.max
_PROBES = ("integers", "uniform", "normal", "samples")


def _probe(location: Location, probe: Mapping[str, Any]) -> Iterator[Finding]:
    if len(probe) != 1 and not probe.keys() - set(_PROBES):
        advice = "integers: [low, high], uniform: [low, high], normal: [mean, std] or samples: FILE.npz"
        yield location, f"write one of {advice}"
    for kind in ("integers", "uniform"):
        match probe.get(kind):
            case [int() | float() as low, int() | float() as high] if low > high:
                yield (*location, kind), f"the low end {low} lies above the high end {high}"
    match probe.get("integers"):
        case [int() as low, int() as high] if low < -(1 << 63) or high >= 1 << 63:
            yield (
                (*location, "integers"),
                "no element type has integers of more than 64 bits (narrow the range)",
            )
    match probe.get("uniform"):
        case [int() | float() as low, int() | float() as high] if not high - low <= _MOST:
            yield (*location, "uniform"), "the two ends lie further apart than any number (narrow the range)"
    match probe.get("normal"):
        case [_, int() | float() as std] if std < 0:
            yield (*location, "normal"), f"the standard deviation {std} is negative"

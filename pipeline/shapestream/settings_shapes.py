"""What `shapes` says, against what the inputs of the same model say: dimensions, bounds, and whether they may be padded.

Like all of `settings_checks.py` it works on the raw values of the file. What only the model file can tell is left to
the engine, which checks all of it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shapestream.settings_raw import Finding
from shapestream.settings_words import closest, did_you_mean
from shapestream.yaml_source import Location
from shapestream_engine.dimension_table import BATCH
from shapestream_engine.errors import ShapeError
from shapestream_engine.shapes import Dimension, NamedShape

__all__ = ["shapes_findings"]


_KEYS = ("strategy", "max_prepared", "max_prepared_bytes", "warm_up", "static")


def shapes_findings(location: Location, model: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with the `shapes` of a model, each with the place of what to change."""
    shapes = model.get("shapes")
    if not isinstance(shapes, dict):
        return
    strategy = shapes.get("strategy", "native")
    sizes = {name: value for name, value in shapes.items() if name not in _KEYS}
    yield from _of_strategy(location, strategy, shapes, sizes)
    inputs = _Inputs(model)
    yield from _static((*location, "static"), shapes.get("static"), strategy, inputs)
    for name, value in sizes.items():
        if not isinstance(name, str):
            continue
        where = (*location, name)
        if strategy == "native":
            continue
        if name not in inputs.bounds:
            known = [*inputs.bounds, *_KEYS]
            yield where, f'no input has a dimension "{name}" {did_you_mean(name, known)}'
            continue
        outside = [size for size in _integers(value) if size not in inputs.bounds[name]]
        if outside:
            bounds = inputs.bounds[name]
            yield (
                where,
                f'{outside[0]} lies outside of "{name}", {bounds} (change it, or the shape of the input)',
            )
        for port in inputs.unpaddable.get(name, []):
            yield where, f'sizes of "{name}" need padding (allow it at inputs.{port}: pad: {{{name}: VALUE}})'


def _of_strategy(
    location: Location, strategy: Any, shapes: Mapping[str, Any], sizes: Mapping[str, Any]
) -> Iterator[Finding]:
    match strategy:
        case "native":
            for name in sizes:
                remedy = (
                    f'did you mean "{close}"?'
                    if (close := closest(str(name), _KEYS))
                    else "remove it, or choose another strategy"
                )
                yield (*location, name), f"the strategy native runs any size as it comes ({remedy})"
            for key in ("max_prepared_bytes", "warm_up"):
                if shapes.get(key):
                    yield (*location, key), "the strategy native prepares nothing (remove it)"
            if shapes.get("max_prepared") == 1:
                yield (
                    (*location, "max_prepared"),
                    "the strategy native needs room for two shapes (write at least 2)",
                )
        case "padded":
            for name, value in sizes.items():
                if isinstance(value, list) and len(value) > 1:
                    yield (*location, name), "the strategy padded takes one size (several are bucketed)"
        case "partitioned":
            if BATCH not in sizes:
                yield location, "the strategy partitioned needs sizes of batch (add batch: [1, 2, 4, 8])"
    if strategy in ("padded", "bucketed") and not sizes:
        example = "seq: 512" if strategy == "padded" else "seq: [64, 128]"
        yield location, f"the strategy {strategy} needs a dimension with its sizes (such as {example})"


def _static(location: Location, static: Any, strategy: Any, inputs: _Inputs) -> Iterator[Finding]:
    if static and strategy != "native":
        yield (
            location,
            f"static shapes are for the strategy native, and this is {strategy} (remove one of them)",
        )
        return
    for index, shape in enumerate(static if isinstance(static, list) else []):
        for name, value in shape.items() if isinstance(shape, dict) else ():
            where = (*location, index, name)
            bounds = inputs.bounds.get(name)
            if bounds is None:
                # A model whose inputs are not described here has its dimensions' names from the file.
                if len(inputs.bounds) > 1:
                    hint = did_you_mean(str(name), list(inputs.bounds))
                    yield where, f'no input has a dimension "{name}" {hint}'
                continue
            outside = [size for size in _integers(value) if size not in bounds]
            if outside:
                remedy = "change it, or the shape of the input"
                yield where, f'{outside[0]} lies outside of "{name}", {bounds} ({remedy})'


class _Inputs:
    """What the inputs say of each dimension, as far as they are written correctly."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.bounds: dict[str, Dimension] = {BATCH: Dimension()}
        """Together; a file's layout may say which axis is `batch`."""
        self.unpaddable: dict[str, list[str]] = {}
        """The inputs that do not allow padding of it."""
        inputs = model.get("inputs")
        for port, values in (inputs if isinstance(inputs, dict) else {}).items():
            if isinstance(values, dict):
                self._add(str(port), values)

    def _add(self, port: str, values: Mapping[str, Any]) -> None:
        shape = values.get("shape")
        if isinstance(shape, list):
            shape = ", ".join(map(str, shape))
        pad = values.get("pad")
        padded = set(pad) if isinstance(pad, dict) else set()
        try:
            named = NamedShape.parse(str(shape)) if isinstance(shape, str | int) else None
        except ShapeError:
            return
        if named is None:
            return
        for name, dimension in zip(named.names, named.dimensions, strict=True):
            if name is None:
                continue
            try:
                self.bounds[name] = self.bounds.get(name, Dimension()).intersection(dimension)
            except ShapeError:
                continue  # said of the inputs, by the engine
            if name != BATCH and name not in padded and values.get("mask_of") is None:
                self.unpaddable.setdefault(name, []).append(port)


def _integers(value: Any) -> list[int]:
    return [size for size in (value if isinstance(value, list) else [value]) if type(size) is int]

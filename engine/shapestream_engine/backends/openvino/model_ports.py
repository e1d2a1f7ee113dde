"""A model's ports as OpenVINO reads them, and the input dimensions that its output axes follow.

Shape inference shows which output axis follows which dimension, before anything runs. The model is reshaped to several
sets of different static sizes. An output axis that has a dimension's size in every set follows that dimension. This takes
milliseconds and no input data. Each call checks the result again when its outputs are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import openvino as ov
from openvino import layout_helpers

from shapestream_engine.backends.file_ports import FilePort, Reshaped, signature_of
from shapestream_engine.backends.openvino.runtime import engine_words
from shapestream_engine.errors import SignatureError
from shapestream_engine.model import ModelSpec
from shapestream_engine.model_files import input_symbols
from shapestream_engine.ports import DimensionTable, InputPort
from shapestream_engine.shapes import Dimension
from shapestream_engine.signature import ModelSignature

_Shapes: TypeAlias = "list[tuple[int | None, ...]]"

# Primes come first, because no product or quotient of two primes is a third. Large primes show an axis that is cut
# off at some size. The others are sizes that models with strides, patches or blocks accept.
_SCHEMES = (
    (3, 5, 7, 11, 13, 17, 19, 23, 29, 31),
    (521, 541, 557, 569, 587, 599, 613, 631),
    (8, 24, 40, 56, 72, 88, 104, 120),
    (64, 128, 192, 256, 320, 384, 448, 512),
    (224, 448, 672, 896, 1120, 1344, 1568),
    (60, 120, 180, 240, 300, 360, 420, 480),
    (1, 2, 4, 6, 9, 10, 12, 14),
)
_ENOUGH = 4
"""Accepted sets of sizes after which the trial ends."""


def signature_of_model(model: ov.Model, spec: ModelSpec) -> ModelSignature:
    """Reshape the inputs of `model` to the spec and return its signature; raises `SignatureError`."""

    def reshape(inputs: tuple[InputPort, ...], table: DimensionTable) -> Reshaped:
        reshape_inputs(model, inputs)
        sizes = enumerate(zip(table.names, table.bounds, strict=True))
        bounds = dict(named for number, named in sizes if number not in table.strings)  # no axis has those
        return follow(model, inputs, bounds)

    symbols = {} if spec.path is None else input_symbols(spec.path)
    return signature_of(
        spec, _ports("input", model.inputs, symbols), _ports("output", model.outputs), reshape=reshape
    )


def _ports(
    kind: str,
    ports: Sequence[Any],
    symbols: Mapping[str, tuple[str | None, ...]] | None = None,
    follows: Sequence[Sequence[str | None]] | None = None,
) -> list[FilePort]:
    """Return the model's ports, by name or else position. `symbols` has an ONNX file's dimension names, which OpenVINO
    drops."""
    found: list[FilePort] = []
    for number, port in enumerate(ports):
        own = sorted(port.names)
        name = str(port.any_name) if own else f"{kind}{number}"
        if any(name == other.name for other in found):  # two outputs may share a tensor
            name = f"{kind}{number}"
        dimensions = (
            None if port.partial_shape.rank.is_dynamic else tuple(map(_dimension, port.partial_shape))
        )
        rank = len(dimensions or ())
        if follows is not None:
            named = tuple(follows[number])
        else:
            in_file = [axes for own_name in own if len(axes := (symbols or {}).get(own_name, ())) == rank]
            named = in_file[0] if in_file else (None,) * rank
        found.append(
            FilePort(
                name=name,
                element_type=_element_type(port),
                symbols=named,
                dimensions=dimensions,
                aliases=frozenset({*own, str(port.node.friendly_name)}),
                batch_axis=_batch_axis(port.node) if kind == "input" else None,
            )
        )
    return found


def _element_type(port: Any) -> str:
    name = str(port.element_type.get_type_name())
    return "str" if name == "string" else name


def _batch_axis(node: Any) -> int | None:
    """Return the axis N of an input's layout; negative if the layout counts from the last axis."""
    return int(layout_helpers.batch_idx(node.layout)) if layout_helpers.has_batch(node.layout) else None


def reshape_inputs(model: ov.Model, inputs: Sequence[InputPort]) -> None:
    """Reshape the model's inputs to these ports; raises `SignatureError` if the model refuses."""
    wanted = {
        number: ov.PartialShape(
            [
                ov.Dimension(axis.minimum, -1 if axis.maximum is None else axis.maximum)
                for axis in port.shape.dimensions
            ]
        )
        for number, port in enumerate(inputs)
    }
    if all(model.inputs[number].partial_shape == shape for number, shape in wanted.items()):
        return
    try:
        model.reshape(wanted)
    except RuntimeError as error:
        shapes = ", ".join(f"{port.name} [{port.shape}]" for port in inputs)
        raise SignatureError(f"the model does not take the shapes {shapes}: {engine_words(error)}") from error


def follow(model: ov.Model, inputs: Sequence[InputPort], bounds: Mapping[str, Dimension]) -> Reshaped:
    """Infer shapes for several sizes within `bounds`, which has each dynamic dimension; `model` stays unchanged."""
    trial = model.clone()
    tried: list[tuple[dict[str, int], _Shapes]] = []
    complaint = ""
    for tie_axes in (False, True):
        for sizes in _size_sets(_groups(inputs, bounds, tie_axes=tie_axes)):
            try:
                tried.append((sizes, _infer_shapes(trial, inputs, sizes)))
            except RuntimeError as error:
                complaint = engine_words(error)
            if len(tried) >= _ENOUGH:
                break
        if tried:
            break
    # A dimension that was tried in one size cannot be told from a constant.
    varied = [name for name in bounds if len({sizes[name] for sizes, _ in tried}) > 1]
    named = [name for name in varied if any(name in port.shape.names for port in inputs)]
    return Reshaped(
        outputs=_ports("output", model.outputs, follows=_following(model, named, tried)),
        accepted=len(tried),
        varied=frozenset(varied),
        complaint=complaint,
    )


def _groups(
    inputs: Sequence[InputPort], bounds: Mapping[str, Dimension], *, tie_axes: bool
) -> list[tuple[list[str], Dimension]]:
    """Return groups of dimensions that get equal sizes. Tied, all unnamed dimensions of one axis number form a group:
    inputs that the model adds need equal sizes, even if the configuration does not say so."""
    groups: dict[object, tuple[list[str], Dimension]] = {}
    for port in inputs:
        for axis, name in enumerate(port.axis_names):
            if name is None:
                continue
            key = axis if tie_axes and port.shape.names[axis] is None else name
            members, _ = groups.setdefault(key, ([], bounds[name]))
            if name not in members:
                members.append(name)
    return list(groups.values())


def _size_sets(groups: list[tuple[list[str], Dimension]]) -> Iterator[dict[str, int]]:
    """Yield sets of sizes in which all groups differ, as far as the bounds allow; no set occurs twice."""
    given = []
    for scheme in _SCHEMES:
        for turn in range(2):
            sizes: dict[str, int] = {}
            for number, (members, bounds) in enumerate(groups):
                # Models rarely divide batch axes; small sizes distinguish them from other axes.
                wanted = _SCHEMES[0] if "batch" in members else scheme
                own = [size for size in wanted if size in bounds]
                if len(own) < (2 if wanted is _SCHEMES[0] else 1):
                    own = _first_sizes(bounds)
                free = [size for size in own if size not in sizes.values()] or own
                size = free[(number + turn) % len(free)]
                sizes.update(dict.fromkeys(members, size))
            if sizes not in given:
                given.append(sizes)
                yield sizes


def _first_sizes(bounds: Dimension) -> list[int]:
    most = bounds.minimum + 15 if bounds.maximum is None else min(bounds.maximum, bounds.minimum + 15)
    return list(range(max(bounds.minimum, min(1, most)), most + 1))


def _infer_shapes(trial: ov.Model, inputs: Sequence[InputPort], sizes: Mapping[str, int]) -> _Shapes:
    trial.reshape(
        {
            number: ov.PartialShape(
                [
                    dimension.minimum if name is None else sizes[name]
                    for name, dimension in zip(port.axis_names, port.shape.dimensions, strict=True)
                ]
            )
            for number, port in enumerate(inputs)
        }
    )
    return [
        ()
        if output.partial_shape.rank.is_dynamic
        else tuple(axis.get_length() if axis.is_static else None for axis in output.partial_shape)
        for output in trial.outputs
    ]


def _following(
    model: ov.Model, named: Sequence[str], tried: Sequence[tuple[dict[str, int], _Shapes]]
) -> list[list[str | None]]:
    found: list[list[str | None]] = []
    for number, output in enumerate(model.outputs):
        rank = output.partial_shape.rank
        names: list[str | None] = []
        for axis in range(0 if rank.is_dynamic else rank.get_length()):
            fitting = [
                name
                for name in named
                if all(
                    axis < len(shapes[number]) and shapes[number][axis] == sizes[name]
                    for sizes, shapes in tried
                )
            ]
            names.append(fitting[0] if len(fitting) == 1 else None)
        found.append(names)
    return found


def _dimension(dimension: Any) -> Dimension:
    most = dimension.get_max_length()
    return Dimension(dimension.get_min_length(), None if most < 0 else most)

"""Gathering and splitting against references that are too simple to be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Tensor

Array = np.ndarray[Any, Any]
DTYPES = {"f32": "<f4", "i64": "<i8", "u8": "u1", "boolean": "?"}


@st.composite
def identity_models(draw: st.DrawFn) -> ModelSignature:
    """A model whose outputs are its inputs: axes in any order, some static, some padded, some masked."""
    ports = []
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        axes = draw(st.permutations(["batch", *draw(st.sets(st.sampled_from(["seq", "height", "2", "1"])))]))
        paddable = draw(st.sets(st.sampled_from(["seq", "height"]))) & set(axes)
        ports.append(
            InputPort(
                name,
                draw(st.sampled_from(sorted(DTYPES))),
                NamedShape.parse(", ".join(axes)),
                {axis: draw(st.integers(0, 1)) for axis in sorted(paddable)},
            )
        )
    if draw(st.booleans()):
        ports.append(InputPort("mask", "i64", ports[0].shape, mask_of="a"))
    outputs = tuple(OutputPort(port.name, port.element_type, port.shape, Rows()) for port in ports)
    return ModelSignature("identity", tuple(ports), outputs)


@st.composite
def calls(draw: st.DrawFn) -> tuple[ModelSignature, list[dict[str, Array]]]:
    """A model, and requests that may share a call: each a mapping of input name to array; masks may be missing."""
    model = draw(identity_models())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shared = {name: draw(st.integers(0, 3)) for name in model.dimensions}
    members = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = tuple(
            draw(st.integers(0, 3)) if paddable or name == "batch" else shared[name]
            for name, paddable in zip(model.dimensions, model.paddable, strict=True)
        )
        arrays = {
            port.name: rng.integers(0, 2 if port.element_type == "boolean" else 200, shape).astype(
                DTYPES[port.element_type]
            )
            for port, shape in zip(model.inputs, model.input_shapes(sizes), strict=True)
        }
        if draw(st.booleans()):
            arrays.pop("mask", None)
        members.append(arrays)
    return model, members


def as_request(model: ModelSignature, arrays: dict[str, Array]) -> Tensors:
    """The request as it arrives."""
    given = [
        (number, port, arrays[port.name]) for number, port in enumerate(model.inputs) if port.name in arrays
    ]
    return Tensors(
        layout=tuple((number, port.element_type, array.shape) for number, port, array in given),
        buffers=tuple(array.tobytes() for _, _, array in given),
    )


def expected_element(
    port: InputPort, own: Array | None, own_shape: tuple[int, ...], index: tuple[int, ...]
) -> Any:
    """One element of the call's input, looked up in the one request that it belongs to."""
    for axis, (position, size) in enumerate(zip(index, own_shape, strict=True)):
        if position >= size:
            return port.pad_value(port.axis_names[axis] or "")
    return 1 if own is None else own[index]


@settings(deadline=None)
@given(calls())
def test_an_identity_model_gives_every_request_its_own_tensors_back(
    call: tuple[ModelSignature, list[dict[str, Array]]],
) -> None:
    """Element by element the gathered tensors are what a lookup in the requests gives; splitting is the inverse."""
    model, members = call
    requests = [as_request(model, arrays) for arrays in members]
    shapes = [model.resolve(request.layout) for request in requests]
    sizes = merge_sizes(model, [shape.sizes for shape in shapes])
    tensors = [Tensor(port.element_type) for port in model.inputs]
    assembly = Assembly(model)
    assembly.gather(sizes, requests, shapes, tensors)
    owners = [(owner, row) for owner, shape in enumerate(shapes) for row in range(shape.rows)]
    for number, (port, tensor) in enumerate(zip(model.inputs, tensors, strict=True)):
        batch_axis = port.shape.names.index("batch")
        assert model.input_shapes(sizes)[number] == tensor.shape
        for index in np.ndindex(tensor.shape):
            owner, row = owners[index[batch_axis]]
            own_index = (*index[:batch_axis], row, *index[batch_axis + 1 :])
            own_shape = model.input_shapes(shapes[owner].sizes)[number]
            expected = expected_element(port, members[owner].get(port.name), own_shape, own_index)
            assert expected == tensor.data[index]
    results = assembly.split(sizes, shapes, [tensor.data for tensor in tensors])
    assert len(members) == len(results)
    for arrays, shape, result in zip(members, shapes, results, strict=True):
        for number, (port, own_shape) in enumerate(
            zip(model.inputs, model.input_shapes(shape.sizes), strict=True)
        ):
            whole = np.ones(own_shape, DTYPES[port.element_type])
            assert (number, port.element_type, own_shape) == result.layout[number]
            assert arrays.get(port.name, whole).tobytes() == bytes(result.buffers[number])

"""Gathering: the requests' bytes, and nothing else, reach their places in the call's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Tensor


def model_of(*ports: InputPort) -> ModelSignature:
    """A model of these inputs, with an output that fits."""
    batched = all("batch" in port.axis_names for port in ports)
    shape, rule = ("batch", Rows()) if batched else ("?", Whole())
    return ModelSignature("m", ports, (OutputPort("y", "f32", NamedShape.parse(shape), rule),))


def input_port(name: str, shape: str, element_type: str = "f32", **more: Any) -> InputPort:
    """An input, its shape given as text."""
    return InputPort(name, element_type, NamedShape.parse(shape), **more)


def request(model: ModelSignature, **arrays: np.ndarray[Any, Any]) -> Tensors:
    """A request as it arrives: each input's layout and bytes."""
    numbers = {port.name: number for number, port in enumerate(model.inputs)}
    return Tensors(
        layout=tuple(
            (numbers[name], model.inputs[numbers[name]].element_type, array.shape)
            for name, array in arrays.items()
        ),
        buffers=tuple(array.tobytes() for array in arrays.values()),
    )


def gathered(model: ModelSignature, sizes: tuple[int, ...], *members: Tensors) -> list[np.ndarray[Any, Any]]:
    """What the tensors hold after a call of another shape, and then this one."""
    tensors = [Tensor(port.element_type) for port in model.inputs]
    for tensor, shape in zip(tensors, model.input_shapes(sizes), strict=True):
        # Left-overs of an earlier call, everywhere where this one writes.
        tensor.shape = shape
        tensor.data[...] = 1 if tensor.element_type == "boolean" else 99
        tensor.shape = (0,)
    shapes = [model.resolve(member.layout) for member in members]
    Assembly(model).gather(sizes, members, shapes, tensors)
    return [tensor.data for tensor in tensors]


PLAIN = model_of(input_port("x", "batch, 2"))


def test_large_requests_are_copied_one_by_one() -> None:
    """Beyond a few KiB nothing is joined first, and the result is the same."""
    model = model_of(input_port("x", "batch, n"))
    arrays = [np.random.default_rng(rows).random((rows, 5000), "f4") for rows in (1, 2, 0)]
    (data,) = gathered(model, (3, 5000), *(request(model, x=array) for array in arrays))
    assert np.concatenate(arrays).tobytes() == data.tobytes()


@pytest.mark.parametrize(
    "kind",
    [
        bytes,
        bytearray,
        memoryview,
        lambda raw: memoryview(b"x" + raw)[1:],
        lambda raw: np.frombuffer(raw, "<f4"),
        lambda raw: np.frombuffer(raw, "<f4").reshape(1, -1),
        lambda raw: pytest.importorskip("zmq").Frame(raw),
    ],
    ids=["bytes", "bytearray", "memoryview", "unaligned", "array", "array of two axes", "ZeroMQ frame"],
)
@pytest.mark.parametrize("columns", [2, 5000], ids=["small", "large"])
@pytest.mark.parametrize("seq", [0, 3], ids=["equal", "padded"])
def test_bytes_are_taken_from_whatever_holds_them(kind: Any, columns: int, seq: int) -> None:
    """Received frames come as many types, often unaligned; they are read in place."""
    model = model_of(input_port("x", "batch, n", pad={"n": 0}))
    array = np.arange(columns, dtype="f4").reshape(1, -1)
    layout = ((0, "f32", array.shape),)
    members = [Tensors(layout=layout, buffers=(kind(array.tobytes()),)) for _ in range(2)]
    (data,) = gathered(model, (2, columns + seq), *members)
    assert [array.tolist()[0] + [0] * seq] * 2 == data.tolist()


def test_a_mask_with_other_axes_than_its_source_is_made_too() -> None:
    """A mask of an image has no channels, and its static axes are whole."""
    model = model_of(
        input_port("image", "batch, 3, h, w", pad={"h": 0, "w": 0}),
        input_port("mask", "w, 2, batch, h", "boolean", mask_of="image"),
    )
    members = [request(model, image=np.zeros((1, 3, *size), "f4")) for size in ((1, 2), (2, 1))]
    _, mask = gathered(model, (2, 2, 2), *members)
    expected = np.zeros((2, 2, 2, 2), bool)
    expected[:2, :, 0, :1] = True
    expected[:1, :, 1, :2] = True
    assert expected.tolist() == mask.tolist()


def test_inputs_are_found_by_number_not_by_place() -> None:
    """Each request may list its inputs in an order of its own."""
    model = model_of(input_port("a", "batch"), input_port("b", "batch", "i64"))
    a, b = np.ones(1, "f4"), np.full(1, 2)
    data = gathered(model, (2,), request(model, a=a, b=b), request(model, b=b, a=a))
    assert [[1, 1], [2, 2]] == [array.tolist() for array in data]


def test_a_model_without_a_batch_axis_takes_one_request() -> None:
    """Its tensors are copied whole, scalars too."""
    model = model_of(input_port("x", "n, 2"), input_port("k", "", "i64"))
    data = gathered(model, (1,), request(model, x=np.array([[1, 2]], "f4"), k=np.array(7)))
    assert [[[1, 2]], 7] == [array.tolist() for array in data]


def test_tensors_are_resized_in_place_and_move_no_more_than_they_must() -> None:
    """Within the capacity the same memory serves every call."""
    tensor = Tensor("f32", (64, 2))
    address = tensor.data.ctypes.data
    assembly = Assembly(PLAIN)
    for rows in (1, 64, 0, 17):
        member = request(PLAIN, x=np.full((rows, 2), rows, "f4"))
        assembly.gather((rows,), [member], [PLAIN.resolve(member.layout)], [tensor])
        assert ((rows, 2), address, 0) == (tensor.shape, tensor.data.ctypes.data, tensor.reallocations)


@pytest.mark.parametrize("length", [0, 7, 9, 16])
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "in company"])
def test_a_buffer_of_another_length_is_refused(length: int, others: int) -> None:
    """Bytes too few or too many would shift the rows of the batch-mates."""
    layout = ((0, "f32", (1, 2)),)
    members = [Tensors(layout=layout, buffers=(bytes(8),))] * others
    members.append(Tensors(layout=layout, buffers=(bytes(length),)))
    with pytest.raises(ShapeError, match=f"input 'x' has {length} bytes, its shape needs 8"):
        gathered(PLAIN, (1 + others,), *members)


def test_bytes_missing_here_and_left_over_there_do_not_cancel_out() -> None:
    """Two wrong lengths with the right sum are two wrong requests."""
    layout = ((0, "f32", (1, 2)),)
    members = [Tensors(layout=layout, buffers=(bytes(length),)) for length in (4, 12)]
    with pytest.raises(ShapeError, match="has 4 bytes"):
        gathered(PLAIN, (2,), *members)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 4, 2), r"the requests have 2 rows, the call 3"),
        ((1, 4, 2), r"the requests have 2 rows, the call 1"),
        ((2, 3, 2), r"dimension 'seq' is 4 in a request and 3 in the call"),
        ((2, 4, 3), r"dimension 'h' is 2 in a request and 3 in the call"),
        ((2, 4), r"a call has 3 sizes, not 2"),
    ],
)
def test_requests_that_do_not_make_up_the_call_are_refused(sizes: tuple[int, ...], message: str) -> None:
    """Rows must add up, own sizes fit, and only what may be padded may be smaller: left-overs must never be computed."""
    model = model_of(input_port("x", "batch, seq, h", pad={"seq": 0}))
    members = [request(model, x=np.zeros((1, seq, 2), "f4")) for seq in (1, 4)]
    shapes = [model.resolve(member.layout) for member in members]
    with pytest.raises(ShapeError, match=message):
        Assembly(model).gather(sizes, members, shapes, [Tensor("f32")])


def test_several_requests_without_a_batch_axis_are_refused() -> None:
    """There is no axis along which they could be put together."""
    model = model_of(input_port("x", "n"))
    member = request(model, x=np.zeros(2, "f4"))
    with pytest.raises(ShapeError, match="has no batch axis"):
        gathered(model, (2,), member, member)

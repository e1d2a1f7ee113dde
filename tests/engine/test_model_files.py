"""Which files a model consists of: what an ONNX file names, wherever in it, and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shapestream_engine.errors import ModelLoadError
from shapestream_engine.model_files import (
    DATA_LOCATION,
    EXTERNAL,
    EXTERNAL_DATA,
    KEY,
    MESSAGES,
    VALUE,
    digest_of_model,
    files_of_model,
    input_symbols,
    outputs_that_are_no_tensors,
)

onnx = pytest.importorskip("onnx")


def external(name: str) -> Any:
    """A tensor whose data is in this file."""
    tensor = onnx.TensorProto(name="w", dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="location", value=name)
    tensor.external_data.add(key="length", value="4")
    return tensor


def graph(name: str) -> Any:
    """A graph with such a tensor."""
    return onnx.GraphProto(initializer=[external(name)])


def node(**attribute: Any) -> Any:
    """A node with an attribute."""
    return onnx.NodeProto(attribute=[onnx.AttributeProto(name="a", **attribute)])


def names_of(path: Path) -> list[str]:
    """The files of the model, relative to its folder."""
    return [str(file.relative_to(path.parent)) for file in files_of_model(path)]


PLACES = {
    "initializer": lambda: onnx.ModelProto(graph=graph("w")),
    "sparse values": lambda: onnx.ModelProto(
        graph=onnx.GraphProto(sparse_initializer=[onnx.SparseTensorProto(values=external("w"))])
    ),
    "sparse indices": lambda: onnx.ModelProto(
        graph=onnx.GraphProto(sparse_initializer=[onnx.SparseTensorProto(indices=external("w"))])
    ),
    "attribute": lambda: onnx.ModelProto(graph=onnx.GraphProto(node=[node(t=external("w"))])),
    "attributes": lambda: onnx.ModelProto(graph=onnx.GraphProto(node=[node(tensors=[external("w")])])),
    "branch": lambda: onnx.ModelProto(graph=onnx.GraphProto(node=[node(g=graph("w"))])),
    "branches": lambda: onnx.ModelProto(graph=onnx.GraphProto(node=[node(graphs=[graph("w")])])),
    "branch of a branch": lambda: onnx.ModelProto(
        graph=onnx.GraphProto(node=[node(g=onnx.GraphProto(node=[node(g=graph("w"))]))])
    ),
    "sparse attribute": lambda: onnx.ModelProto(
        graph=onnx.GraphProto(node=[node(sparse_tensor=onnx.SparseTensorProto(values=external("w")))])
    ),
    "function": lambda: onnx.ModelProto(functions=[onnx.FunctionProto(node=[node(t=external("w"))])]),
    "default of a function": lambda: onnx.ModelProto(
        functions=[onnx.FunctionProto(attribute_proto=[onnx.AttributeProto(name="a", t=external("w"))])]
    ),
    "training": lambda: onnx.ModelProto(training_info=[onnx.TrainingInfoProto(algorithm=graph("w"))]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_in_another_file_is_found_wherever_it_stands(tmp_path: Path, place: str) -> None:
    """In the graph, in the branches of its nodes, and in functions."""
    path = tmp_path / "m.onnx"
    path.write_bytes(PLACES[place]().SerializeToString())
    assert ["m.onnx", "w"] == names_of(path)


def test_a_tensor_behind_the_numbers_of_a_forest_is_found(tmp_path: Path) -> None:
    """Runs of numbers are longer than what is read at once; strings stand between."""
    model = onnx.ModelProto(
        graph=onnx.GraphProto(
            node=[
                node(floats=[1.5] * 50_000),
                node(ints=[-1, 0, 1 << 40] * 20_000, g=graph("w")),
                node(strings=[b"LEAF"] * 20_000),
            ],
            initializer=[external("v")],
        )
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert ["m.onnx", "v", "w"] == names_of(path)


def test_each_file_is_named_once_and_in_order(tmp_path: Path) -> None:
    """Tensors share files; what only looks like a place, in a text or in bytes, is none."""
    own = onnx.TensorProto(name="own", dims=[1], data_type=1, raw_data=external("no").SerializeToString())
    left = external("left over")
    left.data_location = onnx.TensorProto.DEFAULT
    shared = [external(name) for name in ("z.data", "a/b.data", "z.data", "ä" * 200)]
    model = onnx.ModelProto(
        doc_string=external("no").SerializeToString().decode("latin1"),
        graph=onnx.GraphProto(initializer=[own, left, *shared]),
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert ["m.onnx", "a/b.data", "z.data", "ä" * 200] == names_of(path)


def test_the_numbers_of_the_fields_are_those_of_onnx() -> None:
    """Every field on the way to a tensor is known, with its number, and no other."""

    def leads_to_tensors(message: Any, seen: frozenset[str]) -> bool:
        if message.name == "TensorProto" or message.name in seen:
            return message.name == "TensorProto"
        inner = seen | {message.name}
        return any(
            leads_to_tensors(field.message_type, inner) for field in message.fields if field.message_type
        )

    for name, fields in MESSAGES.items():
        described = getattr(onnx, name).DESCRIPTOR
        # A node's attributes lead to graphs, and these to tensors: each message is asked by itself.
        leading = {
            field.number: field.message_type.name
            for field in described.fields
            if field.message_type is not None and leads_to_tensors(field.message_type, frozenset())
        }
        assert leading == fields, name
    tensor = onnx.TensorProto.DESCRIPTOR.fields_by_name
    assert (EXTERNAL_DATA, DATA_LOCATION) == (tensor["external_data"].number, tensor["data_location"].number)
    assert onnx.TensorProto.EXTERNAL == EXTERNAL
    entry = onnx.StringStringEntryProto.DESCRIPTOR.fields_by_name
    assert (KEY, VALUE) == (entry["key"].number, entry["value"].number)


def test_a_file_that_is_cut_short_is_refused_or_names_no_other_files(tmp_path: Path) -> None:
    """At every place: it never names what the whole file does not, and never ends in another error."""
    whole = onnx.ModelProto(
        ir_version=8, graph=onnx.GraphProto(node=[node(g=graph("first"))], initializer=[external("second")])
    ).SerializeToString()
    path = tmp_path / "m.onnx"
    refused = 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            assert set(names_of(path)) <= {"m.onnx", "first", "second"}
        except ModelLoadError:
            refused += 1
    assert refused > len(whole) // 2


def test_a_model_that_is_no_onnx_is_its_file_and_the_weights_beside_it(tmp_path: Path) -> None:
    """An IR has its .bin, if there is one; a file of another format is taken for what it is."""
    for name in ("m.xml", "m.bin", "n.xml", "p.pt2", "q.tflite"):
        (tmp_path / name).write_bytes(b"\xff\xfe not protobuf")
    assert ["m.xml", "m.bin"] == names_of(tmp_path / "m.xml")
    assert ["n.xml"] == names_of(tmp_path / "n.xml")
    assert ["p.pt2"] == names_of(tmp_path / "p.pt2")
    assert ["q.tflite"] == names_of(tmp_path / "q.tflite")
    (tmp_path / "renamed").write_bytes(onnx.ModelProto(graph=graph("w")).SerializeToString())
    assert ["renamed", "w"] == names_of(tmp_path / "renamed")


def test_the_digest_is_that_of_all_files_one_after_the_other(tmp_path: Path) -> None:
    """As `cat m.onnx w | sha256sum` prints it."""
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.ModelProto(graph=graph("w")).SerializeToString())
    (tmp_path / "w").write_bytes(b"weights")
    assert hashlib.sha256(path.read_bytes() + b"weights").hexdigest() == digest_of_model(path)
    (tmp_path / "w").unlink()
    with pytest.raises(FileNotFoundError):
        digest_of_model(path)


def test_the_names_of_axes_are_those_of_the_file(tmp_path: Path) -> None:
    """Per input and axis, and only there; a file that is cut short has none, or the same."""
    helper = onnx.helper
    inputs = [
        helper.make_tensor_value_info("a", 1, ["N", 4, None]),
        helper.make_tensor_value_info("scalar", 1, []),
        helper.make_tensor_value_info("any", 1, None),
    ]
    mapping = helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, []))
    outputs = [
        helper.make_tensor_value_info("y", 1, ["N"]),
        helper.make_value_info("z", helper.make_sequence_type_proto(mapping)),
    ]
    path = tmp_path / "m.onnx"
    whole = helper.make_model(helper.make_graph([], "g", inputs, outputs)).SerializeToString()
    path.write_bytes(whole)
    expected = {"a": ("N", None, None), "scalar": ()}
    assert expected == input_symbols(path)
    assert ["z"] == outputs_that_are_no_tensors(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert input_symbols(path) in ({}, expected)

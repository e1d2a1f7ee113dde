"""What OpenVINO's models take and give, worked out from the file, the spec and shape inference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, SignatureError, compile_model
from shapestream_engine.output_rules import IndexColumn, Rows, Whole, With


def parameter(name: str, shape: list[int] | str, element_type: Any = np.float32) -> Any:
    """An input of a model that is built in memory."""
    return op.parameter(ov.PartialShape(shape), element_type, name=name)


def result(node: Any, name: str) -> Any:
    """An output with a name of its own."""
    node.output(0).get_tensor().set_names({name})
    return op.result(node)


def spec_of(
    nodes: list[Any],
    parameters: list[Any],
    shapes: dict[str, str] | None = None,
    outputs: dict[str, OutputSpec] | None = None,
) -> ModelSpec:
    """A model in memory with the outputs `y0`, `y1`, ..., and what a configuration would say of it."""
    results = [result(node, f"y{number}") for number, node in enumerate(nodes)]
    inputs = {name: InputSpec(shape=shape) for name, shape in (shapes or {}).items()}
    return ModelSpec(name="m", model=ov.Model(results, parameters), inputs=inputs, outputs=outputs or {})


def described(spec: ModelSpec) -> tuple[list[str], list[str]]:
    """The ports of the compiled model, as text."""
    signature = compile_model(spec).signature
    return list(map(str, signature.inputs)), list(map(str, signature.outputs))


def test_the_spec_names_and_bounds_what_the_file_leaves_open() -> None:
    """Names and bounds of the spec reach the model, and a name alone takes the bounds stated for it elsewhere."""
    x, y = parameter("x", [-1, -1, 4]), parameter("y", [-1, -1], np.int64)
    shapes = {"x": "batch:1..8, seq:1..32, 4", "y": "batch, seq"}
    spec = spec_of([op.relu(x), op.add(y, y)], [x, y], shapes)
    assert described(spec) == (
        ["x: f32 [batch:1..8, seq:1..32, 4]", "y: i64 [batch:1..8, seq:1..32]"],
        ["y0: f32 [batch:1..8, seq:1..32, 4], {rule: rows}", "y1: i64 [batch:1..8, seq:1..32], {rule: rows}"],
    )


def test_a_bare_name_keeps_the_bounds_of_the_file() -> None:
    """A name alone says what an axis is called, not that it may have any size."""
    x = parameter("x", "?,1..10")
    spec = spec_of([op.relu(x)], [x]).reshape({"x": "batch, seq"})
    assert "x: f32 [batch, seq:1..10]" == described(spec)[0][0]


def test_the_layout_tells_the_batch_axis() -> None:
    """An axis that the model's own layout calls N is the batch axis, wherever it stands."""
    x = parameter("x", [-1, -1, 3])
    x.set_layout(ov.Layout("HNC"))
    signature = compile_model(spec_of([op.relu(x)], [x])).signature
    assert signature.has_batch
    assert "x: f32 [?, batch, 3]" == str(signature.inputs[0])
    assert Rows() == signature.outputs[0].rule


def test_the_layout_tells_the_batch_axis_of_an_input_of_any_rank() -> None:
    """Its place is counted in the rank that the configuration states, from the end where the layout does so."""
    for layout, expected in (("CN", "x: f32 [?, batch]"), ("...N", "x: f32 [?, batch]")):
        x = op.parameter(ov.PartialShape.dynamic(), np.float32, name="x")
        x.set_layout(ov.Layout(layout))
        spec = spec_of([op.relu(x)], [x]).reshape({"x": "?, ?"})
        assert expected == str(compile_model(spec).signature.inputs[0])


def test_the_spec_overrules_the_layout() -> None:
    """Where the configuration calls another axis batch, the layout is not asked."""
    x = parameter("x", [-1, -1, 3])
    x.set_layout(ov.Layout("HNC"))
    spec = spec_of([op.relu(x)], [x]).reshape({"x": "batch, width, 3"})
    assert ("batch", "width") == compile_model(spec).signature.dimensions


def test_output_axes_that_follow_input_dimensions_get_their_names() -> None:
    """Shape inference tells kept, moved, joined, flattened and dropped axes apart."""
    x, y = parameter("x", [-1, -1, 4]), parameter("y", [-1, -1, 4])
    nodes = [
        op.transpose(x, op.constant(np.array([1, 0, 2]))),
        op.concat([x, y], 1),
        op.reduce_sum(x, op.constant(np.array([1])), False),
        op.reshape(y, op.constant(np.array([0, -1])), True),
    ]
    signature = compile_model(spec_of(nodes, [x, y], {"x": "batch, a, 4", "y": "batch, b, 4"})).signature
    expected = [("a", "batch", None), ("batch", None, None), ("batch", None), ("batch", None)]
    assert expected == [port.shape.names for port in signature.outputs]


def test_an_axis_that_is_cut_off_at_some_size_follows_nothing() -> None:
    """min(seq, 16) equals seq for small sizes only, and large ones are tried too."""
    x = parameter("x", [-1, -1])
    zero, most, one = (op.constant(np.array([value])) for value in (0, 16, 1))
    sliced = op.slice(x, zero, most, one, one)
    signature = compile_model(spec_of([sliced], [x], {"x": "batch, seq"})).signature
    assert ("batch", None) == signature.outputs[0].shape.names


def test_sizes_that_the_model_does_not_take_are_passed_over() -> None:
    """A model that needs multiples of 8 is still asked, with sizes that it takes."""
    x = parameter("x", [-1, -1])
    folded = op.reshape(x, op.constant(np.array([0, -1, 8])), True)
    unfolded = op.reshape(folded, op.constant(np.array([0, -1])), True)
    signature = compile_model(spec_of([unfolded], [x], {"x": "batch, width"})).signature
    assert ("batch", "width") == signature.outputs[0].shape.names


def test_inputs_that_must_agree_without_saying_so_are_still_asked() -> None:
    """Two unnamed axes that are added to each other get the same size in some of the tries."""
    x, y = parameter("x", [-1, 3]), parameter("y", [-1, 3])
    signature = compile_model(spec_of([op.concat([op.add(x, y), x], 1)], [x, y])).signature
    assert ("x.0", "y.0") == signature.dimensions
    assert Whole() == signature.outputs[0].rule


def test_an_output_whose_rows_nobody_can_tell_needs_a_rule() -> None:
    """Data-dependent rows of a model with a batch axis are refused, with what to write."""
    x = parameter("x", [-1, 4])
    spec = spec_of([op.non_zero(x)], [x], {"x": "batch, 4"})
    with pytest.raises(SignatureError, match=r"output 'y0' is \[2, \?\], in which no axis follows the batch"):
        compile_model(spec)


def test_rules_of_the_spec_reach_the_signature() -> None:
    """`index_column` and `with` are taken from the configuration, whichever of its names an output is given by."""
    x = parameter("x", [-1, 4])
    index = op.transpose(op.non_zero(x), op.constant(np.array([1, 0])))
    values = op.gather_nd(x, index)
    outputs = {
        "output0": OutputSpec(rule={"rule": "index_column", "column": 0}),
        "y1": OutputSpec(rule={"rule": "with", "output": "y0"}),
    }
    signature = compile_model(spec_of([index, values], [x], {"x": "batch, 4"}, outputs)).signature
    assert ["output0", "y1"] == [port.name for port in signature.outputs]
    assert [IndexColumn(0), With("output0")] == [port.rule for port in signature.outputs]


def test_a_fixed_axis_can_be_opened() -> None:
    """A file exported with a batch of 1 serves batches, as after OpenVINO's `reshape`."""
    x = parameter("x", [1, 4])
    spec = spec_of([op.relu(x)], [x], {"x": "batch:1..8, 4"})
    assert described(spec) == (["x: f32 [batch:1..8, 4]"], ["y0: f32 [batch:1..8, 4], {rule: rows}"])
    assert "[1,4]" == str(spec.model.inputs[0].partial_shape), "the caller's model was changed"


def test_unbounded_rank_is_settled_by_the_spec() -> None:
    """An input of any rank in the file takes the rank that the configuration states, and needs it."""
    x = op.parameter(ov.PartialShape.dynamic(), np.float32, name="x")
    with pytest.raises(SignatureError, match="input 'x' has any number of axes"):
        compile_model(spec_of([op.relu(x)], [x]))
    x = op.parameter(ov.PartialShape.dynamic(), np.float32, name="x")
    spec = spec_of([op.relu(x)], [x], {"x": "batch, 3"})
    assert ["y0: f32 [batch, 3], {rule: rows}"] == described(spec)[1]


@pytest.mark.parametrize(
    ("shapes", "outputs", "complaint"),
    [
        ({"z": "batch, 4"}, {}, "there is no input 'z'; the model has x"),
        ({"x": "batch, 4, 4"}, {}, r"input 'x' has 2 axes in the model file, \[\?,4\], and 3"),
        ({"x": "batch, 5"}, {}, "does not take the shapes"),
        ({"x": "batch, 4", "input0": "batch, 4"}, {}, "configured twice: as 'x' and 'input0'"),
        ({"x": "batch, hidden"}, {}, "axis 1 is 4 in the model file and \\? in the configuration"),
        ({"x": "batch, 4"}, {"y1": OutputSpec()}, "there is no output 'y1'; the model has y0"),
        ({"x": "batch, 4"}, {"y0": OutputSpec(shape="batch")}, r"has 2 axes, \[\?,2\], and 1"),
        ({"x": "batch, 4"}, {"y0": OutputSpec(shape="batch, 3")}, r"is \[\?,2\], not \[batch, 3\]"),
        ({"x": "batch, 4"}, {"y0": OutputSpec(shape="rows, 2")}, "follows 'batch', and is called 'rows'"),
        ({"x": "batch, 4"}, {"y0": OutputSpec(element_type="i64")}, "is f32 in the model, and i64"),
        ({"x": "batch, 4"}, {"y0": OutputSpec(rule={"rule": "whole"})}, "whole cannot hold"),
        ({"x": "batch, 4"}, {"y0": OutputSpec(rule={"rule": "guess"})}, "unknown rule 'guess'"),
        (
            {"x": "batch, 4"},
            {"y0": OutputSpec(rule={"rule": "with", "output": "z"})},
            "there is no output 'z'",
        ),
        ({"x": "batch:a, 4"}, {}, "'a' is not a dimension"),
    ],
)
def test_a_spec_that_contradicts_the_model_is_refused(
    shapes: dict[str, str], outputs: dict[str, OutputSpec], complaint: str
) -> None:
    """The error names the model, the port and both sides of the contradiction."""
    x = parameter("x", [-1, 4])
    spec = spec_of(
        [op.matmul(x, op.constant(np.ones((4, 2), np.float32)), False, False)], [x], shapes, outputs
    )
    with pytest.raises(SignatureError, match=complaint) as caught:
        compile_model(spec)
    assert str(caught.value).startswith("model 'm'")


def test_the_element_type_of_an_input_is_checked() -> None:
    """A spec that states another element type than the file's is refused."""
    x = parameter("x", [-1])
    spec = ModelSpec(name="m", model=ov.Model([op.relu(x)], [x]), inputs={"x": InputSpec(element_type="f16")})
    with pytest.raises(SignatureError, match="input 'x' is f32 in the model, and f16"):
        compile_model(spec)


@pytest.mark.parametrize("element_type", [ov.Type.i4, ov.Type.f8e4m3])
def test_element_types_that_cannot_travel_are_refused(element_type: ov.Type) -> None:
    """Types that NumPy lacks are refused when the model is loaded, not when a request comes."""
    x = parameter("x", [-1], element_type)
    with pytest.raises(SignatureError, match=r"input 'x': unknown element type '\w+'; known are boolean, i8"):
        compile_model(ModelSpec(name="m", model=ov.Model([op.result(x)], [x])))


def test_padding_and_masks_reach_the_signature() -> None:
    """`pad` and `mask_of` are kept, and a mask may be named by any name of what it masks."""
    ids, mask = parameter("ids", [-1, -1], np.int64), parameter("mask", [-1, -1], np.int64)
    inputs = {
        "ids": InputSpec(shape="batch, seq", pad={"seq": 0}),
        "mask": InputSpec(shape="batch, seq", mask_of="input0"),
    }
    model = ov.Model([result(op.add(ids, mask), "y")], [ids, mask])
    signature = compile_model(ModelSpec(name="m", model=model, inputs=inputs)).signature
    assert "ids" == signature.inputs[1].mask_of
    assert (False, True) == signature.paddable


def without_names(path: Path) -> None:
    """Remove all tensor names from an IR file, as older exporters left them."""
    text = re.sub(r' (names|output_names)="[^"]*"', "", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def test_unnamed_ports_are_called_by_their_positions(tmp_path: Path) -> None:
    """Ports without names are `input0`, `output0`; a spec may use that or the name of the node."""
    x, y = parameter("left", [-1, 2]), parameter("right", [-1, 2])
    ov.save_model(ov.Model([op.add(x, y)], [x, y]), tmp_path / "m.xml")
    without_names(tmp_path / "m.xml")
    spec = ModelSpec(name="m", path=tmp_path / "m.xml")
    assert described(spec) == (
        ["input0: f32 [?, 2]", "input1: f32 [?, 2]"],
        ["output0: f32 [?, 2], {rule: whole}"],
    )
    named = spec.reshape({"input0": "batch, 2", "right": "batch, 2"})
    assert described(named) == (
        ["input0: f32 [batch, 2]", "right: f32 [batch, 2]"],
        ["output0: f32 [batch, 2], {rule: rows}"],
    )


def test_any_of_several_names_of_a_tensor_will_do(tmp_path: Path) -> None:
    """Exporters give tensors several names; the port is called what the configuration calls it."""
    x = parameter("x", [-1, 2])
    x.output(0).get_tensor().set_names({"x", "x:0", "serving_x"})
    model = ov.Model([result(op.relu(x), "y")], [x])
    signature = compile_model(ModelSpec(name="m", model=model).reshape({"x:0": "batch, 2"})).signature
    assert ["x:0"] == [port.name for port in signature.inputs]

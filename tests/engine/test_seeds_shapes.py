"""The seeds' claims about dimensions, bounds and `reshape`, on the real OpenVINO, through the engine's own face.

The numbers are those of tests/engine/seeds.md, which says what each claim is and how it fares.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto, helper
from openvino import opset13 as op
from tests.engine.seed_models import in_memory, nonzero, one_request, plus_one, two_by_two

from shapestream_engine import (
    Dimension,
    InputSpec,
    ModelSpec,
    NamedShape,
    PartialShape,
    ShapeError,
    SignatureError,
    compile_model,
    read_model,
)
from shapestream_engine.tensor import upper_bounds


def onnx_file(path: Path, *shape: Any) -> Path:
    """An ONNX file with an input of this shape: a number, a name, or None for a size that has neither."""
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape) if name == "x" else None)
        for name in ("x", "y")
    ]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.seeds("S002-01", "S003-01")
def test_shapes_are_changed_after_reading_and_before_compiling() -> None:
    """A model of one shape becomes one of another, and runs."""
    model = plus_one(2, 3).reshape([4, 5])
    assert "[4,5]" == str(model.input().partial_shape)
    request = one_request(model)
    request.infer([np.zeros((4, 5))])
    assert (4, 5) == request.output_tensor().shape


@pytest.mark.seeds("S002-02", "S003-02")
def test_one_reshape_serves_any_number_of_calls() -> None:
    """A static shape is set once; nothing is allocated or reshaped between the calls."""
    request = one_request(plus_one().reshape([3, 4]))
    for value in range(20):
        request.infer([np.full((3, 4), value)])
        assert value + 1 == request.output_tensor().data[2, 3]
    assert 0 == request.reallocations


@pytest.mark.seeds("S002-13", "S003-14", "S003-15", "S003-16", "S003-17")
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([1, Dimension()], "[1,?]"),
        ([1, -1], "[1,?]"),
        ("1, ?", "[1,?]"),
        ("[1,-1]", "[1,?]"),
        ([1, "?"], "[1,?]"),
        ([Dimension(), Dimension()], "[?,?]"),
        ([-1, -1], "[?,?]"),
        ("?, ?", "[?,?]"),
        (PartialShape.parse("?, ?"), "[?,?]"),
        (NamedShape.parse("rows, columns"), "[?,?]"),
    ],
)
def test_an_open_dimension_in_every_spelling(shape: Any, expected: str) -> None:
    """-1, ? and Dimension() are the same to `reshape`, in lists and in text, for one dimension or all."""
    model = plus_one(2, 3).reshape(shape)
    assert expected == str(model.input().partial_shape) == str(model.output().partial_shape)
    assert PartialShape.parse(str(ov.PartialShape(expected))) == model.input().partial_shape


@pytest.mark.seeds("S002-16", "S003-23", "S003-24", "S003-25", "S003-26", "S003-51")
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([Dimension(1, 10), Dimension(8, 512)], "[1..10,8..512]"),
        ([(1, 10), (8, 512)], "[1..10,8..512]"),
        ("1..10, 8..512", "[1..10,8..512]"),
        ("rows:1..10, columns:8..512", "[1..10,8..512]"),
        ([-1, (8, 512)], "[?,8..512]"),
        ("8.., ..512", "[8..,..512]"),
        ([(8, -1), (None, 512)], "[8..,..512]"),
        ([(8, None), "..512"], "[8..,..512]"),
        ("<=25, ?", "[..25,?]"),
    ],
)
def test_bounds_in_every_spelling(shape: Any, expected: str) -> None:
    """Lower, upper, both or none, in any mixture; they are printed, on both ends of the model, as OpenVINO prints them."""
    model = plus_one().reshape(shape)
    assert expected == str(model.input().partial_shape) == str(model.output().partial_shape)
    compiled: Any = model.compile()
    assert expected == str(compiled._graphs[0].compiled.input(0).partial_shape)


@pytest.mark.seeds("S003-25")
def test_openvino_itself_does_not_read_the_other_seeds_spelling() -> None:
    """`<=25` is how XLA prints a bound; here it is read all the same."""
    with pytest.raises(RuntimeError, match="Cannot parse dimension"):
        ov.PartialShape("<=25")
    assert Dimension(0, 25) == Dimension.parse("<=25")


@pytest.mark.seeds("S002-14", "S003-18")
def test_any_number_of_inputs_and_outputs() -> None:
    """Each is reshaped, filled and read by name or number; a shape without a name needs a single input."""
    model = two_by_two().reshape({"a": "1..4, 3", 1: [-1, 3]})
    assert ["[1..4,3]", "[?,3]"] == [str(port.partial_shape) for port in model.signature.inputs]
    assert ["[1..,3]", "[?,3]"] == [str(port.partial_shape) for port in model.signature.outputs]
    request = one_request(model)
    for rows in (2, 5, 1):
        request.infer({"a": np.zeros((1, 3)), "b": np.ones((rows, 3))})
        assert (1 + rows, 3) == request.output_tensor("joined").shape
        assert [[2, 2, 2]] * rows == request.output_tensor(1).data.tolist()
    with pytest.raises(SignatureError, match="several inputs, a, b"):
        model.reshape([1, -1])
    with pytest.raises(KeyError, match="no input 'c'"):
        model.reshape({"c": [1]})


def test_a_shape_that_is_none_or_does_not_fit_is_refused() -> None:
    """Before anything is compiled, with what is wrong."""
    with pytest.raises(ShapeError, match="'many' is not a dimension"):
        plus_one().reshape([1, "many"])
    with pytest.raises(SignatureError, match="2 axes in the model file"):
        plus_one().reshape([1, 2, 3])
    x = op.parameter([-1, -1], np.float32, name="x")
    product = in_memory([op.matmul(x, np.ones((4, 2), np.float32), False, False)], [x])
    with pytest.raises(SignatureError, match="does not take the shapes"):
        product.reshape([2, 5])


def test_reshaping_a_spec_needs_no_model_file() -> None:
    """By name always; without one where the spec names a single input."""
    spec = ModelSpec(name="m", path=Path("there.is.none"))
    assert {"x": InputSpec(shape="1..10, ?")} == spec.reshape({"x": [(1, 10), -1]}).inputs
    assert {"x": InputSpec(shape="3")} == spec.reshape({"x": "?"}).reshape([3]).inputs
    with pytest.raises(SignatureError, match=r"which input is to be \[1, \?\]"):
        spec.reshape([1, -1])


@pytest.mark.seeds("S002-15", "S003-19", "S003-20")
@pytest.mark.parametrize("kind", ["onnx", "ir"])
def test_what_is_open_in_the_file_stays_open(tmp_path: Path, kind: str) -> None:
    """Framework models keep their open dimensions through reading, and run at any size without a reshape."""
    path = onnx_file(tmp_path / "model.onnx", "rows", 4, None)
    if kind == "ir":
        ov.save_model(ov.Core().read_model(str(path)), tmp_path / "model.xml")
        path = tmp_path / "model.xml"
    model = read_model(path)
    assert "[?,4,?]" == str(model.input("x").partial_shape)
    assert [True, False, True] == [axis.is_dynamic for axis in model.input("x").partial_shape]
    request = one_request(model)
    for shape in ((1, 4, 7), (5, 4, 2)):
        request.infer({"x": np.ones(shape)})
        assert shape == request.output_tensor().shape


@pytest.mark.seeds("S003-21")
def test_what_will_not_change_is_made_static(tmp_path: Path) -> None:
    """The same `reshape` closes a dimension that the file leaves open; any mixture goes."""
    path = onnx_file(tmp_path / "model.onnx", "rows", "columns", None)
    mixtures = {"2, ?, 3..5": "[2,?,3..5]", "?, 7, 8": "[?,7,8]", "1, 2, 3": "[1,2,3]", "?, ?, ?": "[?,?,?]"}
    for shape, expected in mixtures.items():
        model = read_model(path).reshape(shape)
        assert expected == str(model.output().partial_shape)
        assert ("?" in expected or ".." in expected) == model.input().is_dynamic


@pytest.mark.seeds("S003-22")
def test_shapes_are_stated_at_conversion_by_another_tool(tmp_path: Path) -> None:
    """The Model Optimizer is gone; `convert_model` has taken its place, and what it states is kept."""
    assert importlib.util.find_spec("openvino.tools.mo") is None
    path = onnx_file(tmp_path / "model.onnx", "rows", 4, None)
    converted = ov.convert_model(path, input=[ov.PartialShape("1..10,4,?")])
    assert "[1..10,4,?]" == str(read_model(ModelSpec(name="m", model=converted)).input().partial_shape)


@pytest.mark.seeds("S002-17", "S003-30")
def test_the_upper_bound_is_what_memory_is_allocated_by() -> None:
    """It is reserved at once and is enough for every shape; the lower bound changes nothing."""
    for lower in (0, 1, 60):
        request = one_request(plus_one().reshape([(lower, 64), 384]))
        assert (64 * 384 * 4,) == upper_bounds(request.signature)
        tensor: Any = request.input_tensor()
        assert 64 * 384 * 4 == tensor.capacity_bytes
        for rows in (60, 64, 61):
            request.infer([np.ones((rows, 384))])
        assert 0 == request.reallocations
    unbounded: Any = one_request(plus_one().reshape([(60, -1), 384])).input_tensor()
    assert 0 == unbounded.capacity_bytes


@pytest.mark.seeds("S002-16", "S003-23")
@pytest.mark.parametrize("shape", [(11, 8), (0, 8), (1, 7), (1, 513)])
def test_bounds_are_the_sizes_that_are_allowed(shape: tuple[int, ...]) -> None:
    """A tensor outside of them is refused, and the request stays usable."""
    request = one_request(plus_one().reshape("1..10, 8..512"))
    with pytest.raises(ShapeError, match=r"input 'x' takes \[1..10, 8..512\]"):
        request.infer([np.ones(shape)])
    request.infer([np.ones((10, 8))])
    assert (10, 8) == request.output_tensor().shape


@pytest.mark.seeds("S002-20", "S003-33")
def test_bounds_change_no_result() -> None:
    """A device that does without bounds computes the same with them: stating them costs nothing but the limit."""
    values = np.random.default_rng(0).random((3, 9), np.float32)
    results = []
    for shape in ("?, ?", "1..4, 1..16"):
        request = one_request(plus_one().reshape(shape))
        request.infer([values])
        results.append(request.output_tensor().data.copy())
    np.testing.assert_array_equal(*results)


@pytest.mark.seeds("S002-25", "S002-26", "S003-05", "S003-06", "S003-07", "S003-49", "S003-50")
def test_open_dimensions_are_propagated_to_the_outputs() -> None:
    """Rows, a sequence's length and a picture's sides: the outputs' shapes show them, after reading and after reshaping."""
    picture = op.parameter([-1, 3, -1, -1], np.float32, name="picture")
    kernel = np.ones((8, 3, 1, 1), np.float32)
    painted = op.convolution(picture, kernel, [1, 1], [0, 0], [0, 0], [1, 1])
    model = in_memory([painted], [picture])
    assert "[?,8,1..,1..]" == str(model.output().partial_shape)
    bounded = model.reshape("batch:1..4, 3, height:1..64, width:..32")
    assert "[1..4,8,1..64,1..32]" == str(bounded.output().partial_shape)
    assert ("batch", None, "height", "width") == bounded.output().shape.names
    request = one_request(bounded)
    for shape in ((2, 3, 7, 9), (1, 3, 64, 32)):
        request.infer([np.ones(shape)])
        assert (shape[0], 8, *shape[2:]) == request.output_tensor().shape


@pytest.mark.seeds("S003-08", "S004-01")
def test_the_data_may_decide_an_outputs_shape() -> None:
    """As many rows as are not zero, which no input dimension tells; none is a size too."""
    request = one_request(nonzero(-1, -1))
    random = np.random.default_rng(0)
    for share in (0.5, 0.0, 1.0, 0.1):
        x = (random.random((6, 7)) < share).astype(np.int64)
        request.infer([x])
        np.testing.assert_array_equal(np.argwhere(x), request.output_tensor().data)


@pytest.mark.seeds("S003-52", "S002-26")
def test_ports_and_dimensions_say_whether_they_are_dynamic() -> None:
    """Of inputs and outputs, as a whole and by axis, before and after compiling."""
    model = plus_one(-1, 4)
    for ports in (model, model.compile().signature):
        for port in (
            (model.input(0), model.output(0)) if ports is model else (ports.inputs[0], ports.outputs[0])
        ):
            assert port.partial_shape.is_dynamic
            assert port.is_dynamic
            assert [True, False] == [axis.is_dynamic for axis in port.partial_shape]
    fixed = model.reshape([2, 4])
    assert [False, False] == [fixed.input().is_dynamic, fixed.output(0).partial_shape[0].is_dynamic]


@pytest.mark.seeds("S003-53")
def test_is_dynamic_is_a_property_and_no_call() -> None:
    """In Python, of OpenVINO's shapes as of ours."""
    theirs = ov.PartialShape("?, 4")
    assert [True, True] == [theirs.is_dynamic, theirs[0].is_dynamic]
    assert isinstance(theirs.is_dynamic, bool)
    assert [True, True] == [(ours := PartialShape.parse("?, 4")).is_dynamic, ours[0].is_dynamic]


@pytest.mark.seeds("S003-04", "S002-21", "S003-34")
def test_sizes_unknown_at_compilation_are_given_with_each_call() -> None:
    """One compiled model and one request, for shapes that nobody had named before."""
    model = compile_model(plus_one().spec)
    request = model.create_infer_request()
    for shape in ((1, 128), (1, 200), (3, 5), (1, 128)):
        request.infer([np.zeros(shape)])
        np.testing.assert_array_equal(np.ones(shape), request.output_tensor().data)

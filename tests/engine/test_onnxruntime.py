"""What only ONNX Runtime's backend does: names and rules from the file's symbols, bound outputs, properties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from benchmarks.row_counts import GRAPHS
from onnx import TensorProto, helper

from shapestream_engine import (
    Dimension,
    InferenceError,
    InputSpec,
    ModelLoadError,
    ModelSpec,
    OutputSpec,
    SignatureError,
    compile_model,
    read_model,
)

F32, I64 = TensorProto.FLOAT, TensorProto.INT64


def model_of(
    nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], opset: int = 17
) -> onnx.ModelProto:
    """A model in memory; ports are (type, shape)."""
    values = [
        [helper.make_tensor_value_info(name, *port) for name, port in ports.items()]
        for ports in (inputs, outputs)
    ]
    return helper.make_model(
        helper.make_graph(nodes, "m", *values),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8 if opset < 19 else 9,
    )


def relu(shape: list[Any], output: list[Any] | None = None) -> onnx.ModelProto:
    """max(x, 0)"""
    return model_of(
        [helper.make_node("Relu", ["x"], ["y"])], {"x": (F32, shape)}, {"y": (F32, output or shape)}
    )


def spec_of(model: Any, **given: Any) -> ModelSpec:
    """For ONNX Runtime."""
    return ModelSpec(name="m", model=model, engine="onnxruntime", **given)


def run(request: Any, *arrays: Any) -> list[Any]:
    """Resizes, fills, runs and copies."""
    for tensor, array in zip(request.input_tensors, arrays, strict=True):
        tensor.shape = array.shape
        tensor.data[...] = array
    request.infer()
    return [output.copy() for output in request.outputs()]


def test_symbols_of_the_file_are_names_and_give_rules() -> None:
    """A file that says `batch` needs no configuration."""
    signature = compile_model(spec_of(relu(["batch", "seq", 4]))).signature
    assert ("batch", "seq") == signature.dimensions
    assert ("rows", ("batch", "seq", None)) == (
        signature.outputs[0].rule.NAME,
        signature.outputs[0].shape.names,
    )


def test_a_configuration_may_call_a_symbol_otherwise() -> None:
    """The new name goes wherever the symbol stands; bounds are added to it."""
    spec = spec_of(relu(["N", "L", 4]), inputs={"x": InputSpec(shape="batch:1..8, ?, 4")})
    signature = compile_model(spec).signature
    assert ("batch", "L") == signature.dimensions
    assert Dimension(1, 8) == signature.bounds[0]
    assert ("batch", "L", None) == signature.outputs[0].shape.names


def test_one_symbol_cannot_have_two_names() -> None:
    """The file says that these sizes are the same."""
    spec = spec_of(relu(["N", "N"]), inputs={"x": InputSpec(shape="batch, seq")})
    with pytest.raises(SignatureError, match="'N' of the model file cannot be called both 'batch' and 'seq'"):
        compile_model(spec)


def test_symbols_that_are_no_names_stay_without_one() -> None:
    """ONNX allows any text."""
    signature = compile_model(spec_of(relu(["past + 1", 4]))).signature
    assert ("x.0",) == signature.dimensions
    named = compile_model(spec_of(relu(["past + 1", 4]), inputs={"x": InputSpec(shape="batch, 4")})).signature
    assert ("batch", None) == named.outputs[0].shape.names


def test_what_the_file_has_fixed_cannot_be_opened_but_narrowed() -> None:
    """A size of the file stays; an open one may be fixed, and both may be said again."""
    with pytest.raises(
        SignatureError, match=r"input 'x': axis 1 is 4 in the model file and 1..8 in the conf"
    ):
        compile_model(spec_of(relu(["batch", 4]), inputs={"x": InputSpec(shape="batch, 1..8")}))
    fixed = compile_model(spec_of(relu(["n", 4]), inputs={"x": InputSpec(shape="3, 4")}))
    assert (3, 4) == fixed.create_infer_request().input_tensor(0).shape


def test_a_file_that_says_nothing_about_shapes_has_those_of_the_configuration() -> None:
    """ONNX Runtime shows such ports as it shows scalars."""
    node = helper.make_node("Relu", ["x"], ["y"])
    model = compile_model(
        spec_of(
            model_of([node], {"x": (F32, None)}, {"y": (F32, None)}),
            inputs={"x": InputSpec(shape="batch:1..8, n")},
            outputs={"y": OutputSpec(shape="batch, n")},
        ),
        slots=1,
        threads=1,
    )
    assert ["batch:1..8, n"] == [str(port.shape) for port in model.signature.inputs]
    (y,) = run(model.create_infer_request(), np.full((2, 3), -1.0, np.float32))
    assert np.zeros((2, 3)).tolist() == y.tolist()


def test_an_output_without_the_batch_axis_needs_a_rule() -> None:
    """Nothing but the configuration can say whose rows are whose."""
    found = model_of(
        [helper.make_node("NonZero", ["x"], ["f"]), helper.make_node("Transpose", ["f"], ["y"], perm=[1, 0])],
        {"x": (F32, ["batch", "n"])},
        {"y": (I64, [None, 2])},
    )
    with pytest.raises(SignatureError, match=r"output 'y' is \[\?, 2\].* no axis 'batch'.* state the rule"):
        compile_model(spec_of(found))
    ruled = spec_of(found, outputs={"output0": OutputSpec(rule={"rule": "index_column", "column": 0})})
    signature = compile_model(ruled).signature
    assert ("output0", "index_column") == (signature.outputs[0].name, signature.outputs[0].rule.NAME)


def test_ports_may_be_meant_by_position_but_only_once() -> None:
    """As with the other engines; a port that is not there is answered with those that are."""
    twice = {"x": InputSpec(shape="batch, 4"), "input0": InputSpec()}
    with pytest.raises(SignatureError, match="input 'x' is configured twice: as 'x' and 'input0'"):
        compile_model(spec_of(relu(["n", 4]), inputs=twice))
    with pytest.raises(SignatureError, match="there is no input 'z'; the model has x"):
        compile_model(spec_of(relu(["n", 4]), inputs={"z": InputSpec()}))


def test_outputs_that_the_inputs_determine_stay_where_they_are() -> None:
    """While shapes stay the same, each call writes to where the last one did; a new shape is right again."""
    request = compile_model(spec_of(relu(["batch", 4]))).create_infer_request()
    places = set()
    for number in range(3):
        array = np.full((100, 4), number, np.float32)
        np.testing.assert_array_equal(array, run(request, array)[0])
        places.add(request.outputs()[0].ctypes.data)
    assert 1 == len(places)
    assert (3, 4) == run(request, np.ones((3, 4), np.float32))[0].shape


def test_a_file_that_is_wrong_about_an_output_is_survived() -> None:
    """It says that an output is as long as the input, which it is by chance the first time, and not the second."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["f"]),
        helper.make_node("Squeeze", ["f"], ["y"]),
    ]
    request = compile_model(
        spec_of(model_of(nodes, {"x": (F32, ["n"])}, {"y": (I64, ["n"])}))
    ).create_infer_request()
    for array in ([1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1]):
        assert (
            np.flatnonzero(array).tolist()
            == np.atleast_1d(run(request, np.array(array, np.float32))[0]).tolist()
        )


def test_errors_are_in_the_engines_words_without_its_source() -> None:
    """What failed and why; not where in its code."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    model = model_of(nodes, {"x": (F32, ["n"]), "shape": (I64, [2])}, {"y": (F32, [None, None])})
    request = compile_model(spec_of(model)).create_infer_request()
    with pytest.raises(InferenceError, match="cannot be reshaped to the requested shape") as caught:
        run(request, np.ones(6, np.float32), np.array([4, 4]))
    assert "onnxruntime_src" not in str(caught.value)
    assert (2, 3) == run(request, np.ones(6, np.float32), np.array([2, 3]))[0].shape


def test_properties_are_checked_and_shown() -> None:
    """By ONNX Runtime's names; threads are those of the pool, which every slot's own thread joins."""
    wanted = {
        "graph_optimization_level": "basic",
        "enable_cpu_mem_arena": "NO",
        "session.intra_op.allow_spinning": "1",
    }
    model = compile_model(spec_of(relu(["batch", 4]), properties=wanted), slots=2, threads=4)
    assert wanted.items() <= model.properties.items()
    assert 3 == model.properties["intra_op_num_threads"]
    assert "CPUExecutionProvider" == model.properties["provider"]
    for name, value, complaint in (
        ("graph_optimization_level", "most", "expected one of none, basic, extended, all, not 'most'"),
        ("enable_mem_pattern", "perhaps", "expected true or false"),
        ("intra_op_num_threads", "two", "invalid literal"),
        ("intra_op_threads", "2", "unknown; known are enable_cpu_mem_arena, .*graph_optimization_level"),
    ):
        with pytest.raises(SignatureError, match=f"property '{name}': {complaint}"):
            compile_model(spec_of(relu(["batch", 4]), properties={name: value}))


@pytest.mark.parametrize("name", [name for name in GRAPHS if "TreeEnsemble" in name])
def test_trees_of_a_row_are_added_in_one_order_whatever_the_rows_of_the_call(
    tmp_path: Path, name: str
) -> None:
    """On two threads ONNX Runtime adds 100 trees in other orders at 1, 2 and 51 rows; labels of equal votes flip."""
    graph = GRAPHS[name]()
    path = graph.write(tmp_path)
    spec = ModelSpec(
        name="m",
        path=path,
        engine="onnxruntime",
        inputs={"x": InputSpec(shape=f"batch:1..64, {graph.row[0]}")},
    )
    from_file = compile_model(spec, slots=1, threads=2)
    in_memory = compile_model(replace(spec, path=None, model=path.read_bytes()), slots=1, threads=2)
    rows = graph.rows(np.random.default_rng(0), 64)
    for model in (from_file, in_memory):
        assert 1 == model.properties["intra_op_num_threads"]
        request = model.create_infer_request()
        alone = np.concatenate([run(request, rows[[number]])[0] for number in range(64)])
        for count in (2, 33, 50, 51, 64):
            (together,) = run(request, rows[:count])
            assert alone[:count].tobytes() == together.tobytes(), count


def test_who_sets_the_threads_of_trees_has_them(tmp_path: Path) -> None:
    """A property goes before what the engine chooses."""
    path = GRAPHS["TreeEnsembleRegressor, 100 trees, 2 targets"]().write(tmp_path)
    spec = ModelSpec(
        name="m",
        path=path,
        engine="onnxruntime",
        properties={"intra_op_num_threads": 3},
        inputs={"x": InputSpec(shape="batch:1..64, 8")},
    )
    assert 3 == compile_model(spec, slots=1, threads=2).properties["intra_op_num_threads"]


def test_reading_a_model_optimizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`read_model` asks ONNX Runtime for the ports alone: an optimization of a large model takes seconds."""
    levels = []
    session = ort.InferenceSession

    def made(source: Any, options: ort.SessionOptions, **given: Any) -> ort.InferenceSession:
        levels.append(options.graph_optimization_level)
        return session(source, options, **given)

    monkeypatch.setattr(ort, "InferenceSession", made)
    model = read_model(spec_of(relu(["batch", 4])))
    assert "batch, 4" == str(model.output().shape)
    assert [ort.GraphOptimizationLevel.ORT_DISABLE_ALL] == levels


def test_a_device_that_is_not_there_is_answered_with_those_that_are() -> None:
    """By the name of its execution provider, whatever the case."""
    spec = spec_of(relu(["batch", 4]))
    assert compile_model(replace(spec, device="cpu"))
    with pytest.raises(ModelLoadError, match=r"no device 'ABACUS' here; this ONNX Runtime has .*CPU"):
        compile_model(replace(spec, device="ABACUS"))


def test_models_in_memory_and_what_is_none(tmp_path: Path) -> None:
    """Bytes are as good as a `ModelProto`; a folder or a text is neither."""
    assert compile_model(spec_of(relu(["batch", 4]).SerializeToString()))
    with pytest.raises(SignatureError, match="takes a path or an ONNX model, not int"):
        compile_model(spec_of(42))
    with pytest.raises(ModelLoadError, match="is a directory"):
        compile_model(ModelSpec(name="m", path=tmp_path, engine="onnxruntime"))


def test_types_that_cannot_travel_are_refused() -> None:
    """NumPy has no floats of 8 bits."""
    model = model_of(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        {"x": (TensorProto.FLOAT8E4M3FN, ["n"])},
        {"y": (TensorProto.FLOAT, ["n"])},
        opset=19,
    )
    with pytest.raises(
        SignatureError, match=r"input 'x' is of type tensor\(float8e4m3fn\), which cannot be sent"
    ):
        compile_model(spec_of(model))

"""Steps of outputs: softmax, argmax and topk against slow formulas, on every engine, and what does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper
from tests.engine.slot_bench import SlotBench
from tests.onnx_files import write_onnx
from tests.text_encoders import write_encoder

from shapestream_engine import (
    InferenceError,
    InputSpec,
    ModelSpec,
    OutputPort,
    OutputSpec,
    Pooling,
    Postprocess,
    SignatureError,
    Steps,
    Tensor,
    compile_model,
    read_model,
)
from shapestream_engine.postprocess import largest, softmax
from shapestream_engine.probe import ProbeOptions, prove
from shapestream_engine.probing.tolerances import OutputTolerance, Tolerance, without_ties

Array = np.ndarray[Any, Any]
ENGINES = ("openvino", "onnxruntime", "function")
CLASSES = 4
INPUT = InputSpec(shape="batch:1..8, seq:1..6, 4", element_type="f32", pad={"seq": 0.0})


def slowly(row: list[float], count: int) -> list[int]:
    """The classes with the largest values, one by one: NaN first, the smaller index of equals first."""
    return sorted(
        range(len(row)),
        key=lambda index: (not math.isnan(row[index]), -np.nan_to_num(row[index], nan=0), index),
    )[:count]


NUMBERS = st.one_of(
    st.floats(-8, 8, width=16), st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan])
)


@given(data=st.data())
def test_the_largest_classes_equal_the_slow_formula(data: st.DataObject) -> None:
    """Ties, NaN and infinities, of any element type, and as many classes as there are."""
    columns = data.draw(st.integers(1, 24))
    shape = data.draw(st.sampled_from([(columns,), (0, columns), (3, columns), (2, 3, columns)]))
    values = data.draw(
        hnp.arrays(data.draw(st.sampled_from([np.float32, np.float64, np.float16])), shape, elements=NUMBERS)
    )
    count = data.draw(st.integers(1, columns))
    before = values.copy()
    classes, found = largest(values, count)
    np.testing.assert_array_equal(before, values)
    assert ((*shape[:-1], count), np.int64, values.dtype) == (classes.shape, classes.dtype, found.dtype)
    rows = values.reshape(-1, columns)
    wanted = [slowly(row, count) for row in rows.tolist()]
    assert wanted == classes.reshape(-1, count).tolist()
    np.testing.assert_array_equal(
        np.take_along_axis(rows, classes.reshape(-1, count), 1), found.reshape(-1, count)
    )


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(-300, 300, width=32)))
def test_probabilities_sum_to_one(values: Array) -> None:
    """By the formula, of each element type."""
    powers = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    for dtype, off in ((np.float32, 1e-5), (np.float64, 1e-12), (np.float16, 2e-3)):
        given_values = values.astype(dtype)
        found = softmax(given_values)
        assert dtype == found.dtype
        if dtype != np.float16:
            np.testing.assert_allclose(found, wanted, atol=off)
        np.testing.assert_allclose(found.astype(np.float64).sum(axis=1), 1, atol=5e-3)


def test_what_has_no_probability_is_nan() -> None:
    """NaN, and rows of infinities alone; a class that is impossible has 0."""
    values = np.array(
        [[0, math.nan], [math.inf, math.inf], [-math.inf, -math.inf], [0, -math.inf]], np.float32
    )
    found = softmax(values)
    assert np.isnan(found[:3]).all()
    assert [1, 0] == found[3].tolist()
    assert (0, 0) == softmax(np.zeros((0, 0), np.float32)).shape


@pytest.mark.parametrize("text", ["softmax", "argmax", "topk 5", "softmax, argmax", "softmax, topk 12"])
def test_steps_are_written_as_they_are_read(text: str) -> None:
    """With blanks as one likes."""
    assert text == str(Steps.parse(text))
    assert Steps.parse(text) == Steps.parse(f" {text.replace(',', ' , ').replace(' ', '  ')} ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "argmin",
        "topk",
        "topk 0",
        "topk -1",
        "topk5",
        "topk 1.5",
        "argmax, softmax",
        "softmax, softmax",
        "argmax, topk 2",
        ",",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="softmax, argmax, topk K, or softmax before one of the others"):
        Steps.parse(text)


# ---------------------------------------------------------------- models


def identity(x: Array) -> dict[str, Array]:
    """What it is given, and its double."""
    return {"logits": x, "doubled": x * 2}


def spec_of(folder: Path, engine: str, steps: dict[str, str], **given: Any) -> ModelSpec:
    """A model that gives its input, [batch, seq, 4], as `logits`, and its double."""
    source: dict[str, Any] = {"model": identity}
    outputs = given.pop("outputs", {})
    if engine == "function":
        outputs = {
            name: OutputSpec(shape="batch, seq, 4", element_type="f32", rule={"rule": "rows"})
            for name in ("logits", "doubled")
        } | outputs
    else:
        path = folder / "model.onnx"
        nodes = [
            helper.make_node("Identity", ["x"], ["logits"]),
            helper.make_node("Add", ["x", "x"], ["doubled"]),
        ]
        shape = ["batch", "seq", CLASSES]
        source = {"path": write_onnx(path, nodes, {"x": shape}, {"logits": shape, "doubled": shape})}
    return ModelSpec(
        name="m",
        engine=engine,
        inputs={"x": INPUT},
        outputs=outputs,
        postprocess=Postprocess({name: Steps.parse(text) for name, text in steps.items()}),
        **source,
        **given,
    )


X = np.array([[[0, 1, 2, 3], [3, 3, 1, 0]], [[-1, -1, -1, -1], [0, math.nan, 9, 1]]], np.float32)


def axes_of(port: OutputPort) -> list[Any]:
    """The name of each axis, or its size."""
    return [name or size for name, size in zip(port.shape.names, port.shape.dimensions, strict=True)]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_chooses(tmp_path: Path, engine: str) -> None:
    """The classes and their values, among other outputs, which stay as they are; ties take the first."""
    model = compile_model(spec_of(tmp_path, engine, {"logits": "argmax"}))
    assert [
        "logits: i64 [batch, seq]",
        "logits.values: f32 [batch, seq, 2]",
        "doubled: f32 [batch, seq, 4]",
    ] == [
        f"{port.name}: {port.element_type} [{', '.join(map(str, axes_of(port)))}]" for port in model.outputs
    ]
    request = model.create_infer_request()
    assert [(0, 0), (0, 0, 2), (0, 0, 4)] == [each.shape for each in request.outputs()]
    results = request.infer({"x": X})
    assert [[3, 0], [0, 1]] == results["logits"].tolist()
    np.testing.assert_array_equal(
        np.array([[[3, 2], [3, 3]], [[-1, -1], [math.nan, 9]]], np.float32), results["logits.values"]
    )
    np.testing.assert_array_equal(2 * X, results["doubled"])
    assert model.signature == read_model(spec_of(tmp_path, engine, {"logits": "argmax"})).signature


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_gives_the_largest_few(tmp_path: Path, engine: str) -> None:
    """Of probabilities, and of another output beside it."""
    steps = {"logits": "softmax, topk 3", "doubled": "softmax"}
    model = compile_model(spec_of(tmp_path, engine, steps))
    results = model.create_infer_request().infer({"x": X[:1]})
    assert [[[3, 2, 1], [0, 1, 2]]] == results["logits"].tolist()
    np.testing.assert_allclose(
        results["logits.values"], -np.sort(-softmax(X[:1]), axis=-1)[..., :3], rtol=1e-6
    )
    np.testing.assert_allclose(results["doubled"], softmax(2 * X[:1]), rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_padded_requests_get_their_own_classes(tmp_path: Path, engine: str) -> None:
    """Two requests of other lengths in one call, on a slot; each has its own positions."""
    bench = SlotBench(compile_model(spec_of(tmp_path, engine, {"logits": "argmax"})))
    first, second = X[:1, :1], X[:1]
    report = bench.run({"x": first}, {"x": second})
    one, other = bench.arrays(report)
    assert ([[3]], [[3, 0]]) == (one["logits"].tolist(), other["logits"].tolist())
    assert (1, 1, 2) == one["logits.values"].shape


def test_other_ways_to_run(tmp_path: Path) -> None:
    """A call that is waited for, and outputs that the step leaves alone."""
    request = compile_model(spec_of(tmp_path, "openvino", {"logits": "argmax"})).create_infer_request()
    request.wait()
    request.input_tensor("x").shape = X.shape
    request.input_tensor("x").data[...] = X
    own = Tensor("f32")
    request.set_output_tensor("doubled", own)
    request.start_async()
    request.wait()
    np.testing.assert_array_equal(2 * X, own.data)
    np.testing.assert_array_equal(2 * X, request.outputs()[2])
    with pytest.raises(InferenceError, match="leaves outputs in the engine's memory only"):
        request.set_output_tensor("logits", Tensor("i64"))


def test_pooling_comes_first(tmp_path: Path) -> None:
    """The largest component of a pooled vector."""
    spec = ModelSpec(
        name="encoder",
        path=write_encoder(tmp_path / "model.onnx"),
        engine="onnxruntime",
        inputs={
            "input_ids": InputSpec(shape="batch:1..8, seq:1..32", pad={"seq": 0}),
            "attention_mask": InputSpec(shape="batch, seq", pad={"seq": 0}, mask_of="input_ids"),
        },
        pooling=Pooling(mode="mean"),
    )
    inputs = {"input_ids": [[3, 4, 5], [6, 7, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    pooled = compile_model(spec).create_infer_request().infer(inputs)["sentence_embedding"].copy()
    chosen = replace(spec, postprocess=Postprocess({"sentence_embedding": Steps.parse("argmax")}))
    found = compile_model(chosen).create_infer_request().infer(inputs)
    assert pooled.argmax(axis=1).tolist() == found["sentence_embedding"].tolist()


@pytest.mark.parametrize(
    ("steps", "outputs", "words"),
    [
        ({"scores": "argmax"}, {}, "there is no output 'scores'; it has logits, doubled"),
        ({"logits": "topk 5"}, {}, "has 4 classes (write topk 4 or less)"),
        ({"logits": "argmax"}, {"logits": "batch, seq, ?"}, "nothing says how many classes it has"),
        ({"logits": "argmax"}, {"logits": "batch, seq, seq"}, "nothing says how many classes it has"),
    ],
)
def test_what_does_not_fit_is_refused_at_load(
    tmp_path: Path, steps: dict[str, str], outputs: dict[str, str], words: str
) -> None:
    """With what to do, at the key."""
    stated = {
        name: OutputSpec(shape=shape, element_type="f32", rule={"rule": "rows"})
        for name, shape in outputs.items()
    }
    with pytest.raises(SignatureError, match="model 'm': postprocess: ") as refused:
        compile_model(spec_of(tmp_path, "function", steps, outputs=stated))
    assert words in str(refused.value)
    assert ("postprocess", next(iter(steps))) == refused.value.key


@pytest.mark.parametrize(
    ("ports", "output", "words"),
    [
        ({"y": ("batch, n", "i64")}, "y", "is none of f16, f32, f64"),
        ({"y": ("batch", "f32")}, "y", "the last axis of .* is the batch"),
        ({"y": ("batch, n", "f32"), "y.values": ("batch, n", "f32")}, "y", "an output 'y.values' already"),
    ],
)
def test_outputs_without_classes_are_refused(ports: dict[str, Any], output: str, words: str) -> None:
    """Whole numbers, the batch itself; and a name that another output has."""
    spec = ModelSpec(
        name="m",
        model=identity,
        engine="function",
        inputs={"x": InputSpec(shape="batch:1..4, n", element_type="f32")},
        outputs={
            name: OutputSpec(shape=shape, element_type=element_type, rule={"rule": "rows"})
            for name, (shape, element_type) in ports.items()
        },
        postprocess=Postprocess({output: Steps.parse("argmax")}),
    )
    with pytest.raises(SignatureError, match=words):
        compile_model(spec)


def test_too_few_classes_of_a_call_are_an_error() -> None:
    """Where only the data says how many there are; one class is the largest."""

    def wide(x: Array) -> dict[str, Array]:
        return {"y": x}

    def spec(text: str) -> ModelSpec:
        return ModelSpec(
            name="m",
            model=wide,
            engine="function",
            inputs={"x": InputSpec(shape="batch:1..4, n", element_type="f32")},
            outputs={"y": OutputSpec(shape="batch, n", element_type="f32", rule={"rule": "rows"})},
            postprocess=Postprocess({"y": Steps.parse(text)}),
        )

    request = compile_model(spec("topk 3")).create_infer_request()
    with pytest.raises(InferenceError, match=r"an output \[1, 2\] has too few classes for topk 3"):
        request.infer({"x": [[1, 2]]})
    assert [[2, 1, 0]] == request.infer({"x": [[1, 2, 3]]})["y"].tolist()
    found = compile_model(spec("argmax")).create_infer_request().infer({"x": [[7], [8]]})
    assert ([0, 0], [[7], [8]]) == (found["y"].tolist(), found["y.values"].tolist())


# ---------------------------------------------------------------- proof and audits


def write_tied(path: Path) -> Path:
    """A classifier whose first two classes have equal values, up to rounding, of every input."""
    weight = np.random.default_rng(1).standard_normal((64, 5)).astype(np.float32)
    weight[:, 1] = weight[:, 0]
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("MatMul", ["x", "noise"], ["small"]),
        helper.make_node("Add", ["product", "small"], ["logits"]),
    ]
    noise = 1e-7 * np.random.default_rng(2).standard_normal((64, 5)).astype(np.float32)
    return write_onnx(
        path,
        nodes,
        {"x": ["batch", 64]},
        {"logits": ["batch", 5]},
        {"weight": weight, "noise": noise.astype(np.float32)},
    )


@pytest.mark.parametrize("engine", ENGINES[:2])
@pytest.mark.parametrize("text", ["argmax", "topk 3", "softmax, argmax"])
def test_ties_leave_a_model_proved(tmp_path: Path, engine: str, text: str) -> None:
    """The proof compares the values before the choice, whatever rounding chooses."""
    spec = ModelSpec(
        name="m",
        path=write_tied(tmp_path / "model.onnx"),
        engine=engine,
        inputs={"x": InputSpec(shape="batch:1..16, 64")},
        postprocess=Postprocess({"logits": Steps.parse(text)}),
    )
    report = prove(spec, compile_model(spec), ProbeOptions(budget_s=2.0))
    assert {"proved"} == {finding.verdict for finding in report.findings}, [*report.lines()]
    assert spec.postprocess is not None
    tolerances = spec.postprocess.tolerances(report.tolerances)
    assert {"margins": "logits.values"} == tolerances["logits"]
    assert OutputTolerance.from_dict(tolerances["logits.values"]).overall > 0


def test_a_model_that_mixes_rows_is_refuted(tmp_path: Path) -> None:
    """Though its choice hides it mostly: every row has the mean of all added."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Add", ["x", "mean"], ["logits"]),
    ]
    path = write_onnx(tmp_path / "model.onnx", nodes, {"x": ["batch", 4]}, {"logits": ["batch", 4]})
    spec = ModelSpec(
        name="m",
        path=path,
        engine="onnxruntime",
        inputs={"x": InputSpec(shape="batch:1..8, 4")},
        postprocess=Postprocess({"logits": Steps.parse("argmax")}),
    )
    report = prove(spec, compile_model(spec), ProbeOptions(budget_s=1.0))
    assert ["refuted"] == [finding.verdict for finding in report.findings]


TOLERANCES = {
    "y": OutputTolerance(None, margins="y.values"),
    "y.values": OutputTolerance(Tolerance(1e-3, 0.0), overall=10.0),
}


@pytest.mark.parametrize(
    ("values", "alone", "other", "settled"),
    [
        ([[3.0, 2.0]], [7], [8], [8]),
        ([[3.0, 2.99]], [7], [8], [7]),
        ([[3.0, 2.99], [1.0, 0.9]], [7, 1], [8, 2], [7, 2]),
        ([[math.nan, 2.0]], [7], [8], [7]),
        ([[3.0, 2.0, 1.99]], [[7, 1, 2]], [[0, 2, 1]], [[0, 1, 2]]),
        ([[3.0, 2.0, 1.0]], [[7, 1, 2]], [[0, 2, 9]], [[0, 2, 2]]),
        ([[3.0]], [[7]], [[1]], [[7]]),
    ],
    ids=["clear", "tie", "rows", "NaN", "a tie below", "the last", "one"],
)
def test_a_class_is_judged_where_its_margin_is_clear(
    values: list[Any], alone: list[Any], other: list[Any], settled: list[Any]
) -> None:
    """By 0.01 from each neighbour, here; other classes are as alone."""
    before = [np.array(alone), np.array(values, np.float32)]
    after = [np.array(other), np.array(values, np.float32)]
    found = without_ties(["y", "y.values"], TOLERANCES, before, after)
    assert settled == found[0].tolist()
    assert found[1] is after[1]


def test_tolerances_of_outputs_without_a_choice_stay() -> None:
    """And of those that a proof could not judge, there are none."""
    steps = Postprocess(
        {name: Steps.parse(text) for name, text in {"a": "softmax", "b": "argmax", "d": "topk 2"}.items()}
    )
    spreads = ((0, np.array([1.0])), (1, np.array([2.0])))
    plain = OutputTolerance(Tolerance(1.0, 1.0), spreads, overall=3.0).to_dict()
    found = steps.tolerances({"a": plain, "b": plain, "c": {}})
    assert {
        "a": plain,
        "b": {"margins": "b.values"},
        "b.values": {**plain, "spreads": [[0, [1.0]]]},
        "c": {},
    } == found
    for one in found.values():
        assert dict(one) == OutputTolerance.from_dict(one).to_dict()
    assert {"a": Steps(softmax=True)} == (steps.judged or steps).steps

"""Pooling: its formulas against a slow reference, on every engine, beside padding, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.engine.slot_bench import SlotBench
from tests.text_encoders import table, write_encoder

from shapestream_engine import (
    ArrayTensor,
    InferenceError,
    InputSpec,
    ModelSpec,
    OutputSpec,
    Pooling,
    SignatureError,
    Tensor,
    compile_model,
    read_model,
)
from shapestream_engine.pooling import MODES
from shapestream_engine.probe import ProbeOptions, prove
from shapestream_engine.probing.inputs import Integers
from shapestream_engine.strategy import parse_strategy

Array = np.ndarray[Any, Any]
ENGINES = ("openvino", "onnxruntime")
INPUTS = {
    "input_ids": InputSpec(shape="batch:1..8, seq:1..32", pad={"seq": 0}),
    "attention_mask": InputSpec(shape="batch, seq", pad={"seq": 0}, mask_of="input_ids"),
}


def slowly(mode: str, hidden: Array, mask: Array, normalize: bool) -> list[list[float]]:
    """The pooled rows, number by number: the formulas of sentence-transformers' `Pooling` and `Normalize`."""
    rows = []
    for vectors, present in zip(hidden.astype(float), mask, strict=True):
        tokens = [vector for vector, is_token in zip(vectors, present, strict=True) if is_token]
        width = vectors.shape[1]
        match mode:
            case "mean":
                row = [sum(vector[i] for vector in tokens) / max(len(tokens), 1e-9) for i in range(width)]
            case "cls":
                row = list(vectors[0])
            case "last":
                row = list(tokens[-1]) if tokens else [0.0] * width
            case _:
                row = [max([vector[i] for vector in tokens], default=-1e9) for i in range(width)]
        if normalize:
            length = max(sum(value * value for value in row) ** 0.5, 1e-12)
            row = [value / length for value in row]
        rows.append(row)
    return rows


@given(data=st.data(), mode=st.sampled_from(MODES), normalize=st.booleans())
def test_pooling_equals_the_slow_formulas(data: st.DataObject, mode: str, normalize: bool) -> None:
    """Any mask, with gaps and rows without a token, and any element type of the vectors."""
    batch, seq, width = (data.draw(st.integers(low, 5)) for low in (0, 1, 1))
    dtype = data.draw(st.sampled_from([np.float32, np.float64, np.float16]))
    numbers = st.floats(-50, 50, width=16)
    hidden = data.draw(hnp.arrays(dtype, (batch, seq, width), elements=numbers))
    mask = data.draw(hnp.arrays(np.int64, (batch, seq), elements=st.integers(0, 1)))
    pooled = Pooling(mode=mode, normalize=normalize).pool(hidden, None if mode == "cls" else mask)
    assert np.float32 == pooled.dtype
    expected = np.array(slowly(mode, hidden, mask, normalize)).reshape(batch, width)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_vectors_are_no_views_of_the_engines_output(mode: str) -> None:
    """The engine's memory is written anew by the next call, and is not changed by the pooling."""
    hidden, mask = np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.int64)
    pooled = Pooling(mode=mode, normalize=True).pool(hidden, None if mode == "cls" else mask)
    assert not np.shares_memory(pooled, hidden)
    assert (1 == hidden).all()


def test_the_mean_makes_no_table_as_large_as_the_output() -> None:
    """A product of matrices, which needs no memory but the result's."""
    tracemalloc = pytest.importorskip("tracemalloc")
    hidden, mask = np.ones((8, 256, 384), np.float32), np.ones((8, 256), np.int64)
    tracemalloc.start()
    Pooling(mode="mean", normalize=True).pool(hidden, mask)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < hidden.nbytes / 10


def encoder(path: Path, engine: str, pooling: Pooling | None, **given: Any) -> ModelSpec:
    """An encoder that a test serves."""
    leaks = given.pop("leaks", False)
    return ModelSpec(
        name="encoder",
        path=write_encoder(path / "model.onnx", leaks=leaks),
        engine=engine,
        inputs=INPUTS,
        pooling=pooling,
        **given,
    )


def expected_of(ids: Array, mask: Array, mode: str, normalize: bool) -> Array:
    """What the encoder of the tests gives for these rows, pooled slowly."""
    words = table(50, 6)[ids]
    means = np.array(slowly("mean", words, mask, normalize=False))
    return np.array(slowly(mode, words + means[:, None] / 2, mask, normalize))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", MODES)
def test_each_engine_pools(tmp_path: Path, engine: str, mode: str) -> None:
    """The pooled output stands in the place of the vectors, by `infer` and by `start_async`, over inputs from outside."""
    model = compile_model(encoder(tmp_path, engine, Pooling(mode=mode, normalize=True)))
    assert ["output sentence_embedding: f32 [batch,6]"] == [
        f"output {port.name}: {port.element_type} [{port.shape.names[0]},{port.shape.dimensions[1]}]"
        for port in model.outputs
    ]
    request = model.create_infer_request()
    assert (0, 6) == request.outputs()[0].shape
    ids = np.array([[4, 9, 2], [7, 0, 0]], np.int64)
    mask = np.array([[1, 1, 1], [1, 0, 0]], np.int64)
    expected = expected_of(ids, mask, mode, normalize=True)
    results = request.infer({"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(results["sentence_embedding"], expected, atol=1e-5)
    request.fill({"input_ids": ids[::-1].copy(), "attention_mask": mask[::-1].copy()})
    request.start_async()
    request.wait()
    request.wait()
    np.testing.assert_allclose(request.output_tensor(0).data, expected[::-1], atol=1e-5)
    request.set_input_tensor("attention_mask", ArrayTensor(np.ones((2, 3), np.int64)))
    request.infer()
    whole = expected_of(ids[::-1], np.ones((2, 3), np.int64), mode, normalize=True)
    np.testing.assert_allclose(request.outputs()[0], whole, atol=1e-5)
    model.close()


@pytest.mark.parametrize("strategy", [{}, {"strategy": "bucketed", "seq": [8, 32], "batch": [4]}])
def test_rows_share_padded_calls(tmp_path: Path, strategy: dict[str, Any]) -> None:
    """Requests of other lengths in one call, and of prepared shapes: each has its own vector, without the padding's."""
    spec = encoder(tmp_path, "openvino", Pooling(mode="mean"), strategy=parse_strategy(strategy))
    bench = SlotBench(compile_model(spec))
    rows = [np.array([[3, 4]], np.int64), np.array([[9, 8, 7, 6, 5]], np.int64)]
    ran = bench.run(*[{"input_ids": ids} for ids in rows])
    for ids, outputs in zip(rows, bench.arrays(ran), strict=True):
        expected = expected_of(ids, np.ones_like(ids), "mean", normalize=False)
        np.testing.assert_allclose(outputs["sentence_embedding"], expected, atol=1e-5)


@pytest.mark.parametrize(("leaks", "verdict"), [(False, "proved"), (True, "refuted")])
def test_the_proof_is_of_the_pooled_output(tmp_path: Path, leaks: bool, verdict: str) -> None:
    """Padding under the mask is proved; an encoder that heeds no mask is refuted, although the pooling does."""
    spec = encoder(tmp_path, "onnxruntime", Pooling(mode="mean", normalize=True), leaks=leaks)
    model = compile_model(spec)
    options = ProbeOptions(values={"input_ids": Integers(0, 49)})
    report = prove(spec, model, options, threads=1)
    found = {str(finding.treatment): finding for finding in report.findings}
    assert {"sentence_embedding"} == {finding.output for finding in report.findings if finding.output}
    assert verdict == found["padding of seq"].verdict


def function_spec(
    shape: str,
    element_type: str = "f32",
    rule: dict[str, Any] | None = None,
    mask: str | None = "batch, seq",
) -> ModelSpec:
    """A function whose output has this shape, and its mask that one."""
    masks = {} if mask is None else {"attention_mask": InputSpec(shape=mask, element_type="i64")}
    return ModelSpec(
        name="f",
        model=lambda x, attention_mask=None: {"h": x},
        inputs={
            "x": InputSpec(shape="batch, seq, 2", element_type=element_type),
            **masks,
        },
        outputs={"h": OutputSpec(shape=shape, element_type=element_type, rule=rule)},
        pooling=Pooling(mode="mean"),
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (function_spec("batch, 2"), "has no shape [batch, seq, hidden]"),
        (function_spec("batch, seq, 2", "i64"), "is none of f16, f32, f64"),
        (function_spec("seq, batch, 2"), "has no row of the batch at each index of its first axis"),
        (function_spec("batch, seq, 2", mask="batch"), "is no mask of"),
        (
            function_spec("batch, seq, 2", mask=None),
            "needs a mask, and there is no input 'attention_mask'; it has x",
        ),
    ],
)
def test_outputs_and_masks_that_cannot_be_pooled(spec: ModelSpec, words: str) -> None:
    """The error has the port, and what is needed."""
    with pytest.raises(SignatureError, match="model 'f': pooling: ") as caught:
        compile_model(spec)
    assert words in str(caught.value)


def test_the_only_output_of_any_name_is_pooled() -> None:
    """Where there are two outputs, neither with a usual name, the error has them, and the names that are known."""
    spec = replace(function_spec("batch, seq, 2"), pooling=Pooling(mode="cls"))
    assert ["sentence_embedding"] == [port.name for port in compile_model(spec).outputs]
    two = replace(spec, outputs={**spec.outputs, "g": OutputSpec(shape="batch", element_type="f32")})
    with pytest.raises(
        SignatureError, match="no output 'last_hidden_state' or 'token_embeddings'; it has h, g"
    ):
        compile_model(two)


def test_a_model_that_pools_already(tmp_path: Path) -> None:
    """Two outputs of one name cannot be."""
    path = write_encoder(tmp_path / "m.onnx", outputs=["last_hidden_state", "sentence_embedding"])
    with pytest.raises(SignatureError, match="an output 'sentence_embedding' already; remove the pooling"):
        read_model(ModelSpec(path=path, engine="onnxruntime", pooling=Pooling(mode="mean")))


def test_an_output_of_other_rows_than_the_mask_fails_its_call() -> None:
    """Only the call shows it: the engine is not asked to guess which rows are whose."""
    spec = replace(
        function_spec("batch, seq, 2"),
        model=lambda x, attention_mask=None: {"h": x[:, :1]},
        outputs={"h": OutputSpec(shape="batch, ?, 2", element_type="f32")},
    )
    request = compile_model(spec).create_infer_request()
    inputs = {"x": np.ones((2, 3, 2), np.float32), "attention_mask": np.ones((2, 3), np.int64)}
    with pytest.raises(InferenceError, match=r"\[2, 1, 2\] under a mask \[2, 3\], which cannot be pooled"):
        request.infer(inputs)
    with pytest.raises(InferenceError, match="leaves outputs in the engine's memory only"):
        request.set_output_tensor(0, Tensor("f32"))

"""Models as others export them: labels and boxes of 1,000 requests in company are those of each request alone.

`make test-exporters` trains and exports the models of scikit-learn and LightGBM. Every request runs alone and then in
batches of 2 to 64 others, on a slot, with two threads: with one, the kernels that a server uses are not all tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from examples.embeddings.weights import load_weights, model_folder
from tests.engine.slot_bench import SlotBench
from tests.exporters import graphs

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, compile_model

pytestmark = pytest.mark.thorough

EXPORTED = Path(__file__).resolve().parents[2] / "build" / "exported"
REQUESTS = 1000
COMPANY = (2, 3, 8, 17, 32, 50, 51, 64)
"""Requests of a batch, by turns: on both sides of the 50 rows where the order of ONNX Runtime's trees changes."""
CLOSE = 1e-5
"""Scores, boxes and vectors lie between -10 and 10, so this is rounding of f32."""
ENGINES = ("onnxruntime", "openvino")

Array = np.ndarray[Any, Any]
Answer = Mapping[str, Array]


def bench_of(path: Path, engine: str, inputs: Mapping[str, str], **outputs: OutputSpec) -> SlotBench:
    """One slot of a process that has two threads."""
    spec = ModelSpec(
        name="m",
        path=path,
        engine=engine,
        inputs={name: InputSpec(shape=shape) for name, shape in inputs.items()},
        outputs=outputs,
    )
    return SlotBench(compile_model(spec, slots=1, threads=2))


def batches(count: int) -> Iterator[slice]:
    """All requests in batches of `COMPANY`."""
    at = turn = 0
    while at < count:
        size = COMPANY[turn % len(COMPANY)]
        yield slice(at, at + size)
        at, turn = at + size, turn + 1


def both(bench: SlotBench, requests: list[Array]) -> tuple[list[Answer], list[Answer]]:
    """The answers of the requests alone, and in company."""
    alone = [answer for request in requests for answer in bench.results(request)]
    together = [answer for part in batches(len(requests)) for answer in bench.results(*requests[part])]
    return alone, together


def assert_equal(alone: list[Answer], together: list[Answer]) -> None:
    """Whole numbers exactly, floats but for rounding."""
    assert len(alone) == len(together)
    for name in alone[0]:
        pairs = [(one[name], other[name]) for one, other in zip(alone, together, strict=True)]
        if alone[0][name].dtype.kind in "iu":
            differ = [number for number, (one, other) in enumerate(pairs) if not np.array_equal(one, other)]
            assert [] == differ, name
        else:
            assert [one.shape for one, _ in pairs] == [other.shape for _, other in pairs]
            worst = max((float(np.abs(one - other).max(initial=0)) for one, other in pairs), default=0.0)
            assert worst <= CLOSE, name


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "name", ["forest", "extra_trees", "gradient_boosting", "linear", "neighbours", "lightgbm"]
)
def test_labels_of_a_classifier_are_those_of_the_request_alone(name: str, classes: int) -> None:
    """In any company, and nearly all are those of the library itself."""
    path = EXPORTED / f"{name}_{classes}.onnx"
    if not path.exists():
        pytest.skip("needs `make test-exporters`")
    with np.load(path.with_suffix(".npz")) as file:
        x, labels = file["x"], file["labels"]
    # The converters name no axes. A server finds the rules by its proof.
    label, scores = [port.name for port in onnx.load(path).graph.output]
    shapes = {label: OutputSpec(shape="batch"), scores: OutputSpec(shape=f"batch, {classes}")}
    bench = bench_of(path, "onnxruntime", {"X": f"batch:1..64, {x.shape[1]}"}, **shapes)
    alone, together = both(bench, [x[[number]] for number in range(REQUESTS)])
    assert_equal(alone, together)
    found = np.concatenate([answer[label] for answer in alone])
    # The library adds in f64, so its ties end otherwise.
    assert 0.99 <= np.mean(labels == found)
    assert len(np.unique(found)) == classes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["rows", "tables"])
def test_boxes_of_a_detector_are_those_of_the_picture_alone(tmp_path: Path, kind: str, engine: str) -> None:
    """As rows that name their picture, and as a table per picture."""
    sizes = f"batch:1..64, 1, {graphs.SIZE}, {graphs.SIZE}"
    if kind == "rows":
        path = graphs.write_rows(tmp_path / "rows.onnx")
        column, along = {"rule": "index_column", "column": 0}, {"rule": "with", "output": "selected"}
        bench = bench_of(
            path,
            engine,
            {"image": sizes},
            selected=OutputSpec(rule=column),
            scores=OutputSpec(rule=along),
        )
    else:
        bench = bench_of(graphs.write_tables(tmp_path / "tables.onnx"), engine, {"image": sizes})
    random = np.random.default_rng(3)
    pictures = list(random.normal(size=(REQUESTS, 1, 1, graphs.SIZE, graphs.SIZE)).astype(np.float32))
    alone, together = both(bench, pictures)
    assert_equal(alone, together)
    if kind == "rows":
        assert 1000 < sum(len(answer["selected"]) for answer in alone)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_nearest_text_by_minilm_is_that_of_the_text_alone(tmp_path: Path, engine: str) -> None:
    """Of 1,000 texts of 1 to 24 tokens, each beside texts of its length: which of 50 others is nearest."""
    path = graphs.write_minilm(tmp_path / "minilm.onnx", load_weights(model_folder()))
    bench = bench_of(path, engine, {"input_ids": "batch:1..64, seq:1..512"})
    random = np.random.default_rng(4)
    texts = [random.integers(1000, 30000, (REQUESTS // 4, length)) for length in (1, 6, 13, 24)]
    alone: list[Answer] = []
    together: list[Answer] = []
    for rows in texts:
        found = both(bench, [rows[[number]] for number in range(len(rows))])
        alone += found[0]
        together += found[1]
    assert_equal(alone, together)
    vectors, others = (np.concatenate([answer["embedding"] for answer in of]) for of in (alone, together))
    places = np.random.default_rng(5).permutation(REQUESTS)[:50]
    nearest = [(of @ vectors[places].T).argsort(axis=1)[:, -2] for of in (vectors, others)]
    assert np.array_equal(*nearest)

"""ONNX files that take and give strings, on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests.engine.slot_bench import SlotBench
from tests.onnx_files import write_onnx

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, SignatureError, compile_model, read_model

Array = np.ndarray[Any, Any]

STRING, INT64, FLOAT = TensorProto.STRING, TensorProto.INT64, TensorProto.FLOAT
VOCABULARY = ["das", "haus", "ist", "schön", "the", "house"]


def objects(*elements: str) -> Array:
    """An array of objects [n]."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def spec_of(path: Path, **more: Any) -> ModelSpec:
    """A file on ONNX Runtime."""
    return ModelSpec(name="m", path=path, engine="onnxruntime", **more)


@pytest.fixture(scope="module")
def vectorizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TF-IDF vectorizer: the nodes that skl2onnx writes for scikit-learn's (lower case, tokens, counts with weights).

    Its tokens are a table, padded to the text with the most of them.
    """
    nodes = [
        helper.make_node("StringNormalizer", ["text"], ["lower"], case_change_action="LOWER", locale="C"),
        helper.make_node(
            "Tokenizer",
            ["lower"],
            ["tokens"],
            domain="com.microsoft",
            mark=0,
            mincharnum=1,
            pad_value="#",
            separators=["[ .,]+"],
        ),
        helper.make_node(
            "TfIdfVectorizer",
            ["tokens"],
            ["features"],
            max_gram_length=1,
            max_skip_count=0,
            min_gram_length=1,
            mode="TFIDF",
            ngram_counts=[0],
            ngram_indexes=list(range(len(VOCABULARY))),
            pool_strings=VOCABULARY,
            weights=[1.0, 2.0, 0.5, 3.0, 0.25, 4.0],
        ),
    ]
    return write_onnx(
        tmp_path_factory.mktemp("tfidf") / "tfidf.onnx",
        nodes,
        {"text": ["batch"]},
        {"features": ["batch", len(VOCABULARY)]},
        types={"text": STRING},
        domains={"com.microsoft": 1},
    )


def test_the_ports_of_a_file_are_strings(vectorizer: Path) -> None:
    """Without any statement."""
    signature = read_model(spec_of(vectorizer, inputs={"text": InputSpec(at_most_bytes=512)})).signature
    assert ["text: str [batch], at most 512 bytes each"] == list(map(str, signature.inputs))
    assert ("batch", "text.bytes") == signature.dimensions


WORDS = st.sampled_from([*VOCABULARY, "DAS", "unknown", "日本", "", "."])
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


@pytest.fixture(scope="module")
def served(vectorizer: Path) -> SlotBench:
    """The vectorizer on a slot."""
    return SlotBench(compile_model(spec_of(vectorizer)))


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_vectorizers_batches_are_its_requests_alone(served: SlotBench, batch: list[list[str]]) -> None:
    """Whatever the number of tokens of the others."""
    weights = dict(zip(VOCABULARY, [1.0, 2.0, 0.5, 3.0, 0.25, 4.0], strict=True))
    results = served.results(*[objects(*texts) for texts in batch])
    for texts, result in zip(batch, results, strict=True):
        tokens = [[word.lower() for word in text.split()] for text in texts]
        expected = [[weights[word] * own.count(word) for word in VOCABULARY] for own in tokens]
        np.testing.assert_allclose(result["features"], expected)


def test_strings_in_and_out(tmp_path: Path) -> None:
    """Two inputs of strings, and an output of strings; zeros, other scripts and long texts stay as they are."""
    path = write_onnx(
        tmp_path / "m.onnx",
        [helper.make_node("StringConcat", ["a", "b"], ["y"])],
        {"a": ["batch", 2], "b": ["batch", 2]},
        {"y": ["batch", 2]},
        types={"a": STRING, "b": STRING, "y": STRING},
        opset=20,
    )
    bench = SlotBench(compile_model(spec_of(path)))
    first = {"a": objects("", "é\0").reshape(1, 2), "b": objects("x" * 70_000, "\0日").reshape(1, 2)}
    second = {"a": objects(*"abcd").reshape(2, 2), "b": objects("", "1", "2", "\U0001f600").reshape(2, 2)}
    one, two = bench.results(first, second)
    assert [["x" * 70_000, "é\0\0日"]] == one["y"].tolist()
    assert [["a", "b1"], ["c2", "d\U0001f600"]] == two["y"].tolist()
    (empty,) = bench.results({"a": objects().reshape(0, 2), "b": objects().reshape(0, 2)})
    assert (0, 2) == empty["y"].shape


def test_labels_of_numbers(tmp_path: Path) -> None:
    """A model whose output alone is of strings, and a request of the engine by itself."""
    encoder = helper.make_node(
        "LabelEncoder",
        ["x"],
        ["label"],
        domain="ai.onnx.ml",
        keys_int64s=[0, 1],
        values_strings=["cat", "dög"],
        default_string="?",
    )
    path = write_onnx(
        tmp_path / "m.onnx", [encoder], {"x": ["n"]}, {"label": ["n"]}, types={"x": INT64, "label": STRING},
        domains={"ai.onnx.ml": 3},
    )  # fmt: skip
    request = compile_model(spec_of(path)).create_infer_request()
    assert ["dög", "?", "cat"] == request.infer({"x": [1, 7, 0]})["label"].tolist()
    assert object == request.outputs()[0].dtype


def test_the_rule_counts_divides_strings(tmp_path: Path) -> None:
    """Words of all texts one after the other, and their numbers."""
    nodes = [
        helper.make_node("StringSplit", ["text"], ["table", "n"], delimiter=" "),
        helper.make_node("Reshape", ["table", "flat"], ["words"]),
    ]
    path = write_onnx(
        tmp_path / "m.onnx",
        nodes,
        {"text": ["batch"]},
        {"words": ["?"], "n": ["batch"]},
        {"flat": np.array([-1])},
        types={"text": STRING, "words": STRING, "n": INT64},
        opset=20,
    )
    spec = spec_of(
        path,
        outputs={"words": OutputSpec(rule={"rule": "counts", "output": "n"}), "n": OutputSpec()},
    )
    bench = SlotBench(compile_model(spec))
    # As many words in each text, since the table is padded.
    one, two = bench.results(objects("a bé"), objects("c d", "e f"))
    assert (["a", "bé"], ["c", "d", "e", "f"]) == (one["words"].tolist(), two["words"].tolist())


def test_a_failed_call_is_an_error_in_words(tmp_path: Path) -> None:
    """And the next call runs."""
    path = write_onnx(
        tmp_path / "m.onnx",
        [helper.make_node("Cast", ["text"], ["y"], to=FLOAT)],
        {"text": ["batch"]},
        {"y": ["batch"]},
        types={"text": STRING},
    )
    bench = SlotBench(compile_model(spec_of(path)))
    assert "model_error" == bench.run(objects("nine")).code
    assert [1.5, 2.0] == bench.results(objects("1.5", "2"))[0]["y"].tolist()


def test_bf16_beside_strings_is_refused(tmp_path: Path) -> None:
    """With the remedy."""
    path = write_onnx(
        tmp_path / "m.onnx",
        [
            helper.make_node("Cast", ["text"], ["f"], to=FLOAT),
            helper.make_node("Cast", ["f"], ["y"], to=TensorProto.BFLOAT16),
        ],
        {"text": ["batch"]},
        {"y": ["batch"]},
        types={"text": STRING, "y": TensorProto.BFLOAT16},
    )
    with pytest.raises(
        SignatureError, match="output 'y' is bf16, which ONNX Runtime does not take beside strings"
    ):
        compile_model(spec_of(path))

"""Scores of texts, and the bodies and answers that have them, without a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shapestream.errors import TooLarge
from shapestream.gateway.errors import EmptyList, NotGiven, UnusableVectors, WrongField
from shapestream.gateway.rerank_api import ranking_response, read_ranking
from shapestream.gateway.tei_api import (
    predict_response,
    read_predict,
    read_rerank,
    rerank_response,
    scoring_type,
    tei_error,
)
from shapestream.gateway.text_ports import score_ports, scores_texts
from shapestream.gateway.text_scores import (
    MOST_SCORES,
    SLICE_SCORES,
    Pairs,
    check_number,
    finite,
    probabilities,
    ranked,
)
from shapestream.slices import at_once
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def content_of(pieces: Any) -> Any:
    """The JSON of an answer."""
    return json.loads(b"".join(pieces))


def matrix(*rows: list[float]) -> np.ndarray[Any, Any]:
    """Logits."""
    return np.array(rows, np.float32)


def test_probabilities_are_sigmoid_or_softmax() -> None:
    """Of one label and of several; numbers of any size have one."""
    found = probabilities(matrix([0], [2], [-2], [1e4], [-1e4], [3e38], [-3e38]))[:, 0]
    np.testing.assert_allclose(found, [0.5, 0.880797, 0.119203, 1, 0, 1, 0], rtol=1e-5)
    found = probabilities(matrix([0, 0], [1e30, -1e30], [1, 2]))
    np.testing.assert_allclose(found, [[0.5, 0.5], [1, 0], [0.268941, 0.731059]], rtol=1e-5)
    assert np.float32 == found.dtype


def test_equal_scores_keep_their_order() -> None:
    """The largest first."""
    assert [1, 3, 0, 2, 4] == ranked(np.array([0, 2, 0, 2, -1], np.float32))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(number: float) -> None:
    """Its text is named."""
    with pytest.raises(UnusableVectors, match="NaN or infinity for text 1"):
        finite(matrix([0, 1], [0, number], [number, 0]))


def test_an_answer_has_a_bounded_number_of_labels() -> None:
    """How many texts are taken is told."""
    check_number(32, 2048)
    with pytest.raises(
        TooLarge, match="2048 texts of 33 scores each; at most 1985 texts of so many are taken"
    ):
        check_number(33, 2048)
    assert MOST_SCORES == 32 * 2048


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ({"query": "n", "text": "m"}, {"score": "m, 1"}, None),
        ({"query": "m", "text": "m"}, {"score": "m, 1"}, "whose sizes may differ"),
        ({"text": "m"}, {"score": "m, 1"}, "it needs two inputs"),
        ({"a": "n", "text": "m"}, {"score": "m, 1"}, "it needs two inputs"),
        ({"query": "n", "text": "m, 2"}, {"score": "m, 1"}, "it needs two inputs"),
        ({"query": "n", "text": "m"}, {"score": "m"}, "a row for each text"),
        ({"query": "n", "text": "m"}, {"scores": "m, 1"}, "an output `score`"),
    ],
)
def test_models_that_score_texts(inputs: dict[str, str], outputs: dict[str, str], words: str | None) -> None:
    """By the names and shapes of their ports; others are told what is needed."""
    signature = ModelSignature(
        "m",
        tuple(InputPort(name, "str", NamedShape.parse(shape)) for name, shape in inputs.items()),
        tuple(OutputPort(name, "f32", NamedShape.parse(shape), Whole()) for name, shape in outputs.items()),
    )
    assert ("score" in outputs) == scores_texts(signature)
    if words is None:
        ports = score_ports(signature)
        assert ("text", "f32", 1, False, False) == (
            ports.text,
            ports.element_type,
            ports.labels,
            ports.counts_tokens,
            ports.tells_cuts,
        )
        return
    with pytest.raises(NotGiven, match=f"'m' scores no texts: .*{words}"):
        score_ports(signature)


# ---------------------------------------------------------------- bodies


def test_a_request_to_rerank_is_read() -> None:
    """Each field that it may have."""
    asked = at_once(
        read_rerank(b'{"query": "q", "texts": ["a", ""], "truncate": true, "truncation_direction": "Right"}')
    )
    assert Pairs(queries=("q",), texts=["a", ""], truncate=True) == asked.pairs
    assert (False, False) == (asked.raw_scores, asked.return_text)
    asked = at_once(read_rerank(b'{"query": "q", "texts": ["a"], "raw_scores": true, "return_text": true}'))
    assert (None, True, True) == (asked.pairs.truncate, asked.raw_scores, asked.return_text)


@pytest.mark.parametrize(
    ("inputs", "pairs", "is_list"),
    [
        ("a", Pairs(queries=[], texts=["a"]), False),
        (["a"], Pairs(queries=[], texts=["a"]), False),
        (["q", "a"], Pairs(queries=["q"], texts=["a"]), False),
        ([["a"], ["b"]], Pairs(queries=[], texts=["a", "b"]), True),
        ([["q", "a"], ["r", "b"]], Pairs(queries=["q", "r"], texts=["a", "b"]), True),
    ],
)
def test_a_request_to_predict_is_read(inputs: Any, pairs: Pairs, is_list: bool) -> None:
    """A text, a pair, or a list of either."""
    asked = at_once(read_predict(json.dumps({"inputs": inputs}).encode()))
    assert (pairs, is_list) == (asked.pairs, asked.is_list)


@pytest.mark.parametrize(
    ("read", "body", "field", "words"),
    [
        (read_rerank, {"texts": ["a"]}, "query", '"query" is a text, not null'),
        (read_rerank, {"query": "q"}, "texts", '"texts" is a list of texts, not null'),
        (read_rerank, {"query": "q", "texts": [1]}, "texts", "and of nothing else"),
        (read_rerank, {"query": "q", "texts": ["a"] * 2049}, "texts", "2049 entries; at most 2048"),
        (
            read_rerank,
            {"query": "q", "texts": ["a"], "truncation_direction": "left"},
            "truncation_direction",
            "texts are cut at their end here",
        ),
        (read_predict, {"inputs": ["a", "b", "c"]}, "inputs", "not a list of 3 entries"),
        (read_predict, {"inputs": 7}, "inputs", "not a number"),
        (read_predict, {"inputs": [["a"], ["a", "b"]]}, "inputs", "send them in two requests"),
        (read_ranking, {"query": "q", "documents": ["a"]}, "model", '"model" is a text, not null'),
        (
            read_ranking,
            {"model": "m", "query": "q", "documents": ["a", {"title": "b"}]},
            "documents",
            "entry 1 is an object",
        ),
        (read_ranking, {"model": "m", "query": "q", "documents": ["a"], "top_n": 0}, "top_n", "from 1 on"),
        (
            read_ranking,
            {"model": "m", "query": "q", "documents": ["a"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "the tokenizer's settings say",
        ),
    ],
)
def test_a_wrong_field_is_named(read: Any, body: dict[str, Any], field: str, words: str) -> None:
    """With what it may be."""
    with pytest.raises(WrongField) as refused:
        at_once(read(json.dumps(body).encode()))
    assert field == refused.value.field
    assert words in refused.value.message


@pytest.mark.parametrize("inputs", [[], [[]], [["a"], []]])
def test_an_empty_list_is_of_a_kind_of_its_own(inputs: Any) -> None:
    """As TEI has it."""
    with pytest.raises(EmptyList) as refused:
        at_once(read_predict(json.dumps({"inputs": inputs}).encode()))
    error = tei_error(refused.value)
    assert error.content is not None
    assert (400, "Empty") == (error.status, error.content["error_type"])


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("count", [1, SLICE_SCORES, 2 * SLICE_SCORES + 1])
def test_long_rankings_come_in_slices(count: int) -> None:
    """All of them, of both APIs, with their texts."""
    texts = [f"text {number}" for number in range(count)]
    logits = np.random.default_rng(count).normal(size=(count, 1)).astype(np.float32)
    order = np.argsort(-logits[:, 0], kind="stable").tolist()
    asked = at_once(read_rerank(json.dumps({"query": "q", "texts": ["a"], "return_text": True}).encode()))
    work = rerank_response(
        type(asked)(pairs=Pairs(queries=("q",), texts=texts), raw_scores=True, return_text=True), logits, "i"
    )
    found = content_of(at_once(work).body)
    assert [{"index": index, "text": texts[index]} for index in order] == [
        {"index": each["index"], "text": each["text"]} for each in found
    ]
    np.testing.assert_array_equal(logits[order, 0], np.array([each["score"] for each in found], np.float32))
    ranking = at_once(read_ranking(b'{"model": "m", "query": "q", "documents": ["a"]}'))
    answer = content_of(at_once(ranking_response(ranking, logits, 7, "i")).body)
    assert order == [each["index"] for each in answer["results"]]


def test_many_labels_come_in_slices() -> None:
    """A few rows at a time."""
    logits = np.random.default_rng(0).normal(size=(100, 100)).astype(np.float32)
    asked = at_once(read_predict(json.dumps({"inputs": [["a"]] * 100, "raw_scores": True}).encode()))
    slices = [*predict_response(asked, logits, (), "i")]
    assert 100 / (SLICE_SCORES // 100) == len(slices)
    found = content_of(at_once(predict_response(asked, logits, (), "i")).body)
    for row, labels in zip(logits, found, strict=True):
        assert [f"LABEL_{label}" for label in ranked(row)] == [each["label"] for each in labels]


def test_a_model_of_several_labels_is_a_classifier() -> None:
    """With the labels that are known, if they are as many as its scores."""
    text, query = (InputPort(name, "str", NamedShape.parse(name)) for name in ("text", "query"))
    output = OutputPort("score", "f32", NamedShape.parse("text, 2"), Whole())
    ports = score_ports(ModelSignature("m", (text, query), (output,)))
    assert {
        "classifier": {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    } == scoring_type(ports, ["no", "yes"])
    assert {"0": "LABEL_0", "1": "LABEL_1"} == scoring_type(ports, ["no"])["classifier"]["id2label"]

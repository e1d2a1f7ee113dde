"""The API of text-embeddings-inference (TEI): bodies of requests and answers, and errors, without a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shapestream.errors import (
    DeadlineExceeded,
    Draining,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelError,
    Overloaded,
    Poisoned,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.gateway.errors import EmptyList, NotGiven, UnknownModel, UnusableVectors, WrongField
from shapestream.gateway.json_text import SLICE_NUMBERS
from shapestream.gateway.tei_api import (
    embed_response,
    embed_sparse_response,
    read_embed,
    read_tokenize,
    tei_error,
    tokenize_response,
)
from shapestream.gateway.text_bodies import Texts, TokenLists, VectorForm
from shapestream.slices import at_once
from shapestream.web.answers import error_answer
from shapestream.web.messages import HttpError


def body(**fields: Any) -> bytes:
    """A request's body, of one text where nothing else is said."""
    return json.dumps({"inputs": "a", **fields}).encode()


def content_of(response: Any) -> Any:
    """The JSON of an answer."""
    return json.loads(b"".join(response.body))


def test_a_request_to_embed_is_read() -> None:
    """Vectors have length 1 unless that is not wanted; texts may be cut, or not, as the tokenizer has it or as is said."""
    asked = at_once(read_embed(body(truncate=True, truncation_direction="right", prompt_name=None)))
    assert (Texts(texts=("a",)), VectorForm(normalize=True), True) == (
        asked.inputs,
        asked.form,
        asked.truncate,
    )
    assert at_once(read_embed(body(truncate=False, truncation_direction="left"))).truncate is False
    asked = at_once(read_embed(body(inputs=[[1, 2]], normalize=False, dimensions=3)))
    assert isinstance(asked.inputs, TokenLists)
    assert [[1, 2]] == [tokens.tolist() for tokens in asked.inputs.lists]
    assert VectorForm(dimensions=3, normalize=False) == asked.form


def test_a_request_to_tokenise_is_read() -> None:
    """Special tokens are added, as the tokenizer has it."""
    assert Texts(texts=("a", "")) == at_once(read_tokenize(body(inputs=["a", ""], add_special_tokens=True)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{}", '"inputs" is missing'),
        (body(inputs=7), '"inputs" is a text'),
        (body(truncate=1), '"truncate" is true or false'),
        (body(truncation_direction="left"), "texts are cut at their end here"),
        (body(normalize="no"), '"normalize" is true or false'),
        (body(dimensions=-1), '"dimensions" is an integer'),
        (body(prompt_name="query"), "there are no prompts here"),
    ],
)
def test_a_wrong_field_is_named(text: bytes, words: str) -> None:
    """As unprocessable."""
    with pytest.raises(WrongField) as refused:
        at_once(read_embed(text))
    error = tei_error(refused.value)
    assert error.content is not None
    assert (422, "Validation") == (error.status, error.content["error_type"])
    assert words in error.content["error"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": [[1]]}, "has tokens already"),
        ({"add_special_tokens": False}, '"add_special_tokens" is the tokenizer\'s setting'),
        ({"prompt_name": "query"}, "there are no prompts here"),
    ],
)
def test_what_a_tokenizer_cannot_do_is_refused(fields: dict[str, Any], words: str) -> None:
    """Rather than ignored, since other tokens would come."""
    with pytest.raises(WrongField, match=words):
        at_once(read_tokenize(body(**fields)))


@pytest.mark.parametrize("rows", [1, SLICE_NUMBERS // 2 + 1])
def test_vectors_are_lists_of_numbers(rows: int) -> None:
    """Of length 1, over all slices."""
    vectors = np.random.default_rng(rows).normal(size=(rows, 2)).astype(np.float32)
    response = at_once(embed_response(at_once(read_embed(body(inputs=["a"] * 2))), vectors, "id-1"))
    found = np.array(content_of(response))
    np.testing.assert_allclose(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), found, rtol=1e-5)
    assert (("x-request-id", "id-1"),) == response.headers
    as_they_are = at_once(embed_response(at_once(read_embed(body(normalize=False))), vectors, "i"))
    np.testing.assert_array_equal(vectors, np.array(content_of(as_they_are), np.float32))


def test_sparse_vectors_have_their_numbers_only() -> None:
    """With their places; a vector of zeros has none."""
    vectors = np.array([[0, 0.5, 0, -2], [0, 0, 0, 0]], np.float32)
    found = content_of(at_once(embed_sparse_response(vectors, "i")))
    assert [[{"index": 1, "value": 0.5}, {"index": 3, "value": -2}], []] == found


def test_long_sparse_answers_come_in_slices() -> None:
    """All of it."""
    vectors = np.eye(600, dtype=np.float32)
    found = content_of(at_once(embed_sparse_response(vectors, "i")))
    assert [[{"index": number, "value": 1}] for number in range(600)] == found


def test_tokens_are_told_by_their_numbers() -> None:
    """For each text."""
    tokens = [np.array([101, 7]), np.array([[5]], np.int32), np.array([], np.int64)]
    found = content_of(at_once(tokenize_response(tokens, "i")))
    rest = {"text": None, "special": None, "start": None, "stop": None}
    assert [[{"id": 101, **rest}, {"id": 7, **rest}], [{"id": 5, **rest}], []] == found


def test_many_tokens_are_written_in_slices() -> None:
    """A turn of the event loop writes some of them."""
    work = tokenize_response([np.arange(100_000 // 50)] * 50, "i")
    assert 3 <= len([*work])


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (HttpError(400, "w"), 400, "Validation"),
        (EmptyList("inputs", "w"), 400, "Empty"),
        (InvalidRequest("w"), 422, "Validation"),
        (WrongField("inputs", "w"), 422, "Validation"),
        (TooLarge("w"), 413, "Validation"),
        (HttpError(401, "w"), 401, "Validation"),
        (Forbidden("w"), 403, "Backend"),
        (UnknownModel("w"), 404, "Validation"),
        (NotGiven("w"), 424, "Backend"),
        (ModelError("w"), 422, "Validation"),
        (UnusableVectors("w"), 424, "Backend"),
        (Poisoned("w"), 424, "Backend"),
        (Overloaded("w"), 429, "Overloaded"),
        (InternalError("w"), 500, "Backend"),
        (HttpError(503, "w"), 503, "Unhealthy"),
        (Unavailable("w"), 503, "Unhealthy"),
        (Draining("w"), 503, "Unhealthy"),
        (WorkerLost("w"), 503, "Unhealthy"),
        (DeadlineExceeded("w"), 504, "Backend"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_have_teis_form(error: RequestError | HttpError, status: int, kind: str) -> None:
    """A status as TEI has it, and when to come again."""
    answer = error_answer(tei_error(error))
    assert (status, {"error": "w", "error_type": kind}) == (answer.status, content_of(answer))
    retryable = isinstance(error, RequestError) and error.retryable
    assert retryable == ("Retry-After" in dict(answer.headers))

"""OpenAI's API: bodies of requests and answers, and errors, without a server."""

from __future__ import annotations

import base64
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
from shapestream.gateway.json_text import MOST_JSON_BYTES, SLICE_NUMBERS
from shapestream.gateway.openai_api import (
    Encoding,
    embeddings_response,
    openai_error,
    read_request,
    unknown_model,
)
from shapestream.gateway.text_bodies import Texts, TokenLists, VectorForm
from shapestream.slices import at_once
from shapestream.web.answers import error_answer
from shapestream.web.messages import HttpError


def body(**fields: Any) -> bytes:
    """A request's body, of one text where nothing else is said."""
    return json.dumps({"model": "m", "input": "a", **fields}).encode()


def content_of(response: Any) -> Any:
    """The JSON of an answer."""
    return json.loads(b"".join(response.body))


def test_a_request_is_read() -> None:
    """Numbers are the default form; `user`, null and unknown fields say nothing."""
    asked = at_once(read_request(body(user="me", store=True, dimensions=None, encoding_format=None)))
    assert ("m", Texts(texts=("a",)), Encoding.FLOAT, VectorForm()) == (
        asked.model,
        asked.inputs,
        asked.encoding,
        asked.form,
    )
    asked = at_once(read_request(body(input=[[1, 2]], encoding_format="base64", dimensions=3)))
    assert isinstance(asked.inputs, TokenLists)
    assert [[1, 2]] == [tokens.tolist() for tokens in asked.inputs.lists]
    assert (Encoding.BASE64, VectorForm(dimensions=3)) == (asked.encoding, asked.form)


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        (b'{"input": "a"}', "model", "not null"),
        (body(model=["m"]), "model", "not a list"),
        (b'{"model": "m"}', "input", "missing"),
        (body(input=[]), "input", "at least one text"),
        (body(encoding_format="hex"), "encoding_format", '"float" or "base64"'),
        (body(encoding_format=1), "encoding_format", '"float" or "base64"'),
        (body(encoding_format=["float"]), "encoding_format", '"float" or "base64"'),
        (body(dimensions=0), "dimensions", "from 1 on"),
        (body(dimensions=True), "dimensions", "from 1 on"),
        (body(dimensions="3"), "dimensions", "from 1 on"),
    ],
)
def test_a_wrong_field_is_named(text: bytes, param: str, words: str) -> None:
    """By OpenAI's `param`."""
    with pytest.raises(WrongField) as refused:
        at_once(read_request(text))
    error = openai_error(refused.value)
    assert error.content is not None
    told = error.content["error"]
    assert (400, "invalid_request_error", param) == (error.status, told["type"], told["param"])
    assert words in told["message"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"model": "m", "input": "\\ud800"}', 400),
        (b'{"model": "m", "input": "\xff"}', 400),
        (b'{"model": "m", "input": "' + b"a" * MOST_JSON_BYTES + b'"}', 413),
    ],
)
def test_what_is_no_json_is_refused(text: bytes, status: int) -> None:
    """A lone surrogate is no character; a body that is too long says what to do."""
    with pytest.raises(HttpError) as refused:
        at_once(read_request(text))
    assert status == refused.value.status
    assert status != 413 or "send fewer texts at once" in refused.value.message


def test_texts_may_have_any_number_of_brackets_and_colons() -> None:
    """Only the body's own are counted."""
    text = '[{":' * 60_000 + '\\" \\\\'
    asked = at_once(read_request(body(input=[text, text])))
    assert Texts(texts=(text, text)) == asked.inputs
    for nested in ("[" * 70_000, "[" + "[]," * 50_001, '"x", "y": [' + "[0]," * 50_001):
        with pytest.raises(HttpError, match="lists and objects"):
            at_once(read_request(b'{"model": "m", "input": ' + nested.encode()))
    members = ",".join(f'"{number}": 0' for number in range(50_001))
    with pytest.raises(HttpError, match="members"):
        at_once(read_request(b'{"model": "m", "x": "[:\\"", "input": {' + members.encode() + b"}}"))


@pytest.mark.parametrize("rows", [1, 3, SLICE_NUMBERS // 2 + 1])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_an_answer_has_each_vector_at_its_index(rows: int, encoding: str) -> None:
    """The same numbers in both forms, to the bit, over all slices."""
    vectors = np.random.default_rng(rows).normal(size=(rows, 2)).astype(np.float32)
    asked = at_once(read_request(body(encoding_format=encoding)))
    response = at_once(embeddings_response(asked, vectors, 17, "id-1"))
    found = content_of(response)
    assert {"object": "list", "model": "m", "usage": {"prompt_tokens": 17, "total_tokens": 17}} == {
        key: value for key, value in found.items() if key != "data"
    }
    assert [*range(rows)] == [entry["index"] for entry in found["data"]]
    assert {"embedding"} == {entry["object"] for entry in found["data"]}
    written = [entry["embedding"] for entry in found["data"]]
    if encoding == "base64":
        numbers = np.frombuffer(b"".join(map(base64.b64decode, written)), "<f4").reshape(rows, 2)
    else:
        numbers = np.array(written, np.float32)
    np.testing.assert_array_equal(vectors, numbers)
    assert (("x-request-id", "id-1"),) == response.headers


def test_fewer_dimensions_are_a_vector_of_length_1() -> None:
    """So are all of them where they are asked for; else the vector is the model's own."""
    vectors = np.array([[3, 4, 12]], np.float32)
    cut = at_once(embeddings_response(at_once(read_request(body(dimensions=2))), vectors, 0, "i"))
    np.testing.assert_allclose([0.6, 0.8], content_of(cut)["data"][0]["embedding"], rtol=1e-6)
    whole = at_once(embeddings_response(at_once(read_request(body(dimensions=3))), vectors, 0, "i"))
    np.testing.assert_allclose(
        [3 / 13, 4 / 13, 12 / 13], content_of(whole)["data"][0]["embedding"], rtol=1e-6
    )
    own = at_once(embeddings_response(at_once(read_request(body())), vectors, 0, "i"))
    assert [3, 4, 12] == content_of(own)["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequest("w"), 400, "invalid_request_error", None, "invalid"),
        (WrongField("input", "w"), 400, "invalid_request_error", "input", "invalid"),
        (EmptyList("input", "w"), 400, "invalid_request_error", "input", "invalid"),
        (NotGiven("w"), 400, "invalid_request_error", None, "invalid"),
        (HttpError(401, "w"), 401, "invalid_request_error", None, "invalid_api_key"),
        (Forbidden("w"), 403, "permission_error", None, "forbidden"),
        (UnknownModel("w"), 404, "invalid_request_error", "model", "model_not_found"),
        (HttpError(404, "w"), 404, "invalid_request_error", None, None),
        (HttpError(405, "w"), 405, "invalid_request_error", None, None),
        (TooLarge("w"), 413, "invalid_request_error", None, "too_large"),
        (Overloaded("w"), 429, "rate_limit_error", None, "overloaded"),
        (ModelError("w"), 400, "invalid_request_error", None, "model_error"),
        (UnusableVectors("w"), 500, "server_error", None, "model_error"),
        (Poisoned("w"), 500, "server_error", None, "poisoned"),
        (InternalError("w"), 500, "server_error", None, "internal"),
        (Unavailable("w"), 503, "server_error", None, "unavailable"),
        (Draining("w"), 503, "server_error", None, "draining"),
        (WorkerLost("w"), 503, "server_error", None, "worker_lost"),
        (DeadlineExceeded("w"), 504, "server_error", None, "deadline_exceeded"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_have_openais_form(
    error: RequestError | HttpError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    """A status by which OpenAI's client raises the right error, and when to come again."""
    answer = error_answer(openai_error(error))
    told = {"message": "w", "type": kind, "param": param, "code": code}
    assert (status, {"error": told}) == (answer.status, content_of(answer))
    retryable = isinstance(error, RequestError) and error.retryable
    assert retryable == ("Retry-After" in dict(answer.headers))


def test_an_unknown_model_is_told_the_known_ones() -> None:
    """A long name is cut."""
    message = unknown_model("x" * 1000, ["sentences", "words"]).message
    assert "there is sentences, words" in message
    assert len(message) < 300

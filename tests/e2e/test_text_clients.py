"""Clients of OpenAI's and text-embeddings-inference's APIs, unchanged, at a real server. They need `make test-clients`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.e2e.client_programs import needs, told_by
from tests.e2e.text_chain import SERVED, TEXTS, expected, tokens, words

pytestmark = pytest.mark.e2e


@pytest.fixture
def text_server(workplace: Any) -> str:
    """The HOST:PORT of a server of a chain that embeds texts."""
    served = workplace.serve(SERVED)
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    (line,) = served.events("http ready")
    return str(line["address"])


def normal(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """These vectors with length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def assert_vectors(wanted: npt.NDArray[Any], found: list[list[float]]) -> None:
    """Hold vectors against those that the functions give, up to the last bit of f32."""
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


@needs("openai")
def test_openais_client_embeds_texts(text_server: str) -> None:
    """In base64, which it asks for unasked, and numbers; sync and async; cut; by tokens; with its own errors."""
    found = told_by("openai", "openai_embeddings.py", text_server, TEXTS)
    vectors = expected(TEXTS)
    assert (["sentences"], "sentences") == (found["models"], found["model"])
    for form in ("base64", "float", "tokens"):
        assert_vectors(vectors, found[form]["vectors"])
        assert [*range(len(TEXTS))] == found[form]["indices"]
        assert [tokens(TEXTS)] * 2 == found[form]["tokens"]
        assert "sentences" == found[form]["model"]
    for form in ("one", "one_of_tokens"):
        assert_vectors(vectors[:1], found[form]["vectors"])
        assert [tokens(TEXTS[:1])] * 2 == found[form]["tokens"]
    assert_vectors(normal(vectors[:, :3]), found["cut"]["vectors"])
    assert_vectors(vectors, found["many"])
    wrong = ["BadRequestError", 400, "invalid_request_error"]
    assert ["NotFoundError", 404, "invalid_request_error", "model", "model_not_found"] == found["unknown"]
    assert [*wrong, "input", "invalid"] == found["empty"] == found["too_many_texts"]
    assert [*wrong, "dimensions", "invalid"] == found["too_many_dimensions"]


@needs("huggingface")
def test_huggingfaces_client_extracts_features(text_server: str) -> None:
    """From the server's root, and from the page; of length 1 unless that is not wanted."""
    found = told_by("huggingface", "huggingface_features.py", text_server, TEXTS)
    vectors = expected(TEXTS)
    for form in ("root", "page"):
        assert_vectors(normal(vectors), found[form])
    assert_vectors(normal(vectors[:1]), found["one"])
    assert_vectors(vectors, found["as_they_are"])
    assert_vectors(normal(vectors[:, :3]), found["cut"])
    status, error = found["refused"]
    assert (422, "Validation") == (status, error["error_type"])
    assert found["healthy"]
    assert ("sentences", "float32", words.MOST_TOKENS) == tuple(
        found["info"][key] for key in ("model_id", "model_dtype", "max_input_length")
    )


@needs("langchain")
def test_langchains_client_embeds_documents(text_server: str) -> None:
    """Texts, and by default the tokens of its own encoding."""
    found = told_by("langchain", "langchain_embeddings.py", text_server, TEXTS)
    vectors = expected(TEXTS)
    for form in ("documents", "in_chunks", "awaited"):
        assert_vectors(vectors, found[form])
    assert_vectors(vectors[:1], [found["query"]])
    of_bytes = [
        words.encode(np.frombuffer(text.encode(), np.uint8)[np.newaxis].astype(np.int64))[0]
        for text in TEXTS
        if text
    ]
    assert_vectors(np.stack(of_bytes), found["tokens"])

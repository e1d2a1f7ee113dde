"""A folder with a cross-encoder, served over HTTP: scores as the tokenizer and the formulas by themselves give them."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.cross_encoder.bert import (
    MAX_TOKENS,
    QUERIES,
    TEXTS_OF_QUERY,
    drawn_pairs,
    kept,
    write_cross_encoder,
)

pytestmark = pytest.mark.e2e

YAML = """\
server:
  listen: [ipc://s.sock]
  http: {address: "127.0.0.1:0", texts: ranker}
models: [{name: ranker, path: ranker, engine: ENGINE, calibration_s: 0}]
workers: [{count: 2, slots: 1}]
"""


@pytest.fixture(scope="module", params=["openvino", pytest.param("onnxruntime", marks=pytest.mark.thorough)])
def ranker(module_workplace: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server of the folder, whose model is proved."""
    folder = module_workplace.folder / "ranker"
    if not folder.exists():
        write_cross_encoder(folder)
    served = module_workplace.serve(YAML.replace("ENGINE", request.param))
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    yield served
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def ask(served: Any, path: str, content: Any = None) -> tuple[int, Any]:
    """The status and the content of an answer."""
    (line,) = served.events("http ready")
    data = None if content is None else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(f"http://{line['address']}{path}", data) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def by_index(results: list[dict[str, Any]], field: str) -> list[float]:
    """The scores of an answer in the order of the texts."""
    return [result[field] for result in sorted(results, key=lambda result: result["index"])]


def test_two_hundred_pairs_of_many_callers(ranker: Any) -> None:
    """Each has the score that it has alone, in the right order; requests of several callers share calls."""
    queries = kept()
    assert (QUERIES, TEXTS_OF_QUERY) == (len(queries), len(queries[0]["texts"]))
    assert [{"query": query, "texts": texts} for query, texts in drawn_pairs()] == [
        {key: each[key] for key in ("query", "texts")} for each in queries
    ]
    with ThreadPoolExecutor(QUERIES) as callers:
        bodies = [{"query": each["query"], "texts": each["texts"], "raw_scores": True} for each in queries]
        answers = [*callers.map(lambda body: ask(ranker, "/rerank", body), bodies)]
        ranking = [
            {"model": "ranker", "query": each["query"], "documents": each["texts"]} for each in queries
        ]
        rankings = [*callers.map(lambda body: ask(ranker, "/v1/rerank", body), ranking)]
    for each, (status, found), (ranked_status, ranked) in zip(queries, answers, rankings, strict=True):
        assert (200, 200) == (status, ranked_status)
        wanted = np.array(each["scores"])
        order = np.argsort(-wanted).tolist()
        assert order == [result["index"] for result in found]
        assert order == [result["index"] for result in ranked["results"]]
        np.testing.assert_allclose(by_index(found, "score"), wanted, atol=2e-5)
        np.testing.assert_allclose(
            by_index(ranked["results"], "relevance_score"), 1 / (1 + np.exp(-wanted)), atol=1e-5
        )
    (counted,) = ask(ranker, "/v2/models/ranker.encoder/stats")[1]["model_stats"]
    assert counted["inference_count"] > counted["execution_count"]


def test_pairs_by_the_sdk(ranker: Any) -> None:
    """One query for all texts, and one for each; a text alone; none."""
    each = kept()[0]
    with ranker.client() as client:
        found = client.infer("ranker", {"query": [each["query"]], "text": each["texts"]})
        np.testing.assert_allclose(found["score"][:, 0], each["scores"], atol=2e-5)
        assert (found["tokens"] <= MAX_TOKENS).all()
        assert (found["uncut"] >= found["tokens"]).all()
        own = client.infer("ranker", {"query": [each["query"]] * 2, "text": each["texts"][:2]})
        np.testing.assert_allclose(own["score"][:, 0], each["scores"][:2], atol=2e-5)
        alone = client.infer("ranker", {"query": [], "text": ["", "a"]})
        assert ((2, 1), [2, 3]) == (alone["score"].shape, alone["tokens"].tolist())
        assert (0, 1) == client.infer("ranker", {"query": ["a"], "text": []})["score"].shape


def test_long_pairs_and_other_bodies(ranker: Any) -> None:
    """What is too long is cut, or refused where the caller forbids it; each API's errors name the fault."""
    long = {"query": "a", "texts": ["b", "c " * 400]}
    status, found = ask(ranker, "/rerank", {**long, "truncate": True, "truncation_direction": "right"})
    assert (200, 2) == (status, len(found))
    status, found = ask(ranker, "/rerank", {**long, "truncate": False})
    assert (422, "Validation") == (status, found["error_type"])
    assert f"text 1 has 404 tokens with its query, and the model takes at most {MAX_TOKENS}" in found["error"]
    status, found = ask(ranker, "/rerank", {**long, "query": "a " * (MAX_TOKENS * 257)})
    assert (200, 2) == (status, len(found))
    status, found = ask(ranker, "/predict", {"inputs": [["a", "b"], ["a", "c"]]})
    assert (200, ["LABEL_0"] * 2) == (status, [labels[0]["label"] for labels in found])
    status, found = ask(ranker, "/rerank", {"query": "a" * ((1 << 20) + 1), "texts": ["b"]})
    assert (413, "Validation") == (status, found["error_type"])
    status, found = ask(ranker, "/rerank", {"query": "a", "texts": ["b"] * 2049})
    assert (422, True) == (status, "2049 entries; at most 2048 are taken" in found["error"])
    status, found = ask(ranker, "/v1/rerank", {"model": "none", "query": "a", "documents": ["b"]})
    assert (404, "model_not_found") == (status, found["error"]["code"])
    status, found = ask(ranker, "/rerank", {"query": "a", "texts": ["b"] * 2048})
    assert (200, [*range(2048)]) == (status, [result["index"] for result in found])

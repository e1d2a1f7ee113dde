"""The endpoints that score and rank texts, of TEI and of Cohere and Jina, from a request to its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from tests.pipeline.gateway.text_site import TextSite, labelled, logit, on_text_site

from shapestream.errors import Overloaded
from shapestream.web.tokens import Tokens

RANKING = {"names": ["ranker", "sentences", "classes"]}
QUERY, TEXTS = "an", ["", "banana", "an", "a long text with an answer", "banana"]
ORDER = [1, 4, 2, 0, 3]
"""The texts by their scores; equal ones keep their order."""


def sigmoid(number: float) -> float:
    """The probability of a number."""
    return 1 / (1 + math.exp(-number))


def near(numbers: Sequence[float]) -> Any:
    """These, to the precision of f32."""
    return pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/"])
@on_text_site(**RANKING)
async def test_tei_ranks_texts(site: TextSite, path: str) -> None:
    """All are one request of the chain, with the query once; the best one comes first."""
    found = await site.post(path, {"query": QUERY, "texts": TEXTS})
    assert ORDER == [result["index"] for result in found]
    assert near([sigmoid(logit(QUERY, TEXTS[index])) for index in ORDER]) == [each["score"] for each in found]
    assert ["index", "score"] == [*found[0]]
    raw = await site.post(path, {"query": QUERY, "texts": TEXTS, "raw_scores": True, "return_text": True})
    assert near([logit(QUERY, TEXTS[index]) for index in ORDER]) == [each["score"] for each in raw]
    assert [TEXTS[index] for index in ORDER] == [each["text"] for each in raw]
    assert ["ranker"] * 2 == site.models
    assert [[QUERY]] * 2 == site.queries


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@on_text_site(**RANKING)
async def test_clients_of_cohere_and_jina_rank_documents(site: TextSite, path: str) -> None:
    """By the model that they name, with the caller's id and name; the tokens are counted."""
    documents = [*TEXTS[:2], *({"text": text} for text in TEXTS[2:])]
    body = {"model": "ranker", "query": QUERY, "documents": documents}
    reply = await site.ask("POST", path, body, {"x-request-id": "mine"})
    assert 200 == reply.status
    assert ("mine", "mine", "ranker") == (
        reply.headers["x-request-id"],
        reply.content["id"],
        reply.content["model"],
    )
    results = reply.content["results"]
    assert ORDER == [result["index"] for result in results]
    wanted = [sigmoid(logit(QUERY, TEXTS[index])) for index in ORDER]
    assert near(wanted) == [result["relevance_score"] for result in results]
    assert {"prompt_tokens": 5 + 11 + 7 + 12 + 11, "total_tokens": 46} == reply.content["usage"]
    best = await site.post(path, {**body, "top_n": 2, "return_documents": True})
    assert [{**result, "document": {"text": TEXTS[result["index"]]}} for result in results[:2]] == best[
        "results"
    ]
    assert [{"request_id": "mine", "caller": "127.0.0.1"}, {"caller": "127.0.0.1"}] == [
        request.tags for request in site.server.requests
    ]


@pytest.mark.parametrize("path", ["/predict", "/"])
@on_text_site(names=['classes={"labels": ["long", "one", "a"]}'])
async def test_tei_tells_labels_of_texts(site: TextSite, path: str) -> None:
    """Of one text or of several, each with its probabilities, the largest first."""
    powers = {
        name: math.exp(number) for name, number in zip(["long", "one", "a"], labelled("aab"), strict=True)
    }
    wanted = {name: power / sum(powers.values()) for name, power in powers.items()}
    found = await site.post(path, {"inputs": "aab"})
    assert ["long", "a", "one"] == [each["label"] for each in found]
    assert {name: near([score]) for name, score in wanted.items()} == {
        each["label"]: [each["score"]] for each in found
    }
    several = await site.post(path, {"inputs": [["aab"], [""]], "raw_scores": True})
    assert [
        {"score": 3, "label": "long"},
        {"score": 2, "label": "a"},
        {"score": 1, "label": "one"},
    ] == several[0]
    assert ["one", "long", "a"] == [each["label"] for each in several[1]]
    assert [[], []] == site.queries


@on_text_site(**RANKING)
async def test_pairs_are_scored_each_with_its_own_query(site: TextSite) -> None:
    """Labels that nobody has told of are called as transformers calls them."""
    found = await site.post("/predict", {"inputs": [["b", "banana"], ["", "x"]], "raw_scores": True})
    assert [
        [{"score": logit("b", "banana"), "label": "LABEL_0"}],
        [{"score": logit("", "x"), "label": "LABEL_0"}],
    ] == found
    assert found[0] == await site.post("/predict", {"inputs": ["b", "banana"], "raw_scores": True})


@on_text_site(**RANKING)
async def test_a_cut_may_be_forbidden(site: TextSite) -> None:
    """The text is named with its tokens; where nothing would be cut, nothing is refused."""
    body = {"query": QUERY, "texts": TEXTS, "truncate": False, "truncation_direction": "left"}
    reply = await site.ask("POST", "/rerank", body)
    assert (422, "Validation") == (reply.status, reply.content["error_type"])
    assert "text 3 has 31 tokens with its query, and the model takes at most 12" in reply.content["error"]
    assert 2 == len(await site.post("/rerank", {**body, "texts": TEXTS[:2]}))
    reply = await site.ask("POST", "/predict", {"inputs": TEXTS[3], "truncate": False})
    assert "text 0 has 29 tokens, and the model takes" in reply.content["error"]


@on_text_site(names=["classes"])
async def test_a_model_that_hides_its_cuts_cannot_forbid_them(site: TextSite) -> None:
    """Nothing runs then."""
    reply = await site.ask("POST", "/predict", {"inputs": "a", "truncate": False})
    assert (424, "Backend") == (reply.status, reply.content["error_type"])
    assert "does not tell whether it cuts texts" in reply.content["error"]
    assert [] == site.server.requests


@on_text_site(**RANKING)
async def test_models_of_another_kind_are_refused(site: TextSite) -> None:
    """Those without scores, those with many where one is needed, and those without vectors."""
    for model, words in (
        ("sentences", "scores no texts: it needs two"),
        ("classes", "gives 3 scores for each text"),
    ):
        reply = await site.ask("POST", "/v1/rerank", {"model": model, "query": "a", "documents": ["a"]})
        assert (400, True) == (reply.status, words in reply.content["error"]["message"])
    reply = await site.ask("POST", "/v1/embeddings", {"model": "ranker", "input": "a"})
    assert (400, True) == (reply.status, "embeds no texts" in reply.content["error"]["message"])
    assert ["classes"] == site.models  # its signature does not tell how many scores it gives


@on_text_site(names=["gone", "ranker", "sentences", "listed"])
async def test_tei_asks_the_first_model_that_can_answer(site: TextSite) -> None:
    """Of several names, since TEI's clients name none; one that the server does not know is passed over."""
    await site.post("/embed", {"inputs": "a"})
    await site.post("/embed_sparse", {"inputs": "a"})
    await site.post("/rerank", {"query": "a", "texts": ["a"]})
    await site.post("/predict", {"inputs": "a"})
    assert ["sentences", "sentences", "ranker", "ranker"] == site.models


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("ranker", "/embed", {"inputs": "a"}),
        ("sentences", "/rerank", {"query": "a", "texts": ["a"]}),
    ],
)
def test_tei_refuses_what_no_model_gives(name: str, path: str, body: dict[str, Any]) -> None:
    """As the backend's fault."""

    @on_text_site(names=[name])
    async def test(site: TextSite) -> None:
        reply = await site.ask("POST", path, body)
        assert (424, "Backend") == (reply.status, reply.content["error_type"])
        assert [] == site.server.requests

    test()


@on_text_site(**RANKING)
async def test_a_score_that_is_no_number_is_the_models_fault(site: TextSite) -> None:
    """Its text is named, raw or not."""
    site.not_a_number = 3
    for raw in (True, False):
        reply = await site.ask("POST", "/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": raw})
        assert (424, "the model gave NaN or infinity for text 3") == (reply.status, reply.content["error"])


@on_text_site(**RANKING)
async def test_a_tokenizer_of_pairs_tokenises_texts(site: TextSite) -> None:
    """Alone, without a query."""
    found = await site.post("/tokenize", {"inputs": ["ab", ""]})
    assert [[1, 97, 98], [1]] == [[token["id"] for token in text] for text in found]


@on_text_site(names=['ranker={"labels": ["relevance"]}'])
async def test_tei_tells_that_its_model_ranks(site: TextSite) -> None:
    """With its label."""
    info = (await site.ask("GET", "/info")).content
    assert {"reranker": {"id2label": {"0": "relevance"}, "label2id": {"relevance": 0}}} == info["model_type"]
    assert ("ranker", "float32", 2048) == tuple(
        info[key] for key in ("model_id", "model_dtype", "max_client_batch_size")
    )


@on_text_site(**RANKING, window_requests=20)
async def test_an_error_of_the_server_has_the_form_of_the_path(site: TextSite) -> None:
    """With the time to come again."""
    site.error = Overloaded("too much", retry_after_s=2.5)
    body = {"model": "ranker", "query": "a", "documents": ["a"], "texts": ["a"]}
    for path in ("/rerank", "/v1/rerank"):
        reply = await site.ask("POST", path, body)
        assert (429, "3") == (reply.status, reply.headers["Retry-After"])
    assert "overloaded" == reply.content["error"]["code"]


@on_text_site(**RANKING, tokens=Tokens("shop secret\n"))
async def test_tokens_of_callers_are_asked_for(site: TextSite) -> None:
    """On each page that scores texts, in the form of its path; the caller is told to the server by its name."""
    for path in ("/rerank", "/predict", "/v1/rerank", "/v2/rerank"):
        assert 401 == (await site.ask("POST", path, {})).status
    await site.post("/rerank", {"query": "a", "texts": ["a"]}, {"authorization": "Bearer secret"})
    assert [{"caller": "shop"}] == [request.tags for request in site.server.requests]

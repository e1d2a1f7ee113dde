"""The description of the interface: what it names is served, and requests and answers are as it says."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tests.pipeline.gateway.gateway_site import GatewaySite, Reply, on_site
from tests.pipeline.gateway.text_site import TextSite, on_text_site

from shapestream.errors import (
    InternalError,
    ModelError,
    Overloaded,
    Poisoned,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.gateway.json_text import MOST_JSON_BYTES
from shapestream.web.tokens import Tokens

TOLD = json.loads(files("shapestream.gateway").joinpath("openapi.json").read_text())
"""The description, with the pages of all services."""
BOTH = {"names": ["sentences", "listed", "numbers", "gone"]}
RANKED = {"/v1/rerank", "/v2/rerank"}
OPENAI = {"/v1/embeddings", *RANKED, "/v1/models", "/v1/models/{model}"}
SCORED = {"/rerank", "/predict"}
TEI = {"/", "/embed", "/embed_sparse", *SCORED, "/tokenize", "/info", "/health"}
EMBED = {"model": "sentences", "input": ["banana", ""]}
RANKING = {"names": ["ranker", "sentences"]}
RERANK = {"query": "an", "texts": ["banana", ""]}
RANK = {"model": "ranker", "query": "an", "documents": ["banana", {"text": ""}]}


def schemas() -> dict[str, Any]:
    """All schemas, those of texts without fields that they do not name. A client must still take new ones."""
    named: dict[str, Any] = TOLD["components"]["schemas"]
    return {
        name: closed(schema)
        if name.startswith(("OpenAI", "Tei", "Rank")) and not name.endswith("Request")
        else schema
        for name, schema in named.items()
    }


def closed(schema: Any) -> Any:
    """A schema whose objects have no other fields than it names."""
    if isinstance(schema, list):
        return [*map(closed, schema)]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(content) for key, content in schema.items()}
    return {**inner, "additionalProperties": False} if "properties" in schema else inner


def validator(schema: Any) -> Draft202012Validator:
    """The judge of a schema, which may refer to those of the description."""
    return Draft202012Validator({**schema, "components": {"schemas": schemas()}})


def response_of(method: str, path: str, status: int) -> Any:
    """The description of a page's answers of this status."""
    found = TOLD["paths"][path][method.lower()]["responses"][str(status)]
    if "$ref" in found:
        return TOLD["components"]["responses"][found["$ref"].rpartition("/")[2]]
    return found


def check(reply: Reply, method: str, path: str) -> None:
    """Checks an answer: its body, and the headers that it must have."""
    response = response_of(method, path, reply.status)
    if "content" not in response:
        assert b"" == reply.body
        return
    validator(response["content"]["application/json"]["schema"]).validate(reply.content)
    headers = {name for name, header in response.get("headers", {}).items() if header["required"]}
    assert headers <= reply.headers.keys()
    assert ("Retry-After" in headers) == ("Retry-After" in reply.headers)


async def check_paths(ask: Callable[..., Awaitable[Reply]], model: str) -> set[str]:
    """Checks that each path that a gateway describes is served by the methods that it says. Returns the paths."""
    told = (await ask("GET", "/openapi.json")).content
    assert "3.1.0" == told["openapi"]
    assert told == {**TOLD, "paths": told["paths"]}
    for path, operations in told["paths"].items():
        assert operations == TOLD["paths"][path]
        reply = await ask("DELETE", path.replace("{model}", model).replace("{version}", "1"))
        check(reply, next(iter(operations)), path)
        allowed = {method.lower() for method in reply.headers["Allow"].split(", ")}
        assert (405, allowed - {"head"}) == (reply.status, operations.keys()), path
        for operation in operations.values():
            statuses = set(operation["responses"])
            assert {"200", "400", "405", "408", "413", "415", "417", "421", "431", "500", "503"} <= statuses
            assert "default" not in statuses, "it would document any status"
    return set(told["paths"])


def test_the_description_is_well_formed() -> None:
    """Its schemas are schemas, all that it refers to is there, and all that is there is referred to."""
    for schema in TOLD["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    referred: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                referred.add(node["$ref"])
            for inner in node.values():
                walk(inner)
        elif isinstance(node, list):
            for inner in node:
                walk(inner)

    walk(TOLD)
    components = TOLD["components"].items()
    assert {f"#/components/{kind}/{name}" for kind, named in components for name in named} == referred
    operations = [operation for page in TOLD["paths"].values() for operation in page.values()]
    assert len(operations) == len({operation["operationId"] for operation in operations})


@on_site
async def test_a_gateway_without_services_for_texts_describes_none(site: GatewaySite) -> None:
    """All other pages are described."""
    assert TOLD["paths"].keys() - OPENAI - TEI == await check_paths(site.ask, "double")


@pytest.mark.parametrize(
    ("services", "paths"),
    [({}, set()), (BOTH, OPENAI | TEI)],
)
def test_services_for_texts_are_described_where_they_are_served(
    services: dict[str, Any], paths: set[str]
) -> None:
    """Each path that is served, and no other."""

    @on_text_site(**services)
    async def test(site: TextSite) -> None:
        assert (TOLD["paths"].keys() - OPENAI - TEI) | paths == await check_paths(site.ask, "sentences")

    test()


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/v1/embeddings", EMBED),
        ("POST", "/v1/embeddings", {**EMBED, "encoding_format": "base64", "dimensions": 2}),
        ("POST", "/v1/embeddings", {**EMBED, "input": [[1, 2], [3]]}),
        ("POST", "/v1/embeddings", {"model": "listed", "input": "a"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/{model}", None),
        ("POST", "/", {"inputs": "a"}),
        ("POST", "/embed", {"inputs": ["a", "b"], "normalize": False}),
        ("POST", "/embed_sparse", {"inputs": ["a", "b"]}),
        ("POST", "/tokenize", {"inputs": ["a", ""]}),
        ("GET", "/info", None),
        ("GET", "/v2", None),
        ("GET", "/v2/models/{model}", None),
        ("GET", "/v2/models/{model}/config", None),
        (
            "POST",
            "/v2/models/{model}/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
        ),
    ],
)
@on_text_site(**BOTH)
async def test_answers_are_as_described(site: TextSite, method: str, path: str, content: Any) -> None:
    """A site that serves texts takes and gives bodies that are valid by the schemas."""
    reply = await site.ask(method, path.replace("{model}", "sentences"), content)
    assert 200 == reply.status, reply.content
    check(reply, method, path)
    if content is not None:
        assert is_described(path, content)


@on_text_site(names=["listed"])
async def test_what_tei_does_not_know_is_null_as_described(site: TextSite) -> None:
    """Without an encoder, the most tokens of a text."""
    check(await site.ask("GET", "/info"), "GET", "/info")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/", RERANK),
        ("/rerank", {**RERANK, "return_text": True, "raw_scores": True}),
        ("/predict", {"inputs": ["a", "b"]}),
        ("/predict", {"inputs": [["a", "b"], ["", ""]]}),
        ("/tokenize", {"inputs": ["a", ""]}),
        ("/v1/rerank", {**RANK, "return_documents": True}),
        ("/v2/rerank", {**RANK, "top_n": 1}),
    ],
)
@on_text_site(**RANKING)
async def test_answers_with_scores_are_as_described(site: TextSite, path: str, content: Any) -> None:
    """Of a model that scores texts, with one score for each."""
    reply = await site.ask("POST", path, content)
    assert 200 == reply.status, reply.content
    check(reply, "POST", path)
    assert is_described(path, content)
    check(await site.ask("GET", "/info"), "GET", "/info")


@on_text_site(names=["classes"])
async def test_answers_with_labels_are_as_described(site: TextSite) -> None:
    """Also at the root. Such a model ranks nothing."""
    for path in ("/", "/predict"):
        check(await site.ask("POST", path, {"inputs": [["a"], [""]]}), "POST", path)
    check(await site.ask("GET", "/info"), "GET", "/info")
    reply = await site.ask("POST", "/rerank", RERANK)
    assert 424 == reply.status
    check(reply, "POST", "/rerank")


TEI_POSTS = sorted(path for path in TEI - SCORED if "post" in TOLD["paths"][path])


@pytest.mark.parametrize(
    ("error", "openai", "tei"),
    [
        (TooLarge("w"), 413, 413),
        (ModelError("w"), 400, 422),
        (Overloaded("w", retry_after_s=2), 429, 429),
        (Poisoned("w"), 500, 424),
        (InternalError("w"), 500, 500),
        (Unavailable("w"), 503, 503),
        (WorkerLost("w"), 503, 503),
    ],
    ids=lambda error: type(error).__name__ if isinstance(error, Exception) else None,
)
@on_text_site(**BOTH)
async def test_errors_of_the_server_are_as_described(
    site: TextSite, error: RequestError, openai: int, tei: int
) -> None:
    """Each in its API's form, with Retry-After where the same request may succeed later."""
    site.error = error
    for path in ("/v1/embeddings", *TEI_POSTS):
        reply = await site.ask("POST", path, {**EMBED, "inputs": "a"})
        assert (openai if path in OPENAI else tei) == reply.status
        check(reply, "POST", path)
        assert path in OPENAI or "error_type" in reply.content


@on_text_site(**RANKING)
async def test_errors_of_a_model_that_scores_are_as_described(site: TextSite) -> None:
    """Each in its API's form."""
    site.error = ModelError("w")
    for path in sorted(RANKED | SCORED):
        reply = await site.ask("POST", path, {**RANK, **RERANK, "inputs": "a"})
        assert (400 if path in OPENAI else 422) == reply.status
        check(reply, "POST", path)
        assert path in OPENAI or "error_type" in reply.content


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/embeddings", b"[", 400),
        ("POST", "/v1/embeddings", {**EMBED, "model": "numbers"}, 400),
        ("POST", "/v1/embeddings", {**EMBED, "dimensions": 5}, 400),
        ("POST", "/v1/embeddings", {**EMBED, "model": "gone"}, 404),
        ("POST", "/v1/embeddings", b" " * (MOST_JSON_BYTES + 1), 413),
        ("GET", "/v1/models/{model}", None, 404),
        *(("POST", path, b"[", 400) for path in TEI_POSTS),
        *(("POST", path, {"inputs": []}, 400) for path in TEI_POSTS),
        *(("POST", path, {"inputs": 1}, 422) for path in TEI_POSTS),
        *(("POST", path, b" " * (MOST_JSON_BYTES + 1), 413) for path in TEI_POSTS),
        ("POST", "/embed", {"inputs": "a", "dimensions": 5}, 422),
        ("POST", "/embed_sparse", {"inputs": [1, 2]}, 424),
        *(("POST", path, b"[", 400) for path in sorted(RANKED | SCORED)),
        *(("POST", path, b" " * (MOST_JSON_BYTES + 1), 413) for path in sorted(RANKED | SCORED)),
        ("POST", "/rerank", {"query": "a", "texts": []}, 400),
        ("POST", "/rerank", RERANK, 424),
        ("POST", "/predict", {"inputs": "a"}, 424),
        ("POST", "/v1/rerank", {**RANK, "model": "sentences"}, 400),
        ("POST", "/v2/rerank", {**RANK, "model": "gone"}, 404),
    ],
)
@on_text_site(**BOTH)
async def test_refusals_are_as_described(
    site: TextSite, method: str, path: str, content: Any, status: int
) -> None:
    """Wrong bodies and names get a described status, in the described form."""
    reply = await site.ask(method, path.replace("{model}", "nix"), content)
    assert status == reply.status
    check(reply, method, path)


@pytest.mark.parametrize(
    ("tei", "status", "pages"),
    [
        ("numbers", 424, ["POST /", "POST /embed", "POST /embed_sparse", "POST /tokenize", "GET /info"]),
        ("gone", 404, ["POST /", "POST /embed", "POST /embed_sparse", "GET /", "GET /info", "GET /health"]),
        ("gone", 424, ["POST /tokenize"]),
    ],
)
def test_a_tei_that_lacks_its_model_answers_as_described(tei: str, status: int, pages: list[str]) -> None:
    """A model that is of another kind, or is not there."""

    @on_text_site(names=[tei])
    async def test(site: TextSite) -> None:
        for page in pages:
            method, path = page.split()
            reply = await site.ask(method, path, {"inputs": "a"} if method == "POST" else None)
            assert status == reply.status, page
            check(reply, method, path)

    test()


@on_text_site(names=["sentences"])
async def test_a_silent_server_is_answered_for_as_described(site: TextSite) -> None:
    """Its model is not ready, and nothing is known of it."""
    site.server.go_silent()
    for path, status in (("/", 503), ("/health", 503), ("/info", 504)):
        reply = await site.ask("GET", path)
        assert status == reply.status
        check(reply, "GET", path)


@on_text_site(**BOTH, tokens=Tokens("shop secret\n"))
async def test_pages_that_ask_for_a_token_are_described(site: TextSite) -> None:
    """They have 401 in their own form; the others have none, and find that the server is silent."""
    site.server.go_silent()
    for path, operations in TOLD["paths"].items():
        for method in operations:
            reply = await site.ask(method.upper(), path.replace("{model}", "x").replace("{version}", "1"))
            assert (401 == reply.status) == ("401" in operations[method]["responses"]), (method, path)
            if 401 == reply.status:
                check(reply, method, path)


# ---------------------------------------------------------------- requests


def is_described(path: str, content: Any) -> bool:
    """True if a body is valid by the description of its page."""
    body = TOLD["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return bool(validator(body).is_valid(content))


INPUTS: list[Any] = [
    *("a", "", ["a"], ["a", ""], ["a"] * 2048, [1, 2], [0], [1] * 512, [[1, 2], [3]]),
    *([], None, 7, True, {}, ["a"] * 2049, ["a", 1], [1.5], [-1], [[]], [["a"]], [[1]] * 2049, [None]),
    *([[1], "a"], [True], [[-1]]),
]
FIELDS: dict[str, list[Any]] = {
    "/v1/embeddings": [
        *({"model": None}, {"model": ["sentences"]}, {"encoding_format": "hex"}, {"encoding_format": 1}),
        *({"encoding_format": None}, {"encoding_format": "float"}, {"encoding_format": "base64"}),
        *({"dimensions": 0}, {"dimensions": "3"}, {"dimensions": True}, {"dimensions": None}),
        *({"dimensions": 4}, {"user": 1}, {"store": True}),
    ],
    "/embed": [
        *({"normalize": "no"}, {"normalize": None}, {"normalize": True}, {"truncate": 1}, {"truncate": True}),
        *({"truncation_direction": "left"}, {"truncation_direction": 1}, {"prompt_name": "query"}),
        *({"prompt_name": None}, {"dimensions": -1}, {"dimensions": 2}, {"raw": 1}),
    ],
    "/tokenize": [
        *({"add_special_tokens": False}, {"add_special_tokens": None}, {"add_special_tokens": True}),
        *({"add_special_tokens": 1}, {"prompt_name": "query"}, {"prompt_name": None}, {"normalize": "no"}),
    ],
}
FIELDS |= {"/embed_sparse": FIELDS["/embed"]}


@pytest.mark.parametrize("path", FIELDS)
@on_text_site(**BOTH)
async def test_exactly_the_bodies_that_are_described_are_taken(site: TextSite, path: str) -> None:
    """All forms of texts and fields, and a body without texts."""
    field = "input" if path in OPENAI else "inputs"
    model = {"model": "sentences"} if path in OPENAI else {}
    bodies = [{**model, field: content} for content in INPUTS]
    bodies += [{**model, field: "a", **fields} for fields in FIELDS[path]]
    found = set()
    for body in [*bodies, model, [], "a", {field: "a"}]:
        reply = await site.ask("POST", path, body)
        check(reply, "POST", path)
        assert (200 == reply.status) == is_described(path, body), body
        found.add(reply.status)
    assert found >= {200, 400}


TEXT_LISTS: list[Any] = [
    *(["a"], ["a", ""], ["a"] * 2048, [], None, "a", 7, {}, ["a"] * 2049, ["a", 1], [["a"]], [None]),
    *([{"text": "a"}], [{"text": "a", "title": "b"}, "c"], [{"text": 1}], [{}]),
]
CUTS: list[dict[str, Any]] = [
    *({"truncate": 1}, {"truncate": None}, {"truncate": False}, {"truncate": True}),
    *({"truncation_direction": side} for side in ("left", "Left", "right", "Right", None, "up", 1)),
    *({"truncation_direction": "left", "truncate": truncate} for truncate in (True, False, None)),
]
SCORE_FIELDS = [*CUTS, *({"raw_scores": value} for value in (True, False, None, 1, "yes"))]
SCORE_BODIES: dict[str, list[dict[str, Any]]] = {
    "/rerank": [
        *({"query": "a", "texts": texts} for texts in TEXT_LISTS),
        *({"query": query, "texts": ["a"]} for query in (None, ["a"], "")),
        *({"query": "a", "texts": ["a"], **more} for more in SCORE_FIELDS),
        *({"query": "a", "texts": ["a"], "return_text": value} for value in (True, None, 1)),
        *({"query": "a"}, {"texts": ["a"]}),
    ],
    "/predict": [
        *({"inputs": inputs} for inputs in INPUTS),
        *({"inputs": [["a", "b"]] * count} for count in (1, 2048, 2049)),
        *({"inputs": [["a"], row]} for row in ("a", ["a"], ["a", "b"], ["a", "b", "c"], [], [1], None)),
        *({"inputs": ["a", "b", "c"]}, {"inputs": [["a", 1]]}),
        *({"inputs": "a", **more} for more in SCORE_FIELDS),
    ],
    "/v1/rerank": [
        *({"model": "ranker", "query": "a", "documents": texts} for texts in TEXT_LISTS),
        *({**RANK, **more} for more in ({"query": None}, {"query": ["a"]}, {"model": 1}, {"model": None})),
        *({**RANK, "top_n": value} for value in (1, 9, None, 0, -1, True, "1", 1.5)),
        *({**RANK, "return_documents": value} for value in (True, False, None, 1)),
        *({**RANK, "rank_fields": value} for value in (None, ["text"], ["title"], [], "text")),
        *({**RANK, "max_tokens_per_doc": 4096}, {**RANK, "max_tokens_per_doc": None}),
        *({**RANK, "max_chunks_per_doc": 1}, {**RANK, "priority": 3}),
    ],
}
SCORE_BODIES |= {"/v2/rerank": SCORE_BODIES["/v1/rerank"]}


@pytest.mark.parametrize("path", SCORE_BODIES)
@on_text_site(**RANKING)
async def test_exactly_the_described_bodies_are_scored(site: TextSite, path: str) -> None:
    """All forms of texts, pairs and fields."""
    found = set()
    for body in [*SCORE_BODIES[path], {}, [], "a"]:
        reply = await site.ask("POST", path, body)
        check(reply, "POST", path)
        assert (200 == reply.status) == is_described(path, body), body
        found.add(reply.status)
    assert found >= {200, 400}

"""The endpoints of OpenAI and of text-embeddings-inference (TEI), from a request to its answer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import trio
from tests.pipeline.gateway.gateway_site import Reply
from tests.pipeline.gateway.text_site import TextSite, on_text_site, vector
from trio.testing import wait_all_tasks_blocked

from shapestream.errors import Overloaded, TooLarge
from shapestream.gateway.options import text_service
from shapestream.gateway.routes import TextRoutes
from shapestream.slices import LongSteps
from shapestream.web.messages import HttpError, HttpRequest, HttpResponse
from shapestream.web.quotas import Quotas
from shapestream.web.tokens import Tokens

BOTH = {"names": ["sentences", "listed", "numbers", "gone"]}
TEXTS = ["", "banana", "😀"]
VECTORS = [*map(vector, TEXTS)]
UNLIMITED = Quotas(lambda: 1024, "requests in flight")


def normal(numbers: list[float]) -> Any:
    """These with length 1."""
    return pytest.approx([number / math.hypot(*numbers) for number in numbers], rel=1e-5)


def openai(texts: Any, model: str = "sentences", **fields: Any) -> dict[str, Any]:
    """A body for `/v1/embeddings`."""
    return {"model": model, "input": texts, **fields}


@on_text_site(**BOTH)
async def test_all_texts_are_one_request_of_the_chain(site: TextSite) -> None:
    """With the caller's id, trace and name; the answer tells the id."""
    headers = {"x-request-id": "mine", "traceparent": f"00-{1:032x}-{2:016x}-03"}
    reply = await site.ask("POST", "/v1/embeddings", openai(TEXTS), headers)
    assert VECTORS == [entry["embedding"] for entry in reply.content["data"]]
    assert {"prompt_tokens": 10, "total_tokens": 10} == reply.content["usage"]
    assert "mine" == reply.headers["x-request-id"]
    assert ["sentences"] == site.models
    tags = {"request_id": "mine", "traceparent": headers["traceparent"], "caller": "127.0.0.1"}
    assert [tags] == [request.tags for request in site.server.requests]


@pytest.mark.parametrize("page", ["/embed", "/embed_sparse", "/"])
@on_text_site(**BOTH)
async def test_a_cut_may_be_forbidden(site: TextSite, page: str) -> None:
    """The text is named with its tokens; where nothing would be cut, nothing is refused."""
    reply = await site.ask("POST", page, {"inputs": ["a", "b" * 40], "truncate": False})
    assert (422, "Validation") == (reply.status, reply.content["error_type"])
    assert "text 1 has 41 tokens, and the model takes at most 12" in reply.content["error"]
    assert 2 == len(await site.post(page, {"inputs": ["a", "b" * 40]}))
    assert 1 == len(await site.post(page, {"inputs": "a", "truncate": False}))


@on_text_site(names=["listed"])
async def test_a_model_that_hides_its_cuts_cannot_forbid_them(site: TextSite) -> None:
    """Nothing runs then."""
    reply = await site.ask("POST", "/embed", {"inputs": "a", "truncate": False})
    assert (424, "Backend") == (reply.status, reply.content["error_type"])
    assert "does not tell whether it cuts texts" in reply.content["error"]
    assert [] == site.server.requests


@pytest.mark.parametrize("inputs", [TEXTS, [[1, 2], [3]]], ids=["texts", "tokens"])
@on_text_site(**BOTH)
async def test_headers_have_priority_and_deadline(site: TextSite, inputs: Any) -> None:
    """Of each request that becomes of the call; those who wait for longer get 504, as each API tells it."""
    headers = {"x-request-priority": "-3", "x-request-timeout-ms": "2500"}
    fields = {"/v1/embeddings": "input", "/embed": "inputs"}
    for path, field in fields.items():
        reply = await site.ask("POST", path, {"model": "sentences", field: inputs}, headers)
        assert 200 == reply.status
    asked = site.server.requests
    assert {-3} == {request.priority for request in asked}
    assert 2500 == max(request.remaining_ms for request in asked)
    assert 1500 <= min(request.remaining_ms for request in asked)  # the first one opened its model
    site.server.hold()
    late = [
        await site.ask("POST", path, {"model": "sentences", field: inputs}, headers)
        for path, field in fields.items()
    ]
    assert [504, 504] == [reply.status for reply in late]
    assert "deadline_exceeded" == late[0].content["error"]["code"]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("x-request-priority", "high"),
        ("x-request-priority", "1.5"),
        ("x-request-priority", "9" * 10),
        ("x-request-timeout-ms", "0"),
        ("x-request-timeout-ms", "-1"),
        ("x-request-timeout-ms", "2s"),
    ],
)
@on_text_site(**BOTH)
async def test_headers_that_are_no_numbers_are_refused(site: TextSite, header: str, text: str) -> None:
    """With the header's name, and nothing is sent."""
    reply = await site.ask("POST", "/v1/embeddings", openai(TEXTS), {header: text})
    assert 400 == reply.status
    assert f"the header {header} is " in reply.content["error"]["message"]
    assert not site.server.requests


@on_text_site(**BOTH)
async def test_a_list_of_vectors_is_as_good_as_a_tensor(site: TextSite) -> None:
    """Of the model by whose name the caller asks."""
    found = await site.post("/v1/embeddings", openai(TEXTS, "listed"))
    assert VECTORS == [entry["embedding"] for entry in found["data"]]
    assert "listed" == found["model"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
@on_text_site(**BOTH)
async def test_tokens_are_requests_of_the_encoder(site: TextSite, path: str) -> None:
    """One for each text, all under way at once, up to a number; answers keep their order."""
    lists = [[1, *map(ord, "a" * (number % 5))] for number in range(300)]
    body = {**openai(lists), "inputs": lists, "normalize": False}
    found = await site.post(path, body)
    vectors = [entry["embedding"] for entry in found["data"]] if path.startswith("/v1") else found
    assert [vector("a" * (number % 5)) for number in range(300)] == vectors
    assert ["sentences.encoder"] * 300 == site.models
    assert 256 == site.most_at_once
    if path.startswith("/v1"):
        assert {"prompt_tokens": 900, "total_tokens": 900} == found["usage"]


@on_text_site(**BOTH, window_requests=20)
async def test_tokens_beyond_the_callers_quota_wait_for_its_own_others(site: TextSite) -> None:
    """Of a window of 20 requests a caller has 10; where another request of it has all of them, it is told to slow down."""
    lists = [[1, *map(ord, "a" * (number % 5))] for number in range(30)]
    replies: list[Reply] = []

    async def ask() -> None:
        replies.append(await site.ask("POST", "/v1/embeddings", openai(lists)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask)
    refused, answered = replies
    assert (429, "1") == (refused.status, refused.headers["Retry-After"])
    assert [vector("a" * (number % 5)) for number in range(30)] == [
        entry["embedding"] for entry in answered.content["data"]
    ]
    assert 10 == site.most_at_once


@on_text_site(**BOTH)
async def test_one_refused_list_of_tokens_fails_the_request(site: TextSite) -> None:
    """With its own error. The others are withdrawn, and no more are sent."""
    site.server.hold()
    site.error = Overloaded("too much", retry_after_s=2.5)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            reply = await site.ask("POST", "/v1/embeddings", openai([[1, 2]] * 500))
            assert (429, "3") == (reply.status, reply.headers["Retry-After"])
            assert "overloaded" == reply.content["error"]["code"]

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        site.server.release(1)
    await wait_all_tasks_blocked()
    assert 256 == len(site.server.requests)
    assert 255 == len(site.server.cancelled)


@on_text_site(names=["listed"])
async def test_without_an_encoder_tokens_are_refused(site: TextSite) -> None:
    """In words that say what to send."""
    reply = await site.ask("POST", "/v1/embeddings", openai([1, 2], "listed"))
    assert 400 == reply.status
    assert "no encoder of 'listed' is known here: send texts" == reply.content["error"]["message"]


@on_text_site(names=["sentences"])
async def test_a_token_beyond_the_encoders_numbers_is_refused(site: TextSite) -> None:
    """Its input is named."""
    reply = await site.ask("POST", "/v1/embeddings", openai([[1, 2**31]]))
    assert 400 == reply.status
    assert "input 'input_ids' takes i32" in reply.content["error"]["message"]
    assert [] == site.server.requests


@on_text_site(names=['sentences={"largest_token": 500}'])
async def test_tokens_of_another_model_are_refused(site: TextSite) -> None:
    """Where the largest one is known, before anything runs."""
    reply = await site.ask("POST", "/v1/embeddings", openai([[1, 500], [1, 501, 2]]))
    assert 400 == reply.status
    assert (
        "text 1 has the token 501, and 'sentences' knows those up to 500" in reply.content["error"]["message"]
    )
    assert [] == site.server.requests
    assert 1 == len((await site.post("/v1/embeddings", openai([[1, 500]])))["data"])


@on_text_site(**BOTH)
async def test_a_model_of_other_things_is_refused(site: TextSite) -> None:
    """It is told what is needed, also for a name that the server lacks."""
    reply = await site.ask("POST", "/v1/embeddings", openai("a", "numbers"))
    assert 400 == reply.status
    assert (
        "'numbers' embeds no texts: it needs one input of element type str"
        in reply.content["error"]["message"]
    )
    reply = await site.ask("POST", "/v1/embeddings", openai("a", "gone"))
    assert (404, "model_not_found") == (reply.status, reply.content["error"]["code"])
    assert [] == site.server.requests


@on_text_site(**BOTH)
async def test_dimensions_are_checked_before_anything_runs(site: TextSite) -> None:
    """Where the signature tells the size of vectors; else when they have come."""
    reply = await site.ask("POST", "/v1/embeddings", openai("a", dimensions=5))
    assert (400, "dimensions") == (reply.status, reply.content["error"]["param"])
    assert [] == site.server.requests
    reply = await site.ask("POST", "/v1/embeddings", openai("a", "listed", dimensions=5))
    assert (400, "dimensions") == (reply.status, reply.content["error"]["param"])
    assert ["listed"] == site.models
    found = await site.post("/v1/embeddings", openai("banana", dimensions=2))
    assert normal([6, 3]) == found["data"][0]["embedding"]


@on_text_site(**BOTH)
async def test_models_are_listed(site: TextSite) -> None:
    """And each has a page. Others are not found, in OpenAI's form."""
    pages = await site.ask("GET", "/v1/models")
    assert (200, "list") == (pages.status, pages.content["object"])
    assert BOTH["names"] == [page["id"] for page in pages.content["data"]]
    page = await site.ask("GET", "/v1/models/sentences")
    assert pages.content["data"][0] == page.content
    assert {"id": "sentences", "object": "model"} == {key: page.content[key] for key in ("id", "object")}
    for path in ("/v1/models/nix", "/v1/models/", "/v1/chat/completions"):
        reply = await site.ask("GET", path)
        assert 404 == reply.status
        assert ["message", "type", "param", "code"] == [*reply.content["error"]]


@pytest.mark.parametrize("path", ["/", "/embed"])
@on_text_site(**BOTH)
async def test_tei_embeds(site: TextSite, path: str) -> None:
    """Vectors of length 1, unless that is not wanted."""
    found = await site.post(path, {"inputs": TEXTS})
    assert [*map(normal, VECTORS)] == found
    assert VECTORS == await site.post(path, {"inputs": TEXTS, "normalize": False})
    assert [normal(VECTORS[1])] == await site.post(path, {"inputs": TEXTS[1]})
    assert {"sentences"} == {*site.models}


@on_text_site(**BOTH)
async def test_tei_embeds_sparsely(site: TextSite) -> None:
    """What is not 0."""
    assert [[{"index": 4, "value": 1}]] * 3 == await site.post("/embed_sparse", {"inputs": TEXTS})
    reply = await site.ask("POST", "/embed_sparse", {"inputs": [[1, 2]]})
    assert (424, "Backend") == (reply.status, reply.content["error_type"])


@on_text_site(names=["sentences.tokens"])
async def test_a_model_without_vectors_is_refused_by_tei(site: TextSite) -> None:
    """As the backend's fault, with what is needed."""
    for path in ("/embed", "/embed_sparse"):
        reply = await site.ask("POST", path, {"inputs": "a"})
        assert (424, "Backend") == (reply.status, reply.content["error_type"])
        assert "embeds no texts" in reply.content["error"]


@on_text_site(**BOTH)
async def test_tei_tokenises(site: TextSite) -> None:
    """By the model that the chain's first stage is."""
    found = await site.post("/tokenize", {"inputs": TEXTS})
    assert [[1, *map(ord, text)] for text in TEXTS] == [[token["id"] for token in text] for text in found]
    assert ["sentences.tokens"] == site.models


@on_text_site(names=['listed={"encoder": "sentences.encoder", "tokenizer": "numbers"}'])
async def test_the_models_of_a_chain_are_set_by_name(site: TextSite) -> None:
    """Here an encoder that is right, and a tokenizer that is none."""
    assert 1 == len(await site.post("/embed", {"inputs": [[1, 2]]}))
    reply = await site.ask("POST", "/tokenize", {"inputs": "a"})
    assert (424, True) == (reply.status, "'numbers' is no tokenizer" in reply.content["error"])


@on_text_site(names=["sentences"])
async def test_tei_tells_of_its_model(site: TextSite) -> None:
    """By its own signature, and the bound on tokens by its encoder's."""
    info = (await site.ask("GET", "/info")).content
    told = {"model_id": "sentences", "model_dtype": "float32", "max_input_length": 512}
    assert told == {key: info[key] for key in told}
    assert 2048 == info["max_client_batch_size"]


@on_text_site(names=["listed"])
async def test_tei_tells_what_it_does_not_know_as_null(site: TextSite) -> None:
    """The bound on tokens without an encoder."""
    info = (await site.ask("GET", "/info")).content
    assert (None, "float16") == (info["max_input_length"], info["model_dtype"])


@pytest.mark.parametrize("path", ["/", "/health"])
@on_text_site(names=["sentences"])
async def test_tei_tells_whether_its_model_is_ready(site: TextSite, path: str) -> None:
    """With an empty body, or TEI's error."""
    asked: list[str] = []
    failures = [HttpError(503, "no slot")]

    async def ready(model: str, request: HttpRequest) -> HttpResponse:
        asked.append(model)
        if failures:
            raise failures.pop()
        return HttpResponse(body=(b"{}",))

    routes = TextRoutes(site.client, {"sentences": text_service("sentences")}, LongSteps(), ready, UNLIMITED)
    methods, form = routes.pages[path], routes.form_of(path)
    assert form is not None
    request = HttpRequest(method="GET", path=path, query="", headers={}, body=b"", peer="")
    with pytest.raises(HttpError) as refused:
        await methods["GET"](request)
    error = form(refused.value)
    assert (503, {"error": "no slot", "error_type": "Unhealthy"}) == (error.status, error.content)
    assert () == (await methods["GET"](request)).body
    assert ["sentences"] * 2 == asked


@on_text_site(**BOTH)
async def test_what_is_too_large_is_413_at_both(site: TextSite) -> None:
    """An error of the server has the form of the path."""
    site.error = TooLarge("too long")
    for path, text in (("/v1/embeddings", "message"), ("/embed", None)):
        reply = await site.ask("POST", path, {**openai("a"), "inputs": "a"})
        error = reply.content["error"]
        assert (413, "too long") == (reply.status, error if text is None else error[text])


@pytest.mark.parametrize(
    ("services", "paths"),
    [
        ({}, ["/v1/embeddings", "/v1/models", "/embed", "/info", "/", "/health"]),
    ],
)
def test_what_is_not_configured_is_not_served(services: dict[str, Any], paths: list[str]) -> None:
    """In the common form of errors."""

    @on_text_site(**services)
    async def test(site: TextSite) -> None:
        for path in paths:
            reply = await site.ask("POST", path, openai("a"))
            assert (404, {"error": f"there is no {path!r}"}) == (reply.status, reply.content)

    test()


@on_text_site(**BOTH)
async def test_other_methods_are_refused(site: TextSite) -> None:
    """In the form of the path."""
    reply = await site.ask("GET", "/v1/embeddings")
    assert (405, "POST") == (reply.status, reply.headers["Allow"])
    assert "invalid_request_error" == reply.content["error"]["type"]
    reply = await site.ask("PUT", "/")
    assert (405, "POST, GET, HEAD", "Validation") == (
        reply.status,
        reply.headers["Allow"],
        reply.content["error_type"],
    )


@on_text_site(**BOTH, tokens=Tokens("shop secret\n"))
async def test_tokens_of_callers_are_asked_for(site: TextSite) -> None:
    """In the form of the path."""
    known = {"authorization": "Bearer secret"}
    reply = await site.ask("POST", "/v1/embeddings", openai("a"))
    assert (401, "invalid_api_key") == (reply.status, reply.content["error"]["code"])
    reply = await site.ask("POST", "/", {"inputs": "a"})
    assert (401, "Validation") == (reply.status, reply.content["error_type"])
    assert 401 == (await site.ask("GET", "/info")).status
    await site.post("/v1/embeddings", openai("a"), known)
    assert [{"caller": "shop"}] == [request.tags for request in site.server.requests]


@on_text_site(**BOTH)
async def test_long_answers_are_written_in_turns(site: TextSite) -> None:
    """The bytes of the vectors decide which are long."""
    told: list[int] = []

    class Noting(LongSteps):
        """Turns that note how long they are told to be."""

        async def run_slices(self, nbytes: int, work: Any) -> Any:
            """As those that do not note it."""
            told.append(nbytes)
            return await super().run_slices(nbytes, work)

    routes = TextRoutes(
        site.client, {name: text_service(name) for name in BOTH["names"]}, Noting(), _nothing, UNLIMITED
    )
    for path in ("/v1/embeddings", "/embed", "/embed_sparse"):
        body = json.dumps({**openai(TEXTS), "inputs": TEXTS}).encode()
        await routes.pages[path]["POST"](
            HttpRequest(method="POST", path=path, query="", headers={}, body=body, peer="p")
        )
    assert [3 * 4 * 4, 3 * 4 * 4, 3 * 9 * 4] == told


async def _nothing(model: str, request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@pytest.mark.parametrize(
    "text", ["=", "m={", "m=[]", 'm={"encoder": 1}', 'm={"labels": [1]}', 'm={"nix": 1}', "m=3"]
)
def test_what_is_no_service_is_refused(text: str) -> None:
    """In words that say what is one."""
    with pytest.raises(ValueError):  # noqa: PT011 - of JSON, or ours
        text_service(text)

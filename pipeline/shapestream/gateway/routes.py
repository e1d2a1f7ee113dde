"""The endpoints: which method and path has which answer. Those of the Open Inference Protocol, and those for texts.

A handler gets the request and perhaps a model's name, asks the server through the SDK, and returns the answer. The pages
and bodies are made elsewhere; here the errors of the SDK become statuses.

OpenAI's paths for texts are below `/v1`, those of text-embeddings-inference (TEI) at the root. Each of the two has errors of
its own form. What is served is in the configuration; without it there is no such path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from importlib.resources import files
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Any, TypeAlias

import trio

import shapestream
from shapestream.client.async_face import Client
from shapestream.errors import DeadlineExceeded, RequestError
from shapestream.gateway.errors import OWN_ID, UnknownModel, http_error
from shapestream.gateway.infer_request import (
    HEAD_LENGTH,
    converted_nbytes,
    infer_response,
    json_nbytes,
    read_body,
    read_tensors,
    refused,
)
from shapestream.gateway.infer_tensors import DEFAULT_PRIORITY_LEVEL, flag, own_id
from shapestream.gateway.json_text import MOST_JSON_BYTES, read_object, write_json
from shapestream.gateway.model_pages import (
    PAGE_S,
    READY_S,
    ServerCounters,
    asked_for,
    bare,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
    signature_of,
    versions_of,
    why_not_ready,
    why_server_is_not_ready,
)
from shapestream.gateway.openai_api import (
    embeddings_response,
    model_page,
    models_page,
    openai_error,
    read_request,
    unknown_model,
)
from shapestream.gateway.options import TextService
from shapestream.gateway.rerank_api import ranking_response, read_ranking
from shapestream.gateway.tei_api import (
    EMBEDS,
    embed_response,
    embed_sparse_response,
    info_page,
    predict_response,
    read_embed,
    read_predict,
    read_rerank,
    read_tokenize,
    rerank_response,
    scoring_type,
    tei_error,
    tokenize_response,
)
from shapestream.gateway.text_calls import TextCalls
from shapestream.gateway.text_ports import score_ports, scores_texts, text_ports
from shapestream.slices import LongSteps, at_once
from shapestream.transport.http_listener import REFUSED_SITES, is_sent_by_another_site
from shapestream.versions import parted
from shapestream.web.messages import Admitted, HttpError, HttpRequest, HttpResponse
from shapestream.web.quotas import Quotas
from shapestream.web.tokens import Tokens
from shapestream_engine.signature import ModelSignature

OPEN_TO_ALL = ("/v2/health/live", "/v2/health/ready")
"""Pages that ask for no token: balancers and supervisors have none."""


class Routes:
    """Answers the requests of one gateway, through one client of the server."""

    def __init__(
        self,
        client: shapestream.Client,
        *,
        tokens: Tokens | None = None,
        by_loopback: bool = False,
        default_priority_level: int = DEFAULT_PRIORITY_LEVEL,
        services: Mapping[str, TextService] = MappingProxyType({}),
    ) -> None:
        """Without `tokens`, callers are told apart by their addresses. `by_loopback`: nothing else protects the port."""
        self.leaves = False
        """The gateway leaves: balancers are told that it is not ready, although its server may be."""
        self._client = client
        self._tokens = tokens
        self._by_loopback = by_loopback and tokens is None
        self._default_priority_level = default_priority_level
        self._long_steps = LongSteps()
        self._told_counters = ServerCounters(client)
        self._in_flight = Quotas(lambda: client.window_requests, "requests in flight")
        """All callers' requests at the server. Beyond the client's window they would wait in one queue, whoever asks."""
        self._texts = TextRoutes(client, services, self._long_steps, self._model_ready, self._in_flight)
        self._open_to_all = frozenset((*OPEN_TO_ALL, *self._texts.open_to_all))
        self._pages: dict[str, Methods] = {
            "/v2": {"GET": self._server},
            "/v2/health/live": {"GET": self._live},
            "/v2/health/ready": {"GET": self._ready},
            "/v2/models/stats": {"GET": self._all_statistics},
            "/v2/repository/index": {"POST": self._index},
            "/openapi.json": {"GET": self._openapi},
            **self._texts.pages,
        }
        self._model_pages: dict[str, tuple[str, ModelPage]] = {
            "": ("GET", self._metadata),
            "ready": ("GET", self._model_ready),
            "infer": ("POST", self._infer),
            "config": ("GET", self._config),
            "stats": ("GET", self._statistics),
        }

    def admit(self, request: HttpRequest) -> Admitted:
        """Return the caller of a request, by its head, its handler, and how long its body may be.

        Raises `HttpError` where its body is not worth reading. The handler raises it, too.
        """
        try:
            methods = self._found(request.path)
            method = "GET" if request.method == "HEAD" else request.method
            if method not in methods:
                allowed = ", ".join("GET, HEAD" if name == "GET" else name for name in methods)
                raise HttpError(405, f"{request.path} takes {allowed}", (("Allow", allowed),))
            if self._by_loopback and is_sent_by_another_site(request.headers):
                raise HttpError(421, REFUSED_SITES)
            page = partial(self._answered, methods[method])
            if self._tokens is None or (method == "GET" and request.path in self._open_to_all):
                caller = request.peer
            else:
                caller = self._tokens.caller_of(request)
            # Without binary data the whole body is JSON. More of a small body that was compressed is not made.
            most = inf if HEAD_LENGTH in request.headers else MOST_JSON_BYTES
            return Admitted(caller=caller, handler=page, most_decoded_bytes=most)
        except (RequestError, HttpError) as error:
            raise self._in_its_form(request, error) from None

    async def _answered(self, page: Page, request: HttpRequest) -> HttpResponse:
        try:
            return await page(request)
        except (RequestError, HttpError) as error:
            # It would keep the frames in which it was raised, and these the body, until a garbage collection.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            raise self._in_its_form(request, error) from None

    def _in_its_form(self, request: HttpRequest, error: RequestError | HttpError) -> HttpError:
        """Return an error as the clients of a path expect it."""
        if (form := self._texts.form_of(request.path)) is not None:
            return form(error)
        return http_error(error) if isinstance(error, RequestError) else error

    def _found(self, path: str) -> Methods:
        """Return the methods of a path, and their handlers."""
        if (found := self._pages.get(path) or self._texts.page_of_model(path)) is not None:
            return found
        match path.split("/"):
            case ["", "v2", "models", model, "versions", version, *rest] if version:
                pass
            case ["", "v2", "models", model, *rest]:
                version = ""
            case _:
                raise HttpError(404, f"there is no {path[:200]!r}")
        end = self._model_pages.get("/".join(rest)) if model and rest != [""] else None
        if end is None:
            raise HttpError(404, f"there is no {path[:200]!r}")
        method, model_page = end
        return {method: partial(model_page, asked_for(model, version))}

    # ---------------------------------------------------------------- pages about the server

    async def _server(self, request: HttpRequest) -> HttpResponse:
        return _page(server_metadata())

    async def _live(self, request: HttpRequest) -> HttpResponse:
        return _page({"live": True})

    async def _ready(self, request: HttpRequest) -> HttpResponse:
        self._check_that_it_stays()
        if (why := why_server_is_not_ready(await self._counters(READY_S))) is not None:
            raise _not_ready(why)
        return _page({"ready": True})

    def _check_that_it_stays(self) -> None:
        if self.leaves:
            raise _not_ready("this gateway leaves")

    async def _index(self, request: HttpRequest) -> HttpResponse:
        nbytes = len(request.body)
        read = read_object(request.body)
        asked = await self._long_steps.finish_slices(nbytes, read) if nbytes else {}
        ready_only = flag(asked, "ready") is True
        return _page(repository_index(await self._counters(PAGE_S), ready_only=ready_only))

    async def _all_statistics(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._told_counters.statistics_page(self._long_steps)
        except DeadlineExceeded:
            raise _silent(PAGE_S) from None

    async def _openapi(self, request: HttpRequest) -> HttpResponse:
        return self._description

    @cached_property
    def _description(self) -> HttpResponse:
        """The description of the interface, without the paths of services that are not configured."""
        told = at_once(read_object(files("shapestream.gateway").joinpath("openapi.json").read_bytes()))
        served = (f"{MODELS}{{model}}",) if "/v1/models" in self._pages else ()
        told["paths"] = {
            path: page
            for path, page in told["paths"].items()
            if path in self._pages or path in served or path.startswith("/v2/models/")
        }
        return _page(told)

    async def _counters(self, seconds: float) -> dict[str, Any]:
        try:
            return await self._told_counters.read(seconds)
        except DeadlineExceeded:
            raise _silent(seconds) from None

    # ---------------------------------------------------------------- pages about a model

    async def _metadata(self, model: str, request: HttpRequest) -> HttpResponse:
        signature = await self._loaded(model, PAGE_S)
        told = await self._told_counters.read_or_last(READY_S)
        return _page(model_metadata(signature, versions_of(model, told)))

    async def _config(self, model: str, request: HttpRequest) -> HttpResponse:
        return _page(model_config(await self._loaded(model, PAGE_S)))

    async def _statistics(self, model: str, request: HttpRequest) -> HttpResponse:
        await self._loaded(model, PAGE_S)
        return _page(model_statistics(model, await self._counters(PAGE_S)))

    async def _model_ready(self, model: str, request: HttpRequest) -> HttpResponse:
        self._check_that_it_stays()
        await self._loaded(model, READY_S)
        if (why := why_not_ready(model, await self._counters(READY_S))) is not None:
            raise _not_ready(why)
        return _page({"name": bare(model), "ready": True})

    async def _loaded(self, model: str, seconds: float) -> ModelSignature:
        """Return a model's signature. One that no worker has brought within these seconds is not ready."""
        try:
            return await signature_of(self._client, model, seconds)
        except DeadlineExceeded:
            raise _not_ready(f"model {model!r} is not loaded yet") from None

    # ---------------------------------------------------------------- inference

    async def _infer(self, model: str, request: HttpRequest) -> HttpResponse:
        began = trio.current_time()
        nbytes, steps = json_nbytes(request), self._long_steps
        body = await steps.finish_slices(nbytes, read_body(request, self._default_priority_level))
        deadline_s = body.options.deadline_s
        refusal: RequestError | None = None
        try:
            signature = await signature_of(self._client, model, deadline_s)
        except RequestError as error:
            refusal = error
        if refusal is not None:
            await steps.finish_slices(nbytes, refused(body, refusal), goes_on=True)
        if any(port.is_string for port in signature.inputs):
            nbytes = len(request.body)  # strings are read one by one, also those of binary data
        inputs, asked = await steps.finish_slices(nbytes, read_tensors(body, signature), goes_on=True)
        with self._in_flight.one(request.peer):
            result = await self._client.infer(
                model,
                inputs,
                deadline=None if deadline_s is None else began + deadline_s - trio.current_time(),
                priority=body.options.priority,
                request_id=own_id(request.headers.get(OWN_ID), body.id),
                trace=request.headers,
                caller=request.peer,
            )
        return await steps.run_slices(
            converted_nbytes(asked, result), infer_response(bare(model), body.id, asked, result)
        )


def _page(content: Any) -> HttpResponse:
    return HttpResponse(body=(write_json(content),))


def _silent(seconds: float) -> HttpError:
    return _not_ready(f"the server has not answered for {seconds:g} s")


def _not_ready(why: str) -> HttpError:
    return HttpError(503, why, (("Retry-After", "1"),))


MODELS = "/v1/models/"
RANKINGS = ("/v1/rerank", "/v2/rerank")
"""The pages that Cohere's and Jina's clients ask to rank texts."""
LABEL_PARTS = 12
"""Bytes of a score with its label in JSON, about 48, for each byte of it."""
TEI_OPEN_TO_ALL = ("/", "/health")
"""TEI's pages for balancers, which ask for no token where they are read (GET)."""

Page: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]
Methods: TypeAlias = Mapping[str, Page]
"""The methods of a path, and their handlers."""
ModelPage: TypeAlias = Callable[[str, HttpRequest], Awaitable[HttpResponse]]
CallsPage: TypeAlias = Callable[[TextCalls, HttpRequest], Awaitable[HttpResponse]]
ErrorForm: TypeAlias = Callable[[RequestError | HttpError], HttpError]


class TextRoutes:
    """The pages of a gateway's services for texts."""

    def __init__(
        self,
        client: Client,
        services: Mapping[str, TextService],
        steps: LongSteps,
        ready: ModelPage,
        in_flight: Quotas,
    ) -> None:
        """`ready` answers whether a model is. `in_flight`: of the requests of all callers."""
        self._client = client
        self._steps = steps
        self._ready = ready
        self._calls = {name: TextCalls(client, service, in_flight) for name, service in services.items()}
        self.pages: dict[str, Methods] = {}
        """The paths, except those that name a model."""
        self._tei_paths: frozenset[str] = frozenset()
        for name, calls in islice(self._calls.items(), 1):  # TEI's clients name no model
            health = partial(self._health, name)
            pages: dict[str, Methods] = {
                "/": {"POST": partial(self._embed_or_score, calls), "GET": health},
                "/embed": {"POST": partial(self._by_first, self._embed, scores=False)},
                "/rerank": {"POST": partial(self._by_first, self._rerank, scores=True)},
                "/predict": {"POST": partial(self._by_first, self._predict, scores=True)},
                "/embed_sparse": {"POST": partial(self._by_first, self._embed_sparse, scores=False)},
                "/tokenize": {"POST": partial(self._tokenize, calls)},
                "/info": {"GET": partial(self._info, name, calls)},
                "/health": {"GET": health},
            }
            self._tei_paths = frozenset(pages)
            self.pages = {
                "/v1/embeddings": {"POST": self._embeddings},
                **{path: {"POST": self._rank} for path in RANKINGS},
                "/v1/models": {"GET": self._models},
                **pages,
            }
        self.open_to_all = TEI_OPEN_TO_ALL if self._tei_paths else ()
        """Paths that ask for no token where they are read."""

    def page_of_model(self, path: str) -> Methods | None:
        """Return the methods of a path that names a model; None for any other."""
        if self._calls and path.startswith(MODELS):
            return {"GET": partial(self._model, path.removeprefix(MODELS))}
        return None

    def form_of(self, path: str) -> ErrorForm | None:
        """Return the form of errors at a path; None for the common one."""
        if self._calls and (path.startswith("/v1/") or path in RANKINGS):
            return openai_error
        return tei_error if path in self._tei_paths else None

    # ---------------------------------------------------------------- OpenAI

    async def _embeddings(self, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.finish_slices(len(request.body), read_request(request.body))
        calls = self._named(asked.model)
        found = await calls.embed(asked.inputs, asked.form, request)
        written = embeddings_response(asked, found.vectors, found.tokens, found.request_id)
        return await self._steps.run_slices(found.vectors.nbytes, written)

    async def _rank(self, request: HttpRequest) -> HttpResponse:
        nbytes = len(request.body)
        asked = await self._steps.finish_slices(nbytes, read_ranking(request.body))
        found = await self._named(asked.model).score(asked.pairs, request, only_one=True)
        written = ranking_response(asked, found.logits, found.tokens, found.request_id)
        return await self._steps.run_slices(nbytes, written)

    def _named(self, model: str) -> TextCalls:
        name, version = parted(model)
        calls = self._calls.get(name)
        if calls is None:
            raise unknown_model(model, self._calls)
        return calls if version is None else calls.of_version(version)

    async def _models(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=(write_json(models_page(self._calls)),))

    async def _model(self, name: str, request: HttpRequest) -> HttpResponse:
        if name not in self._calls:
            raise unknown_model(name, self._calls)
        return HttpResponse(body=(write_json(model_page(name)),))

    # ---------------------------------------------------------------- TEI

    async def _embed(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.finish_slices(len(request.body), read_embed(request.body))
        found = await calls.embed(asked.inputs, asked.form, request, truncate=asked.truncate)
        written = embed_response(asked, found.vectors, found.request_id)
        return await self._steps.run_slices(found.vectors.nbytes, written)

    async def _by_first(self, page: CallsPage, request: HttpRequest, *, scores: bool) -> HttpResponse:
        """Answer by the first service that scores texts, or that does not; by the first of all where there is none."""
        first = next(iter(self._calls.values()))
        for calls in self._calls.values():
            with suppress(UnknownModel):
                if (await calls.scoring() is not None) is scores:
                    first = calls
                    break
        return await page(first, request)

    async def _embed_or_score(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        """Answer as the page of the model's kind."""
        ports = await calls.scoring()
        if ports is None:
            return await self._embed(calls, request)
        return await (self._rerank if ports.labels == 1 else self._predict)(calls, request)

    async def _rerank(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        nbytes = len(request.body)
        asked = await self._steps.finish_slices(nbytes, read_rerank(request.body))
        found = await calls.score(asked.pairs, request, only_one=True)
        return await self._steps.run_slices(nbytes, rerank_response(asked, found.logits, found.request_id))

    async def _predict(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.finish_slices(len(request.body), read_predict(request.body))
        found = await calls.score(asked.pairs, request)
        written = predict_response(asked, found.logits, calls.labels, found.request_id)
        return await self._steps.run_slices(found.logits.nbytes * LABEL_PARTS, written)

    async def _embed_sparse(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.finish_slices(len(request.body), read_embed(request.body))
        found = await calls.embed_sparse(asked.inputs, request, truncate=asked.truncate)
        written = embed_sparse_response(found.vectors, found.request_id)
        return await self._steps.run_slices(found.vectors.nbytes, written)

    async def _tokenize(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        inputs = await self._steps.finish_slices(len(request.body), read_tokenize(request.body))
        tokens, request_id = await calls.tokenize(inputs, request)
        nbytes = sum(numbers.nbytes for numbers in tokens)
        return await self._steps.run_slices(nbytes, tokenize_response(tokens, request_id))

    async def _info(self, name: str, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        signature = await signature_of(self._client, name, PAGE_S)
        if scores_texts(signature):
            scoring = score_ports(signature)
            element_type, kind = scoring.element_type, scoring_type(scoring, calls.labels)
        else:
            element_type, kind = text_ports(signature).element_type, EMBEDS
        most = await calls.most_tokens()
        told = info_page(name, element_type, kind, most, server_metadata()["version"])
        return HttpResponse(body=(write_json(told),))

    async def _health(self, name: str, request: HttpRequest) -> HttpResponse:
        await self._ready(name, request)
        return HttpResponse()

"""The endpoints: which method and path has which answer. Here are those of the Open Inference Protocol.

A handler gets the request and perhaps a model's name, asks the server through the SDK, and returns the answer. The pages
and bodies are made elsewhere; here the errors of the SDK become statuses.
"""

from __future__ import annotations

from functools import cached_property, partial
from importlib.resources import files
from typing import Any

import trio

import shapestream
from shapestream.errors import DeadlineExceeded, RequestError
from shapestream.gateway.errors import OWN_ID, http_error
from shapestream.gateway.infer_options import DEFAULT_PRIORITY_LEVEL, flag, own_id
from shapestream.gateway.infer_request import json_nbytes, read_body, read_inputs, read_outputs
from shapestream.gateway.infer_response import converted_nbytes, infer_response
from shapestream.gateway.json_text import read_object, write_json
from shapestream.gateway.long_steps import LongSteps
from shapestream.gateway.model_pages import (
    PAGE_S,
    READY_S,
    check_version,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
    signature_of,
    why_not_ready,
    why_server_is_not_ready,
)
from shapestream.gateway.options import TextServices
from shapestream.gateway.text_routes import Methods, ModelPage, Page, TextRoutes
from shapestream.gateway.tokens import Tokens
from shapestream.transport.http_listener import REFUSED_SITES, is_sent_by_another_site
from shapestream.web.messages import HttpError, HttpRequest, HttpResponse
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
        services: TextServices | None = None,
    ) -> None:
        """Without `tokens`, callers are told apart by their addresses. `by_loopback`: nothing else protects the port."""
        self._client = client
        self._tokens = tokens
        self._by_loopback = by_loopback and tokens is None
        self._default_priority_level = default_priority_level
        self._long_steps = LongSteps()
        self._texts = TextRoutes(client, services or TextServices(), self._long_steps, self._model_ready)
        self._pages: dict[str, tuple[str, Page]] = {
            "/v2": ("GET", self._server),
            "/v2/health/live": ("GET", self._live),
            "/v2/health/ready": ("GET", self._ready),
            "/v2/models/stats": ("GET", self._all_statistics),
            "/v2/repository/index": ("POST", self._index),
            "/openapi.json": ("GET", self._openapi),
        }
        self._model_pages: dict[str, tuple[str, ModelPage]] = {
            "": ("GET", self._metadata),
            "ready": ("GET", self._model_ready),
            "infer": ("POST", self._infer),
            "config": ("GET", self._config),
            "stats": ("GET", self._statistics),
        }

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request that was admitted; raises `HttpError`."""
        try:
            return await self._found(request.path)[_method_of(request)](request)
        except (RequestError, HttpError) as error:
            raise self._in_its_form(request, error) from error

    def admit(self, request: HttpRequest) -> str:
        """Return the caller of a request, by its head; raises `HttpError` where its body is not worth reading."""
        try:
            methods, method = self._found(request.path), _method_of(request)
            if method not in methods:
                allowed = ", ".join("GET, HEAD" if name == "GET" else name for name in methods)
                raise HttpError(405, f"{request.path} takes {allowed}", (("Allow", allowed),))
            if self._by_loopback and is_sent_by_another_site(request.headers):
                raise HttpError(421, REFUSED_SITES)
            if self._tokens is None or self._is_open(method, request.path):
                return request.peer
            return self._tokens.caller_of(request)
        except (RequestError, HttpError) as error:
            raise self._in_its_form(request, error) from error

    def _in_its_form(self, request: HttpRequest, error: RequestError | HttpError) -> HttpError:
        """Return an error as the clients of a path expect it."""
        if (form := self._texts.form_of(request.path)) is not None:
            return form(error)
        return http_error(error) if isinstance(error, RequestError) else error

    def _is_open(self, method: str, path: str) -> bool:
        return method == "GET" and (path in OPEN_TO_ALL or path in self._texts.open_to_all)

    def _found(self, path: str) -> Methods:
        """Return the methods of a path, and their handlers."""
        if (found := self._pages.get(path)) is not None:
            method, page = found
            return {method: page}
        if (methods := self._texts.found(path)) is not None:
            return methods
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
        check_version(version)
        method, model_page = end
        return {method: partial(model_page, model)}

    # ---------------------------------------------------------------- pages about the server

    async def _server(self, request: HttpRequest) -> HttpResponse:
        return _page(server_metadata())

    async def _live(self, request: HttpRequest) -> HttpResponse:
        return _page({"live": True})

    async def _ready(self, request: HttpRequest) -> HttpResponse:
        if (why := why_server_is_not_ready(await self._counters(READY_S))) is not None:
            raise _not_ready(why)
        return _page({"ready": True})

    async def _index(self, request: HttpRequest) -> HttpResponse:
        nbytes = len(request.body)
        asked = await self._long_steps.run(nbytes, partial(read_object, request.body)) if nbytes else {}
        ready_only = flag(asked, "ready") is True
        return _page(repository_index(await self._counters(PAGE_S), ready_only=ready_only))

    async def _all_statistics(self, request: HttpRequest) -> HttpResponse:
        return await self._told(None)

    async def _openapi(self, request: HttpRequest) -> HttpResponse:
        return self._description

    @cached_property
    def _description(self) -> HttpResponse:
        """The description of the interface, without the paths of services that are not configured."""
        told = read_object(files("shapestream.gateway").joinpath("openapi.json").read_bytes())
        told["paths"] = {path: page for path, page in told["paths"].items() if self._is_served(path)}
        return _page(told)

    def _is_served(self, path: str) -> bool:
        return path in self._pages or path.startswith("/v2/models/") or path in self._texts.paths

    async def _counters(self, seconds: float) -> dict[str, Any]:
        try:
            return await self._client.statistics(deadline=seconds)
        except DeadlineExceeded:
            raise _not_ready(f"the server has not answered for {seconds:g} s") from None

    # ---------------------------------------------------------------- pages about a model

    async def _metadata(self, model: str, request: HttpRequest) -> HttpResponse:
        return _page(model_metadata(await self._loaded(model, PAGE_S)))

    async def _config(self, model: str, request: HttpRequest) -> HttpResponse:
        return _page(model_config(await self._loaded(model, PAGE_S)))

    async def _statistics(self, model: str, request: HttpRequest) -> HttpResponse:
        await self._loaded(model, PAGE_S)
        return await self._told(model)

    async def _model_ready(self, model: str, request: HttpRequest) -> HttpResponse:
        await self._loaded(model, READY_S)
        if (why := why_not_ready(model, await self._counters(READY_S))) is not None:
            raise _not_ready(why)
        return _page({"name": model, "ready": True})

    async def _told(self, model: str | None) -> HttpResponse:
        return _page(model_statistics(model, await self._counters(PAGE_S)))

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
        body = await steps.run(nbytes, partial(read_body, request, self._default_priority_level))
        deadline_s = body.options.deadline_s
        signature = await signature_of(self._client, model, deadline_s)
        if any(port.is_string for port in signature.inputs):
            nbytes = len(request.body)  # strings are read one by one, also those of binary data
        inputs = await steps.run_slices(nbytes, read_inputs(body, signature))
        asked = read_outputs(body, signature)
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
            converted_nbytes(asked, result), infer_response(model, body.id, asked, result)
        )


def _method_of(request: HttpRequest) -> str:
    return "GET" if request.method == "HEAD" else request.method


def _page(content: Any) -> HttpResponse:
    return HttpResponse(body=(write_json(content),))


def _not_ready(why: str) -> HttpError:
    return HttpError(503, why, (("Retry-After", "1"),))

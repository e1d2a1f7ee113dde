"""The pages of the Open Inference Protocol: which path and method mean what.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/stats, /openapi.json
    GET  /v2/models/M[/versions/1], and below that /ready, /config, /stats
    POST /v2/models/M[/versions/1]/infer, /v2/repository/index

Every page but /v2/health/live needs the server; every page but the two of health needs a token where tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Any, TypeAlias

from shapestream.client.async_face import Client
from shapestream.errors import InvalidRequest, RequestError, ShapestreamError
from shapestream.gateway.http_messages import HttpError, HttpRequest, HttpResponse
from shapestream.gateway.infer_request import read_infer
from shapestream.gateway.infer_response import MODEL_VERSION, infer_response
from shapestream.gateway.json_text import write_json
from shapestream.gateway.model_counts import AllCounts
from shapestream.gateway.model_pages import config_page, metadata_page
from shapestream.gateway.openapi import DESCRIPTION
from shapestream.gateway.statuses import http_error
from shapestream.gateway.tokens import Tokens
from shapestream.wire.tags import REQUEST_ID, can_be_sent
from shapestream_engine.signature import ModelSignature

EXTENSIONS = ["binary_tensor_data", "parameters", "statistics", "model_configuration", "schedule_policy"]
"""Extensions of the protocol that are served."""
PATIENCE_S = 5.0
"""Seconds for what the server answers at once, or not at all."""

_Page: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]
_ModelPage: TypeAlias = Callable[[str, HttpRequest], Awaitable[HttpResponse]]
_READING, _WRITING = ("GET", "HEAD"), ("POST",)


def json_page(value: Any, status: int = 200) -> HttpResponse:
    """Return plain data as a page."""
    return HttpResponse(status=status, body=(write_json(value),))


class Routes:
    """Answers requests by a client of the server."""

    def __init__(
        self, client: Client, *, version: str, tokens: Tokens | None = None, default_priority_level: int = 0
    ) -> None:
        """`version`: of this program. Without `tokens`, callers are told apart by their addresses."""
        self._client = client
        self._version = version
        self._tokens = tokens
        self._default_priority_level = default_priority_level
        self._counts = AllCounts()
        self._pages: Mapping[tuple[str, ...], tuple[tuple[str, ...], _Page]] = {
            ("v2",): (_READING, self._server),
            ("v2", "health", "live"): (_READING, self._live),
            ("v2", "health", "ready"): (_READING, self._ready),
            ("v2", "models", "stats"): (_READING, self._all_statistics),
            ("v2", "repository", "index"): (_WRITING, self._index),
            ("openapi.json",): (_READING, self._openapi),
        }
        self._model_pages: Mapping[str, tuple[tuple[str, ...], _ModelPage]] = {
            "": (_READING, self._metadata),
            "infer": (_WRITING, self._infer),
            "ready": (_READING, self._model_ready),
            "config": (_READING, self._config),
            "stats": (_READING, self._statistics),
        }

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer one request. Raises HttpError."""
        try:
            return await self._answer(request)
        except RequestError as error:
            raise http_error(error) from error

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        parts = tuple(request.path.strip("/").split("/"))
        if (found := self._pages.get(parts)) is not None:
            methods, page = found
            _check_method(request, methods)
            return await page(request)
        if parts[:2] != ("v2", "models") or len(parts) < 3:
            raise _no_page(request)
        model, rest = parts[2], parts[3:]
        if rest[:1] == ("versions",):
            if len(rest) < 2 or rest[1] != MODEL_VERSION:
                version = "/".join(rest[1:2])
                raise HttpError(
                    404, f"model {model!r} has no version {version!r}; each model has one, {MODEL_VERSION}"
                )
            rest = rest[2:]
        if len(rest) > 1 or (known := self._model_pages.get("".join(rest))) is None:
            raise _no_page(request)
        methods, model_page = known
        _check_method(request, methods)
        return await model_page(model, request)

    def _caller_of(self, request: HttpRequest) -> str:
        """Return the name of whom the request is for. Raises HttpError 401."""
        return request.peer if self._tokens is None else self._tokens.caller_of(request)

    async def _signature(self, model: str, deadline_s: float | None = PATIENCE_S) -> ModelSignature:
        """Return a model's signature. Raises HttpError 404 if there is no such model."""
        try:
            return await self._client.signature(model, deadline=deadline_s)
        except InvalidRequest as error:
            raise HttpError(404, error.message) from error

    # ---------------------------------------------------------------- the server

    async def _live(self, _: HttpRequest) -> HttpResponse:
        return json_page({"live": True})

    async def _ready(self, _: HttpRequest) -> HttpResponse:
        why = (await self._readiness())["not_ready"]
        return json_page(
            {"ready": not why, **({"error": "; ".join(why)} if why else {})}, 503 if why else 200
        )

    async def _readiness(self) -> dict[str, Any]:
        """Return what the server says of itself: why it is not ready, and why which models are not."""
        try:
            return await self._client.statistics(deadline=PATIENCE_S)
        except ShapestreamError as error:
            return {"not_ready": [str(error)], "models_not_ready": {}, "models": []}

    async def _server(self, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        return json_page({"name": "shapestream", "version": self._version, "extensions": EXTENSIONS})

    async def _openapi(self, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        return json_page({**DESCRIPTION, "info": {**DESCRIPTION["info"], "version": self._version}})

    async def _index(self, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        found = await self._client.statistics(deadline=PATIENCE_S)
        waiting = found["models_not_ready"]
        return json_page(
            [
                {
                    "name": name,
                    "version": MODEL_VERSION,
                    "state": "UNAVAILABLE" if name in waiting else "READY",
                    "reason": "; ".join(waiting.get(name, [])),
                }
                for name in found["models"]
            ]
        )

    async def _all_statistics(self, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        found = await self._client.statistics(deadline=PATIENCE_S)
        return json_page({"model_stats": [self._counts[name].to_dict() for name in found["models"]]})

    # ---------------------------------------------------------------- models

    async def _metadata(self, model: str, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        return json_page(metadata_page(await self._signature(model)))

    async def _config(self, model: str, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        return json_page(config_page(await self._signature(model)))

    async def _model_ready(self, model: str, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        found = await self._readiness()
        why = found["models_not_ready"].get(model, [])
        if not why and model not in found["models"]:
            if not found["models"]:
                why = found["not_ready"]
            else:
                raise HttpError(404, f"no model is called {model!r}")
        return json_page(
            {"name": model, "ready": not why, **({"error": "; ".join(why)} if why else {})},
            503 if why else 200,
        )

    async def _statistics(self, model: str, request: HttpRequest) -> HttpResponse:
        self._caller_of(request)
        await self._signature(model)
        return json_page({"model_stats": [self._counts[model].to_dict()]})

    async def _infer(self, model: str, request: HttpRequest) -> HttpResponse:
        caller, began = self._caller_of(request), monotonic()
        signature = await self._signature(model, None)
        asked = await read_infer(request, signature, default_priority_level=self._default_priority_level)
        counts = self._counts[model]
        try:
            result = await self._client.infer(
                model,
                asked.inputs,
                deadline=asked.deadline_s,
                priority=asked.priority,
                request_id=_request_id(request, asked.id),
                trace=request.headers,
                caller=caller,
            )
            response = await infer_response(model, asked, result)
        except BaseException:
            counts.failed(monotonic() - began)
            raise
        first = next(iter(asked.inputs.values()))
        counts.answered(first.shape[0] if first.ndim else 1, result.timings)
        return response


def _request_id(request: HttpRequest, given: str | None) -> str | None:
    """Return the id by which the server's logs and stories know the request: that of a header, or of the body."""
    for text in (request.headers.get("x-request-id"), given):
        if text is not None and can_be_sent(REQUEST_ID, text):
            return text
    return None


def _check_method(request: HttpRequest, methods: tuple[str, ...]) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise HttpError(
            405, f"{request.method} {request.path}: the method is {allowed}", (("Allow", allowed),)
        )


def _no_page(request: HttpRequest) -> HttpError:
    return HttpError(404, f"there is no {request.path[:200]}; see /openapi.json")

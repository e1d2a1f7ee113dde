"""The endpoints for texts: OpenAI's below `/v1`, and text-embeddings-inference's (TEI) at the root.

Each of the two has errors of its own form. What is served is in the configuration; without it there is no such path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

from shapestream.client.async_face import Client
from shapestream.errors import RequestError
from shapestream.gateway.errors import NotGiven
from shapestream.gateway.json_text import write_json
from shapestream.gateway.long_steps import LongSteps
from shapestream.gateway.model_pages import PAGE_S, server_metadata, signature_of
from shapestream.gateway.openai_api import (
    embeddings_response,
    model_page,
    models_page,
    openai_error,
    read_request,
    unknown_model,
)
from shapestream.gateway.options import TextServices
from shapestream.gateway.tei_api import (
    embed_response,
    embed_sparse_response,
    info_page,
    read_embed,
    read_tokenize,
    tei_error,
    tokenize_response,
)
from shapestream.gateway.text_calls import TextCalls
from shapestream.gateway.text_ports import text_ports
from shapestream.web.messages import HttpError, HttpRequest, HttpResponse

MODELS = "/v1/models/"
TEI_OPEN_TO_ALL = ("/", "/health")
"""TEI's pages for balancers, which ask for no token where they are read (GET)."""

Page: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]
Methods: TypeAlias = Mapping[str, Page]
"""The methods of a path, and their handlers."""
ModelPage: TypeAlias = Callable[[str, HttpRequest], Awaitable[HttpResponse]]
ErrorForm: TypeAlias = Callable[[RequestError | HttpError], HttpError]


class TextRoutes:
    """The pages of a gateway's services for texts."""

    def __init__(self, client: Client, services: TextServices, steps: LongSteps, ready: ModelPage) -> None:
        """`ready` answers whether a model is."""
        self._client = client
        self._steps = steps
        self._ready = ready
        self._openai = {name: TextCalls(client, service) for name, service in services.openai.items()}
        self._openai_pages: dict[str, Methods] = {}
        if services.openai:
            self._openai_pages = {
                "/v1/embeddings": {"POST": self._embeddings},
                "/v1/models": {"GET": self._models},
            }
        self._tei_pages: dict[str, Methods] = {}
        if (tei := services.tei) is not None:
            calls = TextCalls(client, tei)
            health, embed = partial(self._health, tei.name), partial(self._embed, calls)
            self._tei_pages = {
                "/": {"POST": embed, "GET": health},
                "/embed": {"POST": embed},
                "/embed_sparse": {"POST": partial(self._embed_sparse, calls)},
                "/tokenize": {"POST": partial(self._tokenize, calls)},
                "/info": {"GET": partial(self._info, tei.name, calls)},
                "/health": {"GET": health},
            }
        self.open_to_all = TEI_OPEN_TO_ALL if self._tei_pages else ()
        """Paths that ask for no token where they are read."""
        model_pages = (f"{MODELS}{{model}}",) if services.openai else ()
        self.paths = frozenset((*self._openai_pages, *model_pages, *self._tei_pages))
        """The paths that are served, as the description of the interface (openapi.json) has them."""

    def found(self, path: str) -> Methods | None:
        """Return the methods of a path, or None for one that is not served here."""
        if self._openai and path.startswith(MODELS):
            return {"GET": partial(self._model, path.removeprefix(MODELS))}
        return self._openai_pages.get(path) or self._tei_pages.get(path)

    def form_of(self, path: str) -> ErrorForm | None:
        """Return the form of errors at a path; None for the common one."""
        if self._openai and path.startswith("/v1/"):
            return openai_error
        return tei_error if path in self._tei_pages else None

    # ---------------------------------------------------------------- OpenAI

    async def _embeddings(self, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.run(len(request.body), partial(read_request, request.body))
        calls = self._openai.get(asked.model)
        if calls is None:
            raise unknown_model(asked.model, self._openai)
        found = await calls.embed(asked.inputs, asked.form, request)
        written = embeddings_response(asked, found.vectors, found.tokens, found.request_id)
        return await self._steps.run_slices(found.vectors.nbytes, written)

    async def _models(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=(write_json(models_page(self._openai)),))

    async def _model(self, name: str, request: HttpRequest) -> HttpResponse:
        if name not in self._openai:
            raise unknown_model(name, self._openai)
        return HttpResponse(body=(write_json(model_page(name)),))

    # ---------------------------------------------------------------- TEI

    async def _embed(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.run(len(request.body), partial(read_embed, request.body))
        found = await calls.embed(asked.inputs, asked.form, request)
        written = embed_response(asked, found.vectors, found.request_id)
        return await self._steps.run_slices(found.vectors.nbytes, written)

    async def _embed_sparse(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        asked = await self._steps.run(len(request.body), partial(read_embed, request.body))
        found = await calls.embed_sparse(asked.inputs, request)
        written = embed_sparse_response(found.vectors, found.request_id)
        return await self._steps.run_slices(found.vectors.nbytes, written)

    async def _tokenize(self, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        inputs = await self._steps.run(len(request.body), partial(read_tokenize, request.body))
        tokens, request_id = await calls.tokenize(inputs, request)
        nbytes = sum(numbers.nbytes for numbers in tokens)
        return await self._steps.run(nbytes, partial(tokenize_response, tokens, request_id))

    async def _info(self, name: str, calls: TextCalls, request: HttpRequest) -> HttpResponse:
        ports = text_ports(await signature_of(self._client, name, PAGE_S))
        try:
            most_tokens = (await calls.encoder()).most_tokens
        except NotGiven:
            most_tokens = None
        told = info_page(name, ports.element_type, most_tokens, server_metadata()["version"])
        return HttpResponse(body=(write_json(told),))

    async def _health(self, name: str, request: HttpRequest) -> HttpResponse:
        await self._ready(name, request)
        return HttpResponse()

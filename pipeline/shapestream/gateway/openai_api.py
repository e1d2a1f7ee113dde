"""OpenAI's API for embeddings, as its clients speak it: bodies of requests and answers, pages about models, errors.

Nothing here waits or asks. https://platform.openai.com/docs/api-reference/embeddings has the API.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from shapestream.errors import ModelError, Overloaded, RequestError
from shapestream.gateway.errors import OWN_ID, STATUSES, UnknownModel, WrongField, http_error
from shapestream.gateway.json_text import type_name, write_json
from shapestream.gateway.text_bodies import (
    Matrix,
    Texts,
    TokenLists,
    VectorForm,
    read_dimensions,
    read_texts,
    reads_object,
    written_rows,
)
from shapestream.slices import Slices
from shapestream.web.messages import HttpError, HttpResponse
from shapestream_engine.layout import value

OWNER = "shapestream"
OPENAI_STATUSES = {**STATUSES, Overloaded: 429, ModelError: 400}
"""Statuses of errors. OpenAI's clients take 429 for the wish that they slow down. They send a request again after any
status of 500 or more; what a model fails on, it would fail on again."""


class Encoding(StrEnum):
    """How a vector is written."""

    FLOAT = "float"
    """A vector is a list of numbers."""
    BASE64 = "base64"
    """A vector is its bytes, f32 and little-endian. OpenAI's clients ask for it unless they are told otherwise."""


@value
class EmbeddingsRequest:
    """The body of `POST /v1/embeddings`."""

    model: str
    inputs: Texts | TokenLists
    encoding: Encoding
    form: VectorForm


@reads_object
def read_request(content: dict[str, Any]) -> Slices[EmbeddingsRequest]:
    """Read the body of a request. Raises `WrongField`.

    `user`, and fields that OpenAI's API does not have, are ignored.
    """
    model = content.get("model")
    if not isinstance(model, str):
        raise WrongField("model", f'"model" is the name of a model, not {type_name(model)}')
    if "input" not in content:
        raise WrongField("input", '"input" is missing: a text, or a list of texts')
    wish = content.get("encoding_format")
    if wish is not None and wish not in [*Encoding]:
        raise WrongField("encoding_format", '"encoding_format" is "float" or "base64"')
    return EmbeddingsRequest(
        model=model,
        inputs=(yield from read_texts("input", content["input"])),
        encoding=Encoding.FLOAT if wish is None else Encoding(wish),
        form=VectorForm(dimensions=read_dimensions(content)),
    )


def embeddings_response(
    request: EmbeddingsRequest, vectors: Matrix, tokens: int, request_id: str
) -> Slices[HttpResponse]:
    """Return the answer to a request, written in slices: its vectors, and the tokens of all texts together."""

    def plain(begin: int, part: Matrix) -> list[Any]:
        return [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(_encoded(part, request.encoding), begin)
        ]

    rows = yield from written_rows(vectors, request.form, plain)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    end = b"]," + write_json({"model": request.model, "usage": usage})[1:]
    return HttpResponse(body=(b'{"object":"list","data":[', *rows, end), headers=((OWN_ID, request_id),))


def _encoded(part: Matrix, encoding: Encoding) -> Iterable[Any]:
    if encoding is Encoding.FLOAT:
        return part
    return [b64encode(row).decode() for row in part.astype("<f4", copy=False)]


# ---------------------------------------------------------------- models


def model_page(name: str) -> dict[str, Any]:
    """Return the entry of a model. The time of its making is not known."""
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER}


def models_page(names: Iterable[str]) -> dict[str, Any]:
    """Return the list of the models of texts."""
    return {"object": "list", "data": [model_page(name) for name in names]}


def unknown_model(name: str, names: Iterable[str]) -> UnknownModel:
    """Return the error for a name that no model here has."""
    return UnknownModel(f"no model of texts is called {name[:200]!r}; there is {', '.join(names)}")


# ---------------------------------------------------------------- errors


def openai_error(error: RequestError | HttpError) -> HttpError:
    """Return an error in OpenAI's form: {"error": {message, type, param, code}}."""
    found = http_error(error, OPENAI_STATUSES) if isinstance(error, RequestError) else error
    told = {
        "message": found.message,
        "type": _type(found.status),
        "param": _param(error),
        "code": _code(error),
    }
    return HttpError(found.status, found.message, found.headers, content={"error": told})


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {403: "permission_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")


def _param(error: RequestError | HttpError) -> str | None:
    match error:
        case WrongField():
            return error.field
        case UnknownModel():
            return "model"
        case _:
            return None


def _code(error: RequestError | HttpError) -> str | None:
    match error:
        case UnknownModel():
            return "model_not_found"
        case RequestError():
            return error.code
        case _:
            return "invalid_api_key" if error.status == 401 else None

"""The description of the gateway's pages by OpenAPI 3.1; it is the same for all models."""

from __future__ import annotations

from typing import Any

from shapestream.gateway.datatypes import DATATYPES
from shapestream.wire.limits import MAX_RANK, MAX_TENSORS
from shapestream_engine.shapes import MAX_SIZE


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_NAME = {"type": "string", "minLength": 1}
_DATATYPE = {"type": "string", "enum": list(DATATYPES.values())}
_SHAPE = _array({"type": "integer", "minimum": 0, "maximum": MAX_SIZE}, maxItems=MAX_RANK)
_OPEN_SHAPE = _array({"type": "integer", "minimum": -1})
_PARAMETERS = {"type": "object"}
_ERROR = _object(["error"], error=_TEXT)
_STATISTICS = _object(["model_stats"], model_stats=_array({"type": "object"}))
_METADATA_TENSOR = _object(["name", "datatype", "shape"], name=_NAME, datatype=_DATATYPE, shape=_OPEN_SHAPE)
_CONFIG_TENSOR = _object(["name", "data_type", "dims"], name=_NAME, data_type=_TEXT, dims=_OPEN_SHAPE)
_INFER_REQUEST = _object(
    ["inputs"],
    id=_TEXT,
    parameters=_PARAMETERS,
    inputs=_array(
        _object(
            ["name", "datatype", "shape"],
            name=_NAME,
            datatype=_DATATYPE,
            shape=_SHAPE,
            parameters=_PARAMETERS,
            data={"type": "array"},
        ),
        minItems=1,
        maxItems=MAX_TENSORS,
    ),
    outputs=_array(_object(["name"], name=_NAME, parameters=_PARAMETERS), maxItems=MAX_TENSORS),
)
_INFER_RESPONSE = _object(
    ["model_name", "model_version", "outputs"],
    id=_TEXT,
    model_name=_NAME,
    model_version=_TEXT,
    outputs=_array(
        _object(
            ["name", "datatype", "shape"],
            name=_NAME,
            datatype=_DATATYPE,
            shape=_SHAPE,
            parameters=_PARAMETERS,
        )
    ),
)

_WORDS = {
    400: "The request cannot be served as it is.",
    401: "A token is asked for.",
    403: "The gateway may not do this.",
    404: "There is no such model, version or page.",
    405: "The page has another method.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The content coding is not known.",
    417: "The only expectation that is met is 100-continue.",
    431: "The headers are too large.",
    500: "The model refused the input, or a defect of the server.",
    503: "Not now; Retry-After says when.",
    504: "The deadline passed before the answer was ready.",
}

_ANY_PAGE = (400, 401, 405, 408, 413, 415, 417, 431, 500, 503)
"""Statuses that a request may get whatever its page: of its form, its token, or the gateway's state."""


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(
    summary: str,
    answer: dict[str, Any],
    *errors: int,
    body: dict[str, Any] | None = None,
    on_model: bool = False,
) -> dict[str, Any]:
    statuses = {*_ANY_PAGE, *errors, *((404,) if on_model else ())}
    return {
        "summary": summary,
        **({} if body is None else {"requestBody": {"required": True, "content": _json(body)}}),
        "responses": {
            "200": {"description": summary, "content": {**_json(answer), **({} if body is None else _BYTES)}},
            **{
                str(status): {"description": _WORDS[status], "content": _json(_ERROR)}
                for status in sorted(statuses)
            },
        },
    }


_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {}}}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": _NAME}
_READY = _object(["ready"], ready={"type": "boolean"}, error=_TEXT)
_METADATA = _object(
    ["name", "versions", "platform", "inputs", "outputs"],
    name=_NAME,
    versions=_array(_TEXT),
    platform=_TEXT,
    inputs=_array(_METADATA_TENSOR),
    outputs=_array(_METADATA_TENSOR),
)
_CONFIG = _object(
    ["name", "platform", "max_batch_size", "input", "output"],
    name=_NAME,
    platform=_TEXT,
    max_batch_size=_COUNT,
    input=_array(_CONFIG_TENSOR),
    output=_array(_CONFIG_TENSOR),
)


def _model_paths(path: str) -> dict[str, Any]:
    """Return the pages of a model, below this path."""
    read: dict[str, dict[str, Any]] = {
        "": _operation("The model's inputs and outputs.", _METADATA, on_model=True),
        "/ready": _operation("Whether the model is ready.", _READY, on_model=True),
        "/config": _operation("The model's configuration, in Triton's form.", _CONFIG, on_model=True),
        "/stats": _operation("Counts of this gateway process, in Triton's form.", _STATISTICS, on_model=True),
    }
    infer = _operation("One inference.", _INFER_RESPONSE, 403, 504, body=_INFER_REQUEST, on_model=True)
    return {
        **{f"{path}{below}": {"parameters": [_MODEL], "get": operation} for below, operation in read.items()},
        f"{path}/infer": {"parameters": [_MODEL], "post": infer},
    }


_PATHS: dict[str, Any] = {
    "/v2": {
        "get": _operation(
            "The server and its extensions.",
            _object(["name", "version", "extensions"], name=_NAME, version=_TEXT, extensions=_array(_TEXT)),
        )
    },
    "/v2/health/live": {"get": _operation("The gateway lives.", _object(["live"], live={"type": "boolean"}))},
    "/v2/health/ready": {"get": _operation("Whether all models are ready.", _READY)},
    "/v2/models/stats": {"get": _operation("Counts of this gateway process, by model.", _STATISTICS)},
    "/v2/repository/index": {
        "post": _operation(
            "The models and their states.",
            _array(_object(["name", "state"], name=_NAME, version=_TEXT, state=_TEXT, reason=_TEXT)),
        )
    },
    **_model_paths("/v2/models/{model}"),
    **_model_paths("/v2/models/{model}/versions/1"),
}


def described(version: str) -> dict[str, Any]:
    """Return the description of this version of the program."""
    title = "shapestream: Open Inference Protocol, version 2"
    return {"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": _PATHS}

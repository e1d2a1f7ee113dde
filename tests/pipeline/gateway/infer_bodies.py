"""Bodies of inference requests, what is read of them, and answers taken apart: over HTTP, without a connection."""

from __future__ import annotations

import json
from typing import Any

import numpy.typing as npt
import pytest
from tests.entries import result_of

from shapestream.client.opened_models import Result
from shapestream.errors import RequestError
from shapestream.gateway.errors import http_error
from shapestream.gateway.infer_request import (
    AskedOutput,
    infer_response,
    read_body,
    read_inputs,
    read_outputs,
)
from shapestream.slices import at_once
from shapestream.testing import identity_signature, tensors_of
from shapestream.web.messages import HttpError, HttpRequest
from shapestream_engine.signature import ModelSignature

Array = npt.NDArray[Any]


def signature_of(element_type: str, rank: int = 2) -> ModelSignature:
    """A model of one input `x` and one output `y` of any sizes."""
    return identity_signature("m", ", ".join("abcdef"[:rank]), element_type)


def posted(content: Any, binary: bytes = b"", **headers: str) -> HttpRequest:
    """A request with this body, which may be text already."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    stated = {"inference-header-content-length": str(len(text))} if binary else {}
    return HttpRequest(
        method="POST", path="/", query="", headers={**stated, **headers}, body=text + binary, peer="127.0.0.1"
    )


def read(request: HttpRequest, signature: ModelSignature) -> dict[str, Array]:
    """The arrays of a request; its options and outputs are read as well."""
    try:
        body = at_once(read_body(request, 1))
        read_outputs(body, signature)
        return at_once(read_inputs(body, signature))
    except RequestError as error:
        raise http_error(error) from error


def entry(datatype: str, shape: Any, **more: Any) -> dict[str, Any]:
    """The input `x`."""
    return {"name": "x", "datatype": datatype, "shape": list(shape), **more}


def answered(array: Array, *, binary: bool) -> tuple[dict[str, Any], bytes]:
    """The output `y` of an answer, and the bytes behind the JSON."""
    result = Result(None, result_of(1, tensors_of([array])), {0: "y"})
    asked = [AskedOutput(name="y", binary=binary)]
    response = at_once(infer_response("m", None, asked, result))
    whole = b"".join(response.body)
    length = int(dict(response.headers).get("Inference-Header-Content-Length", len(whole)))
    (output,) = json.loads(whole[:length])["outputs"]
    return output, whole[length:]


def refuse(request: HttpRequest, signature: ModelSignature) -> str:
    """The reason why a request is refused; its caller is to blame."""
    with pytest.raises(HttpError) as caught:
        read(request, signature)
    assert caught.value.status in (400, 413)
    return caught.value.message

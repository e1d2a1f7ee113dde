"""The gateway's routes before a scripted server, in one event loop and on a clock that jumps; and requests for them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
import trio
from trio.testing import MockClock

import shapestream
from shapestream.errors import ModelError
from shapestream.gateway.routes import Routes
from shapestream.testing import Arrays, MemoryEndpoint, ScriptedModel, ScriptedServer, identity_signature
from shapestream.web.answers import error_answer
from shapestream.web.messages import HttpError, HttpRequest, HttpResponse
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def port_of(text: str, kind: str, name: str, element_type: str) -> Any:
    """A port of this shape; an output has the rule that fits."""
    shape = NamedShape.parse(text)
    if kind == "input":
        return InputPort(name, element_type, shape)
    return OutputPort(name, element_type, shape, Rows() if "batch" in shape.names else Whole())


PAIR = ModelSignature(
    name="pair",
    inputs=(port_of("batch, n", "input", "ids", "i64"), port_of("batch, 2", "input", "flags", "boolean")),
    outputs=(
        port_of("batch, n", "output", "twice", "i64"),
        port_of("batch, 2", "output", "not", "boolean"),
        port_of("batch, 2", "output", "half", "f16"),
    ),
)
"""A model of two inputs and three outputs, of several element types."""


def pair(inputs: Arrays) -> Arrays:
    """The model `pair`."""
    flags = inputs["flags"]
    return {"twice": inputs["ids"] * 2, "not": ~flags, "half": flags.astype(np.float16) / np.float16(2)}


def double(inputs: Arrays) -> Arrays:
    """Twice the input; a negative number in it is more than the model can bear."""
    if inputs["x"].size and inputs["x"].min() < 0:
        raise ModelError("negative numbers overwhelm this model")
    return {"y": inputs["x"] * np.float32(2)}


@dataclass(frozen=True)
class Reply:
    """What a caller got."""

    status: int
    response: HttpResponse

    @property
    def headers(self) -> dict[str, str]:
        """By name."""
        return dict(self.response.headers)

    @property
    def body(self) -> bytes:
        """All pieces."""
        return b"".join(self.response.body)

    @property
    def content(self) -> Any:
        """The JSON of the body, without the binary data behind it."""
        length = self.headers.get("Inference-Header-Content-Length")
        return json.loads(self.body if length is None else self.body[: int(length)])

    @property
    def binary(self) -> bytes:
        """The binary data."""
        return self.body[int(self.headers["Inference-Header-Content-Length"]) :]


async def asked(
    routes: Routes,
    method: str,
    path: str,
    body: bytes | bytearray = b"",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """What these routes answer, errors included."""
    request = HttpRequest(
        method=method, path=path, query="", headers=headers or {}, body=body, peer="127.0.0.1"
    )
    try:
        admitted = routes.admit(request)
        return Reply(200, await admitted.handler(replace(request, peer=admitted.caller)))
    except HttpError as error:
        return Reply(error.status, error_answer(error))


class GatewaySite:
    """Routes, and the server behind them."""

    def __init__(self, server: ScriptedServer, routes: Routes) -> None:
        self.server = server
        self.routes = routes

    async def ask(
        self, method: str, path: str, body: bytes | bytearray = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The answer to a request, errors included."""
        return await asked(self.routes, method, path, body, headers)

    async def get(self, path: str) -> Any:
        """The content of a page."""
        reply = await self.ask("GET", path)
        assert 200 == reply.status, reply.content
        return reply.content

    async def infer(
        self,
        content: Any,
        binary: bytes = b"",
        *,
        model: str = "double",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The answer to an inference request, of JSON and perhaps binary data."""
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        length = {"inference-header-content-length": str(len(text))} if binary else {}
        path = f"/v2/models/{model}/infer"
        return await self.ask("POST", path, text + binary, {**length, **(headers or {})})

    async def refused(self, status: int, content: Any, binary: bytes = b"", **more: Any) -> str:
        """The error of an inference request that is refused with this status before it reaches the server."""
        before = len(self.server.requests)
        reply = await self.infer(content, binary, **more)
        assert status == reply.status, reply.body[:500]
        assert before == len(self.server.requests)
        return str(reply.content["error"])


def x_input(data: Any = None, shape: Any = None, **more: Any) -> dict[str, Any]:
    """The input `x` of a request, by default of three numbers."""
    data = [1, 2, 3] if data is None else data
    return {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, 3] if shape is None else shape,
        "data": data,
        **more,
    }


def x_request(*arguments: Any, **more: Any) -> dict[str, Any]:
    """A request with the input `x`."""
    return {"inputs": [x_input(*arguments, **more)]}


def on_site(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on a site, its first argument."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            server = ScriptedServer(
                ScriptedModel(identity_signature("double", "batch:1..64, n"), double),
                ScriptedModel(identity_signature("slow", "batch:1..64, n"), double, duration_s=30),
                ScriptedModel(identity_signature("any", "a, b", "i64")),
                ScriptedModel(identity_signature("scalar", "", "f64")),
                ScriptedModel(PAIR, pair),
            )
            endpoint = MemoryEndpoint()
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run, endpoint.bind())
                async with shapestream.connect(endpoint.connect) as client:
                    await test(GatewaySite(server, Routes(client, default_priority_level=2)), *args, **kwargs)
                nursery.cancel_scope.cancel()
            assert [] == server.errors

        trio.run(main, clock=MockClock(autojump_threshold=0))

    _, *others = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return run

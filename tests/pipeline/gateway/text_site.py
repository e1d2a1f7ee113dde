"""The routes of a gateway that serves texts, before models of texts, in one event loop and on a clock that jumps."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio
from tests.pipeline.gateway.gateway_site import Reply, asked
from trio.testing import MockClock

from shapestream.errors import InvalidRequest, RequestError
from shapestream.gateway.routes import Routes
from shapestream.gateway.text_services import text_services
from shapestream.gateway.tokens import Tokens
from shapestream_engine.ports import InputPort, OutputPort, Rows, Whole, list_ports
from shapestream_engine.shapes import NamedShape

SIZE = 4
"""Numbers of a vector."""


def vector(text: str) -> list[float]:
    """The vector of a text, not of length 1."""
    return [len(text), text.count("a"), 0.5, 0]


def _text_input() -> Any:
    return SimpleNamespace(name="text", element_type="str", shape=NamedShape.parse("texts"), mask_of=None)


def _port(kind: Any, name: str, element_type: str, shape: str, *more: Any) -> Any:
    return kind(name, element_type, NamedShape.parse(shape), *more)


class FakeClient:
    """The face of the SDK, with models of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """Models that ran, and what their caller asked for besides inputs."""
        self.most_at_once = 0
        self.error: RequestError | None = None
        """What each inference ends with, if anything."""
        self._running = 0
        self._models: dict[str, tuple[Any, Callable[..., dict[str, Any]]]] = {}
        self._add("sentences", [_text_input()], self._outputs("texts"), self._embed)
        self._add("listed", [_text_input()], self._outputs("texts"), self._embed_as_list)
        self._add(
            "numbers", [_port(InputPort, "x", "f32", "batch, n")], self._outputs("batch")[:1], self._encode
        )
        self._add(
            "sentences.tokens",
            [_text_input()],
            list_ports("input_ids", "i64", NamedShape.parse("tokens")),
            lambda text: {"input_ids": [np.array([1, *map(ord, each)]) for each in text]},
        )
        self._add(
            "sentences.encoder",
            [
                _port(InputPort, "input_ids", "i32", "batch, seq:1..512"),
                _port(InputPort, "attention_mask", "i64", "batch, seq:1..512"),
                _port(InputPort, "token_type_ids", "i64", "batch, seq:1..512"),
            ],
            [_port(OutputPort, "sentence_embedding", "f32", "batch, 4", Rows())],
            self._encode,
        )

    def _outputs(self, rows: str) -> list[Any]:
        return [
            _port(OutputPort, "embedding", "f32", f"{rows}, {SIZE}", Whole()),
            _port(OutputPort, "tokens", "i64", rows, Whole()),
            _port(OutputPort, "sparse", "f32", f"{rows}, 9", Whole()),
        ]

    def _add(self, name: str, inputs: Any, outputs: Any, run: Callable[..., dict[str, Any]]) -> None:
        self._models[name] = SimpleNamespace(name=name, inputs=tuple(inputs), outputs=tuple(outputs)), run

    def _embed(self, text: list[str]) -> dict[str, Any]:
        sparse = np.zeros((len(text), 9), np.float32)
        sparse[:, 4] = 1
        return {
            "embedding": np.array([vector(each) for each in text], np.float32),
            "tokens": np.array([1 + len(each) for each in text]),
            "sparse": sparse,
        }

    def _embed_as_list(self, text: list[str]) -> dict[str, Any]:
        outputs = self._embed(text)
        return {**outputs, "embedding": [*outputs["embedding"]]}

    def _encode(self, **inputs: Any) -> dict[str, Any]:
        ids = inputs["input_ids"]
        assert np.int32 == ids.dtype
        assert (1 == inputs["attention_mask"]).all()
        assert (0 == inputs["token_type_ids"]).all()
        text = "".join(map(chr, ids[0, 1:].tolist()))
        return {"sentence_embedding": np.array([vector(text)], np.float32)}

    async def signature(self, model: str, *, deadline: float | None = None) -> Any:
        """As the SDK's."""
        if model not in self._models:
            raise InvalidRequest(f"there is no model {model!r}")
        return self._models[model][0]

    async def infer(self, model: str, inputs: Mapping[str, Any], **options: Any) -> Any:
        """As the SDK's."""
        self.calls.append((model, options))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await trio.sleep(1)
        finally:
            self._running -= 1
        if self.error is not None:
            raise self.error
        result = Outputs(self._models[model][1](**inputs))
        result.request_id = options["request_id"] or "made"
        return result

    async def statistics(self, *, deadline: float | None = None) -> Any:
        """As the SDK's."""
        return {"not_ready": [], "models": [*self._models], "models_not_ready": {"listed": ["no slot"]}}


class Outputs(dict[str, Any]):
    """A result."""

    request_id = ""


class TextSite:
    """Routes, and the client behind them."""

    def __init__(self, tokens: Tokens | None = None, **services: Any) -> None:
        self.client = FakeClient()
        self.routes = Routes(self.client, tokens=tokens, services=text_services(**services))  # type: ignore[arg-type]

    async def ask(
        self, method: str, path: str, content: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The answer to a request, errors included."""
        body = (
            content
            if isinstance(content, bytes)
            else b""
            if content is None
            else json.dumps(content).encode()
        )
        return await asked(self.routes, method, path, body, headers)

    async def post(self, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The content of an answer."""
        reply = await self.ask("POST", path, content, headers)
        assert 200 == reply.status, reply.content
        return reply.content


def on_text_site(**options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test on a site, its first argument."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            async def main() -> None:
                await test(TextSite(**options), *args, **kwargs)

            trio.run(main, clock=MockClock(autojump_threshold=0))

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate

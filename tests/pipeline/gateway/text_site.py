"""The routes of a gateway that serves texts, before a scripted server, in one event loop and on a clock that jumps."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import numpy as np
import trio
from tests.pipeline.gateway.gateway_site import Reply, asked
from trio.testing import MockClock

import shapestream
from shapestream.errors import RequestError
from shapestream.gateway.options import text_service
from shapestream.gateway.routes import Routes
from shapestream.testing import Arrays, MemoryEndpoint, ScriptedModel, ScriptedServer
from shapestream.web.tokens import Tokens
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SIZE = 4
"""Numbers of a vector."""


def vector(text: str) -> list[float]:
    """The vector of a text, not of length 1."""
    return [len(text), text.count("a"), 0.5, 0]


def _input(name: str, element_type: str, shape: str) -> InputPort:
    return InputPort(name, element_type, NamedShape.parse(shape))


def _output(name: str, element_type: str, shape: str) -> OutputPort:
    named = NamedShape.parse(shape)
    return OutputPort(name, element_type, named, Rows() if "batch" in named.names else Whole())


def _list(name: str, element_type: str, shape: str) -> tuple[OutputPort, OutputPort]:
    return list_ports(name, element_type, NamedShape.parse(shape))


TEXT = _input("text", "str", "texts")
SENTENCES = ModelSignature(
    "sentences",
    (TEXT,),
    (
        _output("embedding", "f32", f"texts, {SIZE}"),
        _output("tokens", "i64", "texts"),
        _output("uncut", "i64", "texts"),
        _output("sparse", "f32", "texts, 9"),
    ),
)
LISTED = ModelSignature("listed", (TEXT,), _list("embedding", "f16", "size"))
NUMBERS = ModelSignature(
    "numbers", (_input("x", "f32", "batch, n"),), (_output("embedding", "f32", "batch, n"),)
)
TOKENS = ModelSignature("sentences.tokens", (TEXT,), _list("input_ids", "i64", "tokens"))
ENCODER = ModelSignature(
    "sentences.encoder",
    (
        _input("input_ids", "i32", "batch, seq:1..512"),
        _input("attention_mask", "i64", "batch, seq"),
        _input("token_type_ids", "i64", "batch, seq"),
    ),
    (
        _output("sentence_embedding", "f32", f"batch, {SIZE}"),
        _output("last_hidden_state", "f32", "batch, seq, 8"),
    ),
)


QUERY = _input("query", "str", "queries")
COUNTS = (_output("tokens", "i64", "texts"), _output("uncut", "i64", "texts"))
RANKER = ModelSignature("ranker", (TEXT, QUERY), (_output("score", "f32", "texts, 1"), *COUNTS))
CLASSES = ModelSignature(
    "classes", (TEXT, QUERY), (*_list("score", "f16", "labels"), _output("tokens", "i64", "texts"))
)
PAIR_TOKENS = ModelSignature("ranker.tokens", (TEXT, QUERY), (*_list("input_ids", "i64", "tokens"), *COUNTS))
MOST_TOKENS = 12
"""Tokens of a row, at most: longer ones are cut."""


def logit(query: str, text: str) -> float:
    """The ranker's number for a pair."""
    return text.count(query) - len(text) / 8


def labelled(text: str) -> list[float]:
    """The numbers for the labels of a text."""
    return [len(text), 1, text.count("a")]


class TextSite:
    """Routes, and the server behind them."""

    def __init__(self, window_requests: int = 1024) -> None:
        self.error: RequestError | None = None
        """What each request ends with, if anything."""
        self.not_a_number: int | None = None
        """The text whose score is NaN."""
        self.most_at_once = 0
        self.queries: list[list[str]] = []
        """Those of each request to score texts, in order."""
        self.models: list[str] = []
        """Those that ran, in order."""
        self._running = 0
        models = {
            SENTENCES: self._embed,
            LISTED: self._embed_as_list,
            NUMBERS: lambda inputs: {"embedding": inputs["x"]},
            TOKENS: self._tokenise,
            ENCODER: self._encode,
            RANKER: self._rank,
            CLASSES: self._classify,
            PAIR_TOKENS: self._tokenise,
        }
        self.server = ScriptedServer(
            *(
                ScriptedModel(signature, self._answers(signature.name, run), duration_s=self._begin)
                for signature, run in models.items()
            ),
            window_requests=window_requests,
        )
        self.routes: Routes
        self.client: shapestream.Client

    def _begin(self, inputs: Arrays) -> float:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        return 1

    def _answers(self, name: str, run: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        def answer(inputs: Arrays) -> Arrays:
            self._running -= 1
            self.models.append(name)
            if self.error is not None:
                raise self.error
            return run(inputs)

        return answer

    def _embed(self, inputs: Arrays) -> Arrays:
        texts = inputs["text"].tolist()
        sparse = np.zeros((len(texts), 9), np.float32)
        sparse[:, 4] = 1
        return {
            "embedding": np.array([*map(vector, texts)], np.float32),
            "tokens": np.array([min(MOST_TOKENS, 1 + len(each)) for each in texts]),
            "uncut": np.array([1 + len(each) for each in texts]),
            "sparse": sparse,
        }

    def _embed_as_list(self, inputs: Arrays) -> Arrays:
        vectors = np.array([*map(vector, inputs["text"].tolist())], np.float16)
        return {"embedding": vectors.reshape(-1), "embedding.shapes": np.full((len(vectors), 1), SIZE)}

    def _tokenise(self, inputs: Arrays) -> Arrays:
        lists = [[1, *map(ord, text)] for text in inputs["text"].tolist()]
        found = {
            "input_ids": np.array([*chain(*lists)]),
            "input_ids.shapes": np.array([[len(each)] for each in lists]),
        }
        if "query" not in inputs:
            return found
        assert [] == inputs["query"].tolist()
        counts = np.array([*map(len, lists)])
        return {**found, "tokens": counts, "uncut": counts}

    def _rank(self, inputs: Arrays) -> Arrays:
        texts, queries = inputs["text"].tolist(), inputs["query"].tolist()
        self.queries.append(queries)
        pairs = [
            *zip(queries * (len(texts) if len(queries) == 1 else 1) or [""] * len(texts), texts, strict=True)
        ]
        uncut = np.array([3 + len(query) + len(text) for query, text in pairs])
        score = np.array([[logit(*pair)] for pair in pairs], np.float32)
        if self.not_a_number is not None:
            score[self.not_a_number] = np.nan
        return {
            "score": score,
            "tokens": np.minimum(uncut, MOST_TOKENS),
            "uncut": uncut,
        }

    def _classify(self, inputs: Arrays) -> Arrays:
        texts = inputs["text"].tolist()
        self.queries.append(inputs["query"].tolist())
        return {
            "score": np.array([*chain(*map(labelled, texts))], np.float16),
            "score.shapes": np.full((len(texts), 1), 3),
            "tokens": np.ones(len(texts), np.int64),
        }

    def _encode(self, inputs: Arrays) -> Arrays:
        ids = inputs["input_ids"]
        assert (1 == inputs["attention_mask"]).all()
        assert (0 == inputs["token_type_ids"]).all()
        text = "".join(map(chr, ids[0, 1:].tolist()))
        return {
            "sentence_embedding": np.array([vector(text)], np.float32),
            "last_hidden_state": np.zeros((*ids.shape, 8), np.float32),
        }

    async def ask(
        self, method: str, path: str, content: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The answer to a request, errors included."""
        body = (
            b""
            if content is None
            else content
            if isinstance(content, bytes)
            else json.dumps(content).encode()
        )
        return await asked(self.routes, method, path, body, headers)

    async def post(self, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The content of an answer."""
        reply = await self.ask("POST", path, content, headers)
        assert 200 == reply.status, reply.content
        return reply.content


def on_text_site(
    tokens: Tokens | None = None, window_requests: int = 1024, names: Sequence[str] = ()
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test on a site with these services, its first argument."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            async def main() -> None:
                site, endpoint = TextSite(window_requests), MemoryEndpoint()
                async with trio.open_nursery() as nursery:
                    await nursery.start(site.server.run, endpoint.bind())
                    async with shapestream.connect(endpoint.connect) as site.client:
                        site.routes = Routes(
                            site.client,
                            tokens=tokens,
                            services={service.name: service for service in map(text_service, names)},
                        )
                        await test(site, *args, **kwargs)
                    nursery.cancel_scope.cancel()
                assert [] == site.server.errors

            trio.run(main, clock=MockClock(autojump_threshold=0))

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate

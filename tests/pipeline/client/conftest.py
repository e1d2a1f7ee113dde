"""The three faces behind one: a scenario is written once, as a coroutine, and run under trio, asyncio and neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import shapestream
from shapestream.errors import ModelError
from shapestream.testing import Arrays, ScriptedModel, ScriptedServer, identity_signature, serve_in_thread

Scenario = Callable[..., Coroutine[Any, Any, None]]


class Face:
    """One way to use the client. `run` runs a scenario to its end."""

    name = ""
    has_async_sources = True

    def __init__(self, server: ScriptedServer, address: str) -> None:
        self.as_source: Callable[[Any], Any] = lambda items: items
        self.server = server
        self.address = address

    def run(self, scenario: Scenario) -> None:
        """Run `scenario(face)`."""
        raise NotImplementedError

    def connect(self, **options: Any) -> Any:
        """A client, as an async context manager."""
        raise NotImplementedError

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call something that blocks."""
        raise NotImplementedError

    async def until(self, condition: Callable[[ScriptedServer], Any]) -> None:
        """Wait until the server is in a certain state."""
        await self.in_thread(self.server.wait_until, condition)


class TrioFace(Face):
    """`shapestream.connect`."""

    name = "trio"

    def run(self, scenario: Scenario) -> None:
        """Under trio."""
        trio.run(scenario, self)

    def connect(self, **options: Any) -> Any:
        """The face's own client."""
        return shapestream.connect(self.address, **options)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The face's own way."""
        return await trio.to_thread.run_sync(function, *arguments)


class AioFace(Face):
    """`shapestream.aio.connect`."""

    name = "aio"

    def run(self, scenario: Scenario) -> None:
        """Under asyncio."""
        asyncio.run(scenario(self))

    def connect(self, **options: Any) -> Any:
        """The face's own client."""
        return shapestream.aio.connect(self.address, **options)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The face's own way."""
        return await asyncio.to_thread(function, *arguments)


class BlockingFace(Face):
    """`shapestream.blocking.connect`, dressed up as coroutines that never wait."""

    name = "blocking"
    has_async_sources = False

    def run(self, scenario: Scenario) -> None:
        """With nothing that could suspend it."""
        coroutine = scenario(self)
        with pytest.raises(StopIteration):
            coroutine.send(None)

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]  # of Any
        """The client, dressed up."""
        with shapestream.blocking.connect(self.address, **options) as client:
            yield _DressedClient(client)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The face's own way."""
        return function(*arguments)


class _DressedClient:
    def __init__(self, client: shapestream.blocking.Client) -> None:
        self._client = client

    async def infer(self, *arguments: Any, **options: Any) -> Any:
        return self._client.infer(*arguments, **options)

    async def signature(self, model: str) -> Any:
        return self._client.signature(model)

    async def statistics(self) -> Any:
        return self._client.statistics()

    def stream(self, *arguments: Any, **options: Any) -> Any:
        return _DressedStream(self._client.stream(*arguments, **options))


class _DressedStream:
    def __init__(self, stream: shapestream.blocking.Stream) -> None:
        self._stream = stream

    async def __aenter__(self) -> _DressedStream:
        self._stream.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)

    def __aiter__(self) -> _DressedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._stream)
        except StopIteration:
            raise StopAsyncIteration from None


def double(inputs: Arrays) -> Arrays:
    """Twice the input; a negative number in it is more than the model can bear."""
    if inputs["x"].size and inputs["x"].min() < 0:
        raise ModelError("negative numbers overwhelm this model")
    return {"y": inputs["x"] * np.float32(2)}


@pytest.fixture
def server() -> ScriptedServer:
    """A scripted server with the models `identity`, `double` and `any` (any shape, no batch axis, i64)."""
    return ScriptedServer(
        ScriptedModel(identity_signature("identity")),
        ScriptedModel(identity_signature("double", "batch:1..64, n"), double),
        ScriptedModel(identity_signature("any", "a, b", "i64")),
        ScriptedModel(identity_signature("scalar", "", "f64")),
    )


@pytest.fixture
def address(server: ScriptedServer, tmp_path: Path) -> Iterator[str]:
    """Where the scripted server listens, over ZeroMQ."""
    with serve_in_thread(server, f"ipc://{tmp_path}/run/s") as address:
        yield address


@pytest.fixture(params=[TrioFace, AioFace, BlockingFace], ids=lambda face: face.name)
def face(request: pytest.FixtureRequest, server: ScriptedServer, address: str) -> Face:
    """Each face in turn, with a server to talk to."""
    made: Face = request.param(server, address)
    return made


@pytest.fixture(
    params=[(TrioFace, True), (TrioFace, False), (AioFace, True), (AioFace, False), (BlockingFace, False)],
    ids=lambda pair: f"{pair[0].name}-{'async' if pair[1] else 'plain'}",
)
def sourced(request: pytest.FixtureRequest, server: ScriptedServer, address: str) -> Face:
    """Each face with each kind of source that it takes; `as_source` makes one from an iterable."""
    kind, is_async = request.param
    made: Face = kind(server, address)
    if is_async:
        made.as_source = _as_async
    return made


async def _as_async(items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item

"""The three faces behind one: an async test that takes a face is written once, and run under trio, asyncio and neither.

Other async tests of this folder run under trio, on a clock that jumps to the next deadline whenever all tasks wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import shapestream
from shapestream.errors import ModelError
from shapestream.testing import Arrays, ScriptedModel, ScriptedServer, identity_signature, serve_in_thread

Test: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in an event loop."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    test = partial(pyfuncitem.obj, **arguments)
    for argument in arguments.values():
        if isinstance(argument, Face):
            argument.run(test)
            return True
    trio.run(test, clock=MockClock(autojump_threshold=0))
    return True


class Face:
    """One way to use the client."""

    name = ""
    has_async_sources = True

    def __init__(self, server: ScriptedServer, address: str) -> None:
        self.as_source: Callable[[Any], Any] = lambda items: items
        self.server = server
        self.address = address

    def run(self, test: Test) -> None:
        """Run the test to its end."""
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

    def run(self, test: Test) -> None:
        """Under trio."""
        trio.run(test)

    def connect(self, **options: Any) -> Any:
        """The face's own client."""
        return shapestream.connect(self.address, **options)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The face's own way."""
        return await trio.to_thread.run_sync(function, *arguments)


class AioFace(Face):
    """`shapestream.aio.connect`."""

    name = "aio"

    def run(self, test: Test) -> None:
        """Under asyncio."""
        asyncio.run(test())

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

    def run(self, test: Test) -> None:
        """With nothing that could suspend it."""
        with pytest.raises(StopIteration):
            test().send(None)

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

    async def stories(self, *arguments: Any, **options: Any) -> Any:
        return self._client.stories(*arguments, **options)

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


@pytest.fixture(params=[TrioFace, AioFace], ids=lambda face: face.name)
def async_face(request: pytest.FixtureRequest, server: ScriptedServer, address: str) -> Face:
    """Each of the faces for an event loop."""
    made: Face = request.param(server, address)
    return made


@pytest.fixture
def aio_face(server: ScriptedServer, address: str) -> Face:
    """The face for asyncio."""
    return AioFace(server, address)


@pytest.fixture
def trio_face(server: ScriptedServer, address: str) -> Face:
    """The face for trio."""
    return TrioFace(server, address)


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

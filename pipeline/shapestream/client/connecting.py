"""What is entered with `async with`: `connect` and `stream` of the async faces, and the words for any other attempt.

The wrong keyword and the wrong event loop are the first mistakes with an async library. Python's own errors name neither
the right keyword nor the right face.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

import trio

__all__ = ["AsyncEntered", "Connecting", "connecting", "require_asyncio", "require_trio"]

P = ParamSpec("P")
ClientT = TypeVar("ClientT", covariant=True)


class AsyncEntered:
    """Refuses `with`, `await` and `for` with a TypeError that says `way_in`. Type checkers do not see these methods."""

    _way_in = ""
    """What to write instead, as code."""

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"this is entered with async with: {self._way_in}")

        def __exit__(self, *_: object) -> None:
            """Never called; `with` looks for it first."""

        def __await__(self) -> NoReturn:
            raise TypeError(f"this is not awaited, but entered: {self._way_in}")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"this is entered with async with: {self._way_in}")


class Connecting(AsyncEntered, Generic[ClientT]):
    """A client to be, before `async with` and for its block."""

    def __init__(self, inner: AbstractAsyncContextManager[ClientT], face: str) -> None:
        self._inner = inner
        self._way_in = f"async with {face}.connect(…) as client"

    async def __aenter__(self) -> ClientT:
        return await self._inner.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"there is no {name!r} before the client is entered: {self._way_in}")


def connecting(
    face: str,
) -> Callable[[Callable[P, AsyncIterator[ClientT]]], Callable[P, Connecting[ClientT]]]:
    """Make a generator function the `connect` of this face."""

    def decorate(connect: Callable[P, AsyncIterator[ClientT]]) -> Callable[P, Connecting[ClientT]]:
        manager = asynccontextmanager(connect)

        @wraps(connect)
        def call(*arguments: P.args, **options: P.kwargs) -> Connecting[ClientT]:
            return Connecting(manager(*arguments, **options), face)

        return call

    return decorate


def require_trio() -> None:
    """Raise RuntimeError outside of trio, naming the face for what runs."""
    if not _in_trio():
        instead = "shapestream.aio.connect" if _in_asyncio() else "shapestream.blocking.connect"
        runs = "asyncio runs here, as it does in notebooks" if _in_asyncio() else "no trio runs here"
        raise RuntimeError(f"shapestream.connect is for trio, and {runs}; use {instead}")


def require_asyncio() -> asyncio.AbstractEventLoop:
    """The running event loop; raises RuntimeError outside of asyncio, naming the face for what runs."""
    if not _in_asyncio():
        instead = "shapestream.connect" if _in_trio() else "shapestream.blocking.connect"
        runs = "trio runs here" if _in_trio() else "no asyncio runs here"
        raise RuntimeError(f"shapestream.aio.connect is for asyncio, and {runs}; use {instead}")
    return asyncio.get_running_loop()


def _in_trio() -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def _in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

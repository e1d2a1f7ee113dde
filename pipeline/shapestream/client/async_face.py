"""The client of the trio and the asyncio face. Each face adds `connect` and an `EventLoop`: how tasks wait and run there.

`connect` and `stream` are entered with `async with`. The wrong keyword and the wrong event loop are the first mistakes with
an async library, and Python's own errors name neither the right keyword nor the right face: the errors here do.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial, wraps
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    Unpack,
    overload,
)

import trio

from shapestream.client.calls import Answered, Asking, Calls, Connected, asked
from shapestream.client.core import AnyCore
from shapestream.client.opened_models import Result
from shapestream.client.streaming import (
    Item,
    ItemOptions,
    ItemT,
    Nothing,
    StreamOptions,
    StreamState,
    TaskPermits,
    Wakeup,
    pull_async,
    start_pulling,
)
from shapestream.client.tickets import (
    AnyTicket,
    Owner,
    Question,
    named,
)

_WAY_IN = "async with client.stream(…) as results"
"""The code that enters a stream, for messages."""

_FACES = {"trio": "shapestream", "asyncio": "shapestream.aio", None: "shapestream.blocking"}
"""The face for each event loop, and for none."""

P = ParamSpec("P")
Source: TypeAlias = Iterable[Any] | AsyncIterable[Any]
Library: TypeAlias = Literal["trio", "asyncio"]


class AsyncEntered:
    """Refuses `with`, `await` and `for` with a TypeError that says `way_in`. Type checkers do not see these methods."""

    _way_in = ""
    """The right code, for messages."""

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"this is entered with async with: {self._way_in}")

        def __exit__(self, *_: object) -> None:
            """Never called; `with` looks for it first."""

        def __await__(self) -> NoReturn:
            raise TypeError(f"this is not awaited, but entered: {self._way_in}")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"this is entered with async with: {self._way_in}")


class Connecting(AsyncEntered):
    """A client to be, before `async with` and for its block."""

    def __init__(self, inner: AbstractAsyncContextManager[Client], library: Library) -> None:
        self._inner = inner
        self._library = library
        self._way_in = f"async with {_FACES[library]}.connect(…) as client"

    async def __aenter__(self) -> Client:
        _require(self._library)
        return await self._inner.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"there is no {name!r} before the client is entered: {self._way_in}")


def connecting(
    library: Library,
) -> Callable[[Callable[P, AsyncIterator[Client]]], Callable[P, Connecting]]:
    """Make a generator function the `connect` of the face for this library's event loop."""

    def decorate(connect: Callable[P, AsyncIterator[Client]]) -> Callable[P, Connecting]:
        manager = asynccontextmanager(connect)

        @wraps(connect)
        def call(*arguments: P.args, **options: P.kwargs) -> Connecting:
            return Connecting(manager(*arguments, **options), library)

        return call

    return decorate


def _require(library: Library) -> None:
    """Raise RuntimeError where another event loop runs, or none, and name the face for that."""
    running = running_library()
    if running != library:
        habitat = ", as it does in notebooks" if running == "asyncio" else ""
        runs = f"{running} runs here{habitat}" if running else f"no {library} runs here"
        face = f"{_FACES[library]}.connect is for {library}"
        raise RuntimeError(f"{face}, and {runs}; use {_FACES[running]}.connect")


def running_library() -> Library | None:
    """Return the library whose event loop runs the caller; None for neither."""
    if trio.lowlevel.in_trio_task():
        return "trio"
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return "asyncio"


class AsyncCall(Owner, Protocol):
    """One task that waits for one answer."""

    async def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when cancelled, the ticket is withdrawn."""


class EventLoop(Protocol):
    """The waits and tasks of one event loop."""

    def current(self) -> object:
        """Return the running event loop; raises RuntimeError where there is none."""

    def call(self, core: AnyCore) -> AsyncCall:
        """Make a call of the present task."""

    def wakeup(self) -> Wakeup:
        """Make an empty set of tasks that wait for news."""

    async def checkpoint(self) -> None:
        """Raise where the task is cancelled, under an event loop that wants such points."""

    def start(self, pull: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Run a producer in a task; the returned function cancels it, and waits for its end."""


def awaited(
    call: Callable[Concatenate[Calls, P], Asking[Answered]],
) -> Callable[Concatenate[Client, P], Coroutine[Any, Any, Answered]]:
    """Make a method of a call, to be awaited."""

    async def face(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Answered:
        return await client._ask(call(client._calls, *arguments, **options))

    return asked(call, face)


class Client(Connected):
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(self, core: AnyCore, loop: EventLoop) -> None:
        self._core = core
        self._loop = loop
        self._home = loop.current()
        self._calls = Calls(core, partial(loop.call, core), self._check_loop)

    def _check_loop(self) -> None:
        """Raise RuntimeError where no answer would ever arrive: outside the loop, or the process, that connected."""
        self._core.submissions.check_process()
        try:
            here = self._loop.current() is self._home
        except RuntimeError:
            here = False
        if not here:
            raise RuntimeError(_ELSEWHERE)

    async def _ask(self, asking: Asking[Answered]) -> Answered:
        """Wait for each question of a call, and return its answer."""
        while True:
            try:
                ticket = next(asking)
            except StopIteration as end:
                answer: Answered = end.value
                return answer
            call: Any = ticket.owner
            await call.ask(ticket)

    infer = awaited(Calls.infer)
    signature = awaited(Calls.signature)
    models = awaited(Calls.models)
    statistics = awaited(Calls.statistics)
    stories = awaited(Calls.stories)
    acknowledge_audit = awaited(Calls.acknowledge_audit)

    @overload
    def stream(
        self,
        model: str,
        source: Source,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ItemOptions],
    ) -> Stream[Result]: ...

    @overload
    def stream(
        self,
        model: str,
        source: Source,
        *,
        on_error: Literal["yield"],
        **options: Unpack[ItemOptions],
    ) -> Stream[Item]: ...

    def stream(self, model: str, source: Source, **options: Any) -> Stream[Any]:
        if not isinstance(source, Iterable | AsyncIterable):
            raise TypeError(f"a stream's source is an iterable or an async one, not {type(source).__name__}")
        return Stream(self, model, source, self._calls.stream(model, source, **options))


asked(Calls.stream, Client.stream)


class Stream(AsyncEntered, Generic[ItemT]):
    """A stream of results: `async with` it, then `async for` over it, in one task or several."""

    _way_in = _WAY_IN

    def __init__(
        self,
        client: Client,
        model: str,
        source: Source,
        options: StreamOptions,
    ) -> None:
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._state: _TaskStreamState[ItemT] | None = None
        self._end_producer: Callable[[], Coroutine[Any, Any, None]] | None = None
        """None for a thread, which is not waited for: how long its `next()` takes is not known."""

    async def __aenter__(self) -> Self:
        client, core, loop = self._client, self._client._core, self._client._loop
        opened = await client._ask(client._calls.opened(named(self._model, self._options.version)))
        if isinstance(self._source, AsyncIterable):
            permits = TaskPermits(loop.wakeup())
            self._state = _TaskStreamState(loop.wakeup(), opened, self._options, permits.grant, core)
            self._state.begin()
            self._end_producer = loop.start(pull_async(self._source, self._state, permits))
        else:
            granted: queue.SimpleQueue[int] = queue.SimpleQueue()
            self._state = _TaskStreamState(loop.wakeup(), opened, self._options, granted.put, core)
            self._state.begin()
            start_pulling(self._source, self._state, granted)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        if self._state is None:
            raise RuntimeError(f"enter the stream first: {_WAY_IN}")
        await self._client._loop.checkpoint()
        while True:
            item = self._state.take()
            if item is Nothing.YET:
                self._client._check_loop()
                await self._state.news.wait()
            elif item is Nothing.ANY_MORE:
                raise StopAsyncIteration
            else:
                return item

    async def __aexit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.close()
            self._state.news.wake()
            if self._end_producer is not None:
                await self._end_producer()


class _TaskStreamState(StreamState[ItemT]):
    """A stream's state, and the tasks that wait for its next item."""

    def __init__(self, news: Wakeup, *args: Any) -> None:
        self.news = news
        super().__init__(*args)

    def finish(self, tickets: list[AnyTicket]) -> None:
        super().finish(tickets)
        self.news.wake()


_ELSEWHERE = (
    "this client was connected in another event loop; use it there, or connect anew in this one "
    "(without an event loop: shapestream.blocking.connect)"
)

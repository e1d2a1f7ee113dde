"""The trio and the asyncio face: all that the two share. Each face adds how a task waits, and how a producer's task runs.

`connect` and `stream` are entered with `async with`. The wrong keyword and the wrong event loop are the first mistakes with
an async library, and Python's own errors name neither the right keyword nor the right face: the errors here do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

import trio

from shapestream.client.core import Core
from shapestream.client.models import OpenedModel, OpenModels
from shapestream.client.results import Result
from shapestream.client.streaming import (
    ItemT,
    Nothing,
    OnError,
    StreamOptions,
    StreamState,
    TaskPermits,
    ThreadPermits,
    Wakeup,
    pull_async,
    start_pulling,
)
from shapestream.client.tickets import (
    AnyTicket,
    ModelHandle,
    OpenTicket,
    Owner,
    Question,
    StatisticsTicket,
    checked_name,
    checked_priority,
    deadline_at,
    outcome_of,
)
from shapestream.wire.messages import Result as Answer
from shapestream_engine.signature import ModelSignature

_WAY_IN = "async with client.stream(…) as results"
"""The code that enters a stream, for messages."""

StreamOfResults = TypeVar("StreamOfResults", covariant=True)
"""A stream that raises failures."""
StreamOfItems = TypeVar("StreamOfItems", covariant=True)
"""A stream that gives failures as items."""
P = ParamSpec("P")
ClientT = TypeVar("ClientT", covariant=True)


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
    """Raise RuntimeError outside of trio, naming the face for the loop that runs."""
    if not _in_trio():
        instead = "shapestream.aio.connect" if _in_asyncio() else "shapestream.blocking.connect"
        runs = "asyncio runs here, as it does in notebooks" if _in_asyncio() else "no trio runs here"
        raise RuntimeError(f"shapestream.connect is for trio, and {runs}; use {instead}")


def require_asyncio() -> asyncio.AbstractEventLoop:
    """The running event loop; raises RuntimeError outside of asyncio, naming the right face."""
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


class AsyncCall(Owner, Protocol):
    """One task that waits for one answer."""

    async def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when cancelled, the ticket is withdrawn."""


class AsyncClient(ABC, Generic[StreamOfResults, StreamOfItems]):
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(
        self,
        core: Core,
        *,
        call: Callable[[Core], AsyncCall],
        wakeup: Callable[[], Wakeup],
        current_loop: Callable[[], object],
    ) -> None:
        """`current_loop` gives the running event loop, and raises RuntimeError where there is none."""
        self._core = core
        self._call = call
        self._wakeup = wakeup
        self._models = OpenModels()
        self._current_loop = current_loop
        self._loop = current_loop()

    def _check_loop(self) -> None:
        """Raise RuntimeError where no answer would ever arrive: outside the loop, or the process, that connected."""
        self._core.check_process()
        try:
            here = self._current_loop() is self._loop
        except RuntimeError:
            here = False
        if not here:
            raise RuntimeError(_ELSEWHERE)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Result:
        """Run `model` on `inputs`, a mapping of names to arrays, lists or plain numbers.

        Lists and plain numbers take the element type of the input; an array's is changed only where nothing can be lost.
        Arrays of 64 KiB and more are not copied: leave them unchanged until the result is there. `deadline` is in seconds
        from now, None for none; it covers all waiting, with or without a server. Requests of higher `priority` go first: an
        integer of at most 31 bits and a sign.

        Returns the outputs by name. Raises the `RequestError` that fits: `InvalidRequest` before anything is sent where the
        model's signature tells, `DeadlineExceeded` when the time is over, `Cancelled` where the client is closed meanwhile.
        Raises TypeError and ValueError for a bad name, deadline or priority, and RuntimeError
        in another event loop or process. A cancelled call is cancelled at the server too.
        """
        self._check_loop()
        priority = checked_priority(priority)
        due = deadline_at(self._core.clock, deadline)
        opened = self._models.get(model) or await self._open(model, due)
        call = self._call(self._core)
        ticket = opened.request(call, inputs, deadline=due, priority=priority)
        await call.ask(ticket)
        return Result(None, outcome_of(ticket, Answer), opened.outputs)

    @overload
    def stream(
        self,
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: Literal["raise"] = "raise",
        deadline: float | None = None,
        priority: int = 0,
    ) -> StreamOfResults: ...

    @overload
    def stream(
        self,
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: Literal["yield"],
        deadline: float | None = None,
        priority: int = 0,
    ) -> StreamOfItems: ...

    def stream(
        self,
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: OnError = "raise",
        deadline: float | None = None,
        priority: int = 0,
    ) -> StreamOfResults | StreamOfItems:
        """Run `model` on everything that `source` gives: `async with client.stream(…) as results`.

        `source` is an iterable, pulled in a thread, or an async one, pulled in a task; of inputs, or of `(key, inputs)`.
        At most `max_in_flight` items are under way: pulled, and their results not taken yet. Results come in the order of
        `source`, or as they are ready with `ordered=False`. `deadline` is in seconds for each item, from when it was pulled,
        None for none; `priority` is as in `infer`. Leaving the block withdraws unfinished items.

        Gives a `Result` with the item's `key` for each item. A failed item raises its `RequestError` in its place and ends
        the stream; with `on_error="yield"` it is given there as `Failed`, and the stream goes on. An error of `source` is
        raised after the results of earlier items. Raises TypeError and ValueError for bad arguments.
        """
        if not isinstance(source, Iterable | AsyncIterable):
            raise TypeError(f"a stream's source is an iterable or an async one, not {type(source).__name__}")
        options = StreamOptions(
            max_in_flight=max_in_flight,
            ordered=ordered,
            on_error=on_error,
            deadline=deadline,
            priority=priority,
        )
        stream: StreamOfResults | StreamOfItems = self._stream(model, source, options)
        return stream

    async def signature(self, model: str, *, deadline: float | None = None) -> ModelSignature:
        """The inputs and outputs of `model`; asked for once, and then remembered.

        `deadline` is in seconds from now, None for none. Raises `InvalidRequest` for a model that the server does not have,
        `DeadlineExceeded` when the time is over, and any other `RequestError` that fits; RuntimeError in another event
        loop or process.
        """
        self._check_loop()
        due = deadline_at(self._core.clock, deadline)
        opened = self._models.get(model) or await self._open(model, due)
        return opened.signature

    async def statistics(self, *, deadline: float | None = 10.0) -> dict[str, Any]:
        """The server's counters, as plain data.

        `deadline` is in seconds from now, None for none. Raises `DeadlineExceeded` when the time is over, and any other
        `RequestError` that fits; RuntimeError in another event loop or process.
        """
        self._check_loop()
        call = self._call(self._core)
        ticket = StatisticsTicket(call, deadline=deadline_at(self._core.clock, deadline))
        await call.ask(ticket)
        return outcome_of(ticket, dict)

    async def _open(self, name: str, due: float | None) -> OpenedModel:
        call = self._call(self._core)
        ticket = OpenTicket(call, deadline=due, name=checked_name(name))
        await call.ask(ticket)
        return self._models.add(outcome_of(ticket, ModelHandle))

    @abstractmethod
    def _stream(self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions) -> Any:
        """The face's own stream."""


class AsyncStream(AsyncEntered, ABC, Generic[ItemT]):
    """A stream of results: `async with` it, then `async for` over it, in one task or several."""

    _way_in = _WAY_IN
    _checkpoint: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Raises where the task is cancelled, before each item; under an event loop that wants no such points, None."""

    def __init__(
        self,
        client: AsyncClient[Any, Any],
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        options: StreamOptions,
    ) -> None:
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._state: _State[ItemT] | None = None

    async def __aenter__(self) -> Self:
        client = self._client
        client._check_loop()
        opened = client._models.get(self._model) or await client._open(self._model, None)
        if isinstance(self._source, AsyncIterable):
            permits = TaskPermits(client._wakeup())
            state = self._begin(opened, permits)
            self._start_producer(pull_async(self._source, state, permits, client._core.post))
        else:
            thread_permits = ThreadPermits()
            start_pulling(
                self._source,
                self._begin(opened, thread_permits),
                thread_permits,
                client._core.post,
            )
        return self

    def _begin(self, opened: OpenedModel, permits: TaskPermits | ThreadPermits) -> _State[ItemT]:
        client = self._client
        self._state = _State(
            client._wakeup(), opened, self._options, permits, client._core.post, client._core.clock
        )
        self._state.begin()
        return self._state

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        if self._state is None:
            raise RuntimeError(f"enter the stream first: {_WAY_IN}")
        if self._checkpoint is not None:
            await self._checkpoint()
        while True:
            item = self._state.take()
            if item is Nothing.YET:
                self._client._check_loop()
                await self._state.news.wait()
            elif item is Nothing.ANY_MORE:
                raise StopAsyncIteration
            else:
                return item

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state is not None:
            self._state.close()
            self._state.news.wake()
            await self._end_producer()

    @abstractmethod
    def _start_producer(self, pull: Coroutine[Any, Any, None]) -> None:
        """Run this coroutine in a task. A thread that pulls a plain iterable is not started here."""

    @abstractmethod
    async def _end_producer(self) -> None:
        """Cancel the producer's task, if there is one, and wait for its end."""


class _State(StreamState[ItemT]):
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

"""What the trio and the asyncio face share: the calls of a client. Each face adds how a task waits for an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from shapestream.client.core import Core
from shapestream.client.models import OpenedModel, OpenModels
from shapestream.client.outcomes import answer_of, counters_of, handle_of
from shapestream.client.results import Result
from shapestream.client.streaming import OnError, StreamOptions
from shapestream.client.terms import checked_name, checked_priority, deadline_at
from shapestream.client.tickets import OpenTicket, Owner, Question, StatisticsTicket
from shapestream_engine.signature import ModelSignature

__all__ = ["WAY_IN", "AsyncCall", "AsyncClient"]

WAY_IN = "async with client.stream(…) as results"
"""How a stream is entered."""

StreamOfResults = TypeVar("StreamOfResults", covariant=True)
"""What failures are raised by."""
StreamOfItems = TypeVar("StreamOfItems", covariant=True)
"""What gives failures as well."""


class AsyncCall(Owner, Protocol):
    """One task that waits for one answer."""

    async def ask(self, ticket: Question) -> Any:
        """The ticket's outcome; when cancelled, the ticket is withdrawn."""


class AsyncClient(ABC, Generic[StreamOfResults, StreamOfItems]):
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(
        self, core: Core, call: Callable[[Core], AsyncCall], current_loop: Callable[[], object]
    ) -> None:
        """`current_loop`: the running event loop; raises RuntimeError where there is none."""
        self._core = core
        self._call = call
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
        Raises TypeError and ValueError for a model's name, deadline or priority that is none, and RuntimeError
        in another event loop or process. A cancelled call is cancelled at the server too.
        """
        self._check_loop()
        priority = checked_priority(priority)
        due = deadline_at(self._core.clock, deadline)
        opened = self._models.get(model) or await self._open(model, due)
        call = self._call(self._core)
        ticket = opened.request(call, inputs, deadline=due, priority=priority)
        return Result(None, answer_of(await call.ask(ticket)), opened.outputs)

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
        None for none; `priority` is as in `infer`. Leaving the block withdraws what is unfinished.

        Gives a `Result` with the item's `key` for each item. A failed item raises its `RequestError` in its place and ends
        the stream; with `on_error="yield"` it is given there as `Failed`, and the stream goes on. What `source` raises is
        raised after the results of what it gave before. Raises TypeError and ValueError for arguments that are none.
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
        """What `model` takes and gives; asked for once, and then remembered.

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
        return counters_of(await call.ask(ticket))

    async def _open(self, name: str, due: float | None) -> OpenedModel:
        call = self._call(self._core)
        return self._models.add(
            handle_of(await call.ask(OpenTicket(call, deadline=due, name=checked_name(name))))
        )

    @abstractmethod
    def _stream(self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions) -> Any:
        """The face's own stream."""


_ELSEWHERE = (
    "this client was connected in another event loop; use it there, or connect anew in this one "
    "(without an event loop: shapestream.blocking.connect)"
)

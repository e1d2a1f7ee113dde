"""What the trio and the asyncio face share: the calls of a client. Each face adds how a task waits for an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from shapestream.client.core import Core
from shapestream.client.models import OpenedModel, OpenModels
from shapestream.client.outcomes import answer_of, counters_of, handle_of
from shapestream.client.results import Result
from shapestream.client.streaming import OnError, StreamOptions
from shapestream.client.terms import checked_name, checked_priority, deadline_at
from shapestream.client.tickets import OpenTicket, Owner, Question, StatisticsTicket
from shapestream_engine.signature import ModelSignature

__all__ = ["AsyncCall", "AsyncClient"]

AnyStream = TypeVar("AnyStream", covariant=True)


class AsyncCall(Owner, Protocol):
    """One task that waits for one answer."""

    async def ask(self, ticket: Question) -> Any:
        """The ticket's outcome; when cancelled, the ticket is withdrawn."""


class AsyncClient(ABC, Generic[AnyStream]):
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(self, core: Core, call: Callable[[Core], AsyncCall]) -> None:
        self._core = core
        self._call = call
        self._models = OpenModels()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Result:
        """Run `model` on these inputs, arrays or plain numbers by name.

        `deadline` is in seconds from now; when it passes, `DeadlineExceeded` is raised, with or without a
        server. Higher `priority` goes first. Raises the `RequestError` that fits; `InvalidRequest` without
        a round trip where the model's signature tells. A cancelled call is cancelled at the server too.
        Arrays of 64 KiB and more are not copied: leave them unchanged until the result is there.
        """
        priority = checked_priority(priority)
        due = deadline_at(self._core.clock, deadline)
        opened = self._models.get(model) or await self._open(model, due)
        call = self._call(self._core)
        ticket = opened.request(call, inputs, deadline=due, priority=priority)
        return Result(None, answer_of(await call.ask(ticket)), opened.outputs)

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
    ) -> AnyStream:
        """Run `model` on everything that `source` gives: `async with client.stream(…) as results`.

        `source` is an iterable, pulled in a thread, or an async one, pulled in a task; of inputs, or of
        `(key, inputs)`. At most `max_in_flight` items are under way: pulled, and their results not taken
        yet. Results come in the order of `source`, or as they are ready with `ordered=False`. A failed item
        raises its error in its place, or is yielded there as `Failed` with `on_error="yield"`. What
        `source` raises is raised after the results of what it gave before. Leaving the block withdraws what
        is unfinished. `deadline` is in seconds for each item, from when it was pulled.
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
        return self._stream(model, source, options)

    async def signature(self, model: str, *, deadline: float | None = None) -> ModelSignature:
        """What `model` takes and gives; asked for once, and then remembered."""
        due = deadline_at(self._core.clock, deadline)
        opened = self._models.get(model) or await self._open(model, due)
        return opened.signature

    async def statistics(self, *, deadline: float | None = 10.0) -> dict[str, Any]:
        """The server's counters."""
        call = self._call(self._core)
        ticket = StatisticsTicket(call, deadline=deadline_at(self._core.clock, deadline))
        return counters_of(await call.ask(ticket))

    async def _open(self, name: str, due: float | None) -> OpenedModel:
        call = self._call(self._core)
        return self._models.add(
            handle_of(await call.ask(OpenTicket(call, deadline=due, name=checked_name(name))))
        )

    @abstractmethod
    def _stream(
        self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions
    ) -> AnyStream:
        """The face's own stream."""

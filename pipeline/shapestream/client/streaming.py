"""A stream: its state on the consumer's side, and its producer, which pulls the caller's iterable. Faces add how to wait.

A permit is one item's right to be under way: pulled from the producer, sent, answered, and not yet taken by
the consumer. There are `max_in_flight` of them. A slow consumer, or a slow item at the head of an ordered
stream, holds them, and so the producer waits: nothing piles up anywhere.

Permits go to the producer in handfuls, and items to the core one by one. The core takes all items that have gathered by its
next turn: tiny items share a turn, and the item of a slow producer leaves at once.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypedDict, TypeVar, cast

from shapestream.client.core import AnyCore, Attend, WithdrawAll
from shapestream.client.opened_models import Failed, Model, Result
from shapestream.client.tickets import (
    AnyTicket,
    EndTicket,
    RequestTicket,
    checked_caller,
    checked_deadline,
    checked_priority,
    tags_of,
)
from shapestream.errors import InvalidRequest, RequestError
from shapestream.wire.messages import ResultEntry as Answer
from shapestream_engine.layout import Tensors

Item: TypeAlias = Result | Failed
ItemT = TypeVar("ItemT", covariant=True)
"""The items of a stream: `Result`, or `Item` where failures are yielded."""
OnError: TypeAlias = Literal["raise", "yield"]


class Nothing(Enum):
    """The reason why there is no item."""

    YET = auto()
    ANY_MORE = auto()


class ItemOptions(TypedDict, total=False):
    """The arguments of `stream` that say nothing of the kind of its items, for type checkers; `Calls` explains them."""

    version: str | None
    max_in_flight: int
    ordered: bool
    deadline: float | None
    priority: int
    caller: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnItem:
    """An item with a model and options of its own, in a stream that a gateway opens without a model.

    One with an `error` is answered by it in its place.
    """

    key: Any
    model: Model | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    """Seconds from when it is pulled, or None."""
    priority: int = 0
    request_id: str | None = None
    trace: Mapping[str, str] | None = None
    error: RequestError | None = None


class StreamOptions:
    """The arguments of `stream`, checked; raises ValueError and TypeError."""

    def __init__(
        self,
        *,
        max_in_flight: int,
        ordered: bool,
        on_error: OnError,
        deadline: float | None,
        priority: int,
        caller: str | None,
        version: str | None = None,
    ) -> None:
        if type(max_in_flight) is not int:
            raise TypeError(f"max_in_flight is an integer, not {max_in_flight!r}")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is at least 1, not {max_in_flight}")
        if on_error not in ("raise", "yield"):
            raise ValueError(f'on_error is "raise" or "yield", not {on_error!r}')
        self.max_in_flight = max_in_flight
        self.ordered = ordered
        self.yields_failures = on_error == "yield"
        self.deadline = checked_deadline(deadline)
        self.priority = checked_priority(priority)
        self.caller = checked_caller(caller)
        self.version = version


class Wakeup(Protocol):
    """The tasks that wait for news, under any event loop."""

    def wake(self) -> object:
        """Wake all of them."""

    async def wait(self) -> None:
        """Wait until the next `wake`."""


class TaskPermits:
    """The number of items that a producer's task may pull. The consumer grants them."""

    def __init__(self, news: Wakeup) -> None:
        self._available = 0
        self._news = news

    def grant(self, number: int) -> None:
        """Grant `number` more permits; 0, the end, needs nothing more: the task is cancelled then."""
        self._available += number
        self._news.wake()

    async def take_one(self) -> None:
        """Wait for a permit, and use it."""
        while self._available < 1:
            await self._news.wait()
        self._available -= 1


class StreamState(Generic[ItemT]):
    """The items that have come back, in the producer's order or as they come, and the permits of those that may go out.

    It lives in the consumer's thread, apart from `make`.
    """

    def __init__(
        self,
        model: Model | None,
        options: StreamOptions,
        grant: Callable[[int], None],
        core: AnyCore,
    ) -> None:
        """`grant` lets the producer pull so many more items; 0: none from here on. Without a model, items are `OwnItem`."""
        self.closed = False
        self.submissions = core.submissions
        self._model = model
        self._client = core.client
        self._options = options
        self._grant = grant
        self._clock = core.clock
        self._ready: deque[RequestTicket] = deque()
        self._early: dict[int, RequestTicket] = {}
        """Finished items behind one that is not, by their places; always empty where the stream is not ordered."""
        self._next_place = 0
        self._taken = 0
        self._total: int | None = None
        """The number of items that the producer made, once it has ended."""
        self._cut_off = False
        """The client was closed: no more items will come, however many were produced."""
        self._end_error: BaseException | None = None
        """The error that ended the stream, if the producer did not come to its own end."""
        self._owed = 0
        """Permits that the consumer has freed and not yet granted again."""
        self._handful = max(1, options.max_in_flight // 4)
        self._doomed = False
        """A failure is on its way to the consumer: items pulled now would only be cancelled."""

    def begin(self) -> None:
        """Let the producer begin. From here on `close` is needed."""
        self.submissions.post(Attend(self))
        self._grant(self._options.max_in_flight)

    # ------------------------------------------------------------ the producer's thread

    def make(self, item: Any, place: int) -> RequestTicket:
        """Return the ticket for an item, `inputs` or `(key, inputs)`. It is finished where the model does not take them."""
        options = self._options
        if type(item) is not OwnItem:
            assert self._model is not None
            if self._model.successor is not None:  # a reload has changed it
                self._model = self._model.latest
            key, inputs = item if type(item) is tuple and len(item) == 2 else (place, item)
            tags = tags_of(None, None, options.caller)
            return self._ticket(key, place, self._model, inputs, options.deadline, options.priority, tags)
        if item.error is not None or item.model is None:
            return self._refused(item.key, place, item.error or InvalidRequest("it names no model"))
        left_s, tags = checked_deadline(item.deadline), tags_of(item.request_id, item.trace, options.caller)
        return self._ticket(item.key, place, item.model, item.inputs, left_s, item.priority, tags)

    def _ticket(
        self,
        key: Any,
        place: int,
        model: Model,
        inputs: Mapping[str, Any],
        left_s: float | None,
        priority: int,
        tags: dict[str, str] | None,
    ) -> RequestTicket:
        due = None if left_s is None else self._clock() + left_s
        try:
            tensors, nbytes = model.encode(inputs)
        except InvalidRequest as error:
            return self._refused(key, place, error)
        return RequestTicket(
            self, key, place, due, model=model, tensors=tensors, nbytes=nbytes, priority=priority, tags=tags
        )

    def _refused(self, key: Any, place: int, error: RequestError) -> RequestTicket:
        """Return a finished ticket. Its error has no frames: they hold the item, for as long as a caller keeps the error."""
        cause: BaseException | None = error
        while cause is not None:
            cause.__traceback__ = None
            cause = cause.__cause__ or cause.__context__
        return RequestTicket(self, key, place, outcome=error, model=_NO_MODEL, tensors=NO_TENSORS, nbytes=0)

    # ------------------------------------------------------------ the consumer's thread

    def finish(self, tickets: list[AnyTicket]) -> None:
        """Take the tickets that the core has finished. The faces wake their consumer."""
        for ticket in tickets:
            if type(ticket) is RequestTicket:
                self._put_in_order(ticket)
                if type(ticket.outcome) is not Answer and not self._options.yields_failures:
                    self._doomed = True
            elif type(ticket) is EndTicket:
                self._ended(ticket)

    def take(self) -> ItemT | Nothing:
        """Return the next item, if it is there. Raises an item's error in its place, the producer's at the end."""
        if self.closed:
            return Nothing.ANY_MORE
        if not self._ready:
            return self._no_item()
        self._taken += 1
        ticket = self._ready.popleft()
        self._owed += 1
        if self._owed >= self._handful:
            self._return_permits()
        outcome = ticket.outcome
        if type(outcome) is Answer:
            model = cast("Model", ticket.model)
            client = ticket.client or self._client
            return cast("ItemT", Result(ticket.key, outcome, model.outputs, client, lists=model.lists))
        assert isinstance(outcome, RequestError)
        if self._options.yields_failures:
            return cast("ItemT", Failed(ticket.key, outcome, ticket.id))
        self.close()
        ticket.outcome = None
        try:
            raise outcome
        finally:
            del outcome  # as in `outcome_of`

    def close(self) -> None:
        """End the stream: the producer stops, and unfinished items are withdrawn here and at the server."""
        if not self.closed:
            self.closed = True
            self._grant(0)
            self.submissions.post(WithdrawAll(self))

    def _put_in_order(self, ticket: RequestTicket) -> None:
        if not self._options.ordered:
            self._ready.append(ticket)
        elif ticket.place != self._next_place:
            self._early[ticket.place] = ticket
        else:
            following: RequestTicket | None = ticket
            while following is not None:
                self._ready.append(following)
                self._next_place += 1
                following = self._early.pop(self._next_place, None) if self._early else None

    def _ended(self, ticket: EndTicket) -> None:
        """Note that the producer has ended, or that the client was closed; the first of these counts."""
        if self._total is not None or self._cut_off:
            return
        if ticket.place < 0:
            self._cut_off = True
        else:
            self._total = ticket.place
        self._end_error = ticket.outcome if isinstance(ticket.outcome, BaseException) else None

    def _no_item(self) -> Nothing:
        """Return the reason why no item is ready. At the end, close the stream, and raise the producer's error."""
        if not self._cut_off and self._taken != self._total:
            self._return_permits()
            return Nothing.YET
        self.close()
        error, self._end_error = self._end_error, None
        if error is None:
            return Nothing.ANY_MORE
        try:
            raise error
        finally:
            del error  # as in `outcome_of`

    def _return_permits(self) -> None:
        if self._owed and not self._doomed:
            self._grant(self._owed)
            self._owed = 0


def start_pulling(source: Iterable[Any], stream: StreamState[Any], granted: queue.SimpleQueue[int]) -> None:
    """Pull `source` in a thread of its own, in the caller's context, as many items as are `granted`; 0 is the end.

    The thread cannot be interrupted: when the stream is left, it ends after the `next()` that it is in. It is
    a daemon, so a producer that never ends keeps no process alive.
    """
    # The queue is unbounded, but it holds only granted permits, which are at most max_in_flight in all.
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_pull, source, stream, granted), name="shapestream-producer", daemon=True
    ).start()


def _pull(source: Iterable[Any], stream: StreamState[Any], granted: queue.SimpleQueue[int]) -> None:
    place = 0
    # The error where the thread ends otherwise, such as by SystemExit: the consumer must not wait on.
    error: Exception | None = RuntimeError("the stream's producer was ended from outside")
    iterator: Iterator[Any] | None = None
    try:
        iterator = iter(source)
        while allowed := granted.get():
            before = place
            for item in islice(iterator, allowed):
                if stream.closed:
                    break
                stream.submissions.post(stream.make(item, place))
                place += 1
            if place - before < allowed:
                break
        error = None
    except Exception as raised:  # noqa: BLE001 - the edge to the caller's code; raised in its block
        error = raised
    except BaseException as raised:
        # It ends this thread and must not end the consumer's: that learns of it as the cause of its own error.
        if error is not None:
            error.__cause__ = raised
        raise
    finally:
        stream.submissions.post(EndTicket(stream, place=place, outcome=error))
        del error  # its frames hold this one, and that the last item: see `outcome_of`
        if stream.closed and isinstance(iterator, GeneratorType):
            iterator.close()


async def pull_async(source: AsyncIterable[Any], stream: StreamState[Any], permits: TaskPermits) -> None:
    """Pull `source` in this task until it ends, or the task is cancelled."""
    place = 0
    error: Exception | None = RuntimeError("the stream's producer was cancelled from outside")
    iterator: AsyncIterator[Any] | None = None
    try:
        iterator = aiter(source)
        while not stream.closed:
            await permits.take_one()
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                break
            stream.submissions.post(stream.make(item, place))
            place += 1
        error = None
    except Exception as raised:  # noqa: BLE001 - the edge to the caller's code; raised in its block
        error = raised
    finally:
        stream.submissions.post(EndTicket(stream, place=place, outcome=error))
        del error  # as in `_pull`
        if isinstance(iterator, AsyncGeneratorType):
            await iterator.aclose()


_NO_MODEL = Model(name="", described={}, number=None)
NO_TENSORS = Tensors(layout=(), buffers=())

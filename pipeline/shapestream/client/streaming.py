"""A stream's state on the consumer's side; the three faces add how to wait.

A permit is one item's right to be under way: pulled from the producer, sent, answered, and not yet taken by
the consumer. There are `max_in_flight` of them. A slow consumer, or a slow item at the head of an ordered
stream, holds them, and so the producer waits: nothing piles up anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

from shapestream.client.inbox import Attend, Posted, WithdrawAll
from shapestream.client.models import OpenedModel
from shapestream.client.ordering import ItemOrder
from shapestream.client.producing import Permits
from shapestream.client.results import Failed, Result
from shapestream.client.terms import checked_deadline, checked_priority
from shapestream.client.tickets import AnyTicket, EndTicket, RequestTicket
from shapestream.errors import InvalidRequest, RequestError
from shapestream.wire.messages import Result as Answer
from shapestream_engine.layout import Tensors

__all__ = ["Item", "ItemT", "Nothing", "OnError", "StreamOptions", "StreamState"]

Item: TypeAlias = Result | Failed
ItemT = TypeVar("ItemT", covariant=True)
"""What a stream gives: `Result`, or `Item` where failures are yielded."""
OnError: TypeAlias = Literal["raise", "yield"]


class Nothing(Enum):
    """Why there is no item."""

    YET = auto()
    ANY_MORE = auto()


class StreamOptions:
    """The arguments of `stream`, checked; raises ValueError and TypeError."""

    def __init__(
        self, *, max_in_flight: int, ordered: bool, on_error: OnError, deadline: float | None, priority: int
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


class StreamState(Generic[ItemT]):
    """What has come back, what may go out. Lives in the consumer's thread, but for `make`."""

    def __init__(
        self,
        model: OpenedModel,
        options: StreamOptions,
        permits: Permits,
        post: Callable[[Posted], None],
        clock: Callable[[], float],
    ) -> None:
        self.closed = False
        self._model = model
        self._options = options
        self._permits = permits
        self._post = post
        self._clock = clock
        self._order = ItemOrder(ordered=options.ordered)
        self._owed = 0
        """Permits that the consumer has freed and the producer has not got back yet."""
        self._handful = max(1, options.max_in_flight // 4)
        self._doomed = False
        """A failure is on its way to the consumer: what would be pulled now would only be cancelled."""

    def begin(self) -> None:
        """Let the producer begin. From here on `close` is needed."""
        self._post(Attend(self))
        self._permits.grant(self._options.max_in_flight)

    # ------------------------------------------------------------ the producer's thread

    def make(self, item: Any, place: int) -> RequestTicket:
        """The ticket for one item, `inputs` or `(key, inputs)`; finished if the model does not take it."""
        key, inputs = item if type(item) is tuple and len(item) == 2 else (place, item)
        left_s = self._options.deadline
        try:
            return self._model.request(
                self,
                inputs,
                key=key,
                place=place,
                deadline=None if left_s is None else self._clock() + left_s,
                priority=self._options.priority,
            )
        except InvalidRequest as error:
            return RequestTicket(
                self, key, place, outcome=error, model=self._model.handle, tensors=_NO_TENSORS, nbytes=0
            )

    # ------------------------------------------------------------ the consumer's thread

    def finish(self, tickets: list[AnyTicket]) -> None:
        """Take what the core has finished. The faces wake their consumer."""
        for ticket in tickets:
            if isinstance(ticket, EndTicket):
                self._order.end(ticket)
            elif isinstance(ticket, RequestTicket):
                self._order.add(ticket)
                if isinstance(ticket.outcome, RequestError) and not self._options.yields_failures:
                    self._doomed = True

    def take(self) -> ItemT | Nothing:
        """The next item, if it is there. Raises an item's error in its place, the producer's at the end."""
        if self.closed:
            return Nothing.ANY_MORE
        ticket = self._order.take()
        if ticket is None:
            if self._order.at_end:
                self.close()
                if self._order.error is not None:
                    raise self._order.error
                return Nothing.ANY_MORE
            self._return_permits()
            return Nothing.YET
        self._owed += 1
        if self._owed >= self._handful:
            self._return_permits()
        outcome = ticket.outcome
        if type(outcome) is Answer:
            return cast("ItemT", Result(ticket.key, outcome, self._model.outputs))
        assert isinstance(outcome, RequestError)
        if self._options.yields_failures:
            return cast("ItemT", Failed(ticket.key, outcome, ticket.id))
        self.close()
        raise outcome

    def close(self) -> None:
        """Nobody takes any more: the producer stops, the unfinished is withdrawn here and at the server."""
        if not self.closed:
            self.closed = True
            self._permits.stop()
            self._post(WithdrawAll(self))

    def _return_permits(self) -> None:
        if self._owed and not self._doomed:
            self._permits.grant(self._owed)
            self._owed = 0


_NO_TENSORS = Tensors(layout=(), buffers=())

"""The book of deadlines: whose has passed, or cannot be met any more, and who is in a hurry."""

from __future__ import annotations

from shapestream.scheduling.deadlines import CAUTION, OPTIMISM
from shapestream.scheduling.lazy_heap import LazyHeap
from shapestream.scheduling.records import RUNNING, Request, State

__all__ = ["Expiry"]


class Expiry:
    """The live requests that have a deadline."""

    __slots__ = ("_first", "urgent")

    def __init__(self) -> None:
        self._first = LazyHeap(State.RUNNING)
        """By when not even an optimist would start them any more, while they wait; by their deadline otherwise."""
        self.urgent: dict[int, LazyHeap] = {}
        """By client: what waits, by when a cautious mind would have started it."""

    def __len__(self) -> int:
        return len(self._first)

    def watch(self, request: Request, deadline: float, alone_s: float | None, owned: int) -> None:
        """Remembers a deadline, of one of the `owned` requests of its client.

        `alone_s`: the seconds that it takes on the fastest slot, where that is known.
        """
        if alone_s is None:
            self._first.push(deadline, request)
            return
        self._first.push(deadline - OPTIMISM * alone_s, request)
        urgent = self.urgent.get(request.client)
        if urgent is None:
            urgent = self.urgent[request.client] = LazyHeap(State.QUEUED)
        urgent.push(deadline - CAUTION * alone_s, request)
        urgent.shrink(owned)

    def due(self, now: float) -> Request | None:
        """A request whose deadline has passed, or, while it waits, cannot be met any more; None if there is none."""
        while (first := self._first.first()) is not None and first[0] <= now:
            request = first[2]
            deadline = request.deadline
            if deadline is None or deadline <= now or request.state is not RUNNING:
                return request
            # It has started, or was sent ahead, in time; now its deadline itself counts.
            self._first.postpone(deadline)
        return None

    def next(self) -> float | None:
        """When to look again."""
        first = self._first.first()
        return None if first is None else first[0]

    def forget_client(self, client: int) -> None:
        """It has no requests left."""
        self.urgent.pop(client, None)

    def shrink(self, living: int) -> None:
        """Throws out what has ended, if it outnumbers the `living` requests."""
        self._first.shrink(living)

    def living(self) -> list[Request]:
        """Every live request with a deadline; for checks only."""
        return self._first.living()

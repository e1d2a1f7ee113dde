"""The turns of the clients that wait for one model: which request any slot should run next.

A *flow* holds the queued requests of one client for one model, by rank. The flow with the earliest turn goes next, with its
first request. fairness.py says how a turn is computed, and which promises follow.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from shapestream.scheduling.fairness import ClientShare, Flow
from shapestream.scheduling.queueing import FEW, QUEUED, SAMPLE, LazyHeap, Request

if TYPE_CHECKING:
    from shapestream.scheduling.model_queue import ModelQueue


class ClientFlow(Flow):
    """The queued requests of one client for one model, by rank."""

    __slots__ = ("listed", "queue", "requests")

    def __init__(self, client: ClientShare[ClientFlow], queue: ModelQueue) -> None:
        super().__init__(client)
        self.queue = queue
        self.requests = LazyHeap(QUEUED)
        self.listed: tuple[float, int] | None = None
        """The turn under which `Turns` lists it; None where it is not listed."""

    def __repr__(self) -> str:
        return f"<line of {self.queue.profile.name}: {self.queued} requests>"

    def first(self) -> Request:
        """Its first request; there must be one (`queued`)."""
        first = self.requests.first()
        assert first is not None
        return first[2]


class Turns:
    """The lines of one model that hold requests, by turn: a heap.

    The charge for a batch makes the turns of its members' clients later. A line is listed under its new turn when it reaches
    the top, and at once where a turn becomes earlier (`put`).
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], ClientFlow]] = []

    def __len__(self) -> int:
        """Entries held, the dead included."""
        return len(self._entries)

    def put(self, line: ClientFlow, first: Request) -> None:
        """List a line, of which this is the first request, if it is not listed or its turn has become earlier."""
        turn = first.turn
        if line.listed is None or turn < line.listed:
            line.listed = turn
            heappush(self._entries, (turn, line))

    def first(self) -> Request | None:
        """The first request of the line that has the turn; None if no line holds any."""
        entries = self._entries
        while entries:
            turn, line = entries[0]
            if turn is not line.listed:
                heappop(entries)  # the line is listed under an earlier turn
            elif not line.queued:
                heappop(entries)
                line.listed = None
            else:
                first = line.requests.first()
                assert first is not None
                own = first[2].turn
                if own == turn:
                    return first[2]
                line.listed = own
                heapreplace(entries, (own, line))
        return None

    def shrink(self, living: int) -> None:
        """Throws the dead out if they outnumber the `living` requests, or none lives."""
        if not living or len(self._entries) > 2 * living + FEW:
            entries, self._entries = self._entries, []
            for _, line in entries:
                line.listed = None
            for line in dict.fromkeys([line for _, line in entries]) if living else ():
                if line.queued:
                    self.put(line, line.first())

    def share_until(self, rank: float) -> float:
        """Predicted seconds of all slots of the queued requests that go before a request of this rank.

        Looks at `SAMPLE` lines, evenly spaced, if there are more; each of them stands for as many as were left out.
        """
        every = -(-len(self._entries) // SAMPLE) or 1
        seen_s = 0.0
        for _, line in self._entries[::every]:
            if not line.queued:
                continue
            request = line.first()
            ahead_s = rank - request.turn[0]
            if ahead_s >= 0.0:  # what begins before that rank goes first as a whole
                seen_s += min(line.queued_s, ahead_s + request.share_s)
        return every * seen_s

    def lines(self) -> Collection[ClientFlow]:
        """The lines that hold requests, in no order; for checks only."""
        return [line for line in dict.fromkeys([line for _, line in self._entries]) if line.queued]

"""The turns of the clients that wait for one model: which request any slot should run next.

A *flow* holds the queued requests of one client for one model, by rank. The flow with the earliest turn goes next, with its
first request. fairness.py says how a turn is computed, and which promises follow.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush, heapreplace

from shapestream.scheduling.fairness import ClientShare, Flow
from shapestream.scheduling.queueing import FEW, QUEUED, SAMPLE, LazyHeap, Request


class ClientFlow(Flow):
    """The queued requests of one client for one model, by rank."""

    __slots__ = ("listed", "requests")

    def __init__(self, client: ClientShare[ClientFlow]) -> None:
        super().__init__(client)
        self.requests = LazyHeap(QUEUED)
        self.listed: tuple[float, int] | None = None
        """The turn under which `Turns` lists it; None while it is not listed."""

    def __repr__(self) -> str:
        return f"<flow: {self.queued} requests>"

    def first(self) -> Request:
        """Return its first request; there must be one (`queued`)."""
        first = self.requests.first()
        assert first is not None
        return first[2]


class Turns:
    """The flows of one model that hold requests, by turn: a heap.

    The charge for a batch makes the turns of its members' clients later. A flow is listed under its new turn when it reaches
    the top, and at once where a turn becomes earlier (`put`).
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], ClientFlow]] = []

    def __len__(self) -> int:
        """Count the entries, the dead included."""
        return len(self._entries)

    def put(self, flow: ClientFlow, first: Request) -> None:
        """List a flow, of which this is the first request, if it is not listed or its turn has become earlier."""
        turn = first.turn
        if flow.listed is None or turn < flow.listed:
            flow.listed = turn
            heappush(self._entries, (turn, flow))

    def first(self) -> Request | None:
        """Return the first request of the flow that has the turn; None if no flow holds any."""
        entries = self._entries
        while entries:
            turn, flow = entries[0]
            if turn != flow.listed:
                heappop(entries)  # the flow is listed under an earlier turn
            elif not flow.queued:
                heappop(entries)
                flow.listed = None
            else:
                first = flow.requests.first()
                assert first is not None
                own = first[2].turn
                if own == turn:
                    return first[2]
                flow.listed = own
                heapreplace(entries, (own, flow))
        return None

    def shrink(self, living: int) -> None:
        """Drop the dead entries if they outnumber the `living` requests, or none lives."""
        entries = self._entries
        if living and len(entries) <= 2 * living + FEW:
            return
        for _, flow in entries:
            flow.listed = None
        if not living:
            entries.clear()
            return
        self._entries = []
        for flow in dict.fromkeys([flow for _, flow in entries]):
            if flow.queued:
                self.put(flow, flow.first())

    def share_until(self, rank: float) -> float:
        """Return the predicted seconds of all slots of the queued requests that go before a request of this rank.

        Looks at `SAMPLE` flows, evenly spaced, if there are more; each of them stands for as many as were left out.
        """
        every = -(-len(self._entries) // SAMPLE) or 1
        seen_s = 0.0
        for _, flow in self._entries[::every]:
            if not flow.queued:
                continue
            request = flow.first()
            ahead_s = rank - request.turn[0]
            if ahead_s >= 0.0:  # what begins before that rank goes first as a whole
                seen_s += min(flow.queued_s, ahead_s + request.share_s)
        return every * seen_s

    def flows(self) -> Collection[ClientFlow]:
        """Return the flows that hold requests, in no order; for checks only."""
        return [flow for flow in dict.fromkeys([flow for _, flow in self._entries]) if flow.queued]

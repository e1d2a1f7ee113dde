"""A heap of requests by time, from which the dead drop out by themselves."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from shapestream.scheduling.records import Request, State

# Below this many entries nothing is gained by throwing the dead ones out.
_SMALL = 64


class LazyHeap:
    """Requests by (time, order of admission), for as long as their state is `last_live` or before.

    A request that leaves its state is not searched for: it is skipped when it reaches the top, or thrown
    out with all the others once the dead outnumber the living (`shrink`), so that every operation is
    logarithmic, amortised, and memory stays proportional to the living.
    """

    __slots__ = ("_entries", "_last_live")

    def __init__(self, last_live: State) -> None:
        self._entries: list[tuple[float, int, Request]] = []
        self._last_live = last_live

    def __len__(self) -> int:
        """Entries held, the dead included."""
        return len(self._entries)

    def push(self, time: float, request: Request) -> None:
        """Adds a request; its state must be a live one."""
        heappush(self._entries, (time, request.order, request))

    def first(self) -> tuple[float, int, Request] | None:
        """The earliest living entry, left where it is."""
        entries = self._entries
        last_live = self._last_live
        while entries:
            entry = entries[0]
            if entry[2].state <= last_live:
                return entry
            heappop(entries)
        return None

    def postpone(self, time: float) -> None:
        """Gives the first living entry, which must exist, a later time."""
        entry = self.first()
        assert entry is not None
        heapreplace(self._entries, (time, entry[1], entry[2]))

    def shrink(self, living: int) -> None:
        """Throws the dead out if they outnumber the `living`."""
        if len(self._entries) > 2 * living + _SMALL:
            last_live = self._last_live
            self._entries = [entry for entry in self._entries if entry[2].state <= last_live]
            heapify(self._entries)

    def cost_until(self, time: float, most: int) -> float:
        """Predicted slot seconds of the living that are not later than `time`, as far as they are known.

        Looks at `most` entries, evenly spaced, if there are more; each of them stands for as many as were left out.
        """
        every = -(-len(self._entries) // most) or 1
        last_live = self._last_live
        seen = [
            entry[2].cost_s
            for entry in self._entries[::every]
            if entry[2].state <= last_live and entry[0] <= time
        ]
        return every * sum(seen)

    def living(self) -> list[Request]:
        """Every living request, in no order; for checks only."""
        return [entry[2] for entry in self._entries if entry[2].state <= self._last_live]

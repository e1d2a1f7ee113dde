"""The callers that gateways name: who has the fair share of a gateway's requests, and how many of them are unanswered.

A gateway is one client, and asks for many. The name that it gives stands for the same caller at every gateway and in every
process, so shares, limits of the queue and caps follow the name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class CallerUse:
    """The requests of one caller at all gateways together."""

    __slots__ = ("held_bytes", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        """The scheduler's number of this caller."""
        self.requests = 0
        """Requests without a terminal reply."""
        self.held_bytes = 0
        """Bytes of those requests' tensors."""

    def __repr__(self) -> str:
        return f"<caller: {self.requests} requests, {self.held_bytes} bytes>"


class Callers:
    """The named callers. Of more than `most`, the one that asked longest ago is forgotten."""

    def __init__(self, numbers: Iterator[int], most: int) -> None:
        """`numbers`: numbers of clients at the scheduler that nobody has yet."""
        self._numbers = numbers
        self._most = most
        self._by_name: OrderedDict[str, CallerUse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, name: str) -> CallerUse:
        """Return the use of this caller. One that was forgotten begins like a new client, also while its requests run."""
        use = self._by_name.get(name)
        if use is None:
            use = self._by_name[name] = CallerUse(next(self._numbers))
            if len(self._by_name) > self._most:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        return use

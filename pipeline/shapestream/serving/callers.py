"""The callers that gateways name: who has the fair share of a gateway's requests.

A gateway is one client, and asks for many. The name that it gives stands for the same caller at every gateway and in every
process, so shares, limits of the queue and probation follow the name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Callers:
    """The scheduler's numbers of named callers. Of more than `most`, the one that asked longest ago is forgotten."""

    def __init__(self, numbers: Iterator[int], most: int) -> None:
        """`numbers`: numbers of clients at the scheduler that nobody has yet."""
        self._numbers = numbers
        self._most = most
        self._by_name: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def number_of(self, name: str) -> int:
        """Return the number of this caller. One that was forgotten gets a new one, and begins like a new client."""
        number = self._by_name.get(name)
        if number is None:
            number = self._by_name[name] = next(self._numbers)
            if len(self._by_name) > self._most:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        return number

"""What one peer of a ROUTER has not taken yet, in order. Its bound is kept by the socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import zmq

__all__ = ["Outbox"]


class Outbox:
    """Messages that wait behind a peer's high-water mark; false when empty."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of all waiting frames. They stay allocated for as long as they wait here."""
        self._messages: deque[Sequence[bytes | zmq.Frame]] = deque()

    @property
    def first(self) -> Sequence[bytes | zmq.Frame]:
        """The message that must be sent next."""
        return self._messages[0]

    def put(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Appends a message."""
        self._messages.append(frames)
        self.nbytes += sum(map(len, frames))

    def remove_first(self) -> None:
        """Removes the oldest message, which has been sent."""
        self.nbytes -= sum(map(len, self._messages.popleft()))

    def clear(self) -> None:
        """Drops everything: the peer is gone."""
        self._messages.clear()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<Outbox: {len(self)} messages, {self.nbytes} bytes>"

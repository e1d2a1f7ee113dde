"""What peers of a ROUTER have not taken yet: an outbox per peer, and the bound that all outboxes of a server share."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

import zmq

__all__ = ["Outbox", "OutboxRoom"]


class Outbox:
    """Messages that wait behind a peer's high-water mark; false when empty. Its own bound is kept by the socket."""

    def __init__(self, room: OutboxRoom) -> None:
        self.nbytes = 0
        """Bytes of all waiting frames. They stay allocated for as long as they wait here."""
        self.given_up = False
        """Whether its messages were dropped to make room. The peer gets nothing more: messages would be missing."""
        self._messages: deque[Sequence[bytes | zmq.Frame]] = deque()
        self._room = room

    @property
    def first(self) -> Sequence[bytes | zmq.Frame]:
        """The message that must be sent next."""
        return self._messages[0]

    def put(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Appends a message. Where all outboxes hold too much then, the largest is given up; it may be this one."""
        self._messages.append(frames)
        nbytes = sum(map(len, frames))
        self.nbytes += nbytes
        self._room.take(self, nbytes)

    def remove_first(self) -> None:
        """Removes the oldest message, which has been sent."""
        nbytes = sum(map(len, self._messages.popleft()))
        self.nbytes -= nbytes
        self._room.give_back(self, nbytes)

    def clear(self) -> None:
        """Drops everything: the peer is gone."""
        self._messages.clear()
        nbytes, self.nbytes = self.nbytes, 0
        self._room.give_back(self, nbytes)

    def give_up(self) -> None:
        """Drops everything, for good."""
        self.given_up = True
        self.clear()

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        if self.given_up:
            return "<Outbox: given up, since all outboxes held too much>"
        return f"<Outbox: {len(self)} messages, {self.nbytes} bytes>"


class OutboxRoom:
    """The bytes that all outboxes of one server may hold together, at both of its ports."""

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._waiting: dict[Outbox, None] = {}
        """Outboxes that hold something, the one that has waited longest first."""

    def take(self, outbox: Outbox, nbytes: int) -> None:
        """Counts what an outbox was given; gives up the largest, of equal ones the oldest, until the bound is kept."""
        self._waiting[outbox] = None
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes and self._waiting:
            max(self._waiting, key=lambda waiting: waiting.nbytes).give_up()

    def give_back(self, outbox: Outbox, nbytes: int) -> None:
        """Counts what an outbox has let go of."""
        self._nbytes -= nbytes
        if not outbox:
            self._waiting.pop(outbox, None)

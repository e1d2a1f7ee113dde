"""What finished requests were answered, so that one that comes again is answered again, and not run again. Pure.

A reply can be lost on its way: the connection breaks, the client sends the request again under its number. The reply is
kept for that case, within bounds of number, bytes and age; of older ones only the number is remembered. All of it belongs
to the client's id, not to a connection or session, and ends with the server's process: nothing here is on disk.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import TypeAlias

from shapestream.serving.kept_reply import KeptReply, Packed, pack
from shapestream.serving.spans import Spans
from shapestream.wire.messages import Failure, Result
from shapestream_engine.layout import Tensors

__all__ = ["Answered", "ClientId", "KeptReplies"]

ClientId: TypeAlias = tuple[bytes, str | None]
"""A client: the sixteen bytes of its `Hello`, and the key that it has proved, None where no key is asked for."""

MAX_ABSENT = 4096
"""Clients without a session that are remembered; beyond it the one that left first is forgotten."""


class Answered:
    """The requests of one client that are finished."""

    __slots__ = ("_replies", "client", "gone", "highest", "nbytes", "order")

    def __init__(self, client: ClientId) -> None:
        self.client = client
        self.highest = -1
        """No request with a higher number is finished: for most arrivals this is all that needs a look."""
        self._replies: dict[int, Packed] = {}
        self.order: deque[int] = deque()
        """The numbers of those whose replies are kept, oldest first."""
        self.gone = Spans()
        """Numbers whose replies are no longer kept."""
        self.nbytes = 0

    def find(self, sequence: int) -> KeptReply | None:
        """The reply to this number, if it is kept."""
        kept = self._replies.get(sequence)
        return None if kept is None else KeptReply(kept)

    def add(self, sequence: int, kept: Packed) -> None:
        """One more."""
        self._replies[sequence] = kept
        self.order.append(sequence)
        self.nbytes += kept[0]

    def oldest_at(self) -> float:
        """When the oldest reply that is kept was given; infinity if there is none."""
        return self._replies[self.order[0]][1] if self.order else math.inf

    def drop_oldest(self) -> int:
        """Keeps only the number of the oldest; returns the bytes that this frees."""
        sequence = self.order.popleft()
        nbytes = self._replies.pop(sequence)[0]
        self.nbytes -= nbytes
        self.gone.add(sequence)
        return nbytes

    def check_invariants(self) -> None:
        """Raise AssertionError where the books do not balance; for tests."""
        assert sorted(self.order) == sorted(self._replies)
        assert self.nbytes == sum(nbytes for nbytes, *_ in self._replies.values())
        assert all(sequence <= self.highest for sequence in self._replies)
        assert not any(sequence in self.gone for sequence in self._replies)

    def __repr__(self) -> str:
        return f"<answered {self.client[0].hex()[:12]}: {len(self.order)} kept, {self.nbytes} bytes; gone: {self.gone}>"


class KeptReplies:
    """The finished requests of all clients. Where `max_bytes` is too little, those who hold most make room.

    `max_replies` is each client's bound. With the number of requests that a client may have unanswered it is enough: what it
    misses is among the last so many that it was answered. `max_age_s` is exact to the interval between calls of `expire`.
    """

    def __init__(self, *, max_bytes: int, max_age_s: float, max_replies: int, now: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._max_replies = max_replies
        self._now = now
        self._by_client: dict[ClientId, Answered] = {}
        self._absent: OrderedDict[ClientId, None] = OrderedDict()
        self._holders: dict[Answered, None] = {}
        """Those with replies."""
        self.nbytes = 0

    def __len__(self) -> int:
        """Replies that are kept."""
        return sum([len(answered.order) for answered in self._holders])

    def of(self, client: ClientId) -> Answered:
        """What this client was answered; it has a session from now on."""
        self._absent.pop(client, None)
        answered = self._by_client.get(client)
        if answered is None:
            answered = self._by_client[client] = Answered(client)
        return answered

    def left(self, client: ClientId) -> None:
        """The client has no session any more; it may come back."""
        self._absent[client] = None
        if len(self._absent) > MAX_ABSENT:
            self._forget(next(iter(self._absent)))

    def keep(
        self, answered: Answered, sequence: int, model: int, tensors: Tensors, reply: Result | Failure
    ) -> None:
        """A request of this client has been answered."""
        if sequence > answered.highest:
            answered.highest = sequence
        packed = pack(model, tensors, reply, self._now)
        nbytes = packed[0]
        if nbytes > self._max_bytes:
            answered.gone.add(sequence)
            return
        self._holders[answered] = None
        answered.add(sequence, packed)
        self.nbytes += nbytes
        if len(answered.order) > self._max_replies:
            self._drop_oldest(answered)
        if self.nbytes > self._max_bytes:
            self._make_room()

    def drop(self, answered: Answered) -> None:
        """The client leaves on purpose: it will not ask for its replies. Their numbers stay known."""
        while answered.order:
            self._drop_oldest(answered)

    def expire(self, now: float) -> None:
        """Drops what is too old, and forgets clients of whom nothing is left. To be called now and then."""
        self._now = now
        oldest = now - self._max_age_s
        for answered in list(self._holders):
            while answered.oldest_at() <= oldest:
                self._drop_oldest(answered)
        for client in [client for client in self._absent if self._by_client[client].highest < 0]:
            self._forget(client)

    def _make_room(self) -> None:
        """Frees an eighth, so that it is rare: whoever holds more than a level is cut down to it, the others keep all."""
        level = _level([holder.nbytes for holder in self._holders], self._max_bytes - self._max_bytes // 8)
        for holder in list(self._holders):
            while holder.nbytes > level:
                self._drop_oldest(holder)

    def _drop_oldest(self, answered: Answered) -> None:
        self.nbytes -= answered.drop_oldest()
        if not answered.order:
            del self._holders[answered]

    def _forget(self, client: ClientId) -> None:
        del self._absent[client]
        self.drop(self._by_client.pop(client))

    def check_invariants(self) -> None:
        """Raise AssertionError where the books do not balance; for tests."""
        everybody = list(self._by_client.values())
        assert set(self._holders) == {answered for answered in everybody if answered.order}
        assert self._absent.keys() <= self._by_client.keys()
        assert self.nbytes == sum(answered.nbytes for answered in everybody) <= self._max_bytes
        for answered in everybody:
            answered.check_invariants()
            assert len(answered.order) <= self._max_replies


def _level(sizes: list[int], total: int) -> int:
    """The level to which sizes must be cut for their sum to be `total` at most: max-min fairness."""
    left = total
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return max(sizes)

"""Replies to finished requests, kept so that a request that is sent again is answered again, and not run again. Pure.

A reply is lost if its connection breaks; the client then sends the request again under the same number. The last replies
of each client are kept, within limits of number, bytes and age. Older numbers count as answered. Replies belong to the
client, not to a connection or session, and end with the server's process.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from zlib import crc32

import numpy as np

from shapestream.telemetry.runs import ClientId
from shapestream.wire.messages import Failure, ResultEntry
from shapestream_engine.layout import Layout, Tensors

OVERHEAD_NBYTES = 512
"""Bytes that each reply counts besides its tensors, for the objects around them."""
MAX_ABSENT = 4096
"""Remembered clients without a session; beyond it, the client that left first is forgotten."""
WHOLE_NBYTES = 16 * 1024
"""Largest tensor, in bytes, of which all bytes enter the checksum: 6 us of CRC-32, where 64 KiB took 24 us."""
BLOCKS = 16
"""Blocks of a larger tensor that enter the checksum, evenly spaced, its first and last bytes among them: 5 to 8 us."""
BLOCK_NBYTES = 256


class _KeptReply(NamedTuple):
    """A request's terminal reply, and the properties by which a different request with its number is recognised.

    It is a named tuple because one is made per request: a frozen dataclass takes a microsecond longer.
    """

    model: int
    layout: Layout
    checksum: int
    reply: ResultEntry | Failure
    nbytes: int
    given_at: float


class ClientReplies:
    """The finished requests of one client: the last replies by number, the oldest first."""

    __slots__ = ("below", "client", "nbytes", "replies")

    def __init__(self, client: ClientId) -> None:
        self.client = client
        # An OrderedDict, since the oldest are dropped: a dict walks over all dropped entries to find its first one.
        self.replies: OrderedDict[int, _KeptReply] = OrderedDict()
        self.below = 0
        """Smaller numbers without a kept reply count as answered."""
        self.nbytes = 0

    def knows(self, sequence: int) -> bool:
        """Tell whether a request with this number may have been answered."""
        return sequence < self.below or sequence in self.replies

    def reply_to(self, sequence: int, model: int, tensors: Tensors) -> ResultEntry | Failure | None:
        """Return the reply to this request; None if, by the checksum, the number's reply answered another one.

        Raises KeyError if no reply to this number is kept.
        """
        kept = self.replies[sequence]
        same = kept.model == model and kept.layout == tensors.layout and kept.checksum == checksum(tensors)
        return kept.reply if same else None

    def pass_by(self, sequence: int) -> None:
        """Count this number, and those below it, as answered."""
        self.below = max(self.below, sequence + 1)

    def __repr__(self) -> str:
        kept = f"{len(self.replies)} kept, {self.nbytes} bytes"
        return f"<answered {self.client[0].hex()[:12]}: {kept}, all below {self.below}>"


class KeptReplies:
    """The finished requests of all clients.

    Each client keeps its last `max_replies`. With the limit of its unanswered requests as `max_replies`, every reply that
    the client missed is among them. All clients together keep `max_bytes`; beyond it, the clients with the most bytes lose
    the older half of theirs, so that no client displaces another's. `max_age_s` is exact to the interval between calls of
    `expire`.
    """

    def __init__(self, *, max_bytes: int, max_age_s: float, max_replies: int, now: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._max_replies = max_replies
        self._now = now
        self._by_client: dict[ClientId, ClientReplies] = {}
        self._absent: OrderedDict[ClientId, None] = OrderedDict()
        self._holders: dict[ClientReplies, None] = {}
        """The clients with kept replies; the values have no meaning."""
        self.nbytes = 0

    def __len__(self) -> int:
        """Return the number of kept replies."""
        return sum([len(answered.replies) for answered in self._holders])

    def of(self, client: ClientId) -> ClientReplies:
        """Return the finished requests of a client that has a session now."""
        self._absent.pop(client, None)
        answered = self._by_client.get(client)
        if answered is None:
            answered = self._by_client[client] = ClientReplies(client)
        return answered

    def left(self, client: ClientId) -> None:
        """Note that the client has no session any more. It may come back."""
        self._absent[client] = None
        if len(self._absent) > MAX_ABSENT:
            self._forget(next(iter(self._absent)))

    def keep(
        self,
        answered: ClientReplies,
        sequence: int,
        model: int,
        tensors: Tensors,
        reply: ResultEntry | Failure,
    ) -> None:
        """Keep the reply to this client's request for this model with these tensors."""
        nbytes = OVERHEAD_NBYTES
        if type(reply) is ResultEntry:
            for buffer in reply.tensors.buffers:
                nbytes += memoryview(buffer).nbytes
        if nbytes > self._max_bytes:
            answered.pass_by(sequence)
            return
        row = model, tensors.layout, checksum(tensors), reply, nbytes, self._now
        # One is made per request: this takes a third of the time of `_KeptReply(*row)`.
        answered.replies[sequence] = tuple.__new__(_KeptReply, row)
        answered.nbytes += nbytes
        self._holders[answered] = None
        self.nbytes += nbytes
        if len(answered.replies) > self._max_replies:
            self._drop_oldest(answered)
        if self.nbytes > self._max_bytes:
            self._make_room()

    def drop(self, answered: ClientReplies) -> None:
        """Drop all replies to a client that said goodbye: it will not ask for them. Their numbers stay known."""
        while answered.replies:
            self._drop_oldest(answered)

    def expire(self, now: float) -> None:
        """Drop the replies that are too old, and forget absent clients without any. Call it once per heartbeat."""
        self._now = now
        oldest = now - self._max_age_s
        for answered in list(self._holders):
            while answered.replies and next(iter(answered.replies.values())).given_at <= oldest:
                self._drop_oldest(answered)
        absent = [self._by_client[client] for client in self._absent]
        for answered in absent:
            if not answered.replies and not answered.below:
                self._forget(answered.client)

    def _make_room(self) -> None:
        """Halve the replies of clients, those with the most bytes first, until an eighth of the room is free.

        So this is rare: sorting 1000 clients takes longer than serving a request.
        """
        for holder in sorted(self._holders, key=lambda holder: holder.nbytes, reverse=True):
            if self.nbytes <= self._max_bytes - self._max_bytes // 8:
                break
            half = holder.nbytes // 2
            while holder.nbytes > half:
                self._drop_oldest(holder)

    def _drop_oldest(self, answered: ClientReplies) -> None:
        """Drop the oldest reply of a client. Its number still counts as answered."""
        sequence, kept = answered.replies.popitem(last=False)
        answered.pass_by(sequence)
        answered.nbytes -= kept.nbytes
        self.nbytes -= kept.nbytes
        if not answered.replies:
            del self._holders[answered]

    def _forget(self, client: ClientId) -> None:
        del self._absent[client]
        self.drop(self._by_client.pop(client))

    def check_invariants(self) -> None:
        """Raise AssertionError if the sums are wrong; for tests."""
        answered = list(self._by_client.values())
        assert set(self._holders) == {one for one in answered if one.replies}
        assert self._absent.keys() <= self._by_client.keys()
        assert self.nbytes == sum(one.nbytes for one in answered) <= self._max_bytes
        for one in answered:
            assert one.nbytes == sum(kept.nbytes for kept in one.replies.values())
            assert len(one.replies) <= self._max_replies


def checksum(tensors: Tensors) -> int:
    """Return the CRC-32 of the tensors' bytes, of large tensors in blocks; it does not cover the layout.

    It distinguishes a request that is sent again from another one with the same number, a client's mistake. It does not
    protect against intent: a client can only mislead its own session.
    """
    value = 0
    for buffer in tensors.buffers:
        view = memoryview(buffer)
        if view.nbytes <= WHOLE_NBYTES:
            value = crc32(view, value)
        else:
            view, last = view.cast("B"), view.nbytes - BLOCK_NBYTES
            for number in range(BLOCKS):
                start = last * number // (BLOCKS - 1)
                value = crc32(view[start : start + BLOCK_NBYTES], value)
    return value


def same_tensors(one: Tensors, other: Tensors) -> bool:
    """Tell whether layouts and bytes are equal. It takes about as long as receiving one; nothing is copied."""
    return one.layout == other.layout and all(
        np.array_equal(np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8))
        for mine, theirs in zip(one.buffers, other.buffers, strict=True)
    )

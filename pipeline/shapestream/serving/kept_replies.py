"""Replies to finished requests, kept so that a request that is sent again is answered again, and not run again. Pure.

A reply is lost if its connection breaks; the client then sends the request again under the same number. The last replies of
each client are kept, within limits of number, bytes and age. Older numbers count as answered. Replies belong to the client,
not to a connection or session, and end with the server's process.

A full store has a hundred thousand replies, and the garbage collector visits all that it tracks whenever that has grown by
a quarter: with three objects for each reply, in 30 ms of one turn (65,536 replies). So a reply is kept as a plain tuple of
numbers, strings, bytes and such tuples, which the collector soon stops tracking, level by level, and is made again when it
is asked for, which is seldom.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeAlias

from shapestream.telemetry.runs import ClientId
from shapestream.wire.messages import Failure, ResultEntry, Timings
from shapestream_engine.layout import Layout, Tensors

OVERHEAD_NBYTES = 512
"""Bytes that each reply counts besides its tensors, for the objects around them."""
MOST_EXPIRED = 2048
"""Replies that one call of `expire` drops: in 2 ms, where those of 128 clients took 97 ms. The rest goes with the next."""
MAX_ABSENT = 4096
"""Remembered clients without a session; beyond it, the client that left first is forgotten."""


Row: TypeAlias = tuple[Any, ...]
"""A request's terminal reply. It has the model and the layout by which a different request with its number is recognised
(`RequestRecord.known_by`), its bytes and the time of its making; then the timings, the layout and the buffers of a result,
or the four fields of a failure."""
_NBYTES, _GIVEN_AT, _REPLY = 2, 3, 4
_RESULT_FIELDS = 3


def _reply_of(sequence: int, row: Row) -> ResultEntry | Failure:
    fields = row[_REPLY:]
    if len(fields) == _RESULT_FIELDS:
        timings, layout, buffers = fields
        tensors = Tensors(layout=layout, buffers=buffers)
        return ResultEntry(sequence=sequence, timings=Timings._make(timings), tensors=tensors)
    code, message, retryable, retry_after_ms = fields
    return Failure(
        sequence=sequence, code=code, message=message, retryable=retryable, retry_after_ms=retry_after_ms
    )


class ClientReplies:
    """The finished requests of one client: the last replies by number, the oldest first."""

    __slots__ = ("below", "client", "nbytes", "replies")

    def __init__(self, client: ClientId) -> None:
        self.client = client
        # An OrderedDict, since the oldest are dropped: a dict walks over all dropped entries to find its first one.
        self.replies: OrderedDict[int, Row] = OrderedDict()
        self.below = 0
        """Smaller numbers without a kept reply count as answered."""
        self.nbytes = 0

    def knows(self, sequence: int) -> bool:
        """Tell whether a request with this number may have been answered."""
        return sequence < self.below or sequence in self.replies

    def reply_to(self, sequence: int, known_by: tuple[int, Layout]) -> ResultEntry | Failure | None:
        """Return the reply to this request; None if the number's reply answered one of another model or layout.

        Raises KeyError if no reply to this number is kept.
        """
        row = self.replies[sequence]
        return _reply_of(sequence, row) if row[:_NBYTES] == known_by else None

    def last_reply_to(self, sequence: int) -> ResultEntry | Failure | None:
        """Return the reply to the request with this number; None if it is no longer kept."""
        row = self.replies.get(sequence)
        return None if row is None else _reply_of(sequence, row)

    def pass_by(self, sequence: int) -> None:
        """Count this number, and those below it, as answered."""
        self.below = max(self.below, sequence + 1)

    def __repr__(self) -> str:
        kept = f"{len(self.replies)} kept, {self.nbytes} bytes"
        return f"<answered {self.client[0].hex()[:12]}: {kept}, all below {self.below}>"


def _nbytes(answered: ClientReplies) -> int:
    return answered.nbytes


class KeptReplies:
    """The finished requests of all clients.

    Each client keeps its last `max_replies`. With the limit of its unanswered requests as `max_replies`, every reply that
    the client missed is among them. All clients together keep `max_bytes`; beyond it, a client with the most bytes loses its
    oldest ones, as many as the new one needs, so that no client displaces another's. `max_age_s` is exact to the interval
    between calls of `expire`, of which each drops at most `MOST_EXPIRED`.
    """

    __slots__ = (
        "_absent",
        "_by_client",
        "_holders",
        "_loser",
        "_loser_keeps",
        "_max_age_s",
        "_max_bytes",
        "_max_replies",
        "_now",
        "_plain_timings",
        "_timings",
        "nbytes",
    )

    def __init__(self, *, max_bytes: int, max_age_s: float, max_replies: int, now: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._max_replies = max_replies
        self._now = now
        self._by_client: dict[ClientId, ClientReplies] = {}
        self._absent: OrderedDict[ClientId, None] = OrderedDict()
        self._holders: dict[ClientReplies, None] = {}
        """The clients with kept replies; the values have no meaning."""
        self._loser: ClientReplies | None = None
        """Who had the most bytes when that was asked last, or has more since."""
        self._loser_keeps = 0
        """Bytes at which it is asked again: half of what it had. Asking takes as long as a request where there are many."""
        self.nbytes = 0
        self._timings: Timings | None = None
        """Those of the last result. Requests of one batch that arrived together share them, as a plain tuple too."""
        self._plain_timings: tuple[Any, ...] = ()

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
        known_by: tuple[int, Layout],
        reply: ResultEntry | Failure,
    ) -> None:
        """Keep the reply to this client's request."""
        nbytes = OVERHEAD_NBYTES
        row: Row
        if isinstance(reply, ResultEntry):
            buffers = reply.tensors.buffers
            for buffer in buffers:
                nbytes += len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes
            if reply.timings is not self._timings:
                self._timings, self._plain_timings = reply.timings, tuple(reply.timings)
            row = *known_by, nbytes, self._now, self._plain_timings, reply.tensors.layout, tuple(buffers)
        else:
            fields = reply.code, reply.message, reply.retryable, reply.retry_after_ms
            row = *known_by, nbytes, self._now, *fields
        if nbytes > self._max_bytes:
            answered.pass_by(sequence)
            return
        answered.replies[sequence] = row
        answered.nbytes += nbytes
        self._holders[answered] = None
        self.nbytes += nbytes
        if len(answered.replies) > self._max_replies:
            self._drop_oldest(answered)
        if self.nbytes > self._max_bytes:
            self._make_room(answered)

    def drop(self, answered: ClientReplies) -> None:
        """Drop all replies to a client that said goodbye: it will not ask for them. Their numbers stay known."""
        while answered.replies:
            self._drop_oldest(answered)

    def expire(self, now: float) -> None:
        """Drop the replies that are too old, and forget absent clients without any. Call it once per heartbeat."""
        self._now = now
        oldest = now - self._max_age_s
        left = MOST_EXPIRED
        for answered in list(self._holders):
            while left and answered.replies and next(iter(answered.replies.values()))[_GIVEN_AT] <= oldest:
                self._drop_oldest(answered)
                left -= 1
        absent = [self._by_client[client] for client in self._absent]
        for answered in absent:
            if not answered.replies and not answered.below:
                self._forget(answered.client)

    def _make_room(self, newest: ClientReplies) -> None:
        """Drop no more than the newest reply needs, so that no turn drops thousands of small ones."""
        while self.nbytes > self._max_bytes:
            loser = self._loser
            if loser is None or loser.nbytes <= self._loser_keeps:
                loser = max(self._holders, key=_nbytes)
                self._loser, self._loser_keeps = loser, loser.nbytes // 2
            elif loser.nbytes < newest.nbytes:
                loser = self._loser = newest
                self._loser_keeps = newest.nbytes // 2
            self._drop_oldest(loser)

    def _drop_oldest(self, answered: ClientReplies) -> None:
        """Drop the oldest reply of a client. Its number still counts as answered."""
        sequence, row = answered.replies.popitem(last=False)
        answered.pass_by(sequence)
        answered.nbytes -= row[_NBYTES]
        self.nbytes -= row[_NBYTES]
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
            assert one.nbytes == sum(row[_NBYTES] for row in one.replies.values())
            assert len(one.replies) <= self._max_replies

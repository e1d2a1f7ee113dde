"""What finished requests were answered, so that one that comes again is answered again, and not run again. Pure.

A reply can be lost on its way: the connection breaks, the client sends the request again under its number. The reply is
kept for that case, within bounds of number, bytes and age; of older ones only the number is remembered. All of it belongs
to the client's id, not to a connection or session, and ends with the server's process: nothing here is on disk.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from shapestream.serving.fingerprint import checksum
from shapestream.serving.spans import Spans
from shapestream.wire.messages import Failure, Result
from shapestream_engine.layout import Layout, Tensors

__all__ = ["Answered", "KeptReplies", "KeptReply"]

OVERHEAD_NBYTES = 512
"""Counted for each reply beside its tensors: what the objects around them take."""
MAX_ABSENT = 4096
"""Clients without a session that are remembered; beyond it the one that left first is forgotten."""


class KeptReply:
    """One request's terminal reply, and what the request is known by."""

    __slots__ = ("_checksum", "_layout", "_model", "at", "nbytes", "reply")

    def __init__(self, model: int, tensors: Tensors, reply: Result | Failure, nbytes: int, at: float) -> None:
        self._model = model
        self._layout: Layout = tensors.layout
        self._checksum = checksum(tensors)
        self.reply = reply
        self.nbytes = nbytes
        self.at = at

    def answers(self, model: int, tensors: Tensors) -> bool:
        """Whether this is the reply to such a request, as far as the checksum can tell."""
        return self._model == model and self._layout == tensors.layout and self._checksum == checksum(tensors)


class Answered:
    """The requests of one client that are finished."""

    __slots__ = ("client", "gone", "highest", "nbytes", "order", "replies")

    def __init__(self, client: bytes) -> None:
        self.client = client
        self.highest = -1
        """No request with a higher number is finished: for most arrivals this is all that needs a look."""
        self.replies: dict[int, KeptReply] = {}
        self.order: deque[int] = deque()
        """The numbers in `replies`, oldest first."""
        self.gone = Spans()
        """Numbers whose replies are no longer kept."""
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<answered {self.client.hex()[:12]}: {len(self.order)} kept, {self.nbytes} bytes; gone: {self.gone}>"


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
        self._by_client: dict[bytes, Answered] = {}
        self._absent: OrderedDict[bytes, None] = OrderedDict()
        self._holders: dict[Answered, None] = {}
        """Those with replies."""
        self.nbytes = 0

    def __len__(self) -> int:
        """Replies that are kept."""
        return sum([len(answered.order) for answered in self._holders])

    def of(self, client: bytes) -> Answered:
        """What this client was answered; it has a session from now on."""
        self._absent.pop(client, None)
        answered = self._by_client.get(client)
        if answered is None:
            answered = self._by_client[client] = Answered(client)
        return answered

    def left(self, client: bytes) -> None:
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
        nbytes = OVERHEAD_NBYTES
        if type(reply) is Result:
            for buffer in reply.tensors.buffers:
                nbytes += memoryview(buffer).nbytes
        if nbytes > self._max_bytes:
            answered.gone.add(sequence)
            return
        self._holders[answered] = None
        answered.replies[sequence] = KeptReply(model, tensors, reply, nbytes, self._now)
        answered.order.append(sequence)
        answered.nbytes += nbytes
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
            while answered.order and answered.replies[answered.order[0]].at <= oldest:
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
        sequence = answered.order.popleft()
        nbytes = answered.replies.pop(sequence).nbytes
        answered.nbytes -= nbytes
        self.nbytes -= nbytes
        answered.gone.add(sequence)
        if not answered.order:
            del self._holders[answered]

    def _forget(self, client: bytes) -> None:
        del self._absent[client]
        self.drop(self._by_client.pop(client))

    def check_invariants(self) -> None:
        """Raise AssertionError where the books do not balance; for tests."""
        everybody = list(self._by_client.values())
        assert set(self._holders) == {answered for answered in everybody if answered.order}
        assert self._absent.keys() <= self._by_client.keys()
        assert self.nbytes == sum(answered.nbytes for answered in everybody) <= self._max_bytes
        for answered in everybody:
            assert sorted(answered.order) == sorted(answered.replies)
            assert answered.nbytes == sum(kept.nbytes for kept in answered.replies.values())
            assert len(answered.order) <= self._max_replies
            assert all(sequence <= answered.highest for sequence in answered.replies)
            assert not any(sequence in answered.gone for sequence in answered.replies)


def _level(sizes: list[int], total: int) -> int:
    """The level to which sizes must be cut for their sum to be `total` at most: max-min fairness."""
    left = total
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return max(sizes)

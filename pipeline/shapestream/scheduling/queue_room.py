"""The room in the queue, and how it is divided: in requests, in bytes and, if asked, in seconds of predicted work.

Room is shared as turns are. A client's fair share is the whole, divided by the clients that asked lately. A client may have
more than its share waiting, the whole queue if no other client asks, but it leaves one share free: so it is refused while
there is room for a client with less. Nothing that was admitted is dropped to make room. So a client that comes when one
other fills the whole queue is refused, and finds room when the queue has drained by its share.

A client asked lately if it did since the queue's content was last replaced, or in the time that this took before: as many
requests were admitted meanwhile as the queue may hold. So the clients that are remembered are bounded by that, too.
"""

from __future__ import annotations

from shapestream.scheduling.records import Request

__all__ = ["QueueRoom"]


class QueueRoom:
    """What waits, of all clients together and of each, and which clients asked for room lately."""

    __slots__ = (
        "_asked",
        "_asked_before",
        "_held",
        "_until_replaced",
        "max_bytes",
        "max_requests",
        "max_s",
        "nbytes",
        "requests",
        "sharing",
    )

    def __init__(self, max_requests: int, max_bytes: int, max_s: float | None) -> None:
        if max_requests < 1 or max_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        if max_s is not None and not max_s > 0.0:
            raise ValueError("the queue must have room for at least some seconds")
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_s = max_s
        self.requests = 0
        self.nbytes = 0
        self.sharing = 0
        """Clients that asked lately."""
        self._held: dict[int, tuple[int, int, float]] = {}
        """Requests, bytes and predicted seconds of each client that has any waiting."""
        self._asked: set[int] = set()
        """The clients that asked since the content was replaced."""
        self._asked_before: set[int] = set()
        """Those that did while it was being replaced."""
        self._until_replaced = max_requests

    def __repr__(self) -> str:
        return f"<queue room: {self.requests} of {self.max_requests} requests, {self.sharing} clients>"

    def ask(self, client: int) -> None:
        """A client wants room: it has a share from now on."""
        asked = self._asked
        if client in asked:
            return
        if len(asked) >= self.max_requests:
            self._replaced()
        self._asked.add(client)
        if client not in self._asked_before:
            self.sharing += 1

    def exceeds(self, client: int, nbytes: int) -> bool:
        """Whether one more request of a client would take it above its share, and leave no share free."""
        requests, held_bytes, _ = self._held.get(client, (0, 0, 0.0))
        return self._crowds(requests, 1, self.requests, self.max_requests) or self._crowds(
            held_bytes, nbytes, self.nbytes, self.max_bytes
        )

    def exceeds_s(self, client: int, share_s: float, queued_s: float) -> bool:
        """The same in seconds of predicted work, of which `queued_s` wait."""
        held_s = self._held.get(client, (0, 0, 0.0))[2]
        return self.max_s is not None and self._crowds(held_s, share_s, queued_s, self.max_s)

    def _crowds(self, held: float, more: float, used: float, most: float) -> bool:
        share = most / max(1, self.sharing)
        return held > 0 and held + more > share and used + more + share > most

    def admit(self, request: Request) -> None:
        """A new request waits."""
        self.enter(request)
        self._until_replaced -= 1
        if not self._until_replaced:
            self._replaced()

    def _replaced(self) -> None:
        self._asked_before, self._asked = self._asked, set()
        self.sharing = len(self._asked_before)
        self._until_replaced = self.max_requests

    def enter(self, request: Request) -> None:
        """A request waits, beyond the bounds if it was admitted before."""
        requests, nbytes, seconds = self._held.get(request.client, (0, 0, 0.0))
        self._held[request.client] = (requests + 1, nbytes + request.nbytes, seconds + request.share_s)
        self.requests += 1
        self.nbytes += request.nbytes

    def leave(self, request: Request) -> None:
        """A request waits no longer."""
        requests, nbytes, seconds = self._held[request.client]
        if requests > 1:
            self._held[request.client] = (requests - 1, nbytes - request.nbytes, seconds - request.share_s)
        else:
            del self._held[request.client]
        self.requests -= 1
        self.nbytes -= request.nbytes

    def held(self) -> dict[int, tuple[int, int]]:
        """Requests and bytes of each client that has any waiting; for checks only."""
        return {client: (requests, nbytes) for client, (requests, nbytes, _) in self._held.items()}

"""Who the clients are: one session per client id, however often it reconnects, and what it waits for.

Where clients prove keys, the sessions of one key have a share and a credit in common (`key_credit.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from shapestream.serving.kept_replies import Answered, KeptReplies
from shapestream.serving.key_credit import KeyCredit
from shapestream.serving.links import Link
from shapestream.serving.models import ServedModel
from shapestream.serving.peer_clock import PeerClock
from shapestream.wire.messages import Credit
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import RequestShape

__all__ = ["RequestRecord", "Session", "Sessions"]


PLACES_PER_FREE = 8
"""One key alone can have eight places in nine."""


class RequestRecord:
    """One admitted request, from its arrival to its terminal reply."""

    __slots__ = (
        "arrived",
        "deadline",
        "id",
        "model",
        "priority",
        "sequence",
        "session",
        "shape",
        "started",
        "tensors",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the word that the scheduler uses
        session: Session,
        sequence: int,
        model: ServedModel,
        shape: RequestShape,
        tensors: Tensors,
        arrived: float,
        deadline: float | None,
        priority: int,
    ) -> None:
        self.id = id
        """The server's own number, never used twice; the scheduler knows the request by it."""
        self.session = session
        self.sequence = sequence
        self.model = model
        self.shape = shape
        self.tensors = tensors
        self.arrived = arrived
        self.deadline = deadline
        self.priority = priority
        self.started = False
        """Whether it may have run, for models that are not idempotent; others are not noted."""

    def __repr__(self) -> str:
        return (
            f"<request {self.id}: {self.model.name} {self.shape.sizes}, {self.session.label}:{self.sequence}>"
        )


class Session(Link):
    """One client's session. Its credit is a window: requests, and bytes of them, without a terminal reply."""

    __slots__ = ("answered", "client", "clock", "held_bytes", "key_credit", "number", "running", "software")

    def __init__(
        self,
        number: int,
        answered: Answered,
        peer: bytes,
        software: str,
        now: float,
        key_credit: KeyCredit | None = None,
    ) -> None:
        super().__init__(peer, now)
        self.number = number
        """The scheduler's number of whoever has a share: of this session, or of its key."""
        self.key_credit = key_credit
        """What it has in common with other sessions of its key; None where no key is asked for."""
        self.client = answered.client
        self.answered = answered
        """What this client was answered, also in sessions before this one."""
        self.software = software
        self.running: dict[int, RequestRecord] = {}
        """By sequence number."""
        self.held_bytes = 0
        self.clock = PeerClock()
        """The client's, which its deadlines count by."""

    @property
    def label(self) -> str:
        """How logs name the client: enough of its id to tell clients apart."""
        return self.client.hex()[:12]

    def __repr__(self) -> str:
        return f"<session {self.label}: {len(self.running)} running, {self.held_bytes} bytes>"


class Sessions:
    """All sessions, by routing id and by client id."""

    def __init__(self, max_sessions: int, kept: KeptReplies, window: Credit, windows_per_key: int) -> None:
        """`window`: what a session may have unanswered. `windows_per_key`: how many of these a key may have."""
        self._max_sessions = max_sessions
        self._kept = kept
        self._window = window
        self._windows_per_key = windows_per_key
        self._keys: dict[str, KeyCredit] = {}
        """Of each key that was ever used here. Only listed keys come so far, so the operator's lists bound it."""
        self._numbers = count()
        self.by_peer: dict[bytes, Session] = {}
        self._by_client: dict[bytes, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    def of_client(self, client: bytes) -> Session | None:
        """The session of this client id, on whichever connection."""
        return self._by_client.get(client)

    @property
    def full(self) -> bool:
        """Whether there is no room for another."""
        return len(self._by_client) >= self._max_sessions

    def has_room(self, key: str | None, leaving: int = 0) -> bool:
        """Whether one more may come with this key, when so many have left.

        A key has at most `PLACES_PER_FREE` times as many places as are free, so there is always one for another
        (A. K. Choudhury, E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
        Transactions on Networking 1998).
        """
        free = self._max_sessions + leaving - len(self._by_client)
        credit = None if key is None else self._keys.get(key)
        return free > 0 and (credit is None or credit.connected < PLACES_PER_FREE * free)

    def open(
        self, client: bytes, peer: bytes, software: str, now: float, key: str | None = None
    ) -> Session | None:
        """A new session; None when there are too many, of all or of this key, which the caller must say to the peer.

        One with a key gets its credit from `key_credit.join`, which is for the caller to do: others may have to be told.
        """
        if not self.has_room(key):
            return None
        credit = None if key is None else self._credit_of(key)
        number = next(self._numbers) if credit is None else credit.number
        session = Session(number, self._kept.of(client), peer, software, now, credit)
        self._by_client[client] = self.by_peer[peer] = session
        return session

    def longest_absent(self) -> Session | None:
        """The session without a connection that was heard longest ago. Looks at all of them: for when there are too many."""
        absent = [session for session in self._by_client.values() if session.peer is None]
        return min(absent, key=lambda session: session.heard_at, default=None)

    def move(self, session: Session, peer: bytes) -> None:
        """The client came back on another connection; the old one means nothing from now on."""
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
        session.peer = peer
        self.by_peer[peer] = session

    def detach(self, session: Session) -> None:
        """The connection is gone, and the client perhaps not: it keeps its session, and what is said to it is dropped."""
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
            session.peer = None
            if session.key_credit is not None:
                session.key_credit.leave(session)
        session.outgoing.clear()

    def grow(self, now: float) -> Iterator[tuple[Session, Credit]]:
        """What sessions must be told because others of their key need less, or are over."""
        for credit in self._keys.values():
            yield from credit.grow(now).items()

    def close(self, session: Session) -> None:
        """Forgets the session; what is said to it from now on goes nowhere."""
        self.detach(session)
        if self._by_client.pop(session.client, None) is not None:
            self._kept.left(session.client)

    def _credit_of(self, key: str) -> KeyCredit:
        credit = self._keys.get(key)
        if credit is None:
            credit = self._keys[key] = KeyCredit(next(self._numbers), self._window, self._windows_per_key)
        return credit

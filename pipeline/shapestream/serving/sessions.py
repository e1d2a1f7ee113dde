"""The clients' sessions: one per client id, over all its connections, with its unanswered requests. Pure.

A client chooses its id of sixteen bytes. Where clients prove keys, the key is part of the identity: the same id with
another key is another client. The sessions of one key share a number at the scheduler, and limits of requests and bytes.

A gateway is one client, and asks for many. The name that it gives stands for the same caller at every gateway and in every
process, so shares, limits of the queue and caps follow the name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from shapestream.chains.run import StageRequest
from shapestream.errors import InvalidRequest
from shapestream.scheduling.events import Arrival
from shapestream.serving.announced import Routed, drawn_by, routed_tensors, sent_tensors
from shapestream.serving.grants import UNASKED_BYTES, Grant, Grants, GrantState, RequestRoom
from shapestream.serving.kept_replies import ClientReplies, KeptReplies
from shapestream.serving.port_traffic import PeerLink
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.settings import ServerSettings
from shapestream.telemetry.runs import ClientId
from shapestream.wire.peers import PeerClock
from shapestream.wire.tags import CALLER
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Layout, RequestShape, Tensors, value

PLACES_PER_KEY = 9
"""One key may have eight ninths of all sessions, so that there is room for others."""
CREDIT_PER_CALLER = 2
"""A caller that a gateway names has half of a client's credit, so that its gateway has credit for others at any time."""


class Parent(NamedTuple):
    """The chain's request that a stage's request is for: no tensors, since observers keep it."""

    id: int
    model: str
    """The chain."""
    arrived: float


@value
class RequestRecord(Arrival):
    """One admitted request, from its arrival to its terminal reply. Events and actions carry it."""

    session: ClientSession
    sequence: int
    served: ServedModel
    shape: RequestShape
    tensors: Tensors
    arrived: float
    tags: dict[str, str] | None = None
    """The tags of its client (`wire/tags.py`)."""
    caller: Use | None = None
    """The caller that a gateway named."""
    stage: StageRequest | None = None
    """The stage of a chain that it is for. Session, number and caller are those of the chain's request, whose reply is the
    only one. None: a client sent it."""
    parent: Parent | None = None
    """The chain's request."""
    routed: Routed | None = None
    """How it came to its version; None where it named one, or where its model has no versions."""

    @property
    def known_by(self) -> tuple[int, Layout]:
        """The number of the model, and the layout: by these, another request with the same number is recognised."""
        if self.routed is not None:
            return self.routed.number, self.routed.layout
        return self.served.number, self.tensors.layout

    @property
    def named_caller(self) -> str | None:
        """The name of the caller that a gateway asks for; None for a client's own request."""
        return None if self.caller is None or self.tags is None else self.tags.get(CALLER)

    def moved(self, id_: int, models: ServedModels) -> RequestRecord | None:
        """Return this request, which has not begun, for the version that it is drawn for now, or for the present generation
        of its model; None if that does not take it.
        """
        number, layout = self.known_by
        sent = self.tensors if self.routed is None else sent_tensors(self.tensors, self.routed)
        known = models.by_number.get(number)
        announced = None if known is None else known.announced
        try:
            if announced is not None:
                who = drawn_by(announced.versions, *self.session.client, self.named_caller)
                name, fit = announced.route(who, self.sequence, models.is_live)
                served = models.by_name.get(name)
            else:
                served, fit = (known or self.served).present()
            if served is None or served is self.served or not models.is_live(served.name):
                return None
            tensors = routed_tensors(sent, fit)
            shape = served.resolve(tensors.layout)
            group = served.group_of(shape, tensors) if served.has_alike else None
        except (InvalidRequest, ShapeError):
            return None
        return replace(
            self,
            id=id_,
            model=served.key,
            sizes=queued_sizes(shape),
            nbytes=shape.total_nbytes,
            group=group,
            served=served,
            shape=shape,
            tensors=tensors,
            routed=Routed(number, layout, fit),
        )

    def of_stage(
        self,
        id_: int,
        served: ServedModel,
        shape: RequestShape,
        part: StageRequest,
        now: float,
        group: int | None = None,
        *,
        tensors: Tensors,
        then: tuple[str, ...],
        routed: Routed | None,
    ) -> RequestRecord:
        """Return the record of a request of a stage, for this request of a chain, whose client, deadline and tags it has.

        `then`: the models of later stages. `tensors` are in the order of the version's ports.
        """
        stage = part.stage.stage
        return replace(
            self,
            id=id_,
            model=served.key,
            sizes=queued_sizes(shape),
            nbytes=part.nbytes,
            # The first stages are admitted as the chain is; what follows from them has been.
            since=self.arrived if stage.needs else None,
            then=then,
            group=group,
            submitted=max(self.submitted, part.stage.requests),
            served=served,
            shape=shape,
            tensors=tensors,
            arrived=now,
            stage=part,
            parent=Parent(self.id, self.served.name, self.arrived),
            routed=routed,
        )

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.model} {self.shape.sizes}, {self.session.label}:{self.sequence}>"


def queued_sizes(shape: RequestShape) -> tuple[int, ...]:
    """Return the sizes by which a request is queued. If its answer follows from the ports, no call is made: they are 0."""
    return shape.rounded if shape.answer is None else (0,) * len(shape.rounded)


class Use:
    """The requests of one caller at all gateways together, or of all sessions of one key.

    It outlives the sessions: reconnecting does not free a key's credit.
    """

    __slots__ = ("held_bytes", "number", "requests", "sessions")

    def __init__(self, number: int) -> None:
        self.number = number
        """The scheduler's number of this caller, or key."""
        self.sessions = 0
        """The sessions of a key."""
        self.requests = 0
        """Requests without a terminal reply."""
        self.held_bytes = 0
        """Bytes of those requests' tensors."""

    def __repr__(self) -> str:
        return f"<use: {self.sessions} sessions, {self.requests} requests, {self.held_bytes} bytes>"


class Callers:
    """The named callers. Of more than `most`, the one that asked longest ago is forgotten."""

    def __init__(self, numbers: Iterator[int], most: int) -> None:
        """`numbers`: numbers of clients at the scheduler that nobody has yet."""
        self._numbers = numbers
        self._most = most
        self._by_name: OrderedDict[str, Use] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, name: str) -> Use:
        """Return the use of this caller. One that was forgotten begins like a new client, also while its requests run."""
        use = self._by_name.get(name)
        if use is None:
            use = self._by_name[name] = Use(next(self._numbers))
            if len(self._by_name) > self._most:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        return use


class ClientSession(PeerLink):
    """One client's session. Its credit limits its requests without a terminal reply, and their bytes.

    A request that was granted counts its bytes in its grant alone.
    """

    __slots__ = (
        "abandoned",
        "answered",
        "asks_first",
        "client",
        "clock",
        "grants",
        "heard_by",
        "held_bytes",
        "key_use",
        "names_suspects",
        "number",
        "opened",
        "questions",
        "running",
        "statistics_asked",
    )

    def __init__(
        self,
        number: int,
        answered: ClientReplies,
        peer: bytes,
        now: float,
        key_use: Use | None = None,
    ) -> None:
        super().__init__(peer, now)
        self.heard_by = peer
        """The routing id of its last connection. When that is gone, `peer` is None, and its messages may still be unread."""
        self.number = number
        """The scheduler's number of the owner of a fair share: this session, or its key."""
        self.key_use = key_use
        """None where no key is required."""
        self.client = answered.client
        self.answered = answered
        """The replies to this client, also in earlier sessions."""
        self.running: dict[int, RequestRecord] = {}
        """Unanswered requests by sequence number."""
        self.abandoned = 0
        """Unfinished requests that were abandoned before it ends, since it has many."""
        self.held_bytes = 0
        """Bytes of the tensors of `running`, without those that were granted."""
        self.asks_first = False
        """Whether the client asks before it sends a large request."""
        self.grants: dict[int, Grant] = {}
        """The grants of this session by sequence number, from the question to the terminal reply."""
        self.clock = PeerClock()
        """The client's clock, by which its deadlines count."""
        self.names_suspects = True
        """Whether its suspects run alone: it has always repeated in time that they are about to."""
        self.opened: dict[str, int] = {}
        """The numbers that it was told, by the name that it asked for: as many as there are models."""
        self.questions = 0
        """Unanswered questions for stories."""
        self.statistics_asked = 0
        """Unanswered questions for the counters."""

    @property
    def label(self) -> str:
        """Return the client's name in logs: the first bytes of its id."""
        return self.client[0].hex()[:12]

    def begin(self, record: RequestRecord) -> None:
        """Count an admitted request."""
        nbytes = record.nbytes
        self.running[record.sequence] = record
        if self.grants and (grant := self.grants.get(record.sequence)) is not None:
            grant.use()
            nbytes = 0
        self.held_bytes += nbytes
        for use in (self.key_use, record.caller):
            if use is not None:
                use.requests += 1
                use.held_bytes += nbytes

    def end(self, record: RequestRecord) -> None:
        """Remove a request, which has its terminal reply."""
        nbytes = record.nbytes
        del self.running[record.sequence]
        if self.grants and (grant := self.grants.pop(record.sequence, None)) is not None:
            grant.end()
            nbytes = 0
        self.held_bytes -= nbytes
        for use in (self.key_use, record.caller):
            if use is not None:
                use.requests -= 1
                use.held_bytes -= nbytes

    def give_back(self, sequence: int) -> bool:
        """End the grant of a request that is not here, and will not come. Tell whether there was one."""
        grant = self.grants.get(sequence)
        if grant is None or grant.state is GrantState.USED:
            return False
        del self.grants[sequence]
        grant.end()
        return True

    def give_all_back(self) -> None:
        """End the grants of all requests that are not here: their client, or its connection, is gone."""
        for sequence in list(self.grants):
            self.give_back(sequence)

    def __repr__(self) -> str:
        return f"<session {self.label}: {len(self.running)} running, {self.held_bytes} bytes>"


class Sessions:
    """All sessions, by routing id and by client id, and their limits."""

    __slots__ = (
        "_caller_bytes",
        "_caller_requests",
        "_kept",
        "_key_bytes",
        "_key_requests",
        "_keys",
        "_max_per_key",
        "_max_sessions",
        "_numbers",
        "_window_bytes",
        "_window_requests",
        "askers",
        "by_client",
        "by_peer",
        "callers",
        "grants",
        "room",
    )

    def __init__(self, settings: ServerSettings, kept: KeptReplies, room: RequestRoom) -> None:
        self._kept = kept
        self._max_sessions = settings.max_clients
        self._max_per_key = settings.max_clients - settings.max_clients // PLACES_PER_KEY
        self.room = room
        """Bytes of requests that are let in."""
        self.grants = Grants(self.room.grants, self.room.largest, settings.max_queued_requests)
        self.askers = 0
        """Sessions whose clients ask before they send a large request."""
        self._window_requests = settings.window_requests
        self._window_bytes = self.room.unasked
        self._key_requests = settings.windows_per_key * settings.window_requests
        self._key_bytes = settings.windows_per_key * self._window_bytes
        self._caller_requests = max(1, settings.window_requests // CREDIT_PER_CALLER)
        self._caller_bytes = self._window_bytes // CREDIT_PER_CALLER
        self._keys: dict[str, Use] = {}
        """Every key that was ever used here. The operator's lists of keys limit their number."""
        self._numbers = count()
        self.callers = Callers(self._numbers, settings.max_clients)
        self.by_peer: dict[bytes, ClientSession] = {}
        self.by_client: dict[ClientId, ClientSession] = {}
        """The session of each client, on any connection."""

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(tuple(self.by_client.values()))

    def __len__(self) -> int:
        return len(self.by_client)

    def excess(self, session: ClientSession, caller: Use | None, nbytes: int) -> str | None:
        """Name the limit that one more request of `nbytes` bytes exceeds; None if it exceeds none. Granted bytes are 0 here.

        A caller may always have one request, of any size that a client may send.
        """
        if len(session.running) >= self._window_requests or session.held_bytes + nbytes > self._window_bytes:
            return _beyond("session", self._window_requests, self._window_bytes)
        use = session.key_use
        if use is not None and (
            use.requests >= self._key_requests or use.held_bytes + nbytes > self._key_bytes
        ):
            return _beyond("key", self._key_requests, self._key_bytes)
        if (
            caller is not None
            and caller.requests
            and (caller.requests >= self._caller_requests or caller.held_bytes + nbytes > self._caller_bytes)
        ):
            return _beyond("caller", self._caller_requests, self._caller_bytes)
        return None

    def open(self, client: ClientId, peer: bytes, now: float) -> ClientSession | None:
        """Open a session. None if there are too many, of all clients or of this key; the caller then tells the peer."""
        key = client[1]
        use = None
        if key is not None and (use := self._keys.get(key)) is None:
            use = self._keys[key] = Use(next(self._numbers))
        if len(self.by_client) >= self._max_sessions or self._is_at_cap(use):
            return None
        number = next(self._numbers) if use is None else use.number
        session = ClientSession(number, self._kept.of(client), peer, now, use)
        if use is not None:
            use.sessions += 1
        self.by_client[client] = self.by_peer[peer] = session
        return session

    def session_to_end(self, key: str | None) -> ClientSession | None:
        """Return the session to end to make room for one more with this key; None if there is room, or no such session.

        It is the session without a connection that was heard longest ago. If the key is at its limit, only sessions of
        that key count.
        """
        use = None if key is None else self._keys.get(key)
        at_cap = self._is_at_cap(use)
        if not at_cap and len(self.by_client) < self._max_sessions:
            return None
        absent = [
            session
            for session in self.by_client.values()
            if session.peer is None and (session.key_use is use or not at_cap)
        ]
        return min(absent, key=lambda session: session.heard_at, default=None)

    def _is_at_cap(self, use: Use | None) -> bool:
        return use is not None and use.sessions >= self._max_per_key

    def asks_first(self, session: ClientSession) -> None:
        """Note that this client asks before it sends a large request."""
        if not session.asks_first:
            session.asks_first = True
            self.askers += 1

    @property
    def asker_window_bytes(self) -> int:
        """The window of each client that asks first: an equal part for each, by the next power of two of their number.

        So the windows change seldom. No window is smaller than the largest request that needs no grant.
        """
        parts = 1 << max(0, self.askers - 1).bit_length()
        return min(self._window_bytes, max(UNASKED_BYTES, self.room.unasked // parts))

    def move(self, session: ClientSession, peer: bytes) -> None:
        """Bind the session to another connection of its client. The old one is forgotten."""
        session.give_all_back()
        self.by_peer.pop(session.heard_by, None)
        session.peer = session.heard_by = peer
        self.by_peer[peer] = session

    def detach(self, session: ClientSession) -> None:
        """Keep the session without a connection. Messages to it are dropped; its unread messages are still served."""
        session.give_all_back()
        session.peer = None
        session.outgoing.clear()

    def close(self, session: ClientSession) -> None:
        """Remove the session. Messages to it are dropped from now on."""
        self.detach(session)
        self.by_peer.pop(session.heard_by, None)
        if self.by_client.pop(session.client, None) is not None:
            self._kept.left(session.client)
            self.askers -= session.asks_first
            if session.key_use is not None:
                session.key_use.sessions -= 1


def _beyond(owner: str, requests: int, nbytes: int) -> str:
    return f"more than this {owner}'s credit: {requests} requests, {nbytes} bytes unanswered"

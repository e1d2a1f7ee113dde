"""The clients' port: sessions, and the way of requests from received frames to one `submit` per turn.

The entries of one turn of the event loop are read in order, and their requests are submitted together. Nothing that
arrives is trusted: the codec checks everything that needs no model, and `ModelSignature.resolve` checks the rest. A bad
request fails by its own id. Only the inbox awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from itertools import islice
from typing import Any, TypeAlias

import trio

from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    Conflict,
    Draining,
    InvalidRequest,
    Overloaded,
    Poisoned,
    ProtocolError,
    RequestError,
    TooLarge,
    Unavailable,
)
from shapestream.scheduling.events import Overload
from shapestream.serving.announced import Announced, Routed, drawn_by, routed_tensors
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.ends import Egress
from shapestream.serving.grants import UNASKED_BYTES, GrantState
from shapestream.serving.port_traffic import DEAR, GONE, QUANTUM, TENSORS_PER_POINT, Inbox, Item, PeerLink
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.sessions import (
    ClientSession,
    RequestRecord,
    Sessions,
    Use,
    queued_sizes,
)
from shapestream.settings import ServerSettings
from shapestream.slices import SlicedWork, Slices
from shapestream.telemetry.logging import PRESENT, RateLimit, get_logger
from shapestream.telemetry.runs import ClientId
from shapestream.versions import ONLY, versioned
from shapestream.wire.codec import BadEntry
from shapestream.wire.messages import (
    AcknowledgeAudit,
    Ask,
    AsksFirst,
    Cancel,
    Clock,
    Credit,
    Entry,
    Explain,
    Explanation,
    Goodbye,
    GrantBounds,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    RequestEntry,
    RunsAlone,
    StatisticsEntry,
    StatisticsRequest,
    Unknown,
    Welcome,
)
from shapestream.wire.tags import CALLER, MOST_LOSSES, SUSPECT, losses_of, together_of, trace_of
from shapestream.wire.tensor_frames import BYTES_PER_POINT, check_inputs
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import RequestShape, Tensors

log = get_logger()

MOST_QUESTIONS = 16
"""Largest number of unanswered questions for stories of one session."""
MOST_ABANDONED = 256
"""Unfinished requests that a turn abandons of a session that ends, in 1 to 2 ms: the others follow, before it ends."""
_DRAINS = "this server takes no new requests"
_ENDED_SERVERS = "each of the servers that ran it alone has vanished meanwhile"
_CONFLICT = "use a number once: another request of this client has it"


_Taken: TypeAlias = tuple[ServedModel, RequestShape, Tensors, int | None, int | None, Routed | None]
"""A request that its model takes, whatever the load is: the model, its shape, its tensors in the order of the model's
ports, its group by common inputs, None where its model has none, the losses of a suspect (`losses_of`), None of any other
request, and how it came to its version, None where it needs none."""


class ClientPort:
    """Reads the clients' port and keeps its sessions. Requests go to the dispatcher; replies come through `egress`."""

    __slots__ = (
        "_abandoned",
        "_acknowledge",
        "_answers",
        "_arrived",
        "_asker_window",
        "_describe",
        "_dispatcher",
        "_draining",
        "_egress",
        "_explain",
        "_ids",
        "_inbox",
        "_limit",
        "_models",
        "_readiness",
        "_settings",
        "_socket",
        "_statistics",
        "_totals",
        "_waiting",
        "_welcome",
        "_window",
        "outgoing",
        "sessions",
    )

    def __init__(
        self,
        egress: Egress,
        dispatcher: Dispatcher,
        models: ServedModels,
        sessions: Sessions,
        settings: ServerSettings,
        *,
        epoch: bytes,
        ids: Iterator[int],
        describe: Callable[[], Slices[dict[str, Any]]],
        readiness: Callable[[], dict[str, Any]],
        totals: Callable[[], dict[str, dict[str, int]]],
        acknowledge: Callable[[str], None],
        explain: Callable[[str, int, ClientId | None], Slices[dict[str, Any]]],
    ) -> None:
        """`ids` numbers requests, those of chains' stages too.

        `describe`, `readiness`, `totals` and `explain` are methods of `Readings`, `acknowledge` one of `Auditor`."""
        self.outgoing = egress.outgoing
        self.sessions = sessions
        self._egress = egress
        self._socket = egress.outgoing.socket
        self._inbox = Inbox(
            self._socket,
            egress.outgoing.codec,
            self,
            window_entries=settings.window_requests,
            window_bytes=sessions.room.unasked,
        )
        self._dispatcher = dispatcher
        self._ids = ids
        self._models = models
        self._settings = settings
        self._statistics = egress.outgoing.statistics
        self._describe = describe
        self._readiness = readiness
        self._totals = totals
        self._acknowledge = acknowledge
        self._explain = explain
        self._welcome = Welcome(
            epoch=epoch,
            window_requests=settings.window_requests,
            window_bytes=sessions.room.unasked,
            heartbeat_ms=round(settings.heartbeat_s * 1000),
        )
        self._window = self._asker_window = Credit(
            window_requests=settings.window_requests, window_bytes=sessions.room.unasked
        )
        """The window of a client that does not ask first, and of each that does."""
        self._waiting: dict[str, dict[ClientSession, None]] = {}
        """Sessions that wait for a model that the configuration promises and no worker has brought yet, by its name."""
        self._arrived: list[RequestRecord] = []
        """Requests of this turn that are not submitted yet."""
        self._abandoned = 0
        """Unfinished requests of all sessions that have ended, or are about to."""
        self._draining = False
        self._limit = RateLimit()
        self._answers = SlicedWork()
        """Answers that are made in slices: per session, one of counters and `MOST_QUESTIONS` of stories."""

    # ---------------------------------------------------------------- turns

    async def run(self) -> None:
        """Serve the port until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answers.run, self._dispatcher.end_turn)
            await self._inbox.run()

    def heard(self, peers: Set[bytes], now: float) -> None:
        """Begin a turn: something arrived from these connections."""
        self._statistics.messages = self._inbox.messages
        for peer in peers:
            if (session := self.sessions.by_peer.get(peer)) is not None:
                session.heard_at = now
                if session.peer is None:
                    # Its connection is gone and this was read late, or a client came back with the same routing id.
                    self.outgoing.say_once(peer, Unknown())

    def serve(self, peer: bytes, item: Item, now: float) -> int:
        """Serve an item of a connection, and return its price in points: each request that it abandons costs one.

        A goodbye of a client with many unfinished requests is served in parts.
        """
        session = self.sessions.by_peer.get(peer)
        if type(item) is RequestEntry and session is not None:
            return len(item.tensors.buffers) // TENSORS_PER_POINT + self._admit(peer, session, item, now)
        if type(item) is Clock and session is not None:
            session.clock.heard(item.sent_us, now)
            return 1
        abandoned = self._abandoned
        if type(item) is Goodbye and session is not None:
            self._submit(now)
            if not self._abandon_some(session, now):
                return -MOST_ABANDONED
        if isinstance(item, ProtocolError):
            self._submit(now)
            self.cut_off(peer, str(item), now)
        elif isinstance(item, BadEntry):
            self._refuse(peer, session, item, now)
        else:
            self._carry_out(peer, session, item, now)
        # Making the counters, or a story, takes about a millisecond, in later turns.
        price = QUANTUM if type(item) in (StatisticsRequest, Explain) else DEAR
        return price + self._abandoned - abandoned

    def end_turn(self, now: float) -> None:
        """Submit the requests of this turn as one event, and send all ready messages."""
        self._submit(now)
        self._dispatcher.end_turn()

    def granted_bytes(self, peer: bytes) -> int:
        """Return the bytes of the requests that this connection was granted and that were not read."""
        session = self.sessions.by_peer.get(peer)
        if session is None:
            return 0
        return sum(grant.nbytes for grant in session.grants.values() if grant.state is GrantState.OPEN)

    def _submit(self, now: float) -> None:
        """Submit the requests read so far: a later control entry may concern one of them."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._dispatcher.submit(arrived, now)

    def _carry_out(self, peer: bytes, session: ClientSession | None, entry: Entry, now: float) -> None:
        """Carry out a control entry."""
        self._submit(now)
        if type(entry) is Hello:
            self._greet(peer, session, entry, now)
            return
        if session is None:
            self.outgoing.tell_stranger(peer, now)
            return
        match entry:
            case Heartbeat():
                pass
            case OpenModel():
                self._open_model(session, entry.name)
            case Cancel():
                record = session.running.get(entry.sequence)
                if record is not None:
                    self._dispatcher.cancel(record.id, now)
                elif session.give_back(entry.sequence):
                    self._egress.refuse(
                        session, entry.sequence, Cancelled.code, "withdrawn before it was sent"
                    )
            case Ask():
                self._ask(session, entry, now)
            case AsksFirst():
                self._asks_first(session, now)
            case StatisticsRequest():
                if self._socket.is_admin(peer):
                    self._ask_for_statistics(session)
                else:
                    self.outgoing.say(session, StatisticsEntry(values=self._for_clients(peer)))
            case AcknowledgeAudit():
                if self._socket.is_admin(peer):
                    self._acknowledge(entry.model)
            case Explain():
                self._ask_for_stories(session, entry, None if self._socket.is_admin(peer) else session.client)
            case Goodbye():
                self._egress.kept.drop(session.answered)  # the client will send nothing again
                self._end(session, "goodbye", now)
            case RunsAlone():
                self._dispatcher.lone_run_known(session, entry.sequence, now)
            case Credit():
                if session.clock.repeated() and entry != self._window_of(session):
                    self._tell_window(session, now)  # which has changed since
            case _:
                self.outgoing.refuse(peer, f"unexpected {type(entry).__name__}", now)

    def _ask_for_statistics(self, session: ClientSession) -> None:
        """Answer in later turns. Questions that come before that answer is begun share it."""
        session.statistics_asked += 1
        if session.statistics_asked == 1:
            self._answers.add(self._tell_statistics(session))

    def _tell_statistics(self, session: ClientSession) -> Slices[None]:
        asked = session.statistics_asked
        values = yield from self._describe()
        self.outgoing.say(session, StatisticsEntry(values=values))
        session.statistics_asked -= asked
        if session.statistics_asked:
            self._answers.add(self._tell_statistics(session))

    def _ask_for_stories(self, session: ClientSession, entry: Explain, asker: ClientId | None) -> None:
        """Answer in later turns; at once and without stories if the session has too many unanswered questions."""
        if session.questions < MOST_QUESTIONS:
            session.questions += 1
            self._answers.add(self._tell_stories(session, entry, asker))
        else:
            why = f"{MOST_QUESTIONS} questions of this client wait for their answers; ask again after one of them"
            values = {"stories": [], "unknown": why}
            self.outgoing.say(session, Explanation(question=entry.question, values=values))

    def _tell_stories(self, session: ClientSession, entry: Explain, asker: ClientId | None) -> Slices[None]:
        values = yield from self._explain(entry.request, entry.slowest, asker)
        session.questions -= 1
        self.outgoing.say(session, Explanation(question=entry.question, values=values))

    def _for_clients(self, peer: bytes) -> dict[str, Any]:
        """Return the counters for keys without the role `admin`: the models, and nothing of other clients.

        A gateway is told sums of all clients by model, which it tells its callers.
        """
        return {
            **self._readiness(),
            **({"totals": self._totals()} if self._socket.may_name_callers(peer) else {}),
            "models": self._models.names,
            "chains": sorted(self._models.chains),
            "unavailable": dict(self._models.unavailable),
            "digests": dict(self._models.digests),
            "versions": self._models.shares(),
            "forbidden": "the counters need a key with the role admin",
        }

    # ---------------------------------------------------------------- requests

    def _admit(self, peer: bytes, session: ClientSession, entry: RequestEntry, now: float) -> int:
        """Check a request against its model and its session's limits. The scheduler decides by the load.

        Returns its price in points. It uses credit from now on, or is answered.
        """
        sequence = entry.sequence
        granted = self._granted(session, sequence) if session.grants else 0
        # One that was granted was not answered then, and has had no reply since.
        if sequence in session.running or (not granted and session.answered.knows(sequence)):
            self._again(session, entry)
            return DEAR
        try:
            taken = self._checked(peer, session, entry, granted)
        except RequestError as error:
            self._fail(session, sequence, error.code, error.message, entry.tags)
            return DEAR
        model, shape, tensors, _, losses, _ = taken
        if losses is not None:
            self._log_suspect(session, sequence, model, losses)
        caller = None if entry.tags is None else self._caller(peer, session, entry.tags)
        nbytes = 0 if granted else shape.total_nbytes
        if (excess := self.sessions.excess(session, caller, nbytes)) is not None:
            self._statistics.overloaded[Overload.CREDIT] += 1
            self._fail(session, sequence, "overloaded", excess, entry.tags)
            return DEAR
        price = 1
        if model.takes_strings:
            price += sum(memoryview(buffer).nbytes for buffer in entry.tensors.buffers) // BYTES_PER_POINT
            if (wrong := _wrong_strings(model, tensors)) is not None:
                self._fail(session, sequence, *wrong, entry.tags)
                return DEAR + price
        record = self._record(session, entry, taken, caller, now)
        session.begin(record)
        self._statistics.requests += 1
        self._arrived.append(record)
        return price

    def _record(
        self, session: ClientSession, entry: RequestEntry, taken: _Taken, caller: Use | None, now: float
    ) -> RequestRecord:
        """Return the record of a request that its model takes."""
        model, shape, tensors, group, losses, routed = taken
        remaining_ms = entry.remaining_ms
        return RequestRecord(
            id=next(self._ids),
            client=session.number if caller is None else caller.number,
            model=model.key,
            sizes=queued_sizes(shape),
            nbytes=shape.total_nbytes,
            deadline=None if remaining_ms is None else self._deadline(session, remaining_ms, now),
            priority=entry.priority,
            suspect=losses is not None and session.names_suspects,
            group=group,
            submitted=1 if entry.tags is None else together_of(entry.tags),
            session=session,
            sequence=entry.sequence,
            served=model,
            shape=shape,
            tensors=tensors,
            arrived=now,
            tags=entry.tags,
            caller=caller,
            routed=routed,
        )

    def _checked(self, peer: bytes, session: ClientSession, entry: RequestEntry, granted: int) -> _Taken:
        """Return what a request is to its model.

        `granted`: the bytes that were granted to it. Raises `RequestError` for one that is refused whatever the load is.
        """
        try:
            model = self._models.by_number[entry.model]
        except KeyError:
            text = f"no model has the number {entry.model} here; open a model by its name first"
            raise InvalidRequest(text) from None
        tensors, routed = entry.tensors, None
        if model.successor is not None:
            model, fit = model.present()
            routed = Routed(entry.model, tensors.layout, fit)
            tensors = routed_tensors(tensors, fit)
        if model.announced is not None:
            model, tensors, routed = self._routed(peer, session, entry, model.announced)
        try:
            resolve = model.resolve  # an attribute, not a method: looked up as one, it is not found at once
            shape = resolve(tensors.layout)
        except ShapeError as error:
            raise InvalidRequest(f"model {model.name!r}: {error}") from None
        if (why := self._models.unavailable.get(model.name)) is not None:
            left = self._models.has_left(model)
            raise InvalidRequest(self._models.unknown(model.name)) if left else Unavailable(why)
        nbytes, most = shape.total_nbytes, granted or self._window.window_bytes
        if nbytes > most:
            text = f"{nbytes} bytes in one request; this server takes at most {most}"
            if granted:
                text = f"{nbytes} bytes in a request that asked for {granted}"
            elif nbytes <= self.sessions.room.largest:
                text += ", or more of a client that asks first: update it"
            raise TooLarge(text)
        losses = None if entry.tags is None else losses_of(entry.tags)
        if losses is not None and losses >= MOST_LOSSES:
            raise Poisoned(_ENDED_SERVERS)
        try:
            group = model.group_of(shape, tensors) if model.has_alike else None
        except ShapeError as error:
            raise InvalidRequest(f"model {model.name!r}: {error}") from None
        return model, shape, tensors, group, losses, routed

    def _routed(
        self, peer: bytes, session: ClientSession, entry: RequestEntry, announced: Announced
    ) -> tuple[ServedModel, Tensors, Routed]:
        """Return the version that a request is drawn for, and its tensors in the order of that version's ports."""
        caller = None if entry.tags is None else entry.tags.get(CALLER)
        if caller is not None and not self._socket.may_name_callers(peer):
            caller = None
        who = drawn_by(announced.versions, *session.client, caller)
        name, fit = announced.route(who, entry.sequence, self._models.is_live)
        routed = Routed(announced.number, entry.tensors.layout, fit)
        return self._models.by_name[name], routed_tensors(entry.tensors, fit), routed

    def _granted(self, session: ClientSession, sequence: int) -> int:
        """Return the granted bytes of a request that is here now; 0 if none are. One that did not wait loses its turn."""
        grant = session.grants.get(sequence)
        if grant is None:
            return 0
        if grant.state is GrantState.WAITING:
            session.give_back(sequence)
            return 0
        return grant.nbytes

    def _asks_first(self, session: ClientSession, now: float) -> None:
        """Tell a client which requests to ask for. Smaller ones have a window that it shares with others like it."""
        self.sessions.asks_first(session)
        bounds = GrantBounds(unasked_bytes=UNASKED_BYTES, most_bytes=self.sessions.room.largest)
        self.outgoing.say(session, bounds)
        if not self._change_windows(now) and self._asker_window is not self._window:
            self._tell_window(session, now)

    def _change_windows(self, now: float) -> bool:
        """Tell all clients that ask first their new window, if their number has changed it."""
        nbytes = self.sessions.asker_window_bytes
        if nbytes == self._asker_window.window_bytes:
            return False
        self._asker_window = Credit(window_requests=self._window.window_requests, window_bytes=nbytes)
        for session in self.sessions:
            if session.asks_first:
                self._tell_window(session, now)
        return True

    def _tell_window(self, session: ClientSession, now: float) -> None:
        """Tell a client its window, which it repeats with its clock; until it has, it is told no other one."""
        if session.clock.ask(now):
            self.outgoing.say(session, self._window_of(session))

    def _window_of(self, session: ClientSession) -> Credit:
        return self._asker_window if session.asks_first else self._window

    def _ask(self, session: ClientSession, entry: Ask, now: float) -> None:
        """Let a request wait for its grant, or refuse it at once, before its bytes are sent."""
        sequence = entry.sequence
        if sequence in session.running or sequence in session.grants:
            return  # its reply comes, or its grant
        if session.answered.knows(sequence):
            if (reply := session.answered.last_reply_to(sequence)) is None:
                self._fail(session, sequence, AlreadyAnswered.code, _no_longer_kept(sequence))
            else:
                self._egress.repeat(session, reply)
            return
        if self._draining:
            self._fail_asked(session, sequence, Draining(_DRAINS))
            return
        remaining_ms = entry.remaining_ms
        deadline = None if remaining_ms is None else self._deadline(session, remaining_ms, now)
        try:
            session.grants[sequence] = self.sessions.grants.ask(
                session, session.number, sequence, entry.nbytes, deadline, now
            )
        except RequestError as error:
            self._fail_asked(session, sequence, error)

    def _end_late_grants(self, now: float) -> None:
        """End the grants that are of no use any more. A request that comes after its grant is answered by itself."""
        for grant in self.sessions.grants.unused(now):
            grant.holder.give_back(grant.sequence)
        for grant, error in self.sessions.grants.hopeless(now):
            self._fail_asked(grant.holder, grant.sequence, error)

    def _fail_asked(self, session: ClientSession, sequence: int, error: RequestError) -> None:
        """Refuse a request that was asked for."""
        if error.code == Overloaded.code:
            self._statistics.overloaded[Overload.MEMORY] += 1
        self._fail(session, sequence, error.code, error.message, retry_after_s=error.retry_after_s)

    def _log_suspect(self, session: ClientSession, sequence: int, model: ServedModel, losses: int) -> None:
        if (like_it_before := self._limit.admit(SUSPECT, trio.current_time())) is not None:
            log.warning(
                "suspect arrived",
                client=session.label,
                sequence=sequence,
                model=model.name,
                why="a server vanished while it had this request",
                lost_alone=losses,
                like_it_before=like_it_before,
            )

    def _caller(self, peer: bytes, session: ClientSession, tags: dict[str, str]) -> Use | None:
        """Return the caller that a gateway names, for whom the request counts; None if it counts for its session.

        Removes the name if this peer may not give one.
        """
        caller = tags.get(CALLER)
        if caller is None:
            return None
        if self._socket.may_name_callers(peer):
            return self.sessions.callers.of(caller)
        del tags[CALLER]
        if (like_it_before := self._limit.admit(CALLER, trio.current_time())) is not None:
            advice = "list its key in server.security.gateways"
            what = "the names of callers are ignored, and all count as one client"
            log.warning(
                "not a gateway", client=session.label, what=what, advice=advice, like_it_before=like_it_before
            )
        return None

    def _deadline(self, session: ClientSession, remaining_ms: int, now: float) -> float:
        """Return the deadline by the server's clock, counted from sending. Ask for the client's clock if half has passed."""
        deadline = session.clock.sent_at(now) + remaining_ms * 0.001
        if remaining_ms and deadline - now < remaining_ms * 0.0005:
            self._tell_window(session, now)  # its clock tells whether it stopped or the message was slow
        return deadline

    def _again(self, session: ClientSession, entry: RequestEntry) -> None:
        """Handle a request whose number came before: it shares the earlier one's reply, or is refused.

        A number that was refused before has not run, leaves no record, and does not come here.
        """
        sequence, answered, known_by = entry.sequence, session.answered, (entry.model, entry.tensors.layout)
        if (record := session.running.get(sequence)) is not None:
            if record.known_by == known_by:
                self._statistics.duplicates += 1
                return
            code, text = Conflict.code, f"{_CONFLICT}, which is being worked on"
        elif sequence in answered.replies:
            reply = answered.reply_to(sequence, known_by)
            if reply is not None:
                self._egress.repeat(session, reply)
                return
            code, text = Conflict.code, f"{_CONFLICT}, which was answered"
        else:
            code, text = AlreadyAnswered.code, _no_longer_kept(sequence)
        self._fail(session, sequence, code, text, entry.tags)

    def _fail(
        self,
        session: ClientSession,
        sequence: int,
        code: str,
        message: str,
        tags: dict[str, str] | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """Refuse a request, which still counts as a request, and end its grant."""
        self._statistics.requests += 1
        session.give_back(sequence)
        like_it_before = self._limit.admit(code, trio.current_time())
        if like_it_before is not None or PRESENT.debug:
            write = log.debug if like_it_before is None else log.warning
            write(
                "request refused",
                client=session.label,
                sequence=sequence,
                code=code,
                why=message,
                like_it_before=like_it_before,
                **trace_of(tags),
            )
        self._egress.refuse(session, sequence, code, message, retry_after_s)

    def _refuse(self, peer: bytes, session: ClientSession | None, bad: BadEntry, now: float) -> None:
        """Refuse an entry that the codec rejected: a request fails by its id; other entries are counted."""
        asked_for = bad.kind in (RequestEntry.KIND, Ask.KIND)
        if session is None or not asked_for or bad.id is None or bad.id in session.running:
            self.outgoing.refuse(peer, bad.message, now)
            return
        self._fail(session, bad.id, "invalid", bad.message)

    # ---------------------------------------------------------------- sessions

    def _greet(self, peer: bytes, session: ClientSession | None, hello: Hello, now: float) -> None:
        """Open a session, or move it to this connection. End the connection if there are too many sessions.

        `session` is the session of this connection so far; if it is another client's, it ends.
        """
        key = self._socket.key_of(peer)
        client = (hello.client, key)
        known = self.sessions.by_client.get(client)
        if session is not None and session is not known:
            self._end(session, "another client on its connection", now)
        if known is not None and known.abandoned:
            self._end(known, "greets anew", now)  # a part of its requests is gone
            known = None
        if known is None:
            if (absent := self.sessions.session_to_end(key)) is not None:
                self._end(absent, "makes room for another", now)
            known = self.sessions.open(client, peer, now)
            if known is None:
                most = self._settings.max_clients
                self.cut_off(peer, f"more than {most} sessions, or too many with its key", now)
                return
            known_by = {} if key is None else {"key": key}
            log.info("client joined", client=known.label, software=hello.software, **known_by)
        elif known.peer != peer:
            self.sessions.move(known, peer)
            log.info("client moved to a new connection", client=known.label)
        known.heard_at = now
        known.clock.reconnected()
        self.outgoing.say(known, self._welcome)

    def _open_model(self, session: ClientSession, name: str) -> None:
        """Answer at once, or when a worker has brought the promised model."""
        models = self._models
        model = models.find(name)
        why = models.unavailable.get(models.awaited(name) if model is None else model.name)
        if model is not None and models.has_left(model):
            self.outgoing.say(session, ModelRefused(name=name, code="invalid", message=models.unknown(name)))
        elif why is not None:
            self.outgoing.say(session, ModelRefused(name=name, code="unavailable", message=why))
        elif model is not None:
            self._tell_opened(session, model, name)
        elif models.may_come(name):
            self._waiting.setdefault(name, {})[session] = None
        else:
            self.outgoing.say(session, ModelRefused(name=name, code="invalid", message=models.unknown(name)))

    def _tell_opened(self, session: ClientSession, model: ServedModel, name: str) -> None:
        session.opened[name] = model.number
        self.outgoing.say(session, _opened(model, name))

    def model_added(self, model: ServedModel) -> None:
        """Answer the sessions that wait for this model, and tell those that know another number of it."""
        names = (model.name,) if model.version is not None else (model.name, versioned(model.name, ONLY))
        for name in names:
            if self._models.find(name) is not model:
                continue
            for session in self._waiting.pop(name, {}):
                self._tell_opened(session, model, name)
            if model.number == 0 or model.like is not None:
                continue  # nobody knows another number
            for session in self.sessions:
                if session.opened.get(name, model.number) != model.number:
                    self._tell_opened(session, model, name)

    def model_unavailable(self, name: str, why: str) -> None:
        """Refuse the sessions that wait for this model, which will not come."""
        for waiting in [one for one in self._waiting if self._models.awaited(one) == name]:
            for session in self._waiting.pop(waiting):
                self.outgoing.say(session, ModelRefused(name=waiting, code="unavailable", message=why))

    def beat(self, now: float) -> None:
        """End silent sessions, and send heartbeats to the others. Call it once per heartbeat interval.

        While the port has unread messages no session counts as silent, since they may be its own. Once `MOST_ABANDONED`
        requests are abandoned, the next heartbeats go on.
        """
        self._egress.kept.expire(now)
        self._dispatcher.lone_run_overdue(now)
        read_empty = self._socket.drained  # only then is a quiet client silent, and not just unread
        most = self._abandoned + MOST_ABANDONED
        for session in self.sessions:
            is_silent = read_empty and now - session.heard_at > self._settings.client_silence_s
            # One that was begun to be ended is, even if it is heard now: some of its requests are gone.
            if not is_silent and not session.abandoned:
                self.outgoing.keep_alive(session)
            elif self._abandoned < most and self._abandon_some(session, now):
                self._end(session, "silent", now)
        self._end_late_grants(now)
        self._change_windows(now)
        self.outgoing.count_handshakes(now)

    def drain(self) -> None:
        """Refuse the requests that wait for memory, and those that ask from now on."""
        self._draining = True
        for session in self.sessions:
            waiting = [grant for grant in session.grants.values() if grant.state is GrantState.WAITING]
            for grant in waiting:
                self._fail_asked(session, grant.sequence, Draining(_DRAINS))

    def say_goodbye(self) -> None:
        """Send goodbyes to all sessions at the end of this turn."""
        for session in self.sessions:
            self.outgoing.say(session, Goodbye())

    def lost(self, link: PeerLink, why: str, now: float) -> None:
        """Handle messages to this client that could not be sent."""
        if not isinstance(link, ClientSession) or link.peer is None:
            return
        if why == GONE:
            # Only the connection broke. The client's requests go on, since it may reconnect and send them again. If it
            # does not, the session ends as silent. Its last messages may still be unread.
            self._statistics.peers_lost[f"client: {why}"] += 1
            log.info("client's connection is gone", client=link.label, unfinished=len(link.running))
            self.sessions.detach(link)
        else:
            self._end(link, why, now)
            self._inbox.cut_off(link.heard_by)

    def cut_off(self, peer: bytes, why: str, now: float) -> None:
        """End a connection with a goodbye. The peer may start again on another one."""
        self.outgoing.refuse(peer, why, now)
        session = self.sessions.by_peer.get(peer)
        if session is not None:
            self._end(session, "unreadable message", now)
        self.outgoing.say_once(peer, Goodbye())
        self._inbox.cut_off(peer)

    def _abandon_some(self, session: ClientSession, now: float) -> bool:
        """Tell whether a session has few enough unfinished requests to end in this turn. Of others abandon a part."""
        if len(session.running) <= MOST_ABANDONED:
            return True
        # The last ones: those before them may run already.
        records = [*islice(reversed(session.running.values()), MOST_ABANDONED)]
        self._abandoned += len(records)
        session.abandoned += len(records)
        self._dispatcher.abandon(records, now)
        return False

    def _end(self, session: ClientSession, why: str, now: float) -> None:
        """End a session whose client is gone. Its queued requests, and the results of its running ones, are dropped."""
        self.sessions.close(session)
        for waiting in self._waiting.values():
            waiting.pop(session, None)
        unfinished = [*session.running.values()]
        self._abandoned += len(unfinished)
        self._statistics.peers_lost[f"client: {why}"] += 1
        log.info("client left", client=session.label, why=why, unfinished=session.abandoned + len(unfinished))
        self._dispatcher.abandon(unfinished, now)


def _wrong_strings(model: ServedModel, tensors: Tensors) -> tuple[str, str] | None:
    """Return the code and the message for strings that are longer than their inputs take, or no text; None if none are."""
    try:
        check_inputs(model.signature.inputs, tensors)
    except RequestError as error:
        return error.code, f"model {model.name!r}: {error.message}"
    return None


def _no_longer_kept(sequence: int) -> str:
    return f"number {sequence} was answered before, and the reply is no longer kept"


def _opened(model: ServedModel, name: str) -> ModelOpened:
    signature = model.description
    if not model.profile.idempotent:
        signature = {**signature, "idempotent": False}
    return ModelOpened(name=name, number=model.number, signature=signature)

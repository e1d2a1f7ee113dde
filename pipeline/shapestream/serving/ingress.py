"""The clients' port: from received frames to one `submit` per turn.

Whatever arrived in one turn of the event loop is read in order and handed on together. Nothing that arrives
is trusted: the codec has checked what needs no model, `ModelSignature.resolve` checks the rest, and what
fails is answered by its own id. Nothing here awaits but the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import trio

from shapestream.errors import AlreadyAnswered, Conflict, ProtocolError, Unavailable
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.egress import Egress
from shapestream.serving.fingerprint import same_tensors
from shapestream.serving.links import Outgoing
from shapestream.serving.models import ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.reception import Reception
from shapestream.serving.sessions import RequestRecord, Session
from shapestream.telemetry.logging import RateLimit, debug_enabled
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import BadEntry, Role, decode
from shapestream.wire.messages import (
    Cancel,
    Clock,
    Credit,
    Entry,
    Goodbye,
    Heartbeat,
    Hello,
    OpenModel,
    Request,
    Statistics,
    StatisticsRequest,
)
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Buffer

__all__ = ["Ingress"]

log = structlog.get_logger()

# After so many entries a turn ends, and the rest of a burst is read in the next: a message may hold 256, a burst 256
# messages, and meanwhile no worker is heard. So many requests take some 40 ms.
MOST_ENTRIES = 2048


class Ingress:
    """Reads the clients' port: requests go to the dispatcher, the rest to the reception."""

    def __init__(
        self,
        socket: PeerSocket,
        reception: Reception,
        outgoing: Outgoing,
        egress: Egress,
        dispatcher: Dispatcher,
        models: ServedModels,
        options: ServerOptions,
        statistics: ServerStatistics,
        *,
        clock: Callable[[], float],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        """`describe` gives what `Statistics` carries."""
        self._socket = socket
        self._reception = reception
        self._outgoing = outgoing
        self._egress = egress
        self._dispatcher = dispatcher
        self._models = models
        self._options = options
        self._statistics = statistics
        self._clock = clock
        self._describe = describe
        self._arrived: list[RequestRecord] = []
        self._told: set[Session] = set()
        """Who has been told the counters in this turn."""
        self._debug = debug_enabled()
        self._limit = RateLimit()

    async def run(self) -> None:
        """Serves the port until cancelled."""
        while True:
            messages = await self._socket.receive()
            self._statistics.messages += len(messages)
            self._reception.turned_away.clear()
            while (read := self.accept(messages)) < len(messages):
                messages = messages[read:]
                await trio.lowlevel.checkpoint()

    def accept(self, messages: Sequence[tuple[bytes, list[Buffer]]]) -> int:
        """Takes what arrived in one turn, or as much of it as one turn may; returns how many of the messages."""
        now = self._clock()
        read = entries = 0
        sessions = self._reception.sessions.by_peer
        turned_away = self._reception.turned_away
        for peer, frames in messages:
            if entries >= MOST_ENTRIES:
                break
            read += 1
            if peer in turned_away:
                continue  # this one came behind the message that ended its connection
            try:
                envelope = decode(frames, role=Role.SERVER_OF_CLIENTS)
            except ProtocolError as error:
                self._submit(now)
                self._reception.turn_away(peer, str(error), now)
                continue
            entries += len(envelope.entries) + len(envelope.bad)
            session = sessions.get(peer)
            if session is not None:
                session.heard_at = now
            for entry in envelope.entries:
                if type(entry) is Request and session is not None:
                    self._admit(session, entry, now)
                elif type(entry) is Clock and session is not None:
                    session.clock.heard(entry.sent_us, now)
                else:
                    session = self._obey(peer, session, entry, now)
                    if peer in turned_away:
                        break
            for bad in envelope.bad:
                self._refuse(peer, session, bad, now)
        self._submit(now)
        self._told.clear()
        self._dispatcher.end_turn()
        return read

    def _admit(self, session: Session, entry: Request, now: float) -> None:
        """Checks a request against its model and its session's credit; of load the scheduler knows more."""
        sequence = entry.sequence
        may_be_known = sequence in session.running or sequence <= session.answered.highest
        if may_be_known and self._was_here(session, entry):
            return
        self._statistics.requests += 1
        try:
            model = self._models.by_number[entry.model]
            shape = model.resolve(entry.tensors.layout)
        except IndexError:
            text = f"no model has the number {entry.model} here; open a model by its name first"
            self._fail(session, sequence, "invalid", text)
            return
        except ShapeError as error:
            self._fail(session, sequence, "invalid", f"model {model.name!r}: {error}")
            return
        except Unavailable as error:
            self._fail(session, sequence, error.code, error.message)
            return
        options = self._options
        nbytes = shape.total_nbytes
        key_credit = session.key_credit
        if (
            len(session.running) >= options.window_requests
            or session.held_bytes + nbytes > options.window_bytes
            or (key_credit is not None and not key_credit.covers(nbytes))
        ):
            self._fail_beyond_window(session, sequence, nbytes)
            return
        remaining_ms = entry.remaining_ms
        record = RequestRecord(
            self._dispatcher.next_id(),
            session,
            sequence,
            model,
            shape,
            entry.tensors,
            now,
            None if remaining_ms is None else session.clock.sent_at(now) + remaining_ms * 0.001,
            entry.priority,
        )
        session.running[sequence] = record
        session.held_bytes += nbytes
        if key_credit is not None:
            key_credit.take(nbytes)
        self._arrived.append(record)

    def _was_here(self, session: Session, entry: Request) -> bool:
        """Whether a request with this number came before. If so, it shares that one's reply, or is refused.

        What was refused before, and so did not run, has left no trace: it is a new request.
        """
        sequence, answered = entry.sequence, session.answered
        record, kept = session.running.get(sequence), answered.find(sequence)
        if record is not None:
            if record.model.number == entry.model and same_tensors(record.tensors, entry.tensors):
                self._statistics.duplicates += 1
            else:
                self._fail_again(session, sequence, Conflict.code, f"{_CONFLICT}, which is being worked on")
        elif kept is not None:
            if kept.answers(entry.model, entry.tensors):
                self._egress.repeat(session, kept.reply)
            else:
                self._fail_again(session, sequence, Conflict.code, f"{_CONFLICT}, which was answered")
        elif sequence in answered.gone:
            text = f"number {sequence} was answered before, and the reply is no longer kept"
            self._fail_again(session, sequence, AlreadyAnswered.code, text)
        else:
            return False
        return True

    def _submit(self, now: float) -> None:
        """Hands on what was read so far; a control entry that follows may be about it."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._dispatcher.submit(arrived, now)

    def _fail_beyond_window(self, session: Session, sequence: int, nbytes: int) -> None:
        requests, window_bytes = self._options.window_requests, self._options.window_bytes
        if nbytes > window_bytes:
            text = f"{nbytes} bytes in one request; this server takes at most {window_bytes}"
            self._fail(session, sequence, "too_large", text)
            return
        whose, credit = "session's", session.key_credit
        if credit is not None and not credit.covers(nbytes):
            whose, requests, window_bytes = "key's", credit.max_requests, credit.max_bytes
        text = f"more than this {whose} credit: {requests} requests, {window_bytes} bytes unanswered"
        self._fail(session, sequence, "overloaded", text)

    def _fail_again(self, session: Session, sequence: int, code: str, message: str) -> None:
        self._statistics.requests += 1
        self._fail(session, sequence, code, message)

    def _fail(self, session: Session, sequence: int, code: str, message: str) -> None:
        like_it_before = self._limit.admit(code, self._clock())
        if like_it_before is not None or self._debug:
            write = log.debug if like_it_before is None else log.warning
            write(
                "request refused",
                client=session.label,
                sequence=sequence,
                code=code,
                why=message,
                like_it_before=like_it_before,
            )
        self._egress.refuse(session, sequence, code, message)

    def _refuse(self, peer: bytes, session: Session | None, bad: BadEntry, now: float) -> None:
        """An entry that the codec could not accept: a request fails by its id; anything else is counted."""
        if session is None or bad.kind != Request.KIND or bad.id is None or bad.id in session.running:
            self._outgoing.refuse(peer, bad.message, now)
            return
        self._statistics.requests += 1
        self._fail(session, bad.id, "invalid", bad.message)

    def _for_clients(self) -> dict[str, Any]:
        """What a key without the role `admin` may see: what it may use, and nothing of what others do."""
        return {
            "models": self._models.names,
            "unavailable": dict(self._models.unavailable),
            "forbidden": "the counters need a key with the role admin",
        }

    def _obey(self, peer: bytes, session: Session | None, entry: Entry, now: float) -> Session | None:
        """Carries out a control entry. Returns the peer's session as it is afterwards."""
        self._submit(now)
        if type(entry) is Hello:
            return self._reception.greet(peer, session, entry, now)
        if session is None:
            self._outgoing.tell_stranger(peer, now)
            return None
        match entry:
            case OpenModel():
                self._reception.open_model(session, entry.name)
            case Cancel():
                record = session.running.get(entry.sequence)
                if record is not None:
                    self._dispatcher.cancel(record.id, now)
            case StatisticsRequest() if session in self._told:
                pass
            case StatisticsRequest():
                self._told.add(session)
                values = self._describe() if self._socket.is_admin(peer) else self._for_clients()
                self._outgoing.say(session, Statistics(values=values))
            case Goodbye():
                self._reception.leave(session, now)
                return None
            case Credit():
                self._reception.credit_heard(session, entry)
            case Heartbeat():
                pass
            case _:
                self._outgoing.refuse(peer, f"unexpected {type(entry).__name__}", now)
        return session


_CONFLICT = "use a number once: another request of this client has it"

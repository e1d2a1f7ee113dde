"""The clients' port: from received frames to one `submit` per turn.

Whatever arrived in one turn of the event loop is read in order and handed on together. Nothing that arrives
is trusted: the codec has checked what needs no model, `ModelSignature.resolve` checks the rest, and what
fails is answered by its own id. Nothing here awaits but the socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from shapestream.errors import AlreadyAnswered, Conflict, ProtocolError, Unavailable
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.egress import Egress
from shapestream.serving.inbox import DEAR, QUANTUM, Inbox
from shapestream.serving.kept_replies import same_tensors
from shapestream.serving.links import Outgoing
from shapestream.serving.models import ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.reception import Reception
from shapestream.serving.sessions import RequestRecord, Session
from shapestream.telemetry.logging import RateLimit, debug_enabled
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import BadEntry
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

__all__ = ["Ingress"]

log = structlog.get_logger()


class Ingress:
    """Reads the clients' port: requests go to the dispatcher, the rest to the reception."""

    def __init__(
        self,
        socket: PeerSocket,
        inbox: Inbox,
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
        self._inbox = inbox
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
        self._debug = debug_enabled()
        self._limit = RateLimit()

    async def run(self) -> None:
        """Serves the port until cancelled."""
        inbox = self._inbox
        by_peer = self._reception.sessions.by_peer
        while True:
            heard, beyond = await inbox.read()
            now = self._clock()
            self._statistics.messages = inbox.messages
            for peer in heard:
                if (session := by_peer.get(peer)) is not None:
                    session.heard_at = now
            for peer, why in beyond.items():
                self._reception.turn_away(peer, why, now)
            self._serve_turn(now)

    def _serve_turn(self, now: float) -> None:
        """Serves one turn of the inbox; all its requests become one event of the scheduler."""
        inbox = self._inbox
        by_peer = self._reception.sessions.by_peer
        for peer, item in inbox.turn():
            session = by_peer.get(peer)
            price = DEAR
            if type(item) is Request and session is not None:
                if self._admit(session, item, now):
                    price = 1
            elif type(item) is Clock and session is not None:
                session.clock.heard(item.sent_us, now)
                price = 1
            elif isinstance(item, ProtocolError):
                self._submit(now)
                self._reception.turn_away(peer, str(item), now)
            elif isinstance(item, BadEntry):
                self._refuse(peer, session, item, now)
            else:
                self._obey(peer, session, item, now)
                if type(item) is StatisticsRequest:
                    price = QUANTUM  # the counters take about a millisecond to put together
            inbox.charge(price)
        self._submit(now)
        self._dispatcher.end_turn()

    def _admit(self, session: Session, entry: Request, now: float) -> bool:
        """Checks a request against its model and its session's credit; of load the scheduler knows more.

        Whether it takes some of the credit from now on; if not, it is answered.
        """
        sequence = entry.sequence
        if sequence in session.running or session.answered.knows(sequence):
            self._again(session, entry)
            return False
        self._statistics.requests += 1
        try:
            model = self._models.by_number[entry.model]
            shape = model.resolve(entry.tensors.layout)
        except IndexError:
            text = f"no model has the number {entry.model} here; open a model by its name first"
            self._fail(session, sequence, "invalid", text)
            return False
        except ShapeError as error:
            self._fail(session, sequence, "invalid", f"model {model.name!r}: {error}")
            return False
        except Unavailable as error:
            self._fail(session, sequence, error.code, error.message)
            return False
        nbytes = shape.total_nbytes
        if (excess := self._reception.sessions.excess(session, nbytes)) is not None:
            self._fail_beyond_window(session, sequence, nbytes, excess)
            return False
        remaining_ms = entry.remaining_ms
        deadline = None if remaining_ms is None else session.clock.sent_at(now) + remaining_ms * 0.001
        if remaining_ms and deadline is not None and deadline - now < remaining_ms * 0.0005:
            self._reception.ask_the_time(session, now)  # half of its time was lost on the way, as it seems
        record = RequestRecord(
            self._dispatcher.next_id(),
            session,
            sequence,
            model,
            shape,
            entry.tensors,
            now,
            deadline,
            entry.priority,
        )
        session.begin(record)
        self._arrived.append(record)
        return True

    def _again(self, session: Session, entry: Request) -> None:
        """Take a request whose number came before: it shares that one's reply, or is refused.

        A number that was refused before, and so did not run, has left no trace and does not come here.
        """
        sequence, answered = entry.sequence, session.answered
        if (record := session.running.get(sequence)) is not None:
            if record.model.number == entry.model and same_tensors(record.tensors, entry.tensors):
                self._statistics.duplicates += 1
            else:
                self._fail_again(session, sequence, Conflict.code, f"{_CONFLICT}, which is being worked on")
        elif sequence in answered.replies:
            reply = answered.reply_to(sequence, entry.model, entry.tensors)
            if reply is not None:
                self._egress.repeat(session, reply)
            else:
                self._fail_again(session, sequence, Conflict.code, f"{_CONFLICT}, which was answered")
        else:
            text = f"number {sequence} was answered before, and the reply is no longer kept"
            self._fail_again(session, sequence, AlreadyAnswered.code, text)

    def _submit(self, now: float) -> None:
        """Hands on what was read so far; a control entry that follows may be about it."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._dispatcher.submit(arrived, now)

    def _fail_beyond_window(self, session: Session, sequence: int, nbytes: int, excess: str) -> None:
        most = self._options.window_bytes
        if nbytes > most:
            text = f"{nbytes} bytes in one request; this server takes at most {most}"
            self._fail(session, sequence, "too_large", text)
        else:
            self._fail(session, sequence, "overloaded", excess)

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
            "digests": dict(self._models.digests),
            "forbidden": "the counters need a key with the role admin",
        }

    def _obey(self, peer: bytes, session: Session | None, entry: Entry, now: float) -> None:
        """Carries out a control entry."""
        self._submit(now)
        if type(entry) is Hello:
            self._reception.greet(peer, session, entry, now)
            return
        if session is None:
            self._outgoing.tell_stranger(peer, now)
            return
        match entry:
            case OpenModel():
                self._reception.open_model(session, entry.name)
            case Cancel():
                record = session.running.get(entry.sequence)
                if record is not None:
                    self._dispatcher.cancel(record.id, now)
            case StatisticsRequest():
                values = self._describe() if self._socket.is_admin(peer) else self._for_clients()
                self._outgoing.say(session, Statistics(values=values))
            case Goodbye():
                self._reception.leave(session, now)
            case Credit():
                session.clock.repeated()
            case Heartbeat():
                pass
            case _:
                self._outgoing.refuse(peer, f"unexpected {type(entry).__name__}", now)


_CONFLICT = "use a number once: another request of this client has it"

"""Clients come, ask for models, fall silent and go: everything about a session that is not a request."""

from __future__ import annotations

from typing import Any

import structlog

from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.inbox import Inbox
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.links import GONE, Link, Outgoing
from shapestream.serving.models import ServedModel, ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.sessions import Session, Sessions
from shapestream.telemetry.logging import LineBudget
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.interface import PeerSocket
from shapestream.wire.messages import Credit, Goodbye, Hello, ModelOpened, ModelRefused, Welcome

__all__ = ["Reception"]

log = structlog.get_logger()


class Reception:
    """Keeps the sessions of the clients' port."""

    def __init__(
        self,
        socket: PeerSocket,
        inbox: Inbox,
        outgoing: Outgoing,
        dispatcher: Dispatcher,
        models: ServedModels,
        options: ServerOptions,
        statistics: ServerStatistics,
        kept: KeptReplies,
        *,
        epoch: bytes,
    ) -> None:
        self._socket = socket
        self._inbox = inbox
        self._outgoing = outgoing
        self._dispatcher = dispatcher
        self._models = models
        self._options = options
        self._statistics = statistics
        self._welcome = Welcome(
            epoch=epoch,
            window_requests=options.window_requests,
            window_bytes=options.window_bytes,
            heartbeat_ms=round(options.heartbeat_s * 1000),
        )
        self._window = Credit(window_requests=options.window_requests, window_bytes=options.window_bytes)
        self.sessions = Sessions(options, kept)
        self._kept = kept
        self._lines = LineBudget()
        self._waiting: dict[str, dict[Session, None]] = {}
        """Sessions that asked for a model that the configuration promises and no executor has brought yet."""

    def greet(self, peer: bytes, session: Session | None, hello: Hello, now: float) -> Session | None:
        """Opens a session, or moves it to this connection; None when there are too many.

        `session` is the one that this connection had so far; one of another client ends.
        """
        key = self._socket.key_of(peer)
        client = (hello.client, key)
        known = self.sessions.of_client(client)
        if session is not None and session is not known:
            self.end(session, "another client on its connection", now)
        if known is None:
            if (absent := self.sessions.session_to_end(key)) is not None:
                self.end(absent, "makes room for another", now)
            known = self.sessions.open(client, peer, hello.software, now)
            if known is None:
                self.turn_away(
                    peer, f"more than {self._options.max_sessions} sessions, or too many with its key", now
                )
                return None
            known_by = {} if key is None else {"key": key}
            self._tell("client joined", known, now, software=hello.software, **known_by)
        elif known.peer != peer:
            self.sessions.move(known, peer)
            self._tell("client moved to a new connection", known, now)
        known.heard_at = now
        known.clock.reconnected()
        self._outgoing.say(known, self._welcome)
        return known

    def open_model(self, session: Session, name: str) -> None:
        """Answers at once, or when a promised model is there."""
        model = self._models.get(name)
        why = self._models.unavailable.get(name)
        if why is not None:
            self._outgoing.say(session, ModelRefused(name=name, code="unavailable", message=why))
        elif model is not None:
            self._outgoing.say(session, _opened(model))
        elif self._models.is_expected(name):
            self._waiting.setdefault(name, {})[session] = None
        else:
            known = ", ".join(self._models.names) or "none"
            text = f"no model is called {name!r}; this server has: {known}"
            self._outgoing.say(session, ModelRefused(name=name, code="invalid", message=text))

    def model_added(self, model: ServedModel) -> None:
        """Answers the sessions that have waited for this model."""
        for session in self._waiting.pop(model.name, {}):
            self._outgoing.say(session, _opened(model))

    def model_unavailable(self, name: str, why: str) -> None:
        """Answers the sessions that have waited for this model: it will not come."""
        for session in self._waiting.pop(name, {}):
            self._outgoing.say(session, ModelRefused(name=name, code="unavailable", message=why))

    def turn_away(self, peer: bytes, why: str, now: float) -> None:
        """Ends a connection: the peer learns that it is over, and may start again on another one."""
        self._outgoing.refuse(peer, why, now)
        session = self.sessions.by_peer.get(peer)
        if session is not None:
            self.end(session, "unreadable message", now)
        self._outgoing.say_once(peer, Goodbye())
        self._inbox.cut_off(peer)

    def lost(self, link: Link, why: str, now: float) -> None:
        """What was ready for this client could not be sent."""
        peer = link.peer
        session = None if peer is None else self.sessions.by_peer.get(peer)
        if peer is None or session is None:
            return
        if why == GONE:
            # A connection broke, no more is known: what the client asked for goes on, and it may be back in a moment
            # and ask again. One that is never heard again ends as silent.
            self._statistics.peers_lost[f"client: {why}"] += 1
            self._tell("client's connection is gone", session, now, unfinished=len(session.running))
            self.sessions.detach(session)
        else:
            self.end(session, why, now)
            self._inbox.cut_off(peer)

    def end(self, session: Session, why: str, now: float) -> None:
        """The client is gone: its queued work is dropped, its running work finishes for nobody."""
        self.sessions.close(session)
        for waiting in self._waiting.values():
            waiting.pop(session, None)
        self._statistics.peers_lost[f"client: {why}"] += 1
        self._tell("client left", session, now, why=why, unfinished=len(session.running))
        self._dispatcher.client_left(session, now)

    def _tell(self, event: str, session: Session, now: float, **facts: Any) -> None:
        """A line of the log, unless somebody makes them by the thousand: at `debug` all of them are there."""
        self._lines.write(log, "info", event, now, client=session.label, **facts)

    def leave(self, session: Session, now: float) -> None:
        """The client leaves on purpose, and will ask for nothing again."""
        self._kept.drop(session.answered)
        self.end(session, "goodbye", now)

    def beat(self, now: float) -> None:
        """Once per heartbeat interval: ends silent sessions, and tells the others that this loop is alive.

        No session is silent as long as the port was not read empty: what it said may still be unread.
        """
        self._kept.expire(now)
        read_empty = self._inbox.read_empty
        for session in self.sessions:
            if read_empty and now - session.heard_at > self._options.client_silence_s:
                self.end(session, "silent", now)
            else:
                self._outgoing.keep_alive(session)

    def ask_the_time(self, session: Session, now: float) -> None:
        """Say a client's credit again, which it repeats with its clock: did that stand still, or was its message slow?"""
        if session.clock.ask(now):
            self._outgoing.say(session, self._window)


def _opened(model: ServedModel) -> ModelOpened:
    signature = model.description
    if not model.profile.idempotent:
        signature = {**signature, "idempotent": False}
    return ModelOpened(name=model.name, number=model.number, signature=signature)

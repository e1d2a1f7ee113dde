"""The peers at a port of the server, and the entries that leave for them.

`Outgoing` is the last stop of everything that leaves through a port. The entries for one peer that became ready within one
turn of the event loop leave together, in as few messages as the protocol allows.
"""

from __future__ import annotations

import structlog
import trio

from shapestream.errors import OutboxFull, PeerGone, RequestError
from shapestream.telemetry.counters import ServerStatistics
from shapestream.telemetry.logging import RateLimit
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import Codec
from shapestream.wire.messages import Entry, Failure, Heartbeat, ResultEntry, Unknown
from shapestream_engine.layout import Buffer

log = structlog.get_logger()

GONE = "gone"
"""The reason for a lost link whose connection has broken."""
REJOIN = "is to greet anew"
"""The reason for a link whose connection is sound, and whose session ends, since the scheduler has forgotten it."""
REJOIN_S = 1.0
"""Shortest time between two such ends of a worker's sessions, in seconds: a defect may come back whenever slots join."""


class PeerLink:
    """One peer. Sessions, workers and their slots are links; `outgoing` lives for one turn, so that it needs no bound."""

    __slots__ = ("heard_at", "outgoing", "peer", "spoken")

    def __init__(self, peer: bytes | None, now: float) -> None:
        self.peer = peer
        """The transport's routing id; None while there is no connection, and at the end: entries are dropped then."""
        self.heard_at = now
        self.outgoing: list[Entry] = []
        self.spoken = False
        """Whether anything was sent since the last round of heartbeats."""


class Outgoing:
    """The entries of a port by link, sent at `flush` in few messages."""

    def __init__(
        self,
        socket: PeerSocket,
        port: str,
        statistics: ServerStatistics,
        codec: Codec,
    ) -> None:
        """`port` is its name in logs and counters."""
        self.socket = socket
        self.statistics = statistics
        self.codec = codec
        self._port = port
        self.ready: list[PeerLink] = []
        """Links with entries that are not sent yet."""
        self._limit = RateLimit()
        self.lost: list[tuple[PeerLink, str]] = []
        """Links that could not be sent to, or are to end, with the reason, until the next `flush` returns them."""

    def say(self, link: PeerLink, entry: Entry) -> None:
        """Queue an entry until the end of this turn."""
        if link.peer is None:
            return
        if not link.outgoing:
            self.ready.append(link)
        link.outgoing.append(entry)

    def say_once(self, peer: bytes, entry: Entry) -> None:
        """Send one entry to a peer that has no link, at once, if it can be reached."""
        try:
            self.socket.send_nowait(peer, self.codec.pack([entry])[0])
        except (PeerGone, OutboxFull):
            self.socket.forget(peer)

    def flush(self) -> list[tuple[PeerLink, str]]:
        """Send what was queued. Returns the links that are lost, with the reason: gone, or their peers do not read."""
        ready, self.ready = self.ready, []
        for link in ready:
            entries, link.outgoing = link.outgoing, []
            if link.peer is None:
                continue
            link.spoken = True
            try:
                try:
                    messages = self.codec.pack(entries)
                except RequestError as error:
                    messages = self._pack_singly(link, entries, error)
                for frames in messages:
                    self.socket.send_nowait(link.peer, frames)
            except PeerGone:
                self.lost.append((link, GONE))
            except OutboxFull:
                self.lost.append((link, "does not read"))
        lost, self.lost = self.lost, []
        return lost

    def _pack_singly(self, link: PeerLink, entries: list[Entry], why: RequestError) -> list[list[Buffer]]:
        """Pack each of these entries by itself, since one of them fits no message."""
        skipped = self._limit.admit("unsendable", trio.current_time())
        if skipped is not None:
            log.error("an entry cannot be sent", port=self._port, why=str(why), like_it_before=skipped)
        messages: list[list[Buffer]] = []
        for entry in entries:
            try:
                messages += self.codec.pack([entry])
            except RequestError as error:
                if isinstance(entry, ResultEntry):
                    messages += self.codec.pack([_instead_of(entry, str(error))])
                else:  # the peer would wait for it for ever
                    self.lost.append((link, "cannot be told what it must know"))
        return messages

    def keep_alive(self, link: PeerLink) -> None:
        """Queue a heartbeat if nothing was sent since the last call."""
        if not link.spoken:
            self.say(link, Heartbeat())
        link.spoken = False

    def tell_stranger(self, peer: bytes, now: float) -> None:
        """Answer a peer that has not greeted, or greeted another server; count it, and log it at a limited rate."""
        self.statistics.strangers[self._port] += 1
        skipped = self._limit.admit("stranger", now)
        if skipped is not None:
            log.warning("stranger", port=self._port, peer=peer.hex(), like_it_before=skipped)
        self.say_once(peer, Unknown())

    def count_handshakes(self, now: float) -> None:
        """Count connections that failed in their handshake, and log them at a limited rate."""
        failed = self.socket.failed_handshakes()
        if not failed:
            return
        self.statistics.failed_handshakes[self._port] += failed
        skipped = self._limit.admit("handshake", now)
        if skipped is not None:
            log.warning("handshakes failed", port=self._port, count=failed, like_it_before=skipped)

    def refuse(self, peer: bytes, why: str, now: float) -> None:
        """Count a message that could not be accepted, and log it at a limited rate."""
        self.statistics.bad_messages[self._port] += 1
        skipped = self._limit.admit(self._port, now)
        if skipped is not None:
            log.warning("message refused", port=self._port, peer=peer.hex(), why=why, like_it_before=skipped)


def _instead_of(result: ResultEntry, why: str) -> Failure:
    """Return the failure that replaces a result. A model may give outputs that no message can hold."""
    text = f"the result cannot be sent: {why}"
    return Failure(
        sequence=result.sequence, code="model_error", message=text, retryable=False, retry_after_ms=None
    )

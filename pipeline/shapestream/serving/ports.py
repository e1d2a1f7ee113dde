"""The server's ports seen alike, clients' and workers': what both do once per turn, per heartbeat, and at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from shapestream.serving.links import Link, Outgoing
from shapestream.transport.curve import KeyRing, ProtectedRouter
from shapestream.transport.interface import PeerSocket
from shapestream.wire.messages import Goodbye

__all__ = ["Port", "Ports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port: its socket, and what the parts that keep it do about it."""

    socket: PeerSocket
    outgoing: Outgoing
    serve: Callable[[], Awaitable[None]]
    """Reads the port until cancelled."""
    lost: Callable[[Link, str, float], None]
    """A link could not be sent to, for this reason."""
    beat: Callable[[float], None]
    links: Callable[[], Iterable[Link]]
    """Who is there now."""


class Ports:
    """Those that this server has."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ports: list[Port] = []

    def __iter__(self) -> Iterator[Port]:
        return iter(self._ports)

    def add(self, port: Port) -> None:
        """Before the server runs."""
        self._ports.append(port)

    def flush(self) -> None:
        """Sends what became ready, and ends the links that could not be sent to; that may make more ready."""
        while True:
            for port in self._ports:
                port.outgoing.flush()
            if not self._end_lost_links():
                return

    def _end_lost_links(self) -> bool:
        """Whether there were any."""
        found = False
        for port in self._ports:
            if port.outgoing.lost:
                found = True
                lost, port.outgoing.lost = port.outgoing.lost, []
                now = self._clock()
                for link, why in lost:
                    port.lost(link, why, now)
        return found

    def beat(self, now: float) -> None:
        """Once per heartbeat interval: who is silent is given up, the others hear that this loop is alive."""
        for port in self._ports:
            port.beat(now)
            port.outgoing.count_handshakes(now)

    def say_goodbye(self) -> None:
        """To everybody, at the end of this turn."""
        for port in self._ports:
            for link in port.links():
                port.outgoing.say(link, Goodbye())

    def let_in(self, ring: KeyRing) -> None:
        """Replaces the keys that are let in, where any are asked for."""
        for port in self._ports:
            if isinstance(port.socket, ProtectedRouter):
                port.socket.let_in(ring)

    def refused(self) -> dict[str, dict[str, int]]:
        """How many peers were turned away at the ports that ask for keys, by port and reason."""
        sockets = [port.socket for port in self._ports]
        return {
            socket.port: dict(socket.refused) for socket in sockets if isinstance(socket, ProtectedRouter)
        }

"""The ports of a server, seen alike."""

from __future__ import annotations

import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.raw_peer import RawPeer

from shapestream.serving.links import GONE, Link, Outgoing
from shapestream.serving.ports import Port, Ports
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.memory import memory_server
from shapestream.wire.messages import Goodbye, Heartbeat

STRANGER = b"nobody"


class Kept:
    """A port over memory, whose keeper tells another link goodbye when one of its own is lost."""

    def __init__(self, ports: Ports) -> None:
        self.socket = memory_server()
        self.outgoing = Outgoing(self.socket, "clients", ServerStatistics())
        self.links: list[Link] = []
        self.lost: list[tuple[Link, str, float]] = []
        self.beats: list[float] = []
        self.to_tell: tuple[Outgoing, Link] | None = None
        ports.add(
            Port(
                socket=self.socket,
                outgoing=self.outgoing,
                serve=trio.sleep_forever,
                lost=self._on_lost,
                beat=self.beats.append,
                links=lambda: self.links,
            )
        )

    def _on_lost(self, link: Link, why: str, now: float) -> None:
        self.lost.append((link, why, now))
        if self.to_tell is not None:
            outgoing, other = self.to_tell
            outgoing.say(other, Goodbye())

    async def peer(self) -> RawPeer:
        """Somebody who is connected, and has a link."""
        peer = RawPeer(self.socket.connect())
        peer.say(Heartbeat())
        ((routing_id, _frames),) = await self.socket.receive()
        self.links.append(Link(routing_id, 0.0))
        return peer


@virtual_time
async def test_what_becomes_ready_because_a_link_was_lost_leaves_in_the_same_turn() -> None:
    """Also where the port of the one who hears of it has had its turn already."""
    ports = Ports(lambda: 7.0)
    first, second = Kept(ports), Kept(ports)
    peer = await first.peer()
    second.to_tell = (first.outgoing, first.links[0])
    gone = Link(STRANGER, 0.0)
    second.outgoing.say(gone, Heartbeat())
    ports.flush()
    assert [(gone, GONE, 7.0)] == second.lost
    assert [] == first.lost
    await peer.hear(Goodbye)


@virtual_time
async def test_everybody_at_every_port_is_told_goodbye() -> None:
    """At the end of the turn, not before."""
    ports = Ports(trio.current_time)
    peers = [await Kept(ports).peer() for _ in range(2)]
    ports.say_goodbye()
    assert [[], []] == [peer.connection.receive_nowait() for peer in peers]
    ports.flush()
    for peer in peers:
        await peer.hear(Goodbye)


def test_both_ports_hear_each_beat() -> None:
    """With its time."""
    ports = Ports(lambda: 0.0)
    kept = Kept(ports), Kept(ports)
    ports.beat(3.0)
    assert [[3.0], [3.0]] == [each.beats for each in kept]

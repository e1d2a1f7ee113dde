"""Sockets that prove who speaks: CURVE and ZAP over the ROUTER and DEALER of `zeromq.py`.

    address   asks for           a peer is known by
    tcp       CURVE, a key that is listed for this port      its public key
    ipc       nothing: the folder's mode says who gets there `LOCAL`

The key that a peer has proved to own comes with each message, from libzmq itself. A routing id proves nothing: peers may
choose it. So each message is checked against the key of its routing id's first one, and against the list.

libzmq asks its ZAP handler through an address of its context (`inproc://zeromq.zap.01`), so each protected socket has
a context, and a handler, of its own. Without a running handler nobody gets in (ZAP_ENFORCE_DOMAIN).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import trio
import zmq

from shapestream.errors import PeerGone
from shapestream.telemetry.logging import RateLimit
from shapestream.transport.curve_keys import KeyPair
from shapestream.transport.handshakes import HandshakeFailure
from shapestream.transport.outbox import OutboxRoom
from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.zap import LOCAL, LOCAL_DOMAIN, PROTECTED_DOMAIN, KeyRing, KeyRole, answer_zap
from shapestream.transport.zeromq import DealerSocket, RouterSocket
from shapestream_engine.layout import Buffer

__all__ = ["CallerKeys", "ProtectedDealer", "ProtectedRouter", "ServerSecurity"]

log = structlog.get_logger()

# Routing ids whose keys are remembered, those heard last. Enough for all sessions that a server may have (65,536):
# to be forgotten by others' handshakes within a session's silence takes more of them than CURVE can do in that time.
MAX_REMEMBERED = 131_072
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
# libzmq's own routing ids: a zero, and four bytes that count up.
_OWN_ID_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """The server's own key, and the keys that it lets in."""

    key: KeyPair
    ring: KeyRing


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerKeys:
    """What a client or a worker needs to reach a protected server: its own key, and the server's public one."""

    key: KeyPair
    server_key: str


class ProtectedRouter(RouterSocket):
    """A `PeerSocket` over ROUTER that lets in only listed keys, except over ipc.

    `port` is what logs call it; `roles` are those that may use it.
    """

    def __init__(
        self,
        security: ServerSecurity,
        roles: Sequence[KeyRole],
        *,
        port: str,
        options: SocketOptions | None = None,
        room: OutboxRoom | None = None,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        super().__init__(options=options, context=self._context, room=room)
        self._security = security
        self.port = port
        self._roles = roles
        self._admitted: Mapping[str, str] = {}
        self._admins: Mapping[str, str] = {}
        self._keys: OrderedDict[bytes, str] = OrderedDict()
        self._closed_to: OrderedDict[bytes, None] = OrderedDict()
        """Routing ids that are sent nothing more: another key has taken them, or theirs was taken back."""
        self.refused: Counter[str] = Counter()
        """Handshakes and messages that were refused, by why."""
        self._limit = RateLimit()
        self.let_in(security.ring)
        self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._handler = RouterSocket(context=self._context)
        self._handler.bind(_ZAP_ADDRESS)

    def let_in(self, ring: KeyRing) -> None:
        """From now on these keys are let in, and no others; connections of a key that is no longer listed are cut off."""
        self._admitted = {**ring.of(self._roles), LOCAL: LOCAL}
        self._admins = ring.admins
        for peer in [peer for peer, key in self._keys.items() if key not in self._admitted]:
            self._close_to(peer)

    def bind(self, address: str) -> None:
        """Listens at `tcp://…` for listed keys, at `ipc://…` for whoever may use the folder."""
        protected = not address.startswith("ipc://")
        self._check_open()
        # Options of a listener are those that the socket has when it is bound.
        self._socket.set(zmq.CURVE_SERVER, int(protected))
        self._socket.set(zmq.ZAP_DOMAIN, PROTECTED_DOMAIN if protected else LOCAL_DOMAIN)
        if protected:
            self._socket.set(zmq.CURVE_SECRETKEY, self._security.key.secret.encode())
        super().bind(address)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watches the socket, and answers who may connect, until it is closed or cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._handler.run)
            await nursery.start(self._monitor.run)
            nursery.start_soon(self._answer_handshakes)
            nursery.start_soon(self._count_failures)
            await super().run(task_status=task_status)
            nursery.cancel_scope.cancel()

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Sends; `PeerGone` also for a routing id that another key has taken, or whose key is no longer listed."""
        if self._closed_to and peer in self._closed_to:
            raise PeerGone(f"peer {peer.hex()}: its key is not, or no longer, the one that may hear this")
        super().send_nowait(peer, frames)

    def key_of(self, peer: bytes) -> str | None:
        """The public key that this peer has proved to own; None for one over ipc."""
        key = self._keys.get(peer)
        return None if key == LOCAL else key

    def is_admin(self, peer: bytes) -> bool:
        """Whether this peer may see the counters: over ipc, or with an admin's key."""
        key = self._keys.get(peer)
        return key == LOCAL or key in self._admins

    def failed_handshakes(self) -> int:
        """None to be counted again: `refused` has them, by why."""
        return 0

    def close(self) -> None:
        """Stops listening. What libzmq has taken lingers, then its threads end."""
        if self._closed:
            return
        super().close()
        self._handler.close()
        self._keys.clear()
        # It waits until everything lingering is gone, so it gets a thread of its own; nobody waits for that.
        threading.Thread(target=self._context.term, name="shapestream-curve-end", daemon=True).start()

    def _may_speak(self, peer: bytes, first: zmq.Frame) -> bool:
        try:
            key = str(first.get("User-Id"))
        except (
            zmq.ZMQError
        ):  # cannot be: each address here is bound with a domain, and each reply names a user
            return self._refuse("no key", f"peer {peer.hex()}", peer)
        known = self._keys.get(peer)
        if key not in self._admitted:
            return self._refuse("key not listed", f"{key} is no longer listed for this port", peer)
        if key == known:
            self._keys.move_to_end(peer)
            return True
        if known is not None:
            # The connection that had this id is gone; what is meant for its owner must not reach the new one.
            self._close_to(peer)
            return self._refuse("another's routing id", f"{key} took the routing id of {known}", peer)
        if key != LOCAL and (len(peer) != _OWN_ID_BYTES or peer[0] != 0):
            return self._refuse("chosen routing id", f"{key} chose its own routing id", peer)
        self._keys[peer] = key
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)
        return True

    def _close_to(self, peer: bytes) -> None:
        self._closed_to[peer] = None
        self.forget(peer)
        if len(self._closed_to) > MAX_REMEMBERED:
            self._closed_to.popitem(last=False)

    def _refuse(self, kind: str, why: str, peer: bytes) -> bool:
        self.cut_off(peer)
        self._note(kind, why)
        return False

    def _note(self, kind: str, why: str) -> None:
        self.refused[kind] += 1
        skipped = self._limit.admit(kind, trio.current_time())
        if skipped is not None:
            log.warning("peer refused", port=self.port, reason=kind, why=why, like_it_before=skipped)

    async def _answer_handshakes(self) -> None:
        with contextlib.suppress(trio.ClosedResourceError):
            while True:
                for asking, frames in await self._handler.receive():
                    verdict = answer_zap(frames, self._admitted)
                    if verdict is None:
                        continue
                    if verdict.refused is not None:
                        self._note("key not listed", verdict.refused)
                    with contextlib.suppress(PeerGone):  # who hung up meanwhile needs no answer
                        self._handler.send_nowait(asking, verdict.reply)

    async def _count_failures(self) -> None:
        with contextlib.suppress(trio.ClosedResourceError):
            while True:
                for failure in await self._monitor.receive():
                    if failure is not HandshakeFailure.REFUSED:  # that was counted when ZAP was asked
                        self._note("handshake failed", failure.name.lower())


class ProtectedDealer(DealerSocket):
    """A `Connection` over DEALER that proves its key, and speaks to the owner of `server_key` only."""

    def __init__(self, keys: CallerKeys, *, options: SocketOptions | None = None) -> None:
        super().__init__(options=options)
        self._has_key = True
        self._socket.set(zmq.CURVE_PUBLICKEY, keys.key.public.encode())
        self._socket.set(zmq.CURVE_SECRETKEY, keys.key.secret.encode())
        self._socket.set(zmq.CURVE_SERVERKEY, keys.server_key.encode())

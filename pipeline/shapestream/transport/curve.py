"""CURVE and ZAP over ROUTER and DEALER: sockets whose peers prove their keys.

    address   asks for           a peer is known by
    tcp       CURVE, a key that is listed for this port      its public key
    ipc       nothing: the folder's mode decides          `LOCAL`

libzmq attaches the proved key of its peer to each message. A routing id proves nothing: peers may choose it. So each
message is checked against the key of the first message under its routing id, and against the list.

For each handshake on a protected socket libzmq sends a request (ZeroMQ's RFC 27) to `inproc://zeromq.zap.01` of its
context, and admits the peer only after a reply with the status 200. So each protected socket has a context, and a
handler, of its own. Without a running handler no peer is admitted (ZAP_ENFORCE_DOMAIN).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import trio
import zmq
from zmq.utils import z85

from shapestream.errors import PeerGone
from shapestream.telemetry.logging import RateLimit, get_logger
from shapestream.transport.curve_keys import KeyPair
from shapestream.transport.router import OutboxRoom, RouterSocket
from shapestream.transport.zeromq import CLOSED, HandshakeFailure, SocketOptions
from shapestream_engine.layout import Buffer

log = get_logger()

# Routing ids with remembered keys, the latest: twice the sessions of a server (65,536). CURVE cannot do enough
# handshakes during a session's permitted silence to displace its key.
MAX_REMEMBERED = 131_072
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
# libzmq's own routing ids: a zero, and four bytes that count up.
_OWN_ID_BYTES = 5
# Domains of our addresses in libzmq's requests. Connections without a key (NULL) are asked about too; they are
# admitted where no key is wanted, and nowhere else.
PROTECTED_DOMAIN, LOCAL_DOMAIN = b"protected", b"local"
LOCAL = "local"
"""The user id of a peer at an address that asks for no key. Public keys are longer."""
_VERSION = b"1.0"


class KeyRole(Enum):
    """Permission of a key's owner. Peers over ipc may do everything."""

    CLIENT = "client"
    """May open models and send requests."""
    ADMIN = "admin"
    """May do what a client may, and see the server's counters, which concern other clients too."""
    GATEWAY = "gateway"
    """May do what a client may, and name the caller of each request, by whom fair shares count."""
    WORKER = "worker"
    """May serve models at the workers' port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """Admitted public keys, by role: Z85 -> a name for logs."""

    clients: Mapping[str, str] = field(default_factory=dict)
    admins: Mapping[str, str] = field(default_factory=dict)
    gateways: Mapping[str, str] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)

    def of(self, roles: Sequence[KeyRole]) -> dict[str, str]:
        """Return the keys with one of these roles, each with its name."""
        by_role = {
            KeyRole.CLIENT: self.clients,
            KeyRole.ADMIN: self.admins,
            KeyRole.GATEWAY: self.gateways,
            KeyRole.WORKER: self.workers,
        }
        return {key: name for role in roles for key, name in by_role[role].items()}

    def counts(self) -> dict[str, int]:
        """Return the number of keys per role, for logs."""
        return {
            "clients": len(self.clients),
            "admins": len(self.admins),
            "gateways": len(self.gateways),
            "workers": len(self.workers),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """The server's own key, and the keys that it admits."""

    key: KeyPair
    ring: KeyRing


class ProtectedRouter(RouterSocket):
    """A `PeerSocket` over ROUTER that admits only listed keys, except over ipc.

    `port` is its name in logs; keys of other than these `roles` are refused.
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
        self._ring = security.ring
        self._keys: OrderedDict[bytes, str] = OrderedDict()
        self._closed_to: OrderedDict[bytes, None] = OrderedDict()
        """Routing ids that get no more messages: another key has taken them, or their key was withdrawn."""
        self.refused: Counter[str] = Counter()
        """Number of refused handshakes and messages, by reason."""
        self._limit = RateLimit()
        self.let_in(security.ring)
        self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._handler = RouterSocket(context=self._context)
        self._handler.bind(_ZAP_ADDRESS)

    def let_in(self, ring: KeyRing) -> None:
        """Admit these keys from now on, and no others; cut off connections of withdrawn keys."""
        self._admitted = {**ring.of(self._roles), LOCAL: LOCAL}
        self._ring = ring
        for peer in [peer for peer, key in self._keys.items() if key not in self._admitted]:
            self._close_to(peer)

    def bind(self, address: str) -> None:
        """Listen at `tcp://…` for listed keys, at `ipc://…` for all users of the folder."""
        protected = not address.startswith("ipc://")
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        # A listener keeps the options that the socket has when it is bound.
        self._socket.set(zmq.CURVE_SERVER, int(protected))
        self._socket.set(zmq.ZAP_DOMAIN, PROTECTED_DOMAIN if protected else LOCAL_DOMAIN)
        if protected:
            self._socket.set(zmq.CURVE_SECRETKEY, self._security.key.secret.encode())
        super().bind(address)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the socket, and answer ZAP requests, until it is closed or cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._handler.run)
            nursery.start_soon(self._answer_handshakes)
            await super().run(task_status=task_status)
            nursery.cancel_scope.cancel()

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Send; `PeerGone` also for a routing id that another key has taken, or whose key was withdrawn."""
        if self._closed_to and peer in self._closed_to:
            raise PeerGone(
                f"peer {peer.hex()} is cut off: its key was withdrawn, or another key took its routing id"
            )
        super().send_nowait(peer, frames)

    def key_of(self, peer: bytes) -> str | None:
        """Return the public key that this peer has proved to own; None over ipc."""
        key = self._keys.get(peer)
        return None if key == LOCAL else key

    def is_admin(self, peer: bytes) -> bool:
        """Tell whether a peer may see the counters: over ipc, or with an admin's key."""
        key = self._keys.get(peer)
        return key == LOCAL or key in self._ring.admins

    def may_name_callers(self, peer: bytes) -> bool:
        """Tell whether a peer may name the callers of its requests: over ipc, or with a gateway's key."""
        key = self._keys.get(peer)
        return key == LOCAL or key in self._ring.gateways

    def failed_handshakes(self) -> int:
        """Return 0: `refused` counts them by reason. Those that ZAP refused were counted when it was asked."""
        for failure in self._monitor.failures():
            if failure is not HandshakeFailure.REFUSED:
                self._note("handshake failed", failure.name.lower())
        return 0

    def close(self) -> None:
        """Stop listening. Messages that libzmq has taken linger, then its threads end."""
        if self._closed:
            return
        super().close()
        self._handler.close()
        self._keys.clear()
        # It waits for lingering messages, hence a thread of its own, which is not waited for.
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
            # The first connection with this id is gone; messages for its owner must not reach the new one.
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
                    with contextlib.suppress(PeerGone):  # the peer has hung up
                        self._handler.send_nowait(asking, verdict.reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reply to one request; `refused` is the reason of a refusal, for the log, or None."""

    reply: list[bytes]
    refused: str | None


def answer_zap(frames: Sequence[Buffer], admitted: Mapping[str, str]) -> Verdict | None:
    """Return the verdict on one handshake; None for frames that are no request, and cannot be answered.

    Keys in `admitted` are let in at protected addresses, all peers at local ones, and none elsewhere.
    """
    parts = [bytes(frame) for frame in frames]
    if len(parts) < 7 or parts[0] != b"":
        return None
    _, version, request, domain, address, _, mechanism, *credentials = parts
    whence = address.decode("latin-1")
    if version != _VERSION:
        return _refusal(request, f"version {version!r} of ZAP")
    if mechanism == b"NULL" and domain == LOCAL_DOMAIN and not credentials:
        return _admission(request, LOCAL)
    if (
        mechanism != b"CURVE"
        or domain != PROTECTED_DOMAIN
        or len(credentials) != 1
        or len(credentials[0]) != 32
    ):
        return _refusal(request, f"{mechanism.decode('latin-1')} from {whence}")
    key = z85.encode(credentials[0]).decode()
    if key not in admitted:
        return _refusal(request, f"the key {key} from {whence} is not listed for this port")
    return _admission(request, key)


def _admission(request: bytes, user: str) -> Verdict:
    return Verdict(reply=[b"", _VERSION, request, b"200", b"OK", user.encode(), b""], refused=None)


def _refusal(request: bytes, why: str) -> Verdict:
    # No details: a stranger must not learn which keys are listed.
    return Verdict(reply=[b"", _VERSION, request, b"400", b"no access", b"", b""], refused=why)

"""Who may connect, as libzmq asks it: ZeroMQ's Authentication Protocol (RFC 27). Pure.

For each handshake on a protected socket libzmq sends a request to `inproc://zeromq.zap.01`, and lets the peer in only
after a reply with the status 200. The user id of that reply then comes with every message of that connection: it is
how the server knows who speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from zmq.utils import z85

from shapestream_engine.layout import Buffer

__all__ = ["LOCAL", "LOCAL_DOMAIN", "PROTECTED_DOMAIN", "KeyRing", "KeyRole", "Verdict", "answer_zap"]

# The domains of our addresses, as libzmq names them in its requests. It asks also about connections without a key
# (NULL): those are let in where no key is wanted, and nowhere else.
PROTECTED_DOMAIN, LOCAL_DOMAIN = b"protected", b"local"
LOCAL = "local"
"""The user id of a peer that came over an address that asks for no key. No public key is so short."""
_VERSION = b"1.0"


class KeyRole(Enum):
    """What the owner of a key may do. Whoever is at home (ipc) may do everything."""

    CLIENT = "client"
    """Ask for models and send requests."""
    ADMIN = "admin"
    """The same, and see the server's counters, which tell of other clients."""
    WORKER = "worker"
    """Serve models at the workers' port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """The public keys that are let in, by role: Z85 -> a name for logs."""

    clients: Mapping[str, str] = field(default_factory=dict)
    admins: Mapping[str, str] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)

    def of(self, roles: Sequence[KeyRole]) -> dict[str, str]:
        """The keys that have one of these roles."""
        by_role = {
            KeyRole.CLIENT: self.clients,
            KeyRole.ADMIN: self.admins,
            KeyRole.WORKER: self.workers,
        }
        return {key: name for role in roles for key, name in by_role[role].items()}

    def counts(self) -> dict[str, int]:
        """How many keys each role has, for logs."""
        return {"clients": len(self.clients), "admins": len(self.admins), "workers": len(self.workers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reply to one request; `refused` says why it is a refusal, for the log, or is None."""

    reply: list[bytes]
    refused: str | None


def answer_zap(frames: Sequence[Buffer], admitted: Mapping[str, str]) -> Verdict | None:
    """Decides about one handshake; None for what is no request at all, and cannot be answered.

    The keys in `admitted` are let in at protected addresses, anybody at the others, nobody anywhere else.
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
    # The peer learns no more than that: a stranger is not told which keys there are.
    return Verdict(reply=[b"", _VERSION, request, b"400", b"no access", b"", b""], refused=why)

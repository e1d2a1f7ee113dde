"""The sockets of a server: bound to the addresses of the settings, and protected by keys where other machines connect."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import structlog

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.errors import ConfigurationError
from shapestream.settings import ServerSettings
from shapestream.transport.curve import KeyRole, ProtectedRouter, ServerSecurity
from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.zeromq import OutboxRoom, RouterSocket
from shapestream.wire.codec import encode
from shapestream.wire.limits import Limits
from shapestream.wire.messages import Goodbye

log = structlog.get_logger()

SENT_AHEAD = 32
"""Messages that libzmq buffers for a peer that does not read, besides its outbox.

A message to a client has about 1 MiB at most (`CLIENT_LIMITS`), or holds one larger result.
"""


def listen(
    addresses: Sequence[str],
    settings: ServerSettings,
    keys: ServerSecurity | None,
    port: str,
    roles: Sequence[KeyRole],
    room: OutboxRoom,
    limits: Limits,
) -> RouterSocket:
    """Bind a socket to all these addresses, for peers whose key has one of these roles.

    port: name in logs and counters.
    room: bytes that the outboxes of all ports may hold together.
    limits: the largest messages of this port.

    Raises AddressInUse, and ConfigurationError for an address that other machines reach, without `keys` or
    `security: network`.
    """
    open_to_all = [address for address in addresses if is_beyond_loopback(address)]
    if open_to_all and keys is None and not settings.network_is_safe:
        raise ConfigurationError(
            [f"{address}: other machines reach it (security is needed)" for address in open_to_all]
        )
    if open_to_all and keys is None:
        advice = "each can end this process, too: use keys (docs/security.md)"
        log.warning(
            "every peer that reaches these addresses is let in", port=port, listen=open_to_all, advice=advice
        )
    # CURVE requires keys at tcp addresses only.
    asks = keys is not None and any(map(is_protectable, addresses))
    # One frame for the header, and one too many, by which the decoder recognises a message to refuse.
    (farewell,) = encode([Goodbye()])
    asked = SocketOptions(
        high_water_mark=SENT_AHEAD, max_frames=limits.max_frames + 2, farewell=bytes(farewell)
    )
    socket = (
        ProtectedRouter(keys, roles, port=port, options=asked, room=room)
        if asks and keys
        else RouterSocket(options=asked, room=room)
    )
    with ExitStack() as unless_bound:
        unless_bound.callback(socket.close)
        for address in addresses:
            socket.bind(address)
        unless_bound.pop_all()
    return socket

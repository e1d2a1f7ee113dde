"""A socket that listens where the settings say, and asks for keys where it has to."""

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

# Messages that libzmq holds for a peer that does not read, beside its outbox. A message to a client has some 1 MiB at most
# (`CLIENT_LIMITS`), or one larger result.
SENT_AHEAD = 32


def listen(
    addresses: Sequence[str],
    settings: ServerSettings,
    keys: ServerSecurity | None,
    port: str,
    roles: Sequence[KeyRole],
    room: OutboxRoom,
    limits: Limits,
) -> RouterSocket:
    """Binds a socket to all of these, for peers with one of these roles; `port` is what logs and counters call it.

    `room` is what the outboxes of all ports may hold together, and `limits` are those of messages at this port.

    Raises AddressInUse; ConfigurationError for an address that other machines reach, without `keys` or `security: network`.
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
    # CURVE asks for keys at tcp addresses only.
    asks = keys is not None and any(map(is_protectable, addresses))
    # The header frame, and one frame too many: by that the decoder knows a message that is refused.
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

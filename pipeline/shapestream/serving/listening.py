"""A socket that listens where the options say, and asks for keys where it has to."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.errors import ConfigurationError
from shapestream.serving.options import ServerOptions
from shapestream.transport.curve import ProtectedRouter
from shapestream.transport.zap import KeyRole
from shapestream.transport.zeromq import RouterSocket

__all__ = ["listen"]

log = structlog.get_logger()


def listen(
    addresses: Sequence[str], options: ServerOptions, port: str, roles: Sequence[KeyRole]
) -> RouterSocket:
    """Binds a socket to all of these, for peers with one of these roles; `port` is what logs and counters call it.

    Raises AddressInUse; ConfigurationError for an address that other machines reach without `security`.
    """
    open_to_all = [address for address in addresses if is_beyond_loopback(address)]
    if open_to_all and options.security is None and not options.network_is_safe:
        raise ConfigurationError(
            [f"{address}: other machines reach it (security is needed)" for address in open_to_all]
        )
    if open_to_all and options.security is None:
        log.warning("anybody who reaches these addresses is let in", port=port, listen=open_to_all)
    # Where nothing but ipc is listened at there is nobody to ask.
    asks = options.security is not None and any(map(is_protectable, addresses))
    socket = (
        ProtectedRouter(options.security, roles, port=port) if asks and options.security else RouterSocket()
    )
    try:
        for address in addresses:
            socket.bind(address)
    except BaseException:
        socket.close()
        raise
    return socket

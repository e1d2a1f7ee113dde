"""`shapestream health`: does a server answer at an address? For health checks, which ask every few seconds.

It says hello as a client does, takes any answer for a sign of life, and says goodbye: an answer comes from the event loop
that does the work. Nothing but ZeroMQ and msgpack is imported for it: a tenth of a second of CPU, where a client takes ten
times that. So the few bytes that it sends are written here by the protocol's numbers (docs/protocol.md).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgpack
import zmq

from shapestream_workers.exit_codes import EXIT_CONFIGURATION, EXIT_OK, EXIT_RUNTIME

if TYPE_CHECKING:
    from shapestream.transport.curve import CallerKeys

DEFAULT_TIMEOUT_S = 5.0
# The wire protocol's version, and its kinds of entries.
_VERSION, _GOODBYE, _HELLO = 1, 1, 10
# For the goodbye to leave: what the server's system does not take by then is not worth waiting for.
_FAREWELL_MS = 500


def greeting() -> bytes:
    """Return a message that opens a session, of a new client."""
    return _message(_HELLO, os.urandom(16), "shapestream health")


def goodbye() -> bytes:
    """Return a message that ends it."""
    return _message(_GOODBYE)


def _message(kind: int, *fields: bytes | str) -> bytes:
    packed: bytes = msgpack.packb([_VERSION, [[kind, 0, *fields]]])
    return packed


def main(arguments: Sequence[str]) -> int:
    """Ask once and return the exit status: 0 for an answer, 1 for none, 3 for an unusable configuration or key."""
    options = _parser().parse_args(arguments)
    from_environment = os.environ.get
    try:
        address = _address(options.target)
        keys = None
        if address.startswith("tcp://"):
            key = options.key or from_environment("SHAPESTREAM_KEY")
            server_key = options.server_key or from_environment("SHAPESTREAM_SERVER_KEY")
            keys = _keys(key, server_key)
    except _Unusable as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIGURATION
    why = _ask(address, options.timeout, keys)
    if why is not None:
        print(f"unavailable: {why}", file=sys.stderr)
        return EXIT_RUNTIME
    print(f"{address} answers")
    return EXIT_OK


class _Unusable(Exception):
    """A configuration or a key cannot be used; the text says why, a line per problem."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shapestream health",
        description="Ask whether a server answers. Exit status: 0 it does, 1 it does not in time.",
    )
    parser.add_argument(
        "target",
        metavar="ADDRESS|CONFIG",
        help="A server's address (ipc://..., tcp://...), which is quickest, or the YAML that it serves.",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="For the answer (5)."
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        help="Our secret key's file, for a server that asks for keys (SHAPESTREAM_KEY).",
    )
    parser.add_argument(
        "--server-key", metavar="KEY|FILE", help="That server's public key (SHAPESTREAM_SERVER_KEY)."
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


def _address(target: str) -> str:
    if "://" in target:
        return target
    from shapestream.errors import ConfigurationError
    from shapestream_workers.target import address_of

    try:
        return address_of(target)
    except ConfigurationError as error:
        raise _Unusable("\n".join(error.problems)) from error


def _keys(key: str | None, server_key: str | None) -> CallerKeys | None:
    if key is None and server_key is None:
        return None
    from pathlib import Path

    from shapestream.errors import ConfigurationError
    from shapestream_workers.security import caller_keys

    try:
        return caller_keys(None if key is None else Path(key), server_key)
    except ConfigurationError as error:
        raise _Unusable("\n".join(error.problems)) from error


def _ask(address: str, timeout_s: float, keys: CallerKeys | None) -> str | None:
    """Ask the server; return None for an answer, else the reason why it counts as absent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        if keys is not None:
            socket.set(zmq.CURVE_PUBLICKEY, keys.key.public.encode())
            socket.set(zmq.CURVE_SECRETKEY, keys.key.secret.encode())
            socket.set(zmq.CURVE_SERVERKEY, keys.server_key.encode())
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            return f"{address}: {error.strerror} (an address is ipc://PATH or tcp://HOST:PORT)"
        socket.send(greeting())
        if not socket.poll(round(timeout_s * 1000)):
            hint = (
                " (--key and --server-key, if it asks for keys)"
                if address.startswith("tcp://") and keys is None
                else ""
            )
            return f"no server at {address} answers within {timeout_s:g} s{hint}"
        socket.set(zmq.LINGER, _FAREWELL_MS)
        socket.send(goodbye())
        return None

"""`shapestream health`: tell whether a server answers, for health checks that ask every few seconds.

The command sends a client's greeting, waits for any answer, and sends a goodbye. The answer comes from the server's main
event loop. Only ZeroMQ and msgpack are imported: that takes a tenth of a second of CPU, and a client ten times that. So the
messages are built here by the protocol's numbers (docs/protocol.md).
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

from shapestream_workers import EXIT_CONFIGURATION, EXIT_OK, EXIT_RUNTIME

if TYPE_CHECKING:
    from shapestream.transport.curve_keys import CallerKeys

DEFAULT_TIMEOUT_S = 5.0
# The wire protocol's version, and its kinds of entries.
_VERSION, _GOODBYE, _HELLO = 1, 1, 10
_FAREWELL_MS = 500
"""Milliseconds to send the goodbye."""


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
    try:
        address = _address(options.target)
        keys = _keys(options.key, options.server_key) if address.startswith("tcp://") else None
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
    """A configuration or a key cannot be used; the text has a line for each problem."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shapestream health",
        description="Ask whether a server answers. Exit status: 0 it does, 1 it does not in time.",
    )
    parser.add_argument(
        "target",
        metavar="ADDRESS|CONFIG",
        help="The server's address (ipc://..., tcp://...), which is quickest, or its YAML file.",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="Time for the answer (5).",
    )
    variable = os.environ.get
    parser.add_argument(
        "--key",
        metavar="FILE",
        default=variable("SHAPESTREAM_KEY"),
        help="Your secret key, for a server with keys (SHAPESTREAM_KEY).",
    )
    parser.add_argument(
        "--server-key",
        metavar="KEY|FILE",
        default=variable("SHAPESTREAM_SERVER_KEY"),
        help="The server's public key, or its file (SHAPESTREAM_SERVER_KEY).",
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
    from shapestream_workers.access import caller_keys

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
            socket.set(zmq.IPV6, int(address.startswith("tcp://[")))
            socket.connect(address)
        except zmq.ZMQError as error:
            return f"{address}: {error.strerror} (an address is ipc://PATH or tcp://HOST:PORT)"
        socket.send(greeting())
        if not socket.poll(round(timeout_s * 1000)):
            keyless = address.startswith("tcp://") and keys is None
            hint = " (add --key and --server-key if it asks for keys)" if keyless else ""
            return f"no server at {address} answers within {timeout_s:g} s{hint}"
        socket.set(zmq.LINGER, _FAREWELL_MS)
        socket.send(goodbye())
        return None

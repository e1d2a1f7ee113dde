"""Bare HTTP echoes, the floors of the gateway: `python -m benchmarks.http_echoes trio|asyncio READY`.

httptools reads a request, and its body goes back: no routes, no limits, no model. The port is written into the file READY.
`python -m benchmarks.http_echoes sdk READY ADDRESS` has each body, a row of the model `small`, answered by a server through
the SDK. So the server gets requests as a gateway's callers send them, each when its connection has it, without a gateway.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import httptools
import numpy as np
import trio

import shapestream
from benchmarks.http_client import HOST

_READ_BYTES = 256 * 1024
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


class _Echo:
    """The parser of one connection; `answers` are those of requests that are complete."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self.answers: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        """Take a piece of a body."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """Make the answer."""
        length = sum(map(len, self._body))
        self.answers.append(b"".join([_HEAD % length, *self._body]))
        self._body.clear()


async def _converse(stream: trio.SocketStream) -> None:
    echo = _Echo()
    while data := await stream.receive_some(_READ_BYTES):
        echo.feed(data)
        while echo.answers:
            await stream.send_all(echo.answers.pop(0))


class _Rows(_Echo):
    """The parser of one connection whose bodies a model answers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[bytes] = []

    def on_message_complete(self) -> None:
        """Note the row."""
        self.rows.append(b"".join(self._body))
        self._body.clear()


async def _forward(client: shapestream.Client, stream: trio.SocketStream) -> None:
    asked = _Rows()
    while data := await stream.receive_some(_READ_BYTES):
        asked.feed(data)
        while asked.rows:
            row = np.frombuffer(asked.rows.pop(0), np.float32).reshape(1, -1)
            result = await client.infer("small", {"x": row})
            await stream.send_all(b"".join([_HEAD % row.nbytes, result["y"].tobytes()]))


class _EchoProtocol(asyncio.Protocol):
    def __init__(self) -> None:
        self._echo = _Echo()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._echo.feed(data)
        while self._echo.answers:
            self._transport.write(self._echo.answers.pop(0))


async def _on_trio(
    ready: Callable[[int], None], converse: Callable[[trio.SocketStream], Awaitable[None]] = _converse
) -> None:
    listeners = await trio.open_tcp_listeners(0, host=HOST)
    ready(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(converse, listeners)


async def _by_sdk(ready: Callable[[int], None], address: str) -> None:
    async with shapestream.connect(address) as client:
        await _on_trio(ready, partial(_forward, client))


async def _on_asyncio(ready: Callable[[int], None]) -> None:
    server = await asyncio.get_running_loop().create_server(_EchoProtocol, HOST, 0)
    ready(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def write_port(path: str, port: int) -> None:
    """Write a port so that a reader finds all of it or nothing."""
    unfinished = Path(f"{path}.new")
    unfinished.write_text(str(port))
    os.replace(unfinished, path)


def main(loop: str, path: str, address: str = "") -> None:
    """Echo until ended; `address` is that of the server for `sdk`."""

    def ready(port: int) -> None:
        write_port(path, port)

    if loop == "trio":
        trio.run(_on_trio, ready)
    elif loop == "sdk":
        trio.run(_by_sdk, ready, address)
    else:
        asyncio.run(_on_asyncio(ready))


if __name__ == "__main__":
    main(*sys.argv[1:])

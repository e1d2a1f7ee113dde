"""Bare HTTP echoes, the floors of the gateway: `python -m benchmarks.http_echoes trio|asyncio READY`.

httptools reads a request, and its body goes back: no routes, no limits, no model. The port is written into the file READY.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import httptools
import trio

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


async def _on_trio(ready: Callable[[int], None]) -> None:
    listeners = await trio.open_tcp_listeners(0, host=HOST)
    ready(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(_converse, listeners)


async def _on_asyncio(ready: Callable[[int], None]) -> None:
    server = await asyncio.get_running_loop().create_server(_EchoProtocol, HOST, 0)
    ready(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def write_port(path: str, port: int) -> None:
    """Write a port so that a reader finds all of it or nothing."""
    unfinished = Path(f"{path}.new")
    unfinished.write_text(str(port))
    os.replace(unfinished, path)


def main(loop: str, path: str) -> None:
    """Echo until ended."""

    def ready(port: int) -> None:
        write_port(path, port)

    if loop == "trio":
        trio.run(_on_trio, ready)
    else:
        asyncio.run(_on_asyncio(ready))


if __name__ == "__main__":
    main(*sys.argv[1:])

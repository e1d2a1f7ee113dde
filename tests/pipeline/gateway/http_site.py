"""An HTTP server on loopback, and peers that send it bytes: what the tests of the HTTP server share."""

from __future__ import annotations

import inspect
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shapestream.transport.http_listener import listen_at
from shapestream.web.messages import Admitted, Handler, HttpLimits, HttpRequest, HttpResponse
from shapestream.web.server import HttpServer, listeners_of
from shapestream.web.turns import LoopTurns

PATIENCE_S = 100.0
"""No bound of anything that is tested: what never comes is an error, not a hang."""
VIRTUAL_PATIENCE_S = 1e6
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
"""The shortest request."""


@dataclass(frozen=True)
class Answer:
    """What a peer got. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The text of an error."""
        assert "application/json" == self.headers["content-type"]
        content = json.loads(self.body)
        assert ["error"] == list(content)
        return str(content["error"])

    @property
    def closes(self) -> bool:
        """Whether it tells that the connection ends."""
        return "close" == self.headers.get("connection")

    @property
    def lasting(self) -> tuple[int, dict[str, str], bytes]:
        """All of it that does not depend on the time."""
        return self.status, {**self.headers, "date": ""}, self.body


class Peer:
    """A client that writes the bytes of its requests itself."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._received = b""

    async def send(self, data: bytes) -> None:
        """Sends bytes."""
        await self.stream.send_all(data)

    async def sent_and_read(self, data: bytes) -> None:
        """Sends bytes, and waits until the server has nothing more to do with them."""
        await self.stream.send_all(data)
        await wait_all_tasks_blocked()

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The next answer, which has a body of the length that it says, but for `bodiless`."""
        while b"\r\n\r\n" not in self._received:
            await self._receive()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = status_line.split(" ", 2)
        assert "HTTP/1.1" == version
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        assert len(lines) == len(headers), "a header is there twice"
        length = 0 if bodiless else int(headers.get("content-length", 0))
        while len(self._received) < length:
            await self._receive()
        body, self._received = self._received[:length], self._received[length:]
        return Answer(int(status), headers, body)

    async def ask(self, data: bytes) -> Answer:
        """Sends a request, and returns its answer."""
        await self.send(data)
        return await self.answer()

    async def end(self) -> bytes:
        """What still comes until the server closes."""
        while chunk := await self.stream.receive_some():
            self._received += chunk
        return self._received

    async def received(self, nbytes: int) -> bytes:
        """What has come after the last answer, once it has so many bytes."""
        while len(self._received) < nbytes:
            await self._receive()
        return self._received

    async def _receive(self) -> None:
        chunk = await self.stream.receive_some()
        assert chunk, f"the server has closed, after {self._received!r}"
        self._received += chunk


@dataclass
class Site:
    """A server that runs, and the peers that were connected to it."""

    server: HttpServer
    port: int
    clock: MockClock | None
    nursery: trio.Nursery
    peers: list[Peer]
    serves: bool = True

    async def connect(self) -> Peer:
        """A new connection."""
        self.peers.append(Peer(await trio.open_tcp_stream("127.0.0.1", self.port)))
        return self.peers[-1]

    async def ask(self, data: bytes) -> Answer:
        """The answer to one request, on a connection of its own."""
        return await (await self.connect()).ask(data)

    async def pass_time(self, seconds: float) -> None:
        """Lets virtual time pass, and all have done what follows."""
        assert self.clock is not None
        await wait_all_tasks_blocked()
        self.clock.jump(seconds)
        await wait_all_tasks_blocked()


async def echo(request: HttpRequest) -> HttpResponse:
    """Answers with the body of the request."""
    return HttpResponse(body=(request.body,), content_type="text/plain")


async def report(request: HttpRequest) -> HttpResponse:
    """Answers with all of the request, as JSON."""
    told = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": dict(request.headers),
        "body": bytes(request.body).decode("latin-1"),
        "peer": request.peer,
    }
    return HttpResponse(body=(json.dumps(told).encode(),))


class Hold:
    """A handler that answers when it is told to, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.answered = 0
        self.go = trio.Event()

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Waits, and then echoes."""
        self.begun += 1
        try:
            await self.go.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        self.answered += 1
        return await echo(request)


def address_of(request: HttpRequest) -> str:
    """The address that a request comes from."""
    return request.peer


def served(
    handler: Handler = echo,
    *,
    caller_of: Callable[[HttpRequest], str] = address_of,
    virtual_time: bool = False,
    tls: ssl.SSLContext | None = None,
    turns: LoopTurns | None = None,
    **limits: Any,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test on a site, its first argument, which serves `handler`."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            serve(
                lambda site: test(site, *args, **kwargs),
                handler,
                caller_of=caller_of,
                virtual_time=virtual_time,
                tls=tls,
                turns=turns,
                **limits,
            )

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


def serve(
    play: Callable[[Site], Awaitable[None]],
    handler: Handler = echo,
    *,
    caller_of: Callable[[HttpRequest], str] = address_of,
    virtual_time: bool = False,
    tls: ssl.SSLContext | None = None,
    turns: LoopTurns | None = None,
    **limits: Any,
) -> None:
    """Serves a handler while a play runs. Afterwards no task of the server is left."""
    clock = MockClock() if virtual_time else None

    async def main() -> None:
        listeners = listeners_of(listen_at("127.0.0.1:0"), tls)
        plain = (
            listeners[0] if isinstance(listeners[0], trio.SocketListener) else listeners[0].transport_listener
        )
        port = plain.socket.getsockname()[1]

        def admission(request: HttpRequest) -> Admitted:
            return Admitted(caller=caller_of(request), handler=handler)

        server = HttpServer(admission, HttpLimits(**limits), turns)
        peers: list[Peer] = []
        try:
            with trio.fail_after(VIRTUAL_PATIENCE_S if virtual_time else PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    site = Site(server, port, clock, nursery, peers)

                    async def run(task_status: trio.TaskStatus[None]) -> None:
                        await server.run(listeners, task_status=task_status)
                        site.serves = False

                    await nursery.start(run)
                    await play(site)
                    nursery.cancel_scope.cancel()
        finally:
            for peer in peers:
                peer.stream.socket.close()
        assert 0 == server.open_connections

    trio.run(main, clock=clock)

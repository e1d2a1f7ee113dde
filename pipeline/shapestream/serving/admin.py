"""The admin port: HTTP for operators, served by a thread with an event loop of its own.

    caller ── HTTP ──▶ port's thread ── run_sync_soon ──▶ main loop: `Page.read`, quick, or in slices
                            ▲                                 │
                            └──────── `Page.write` ◀──────────┘

The thread answers a probe while the main loop is busy, and while models are compiled, before the main loop runs. A slow
reader, or a defect of an HTTP library, delays no request. Each answer is read on the main loop and written in the thread.
Where the main loop does not answer within `PATIENCE_S`, the caller gets 503.

The port limits its connections, so that its callers cannot use up the process's open files (`Connections`). Without a
token, a port on loopback refuses calls that a browser makes for a page of another site (`_Callers`).

admin_pages.py defines the pages. Only these two modules import packages of the extra `[admin]`.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, cast

import outcome
import structlog
import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shapestream.addresses import is_beyond_loopback
from shapestream.errors import ConfigurationError
from shapestream.serving.admin_pages import EventStream, Page, health_page
from shapestream.serving.event_stream import MOST_VIEWERS, Feed
from shapestream.settings import AdminSettings
from shapestream.transport.guards import admin_connections
from shapestream.transport.http_listener import REFUSED_SITES, is_sent_by_another_site, listen_at, place_of
from shapestream_engine.regular_files import read_regular

log = structlog.get_logger()

PATIENCE_S = 0.8
"""Seconds to wait for the main loop: less than the second that Kubernetes gives a probe."""
IDLE_S = 5
"""Seconds after which a connection without a complete request is closed."""
UNREAD_MS = 10_000
"""Milliseconds after which the kernel closes a connection whose reader takes nothing of an answer."""
MAX_UNSENT_BYTES = 64 * 1024
"""Bytes that the kernel buffers for a reader. A viewer that does not read is noticed when they are full."""
MAX_HEAD_BYTES = 16 * 1024
"""Largest number of bytes of a request's head, and of the body of a PUT."""
RETRY_S = 1.0
"""Seconds until the port is opened again after a defect."""
LOOK_S = 0.02
"""Seconds between two checks whether there are pages; they come soon after models were prepared."""


_WHILE_PREPARING = {
    "/health/live": health_page("live", list),
    "/health/ready": health_page("ready", lambda: ["models are being prepared"]),
}
"""The pages while there is no main loop."""


class AdminPort:
    """A port that listens from its construction on. Callers get no answer before `preparing` or `run`."""

    def __init__(self, settings: AdminSettings) -> None:
        """Listen. Raises `ConfigurationError` for an address that cannot be used, and for an unusable token file."""
        token = None if settings.token_file is None else _read_token(Path(settings.token_file))
        self._socket = _listen(settings.address)
        self._thread = _Thread(self._socket, _Callers(settings.address, token))
        self.address = place_of(self._socket)
        """HOST:PORT where it listens, with the port that was chosen for 0."""
        log.info("admin port ready", address=f"http://{self.address}")

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Answer that the process lives and is not ready, while the main thread prepares models.

        After the block, callers wait until `run` is called.
        """
        self._thread.answer(_WHILE_PREPARING, None)
        self._thread.begin()
        try:
            yield
        finally:
            self._thread.pause()

    async def run(self, pages: Mapping[str, Page | EventStream]) -> None:
        """Answer until cancelled."""
        self._thread.answer(pages, trio.lowlevel.current_trio_token())
        self._thread.begin()
        try:
            await trio.sleep_forever()
        finally:
            self._thread.stop()
            self.close()


class _Callers:
    """The rule that decides which callers are refused, and which may see all."""

    def __init__(self, address: str, token: str | None) -> None:
        self._token = token
        # Beyond loopback, the token or the network protects the port.
        self._by_loopback = token is None and not is_beyond_loopback(f"tcp://{address}")

    def are_sent_from_elsewhere(self, request: Request) -> bool:
        """Tell whether a page of another site makes a browser call this port, which only loopback protects."""
        return self._by_loopback and is_sent_by_another_site(request.headers)

    def may_see(self, request: Request) -> bool:
        """Tell whether a caller showed the token, or none is required."""
        if self._token is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())


class EvictionOrder(IntEnum):
    """The order in which connections are ended when there are too many: the lowest first."""

    IDLE = 0
    """No complete request has come."""
    ASKED = 1
    """Its request is being answered."""
    VIEWER = 2
    """It receives the events of the page."""


@dataclass(slots=True, eq=False)
class AdminConnection:
    """One connection of the port."""

    stream: trio.SocketStream
    scope: trio.CancelScope
    order: EvictionOrder = EvictionOrder.IDLE

    def end(self) -> None:
        """Close its socket at once. An answer that waits for its reader fails."""
        self.stream.socket.close()
        self.scope.cancel()


_CONNECTION: ContextVar[AdminConnection] = ContextVar("connection")
"""The connection that a task of Hypercorn serves."""


class Connections:
    """The open connections. Their number is limited, so that callers of this port leave descriptors for others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[AdminConnection, None] = {}
        """In order of their beginning, the oldest first. The values have no meaning."""

    @contextmanager
    def holding(self, stream: trio.SocketStream) -> Iterator[None]:
        """Count a connection during the block. If there are too many, end the oldest of the lowest order."""
        if len(self._open) >= self._most:
            ended = min(self._open, key=lambda connection: connection.order)
            del self._open[ended]
            ended.end()
        connection = AdminConnection(stream, trio.CancelScope())
        self._open[connection] = None
        _CONNECTION.set(connection)
        try:
            with connection.scope:
                yield
        finally:
            stream.socket.close()
            self._open.pop(connection, None)


class _Thread:
    """The thread of the port, from `begin` to `stop`."""

    def __init__(self, listener: socket.socket, callers: _Callers) -> None:
        self._listener = listener
        self._callers = callers
        self._main_loop: trio.lowlevel.TrioToken | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._begun = False
        self._ends = threading.Event()
        self._stopped = trio.Event()
        self._application: Starlette | None = None
        self._nursery: trio.Nursery
        self._slicing: trio.Lock
        """Held by the answer that is read in slices, so that each turn of the main loop reads one slice at most."""
        self._feeds: list[Feed] = []
        """The feeds that run, each from its first viewer on."""

    # ---------------------------------------------------------------- for the main thread

    def answer(
        self, pages: Mapping[str, Page | EventStream], main_loop: trio.lowlevel.TrioToken | None
    ) -> None:
        """Answer with these pages from now on. Without a `main_loop` the thread reads them; other paths answer 503."""
        self._main_loop = main_loop
        self._application = Starlette(
            routes=self._routes(pages),
            exception_handlers={404: _not_yet} if main_loop is None else None,
        )

    def pause(self) -> None:
        """Let callers wait for the next pages."""
        self._application = None

    def begin(self) -> None:
        """Start the thread, once."""
        if not self._begun:
            self._begun = True
            context = copy_context()  # it holds the name of the process, for the log
            threading.Thread(target=context.run, args=(self._run,), name="admin port", daemon=True).start()

    def stop(self) -> None:
        """End the thread soon."""
        self._ends.set()
        if self._loop is not None:
            with suppress(trio.RunFinishedError):
                self._loop.run_sync_soon(self._stopped.set)

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self._serve_once()
            except Exception:  # a defect of the HTTP libraries must not end the port
                if not self._ends.is_set():
                    log.exception("admin port failed")
            self._ends.wait(RETRY_S)

    def _serve_once(self) -> None:
        config = Config()
        config.errorlog = config.accesslog = None
        config.include_server_header = False
        config.h11_max_incomplete_size = MAX_HEAD_BYTES
        config.keep_alive_timeout = IDLE_S
        # One request per connection: Hypercorn never frees a connection that was closed with unread requests.
        config.keep_alive_max_requests = 0
        config.graceful_timeout = 0.0
        trio.run(self._serve, config)

    async def _serve(self, config: Config) -> None:
        self._loop = trio.lowlevel.current_trio_token()
        self._slicing = trio.Lock()
        self._feeds.clear()
        application = wrap_app(cast(Any, self._answer), config.wsgi_max_body_size, None)
        connections = Connections(admin_connections())

        async def converse(stream: trio.SocketStream) -> None:
            server = TCPServer(
                application, config, WorkerContext(None), ConnectionState({}), cast(Any, stream)
            )
            # A nursery of its own: a connection that is cut off may raise a Cancelled of Hypercorn's.
            with connections.holding(stream):
                async with trio.open_nursery() as own:
                    own.start_soon(server.run)

        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        async with trio.open_nursery() as self._nursery:
            if not self._ends.is_set():
                self._nursery.start_soon(trio.serve_listeners, converse, [listener])
                await self._stopped.wait()
            self._nursery.cancel_scope.cancel()

    async def _answer(self, *call: Any) -> None:
        _CONNECTION.get().order = EvictionOrder.ASKED
        while (application := self._application) is None:  # noqa: ASYNC110 - the main thread sets it soon
            await trio.sleep(LOOK_S)
        await application(*call)

    def _routes(self, pages: Mapping[str, Page | EventStream]) -> list[Route]:
        return [
            Route(
                path,
                self._endpoint(page),
                methods=["GET", *(["PUT"] if isinstance(page, Page) and page.change else [])],
            )
            for path, page in pages.items()
        ]

    def _endpoint(self, page: Page | EventStream) -> Callable[[Request], Awaitable[Response]]:
        answer = self._answer_of(page) if isinstance(page, Page) else self._answer_of_stream(page)

        async def endpoint(request: Request) -> Response:
            if self._callers.are_sent_from_elsewhere(request):
                return JSONResponse({"error": REFUSED_SITES}, status_code=421)
            sees = self._callers.may_see(request)
            if not sees and (isinstance(page, EventStream) or page.hidden is None):
                return JSONResponse(
                    {"error": "the token is missing or wrong"},
                    status_code=401,
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return await answer(request, sees)

        return endpoint

    def _answer_of(self, page: Page) -> Callable[[Request, bool], Awaitable[Response]]:
        async def answer(request: Request, sees: bool) -> Response:
            write = page.write if sees or page.hidden is None else page.hidden
            given = {**request.query_params, **request.path_params}
            read = page.read and partial(
                page.read, **{name: given[name] for name in page.takes if name in given}
            )
            try:
                if request.method == "PUT" and page.change is not None:
                    read = partial(page.change, await _json_of(request))
                return write(None if read is None else await self._on_main_loop(read))
            except ConfigurationError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            except trio.TooSlowError:
                why = f"the event loop has not answered for {PATIENCE_S} s"
                return JSONResponse({"error": why}, status_code=503)

        return answer

    def _answer_of_stream(self, stream: EventStream) -> Callable[[Request, bool], Awaitable[Response]]:
        feed = Feed(lambda batches: self._on_main_loop(partial(stream.read, batches)))

        async def serve_and_close(*asgi: Any) -> None:
            _CONNECTION.get().order = EvictionOrder.VIEWER
            await feed.serve(*asgi)
            # Hypercorn never frees a connection that was closed with unread requests: end its tasks.
            connection = trio.lowlevel.current_task().parent_nursery
            if connection is not None:
                connection.cancel_scope.cancel()

        async def answer(request: Request, sees: bool) -> Response:
            if feed.full:
                return JSONResponse({"error": f"{MOST_VIEWERS} viewers look already"}, status_code=503)
            if feed not in self._feeds:
                self._feeds.append(feed)
                self._nursery.start_soon(feed.run)
            return cast(Response, serve_and_close)

        return answer

    async def _on_main_loop(self, read: Callable[[], Any]) -> Any:
        """Call `read` on the main loop, and return its result. If it returns `Slices`, each slice has its own turn.

        Raises TooSlowError if the loop does not answer in time, or has ended.
        """
        found = await self._in_one_turn(read)
        if not isinstance(found, Generator):
            return found
        ended: list[Any] = []

        def advance() -> None:
            try:
                next(found)
            except StopIteration as end:
                ended.append(end.value)

        async with self._slicing:
            while not ended:
                await self._in_one_turn(advance)
        return ended[0]

    async def _in_one_turn(self, read: Callable[[], Any]) -> Any:
        if self._main_loop is None:
            return read()
        here, answered = trio.lowlevel.current_trio_token(), trio.Event()
        results: list[outcome.Outcome[Any]] = []

        def there() -> None:
            results.append(outcome.capture(read))
            with suppress(trio.RunFinishedError):
                here.run_sync_soon(answered.set)

        with trio.fail_after(PATIENCE_S):
            try:
                self._main_loop.run_sync_soon(there)
            except trio.RunFinishedError:
                raise trio.TooSlowError from None
            await answered.wait()
        return results[0].unwrap()


async def _json_of(request: Request) -> Any:
    """Read the JSON body of a request. Raises `ConfigurationError` if it is no JSON, too long, or does not come.

    The content type must be JSON: for that, a browser asks this port first whether another site's page may send it.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ConfigurationError(["expected Content-Type: application/json"])
    body = b""
    with trio.move_on_after(IDLE_S), suppress(ClientDisconnect):
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_HEAD_BYTES:
                break
        else:
            with suppress(ValueError, RecursionError):
                return json.loads(body)
    raise ConfigurationError([f"expected JSON of at most {MAX_HEAD_BYTES} bytes"])


def _not_yet(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "models are being prepared"}, status_code=503)


def _listen(address: str) -> socket.socket:
    listener = listen_at(address)
    # Accepted connections inherit both options.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_UNSENT_BYTES)
    return listener


def _read_token(path: Path) -> str:
    try:
        token = read_regular(path, MAX_HEAD_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"{path}: {error}"]) from error
    if not token or any(character.isspace() for character in token):
        raise ConfigurationError([f"{path}: expected a token of one word"])
    return token

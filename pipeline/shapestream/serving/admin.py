"""The admin port: health, metrics and statistics over HTTP, from a thread with an event loop of its own.

A probe so gets an answer while the process's main loop stands still, or has not begun since models are compiled first. A
reader that is slow, or a defect of an HTTP library, holds up no request. What an answer tells is read on the main loop,
and written out here.

The one module that imports what the extra `[admin]` brings.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from importlib.resources import files
from ipaddress import ip_address
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
from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shapestream.addresses import is_beyond_loopback
from shapestream.errors import ConfigurationError
from shapestream.serving.event_stream import MOST_VIEWERS, Feed
from shapestream.serving.server import Server
from shapestream.settings import AdminSettings
from shapestream.slices import Slices
from shapestream.telemetry.logging import LEVELS, PRESENT
from shapestream.telemetry.metrics import Buckets, Metric, MetricType, Sample, observe
from shapestream.transport.guards import admin_connections
from shapestream_engine.regular_files import read_regular

log = structlog.get_logger()

# Patience with the main loop, in seconds: less than the second that Kubernetes gives a probe.
PATIENCE_S = 0.8
# A connection is closed that asks nothing, or not all of it, for so long, in seconds.
IDLE_S = 5
# Milliseconds in which a reader takes nothing of an answer; then the kernel closes its connection.
UNREAD_MS = 10_000
# Bytes that the kernel holds for a reader, about: a viewer that does not read is found when they are full.
MAX_UNSENT_BYTES = 64 * 1024
# Bytes of a request's head, and of the body of a PUT, at most.
MAX_HEAD_BYTES = 16 * 1024
# Until the port is opened again after a defect.
RETRY_S = 1.0
# Between two looks whether there are pages; they come within a moment after models were prepared.
LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One path of the port."""

    read: Callable[..., Any] | None
    """Called on the main loop, so it is quick, or returns `Slices`; None: the answer needs nothing from there."""
    write: Callable[[Any], Response]
    """The answer, made of what `read` returned in the port's own thread."""
    hidden: Callable[[Any], Response] | None = None
    """The answer to a caller without the token; None: such a caller is turned away."""
    takes: tuple[str, ...] = ()
    """Names of parameters of the path, or of the query, that `read` is given where they are there."""
    change: Callable[[Any], Any] | None = None
    """Called on the main loop with the JSON of a PUT; returns what `read` does. Raises `ConfigurationError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """A path whose answer is a stream of server-sent events, until its viewer leaves."""

    read: Callable[[int], Slices[dict[str, Any]]]
    """`Server.live`, called on the main loop."""


def health_page(word: str, reasons: Callable[[], list[str]]) -> Page:
    """A check that fails while there are `reasons`; callers without the token are not told them."""

    def answer(why: list[str], more: dict[str, Any]) -> Response:
        return JSONResponse({word: not why, **more}, status_code=503 if why else 200)

    return Page(
        read=reasons,
        write=lambda why: answer(why, {"why": why}),
        hidden=lambda why: answer(why, {}),
    )


def ready_page(server: Server) -> Page:
    """The check whether a server may get requests, for all its models or for that of the query's `model`.

    A caller without the token is not told whether there is such a model.
    """

    def look(model: str | None = None) -> dict[str, Any]:
        if model is None:
            why = server.not_ready()
            return {"ready": not why, "why": why}
        known = server.knows(model)
        why = server.not_ready(model) if known else [f"no model {model!r}"]
        return {"ready": not why, "model": model, "why": why, "known": known}

    def write(found: dict[str, Any]) -> Response:
        known = found.pop("known", True)
        status = 200 if found["ready"] else 503 if known else 404
        return JSONResponse(found, status_code=status)

    def hidden(found: dict[str, Any]) -> Response:
        return JSONResponse({"ready": found["ready"]}, status_code=200 if found["ready"] else 503)

    return Page(read=look, write=write, hidden=hidden, takes=("model",))


def json_page(read: Callable[[], dict[str, Any] | Slices[dict[str, Any]]]) -> Page:
    """A page of plain data."""
    return Page(read=read, write=JSONResponse)


_WHILE_PREPARING = {
    "/health/live": health_page("live", list),
    "/health/ready": health_page("ready", lambda: ["models are being prepared"]),
}
"""The pages while there is no main loop."""


class AdminPort:
    """A port that listens from its construction; callers wait for `preparing` or `run`."""

    def __init__(self, settings: AdminSettings) -> None:
        """Raises `ConfigurationError` for an address that cannot be listened at, and a token that cannot be used."""
        token = None if settings.token_file is None else _read_token(Path(settings.token_file))
        self._socket = _listen(settings.address)
        self._thread = _Thread(self._socket, _Callers(settings.address, token))
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where it listens, with the port that was chosen for 0."""
        log.info("admin port ready", address=f"http://{self.address}")

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Answer that the process lives and is not ready, while the main thread prepares models.

        From then on callers wait for `run`.
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


_HOST = re.compile(r"(?P<name>\[[^]]*\]|[^:]*)(:[0-9]+)?")
"""The form of the header Host."""


class _Callers:
    """The rule that tells what a caller may see."""

    def __init__(self, address: str, token: str | None) -> None:
        self._token = token
        # Elsewhere the token, or the network, is the guard.
        self._by_loopback = token is None and not is_beyond_loopback(f"tcp://{address}")

    def are_sent_from_elsewhere(self, request: Request) -> bool:
        """Tell whether a page from elsewhere makes a browser on this machine call a port that only loopback guards.

        Either it says so, or it reaches the port under a name of its own (DNS rebinding), which is neither localhost nor
        an IP address.
        """
        headers = request.headers
        if not self._by_loopback:
            return False
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return True
        host = _HOST.fullmatch(headers.get("host", "localhost"))
        return host is None or not (
            host["name"].lower() == "localhost" or _is_ip_address(host["name"].strip("[]"))
        )

    def may_see(self, request: Request) -> bool:
        """Whether the caller showed the token, where one is asked for."""
        if self._token is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())


class EvictionOrder(IntEnum):
    """The standing of a connection: where there are too many, the lowest ends first."""

    IDLE = 0
    """It has not asked, or not all of it has come."""
    ASKED = 1
    """It waits for its answer, or for its reader."""
    VIEWER = 2
    """It is sent the page's data."""


@dataclass(slots=True, eq=False)
class AdminConnection:
    """One connection of the port."""

    stream: trio.SocketStream
    scope: trio.CancelScope
    standing: EvictionOrder = EvictionOrder.IDLE

    def end(self) -> None:
        """Give its descriptor back at once; what waits for its reader fails."""
        self.stream.socket.close()
        self.scope.cancel()


_CONNECTION: ContextVar[AdminConnection] = ContextVar("connection")
"""That of a task of Hypercorn's."""


class Connections:
    """The connections that are open: at most so many, so that callers of this port leave descriptors to others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[AdminConnection, None] = {}
        """The oldest first."""

    @contextmanager
    def holding(self, stream: trio.SocketStream) -> Iterator[None]:
        """Count a connection for the time of the block. Where they are too many, the oldest of the lowest ends."""
        if len(self._open) >= self._most:
            ended = min(self._open, key=lambda connection: connection.standing)
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


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class _Thread:
    """What the thread of the port does, from `begin` to `stop`."""

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
        """Held by the answer that is read in slices: a turn of the main loop has one of them, however many callers ask."""
        self._feeds: list[Feed] = []
        """Those that run, from their first viewer on."""

    # ---------------------------------------------------------------- for the main thread

    def answer(
        self, pages: Mapping[str, Page | EventStream], main_loop: trio.lowlevel.TrioToken | None
    ) -> None:
        """Answer with these pages from now on. Without a `main_loop` they are read in the thread, and others answer 503."""
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
            context = copy_context()  # lines of the log name the process
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
            except Exception:  # of the HTTP libraries, which must not end what is served
                if not self._ends.is_set():
                    log.exception("admin port failed")
            self._ends.wait(RETRY_S)

    def _serve_once(self) -> None:
        config = Config()
        config.errorlog = config.accesslog = None
        config.include_server_header = False
        config.h11_max_incomplete_size = MAX_HEAD_BYTES
        config.keep_alive_timeout = IDLE_S
        # One request per connection: Hypercorn never frees one whose caller leaves behind requests that it sent ahead.
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
            # A nursery of its own: where a connection ends in the middle, a Cancelled of Hypercorn's may come out.
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
        _CONNECTION.get().standing = EvictionOrder.ASKED
        while (application := self._application) is None:  # noqa: ASYNC110 - the main thread sets it, in a moment
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
                why = "this port answers to localhost and IP addresses, and to no page from elsewhere"
                return JSONResponse({"error": why}, status_code=421)
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
            _CONNECTION.get().standing = EvictionOrder.VIEWER
            await feed.serve(*asgi)
            # Hypercorn frees no connection whose caller vanished and had sent more requests ahead: end its tasks.
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
        """Call `read` on the main loop, where it returns `Slices` each slice in a turn of its own.

        Raises TooSlowError where the loop does not answer in time, or has ended.
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
    """The body of a request. Raises `ConfigurationError` where it is no JSON, or too long, or does not come.

    A page of another site cannot ask for this type without asking this port first, which says no.
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
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise ConfigurationError([f'"{address}": {error.strerror or error}']) from error
    # Connections inherit these.
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


class _Collected:
    """Families of metrics that were read already, and those of the process."""

    def __init__(self, found: list[tuple[Metric, list[Sample]]]) -> None:
        self._found = found

    def collect(self) -> Iterator[MetricFamily]:
        """Yield each family."""
        for metric, samples in self._found:
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
            for labels, value in samples:
                if isinstance(value, Buckets):
                    family.add_metric(labels, value.counts, value.total)
                else:
                    family.add_metric(labels, value)
            yield family
        yield from _PROCESS.collect()


_FAMILIES: dict[MetricType, Callable[..., Any]] = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
    MetricType.HISTOGRAM: HistogramMetricFamily,
}
_PROCESS = ProcessCollector(registry=None)


def _exposition(found: list[tuple[Metric, list[Sample]]]) -> Response:
    return Response(generate_latest(cast(Any, _Collected(found))), media_type=CONTENT_TYPE_LATEST)


def html_page() -> Page:
    """The page itself, which holds no data: `/events` brings it. Its own styles and script run, and no others."""
    html = files("shapestream.serving").joinpath("page.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        inside = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert inside is not None
        return base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    def write(_: None) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return Page(read=None, write=write, hidden=write)


def reload_page(
    ask: Callable[[], dict[str, Any]], find: Callable[[int | None], dict[str, Any] | None]
) -> Page:
    """A page whose PUT of `{}` asks for a reload, and whose GET tells of the last one, or of that of the query's `number`.

    Neither waits for its end. `find` returns None where there is none.
    """

    def look(number: str = "") -> dict[str, Any] | None:
        if number and not (number.isdecimal() and len(number) < 10):
            raise ConfigurationError(["number is that of a reload"])
        return find(int(number) if number else None)

    def change(asked: Any) -> dict[str, Any]:
        if asked != {}:
            raise ConfigurationError(["expected {}"])
        return ask()

    def write(found: dict[str, Any] | None) -> Response:
        if found is None:
            return JSONResponse({"error": "there was no such reload, or it is forgotten"}, status_code=404)
        return JSONResponse(found)

    return Page(read=look, write=write, takes=("number",), change=change)


def server_pages(server: Server) -> dict[str, Page | EventStream]:
    """The pages of a server."""

    def standstill() -> list[str]:
        why = server.standstill()
        return [] if why is None else [why]

    def slowest_stories(slowest: str = "10") -> Slices[dict[str, Any]]:
        if not (slowest.isdecimal() and len(slowest) < 5):
            raise ConfigurationError(["slowest is a number of requests"])
        return server.explain("", int(slowest))

    def change_log_level(asked: Any) -> dict[str, str]:
        for level in LEVELS:
            if asked == {"level": level}:
                server.change_logging(level)
                return log_settings()
        raise ConfigurationError([f'expected {{"level": LEVEL}}, with a LEVEL of {", ".join(LEVELS)}'])

    def log_settings() -> dict[str, str]:
        return {"level": PRESENT.level, "format": PRESENT.format}

    return {
        "/": html_page(),
        "/events": EventStream(read=server.live),
        "/health/live": health_page("live", standstill),
        "/health/ready": ready_page(server),
        "/statistics": json_page(server.statistics_in_slices),
        "/audit": json_page(server.audit),
        "/logging": Page(read=log_settings, write=JSONResponse, change=change_log_level),
        "/metrics": Page(read=lambda: observe(server.observation()), write=_exposition),
        "/requests": Page(read=slowest_stories, write=JSONResponse, takes=("slowest",)),
        "/requests/{request}": Page(
            read=lambda request: server.explain(request, 0),
            write=lambda found: JSONResponse(found, status_code=404 if "unknown" in found else 200),
            takes=("request",),
        ),
    }

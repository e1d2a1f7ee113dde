"""The admin port: health, metrics and statistics over HTTP, from a thread with an event loop of its own.

A probe so gets an answer while the process's main loop stands still, or has not begun since models are compiled first. A
reader that is slow, or a defect of an HTTP library, holds up no request. What an answer tells is read on the main loop,
and written out here.

The one module that imports what the extra `[admin]` brings.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import outcome
import structlog
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shapestream.errors import ConfigurationError
from shapestream.serving.server import Server
from shapestream.settings import AdminSettings
from shapestream.telemetry.logging import LEVELS, PRESENT
from shapestream.telemetry.metrics import Buckets, Kind, Metric, Sample, observe

log = structlog.get_logger()

# Patience with the main loop, in seconds: less than the second that Kubernetes gives a probe.
PATIENCE_S = 0.8
# A connection is closed that asks nothing, or not all of it, for so long, in seconds.
IDLE_S = 5
# Milliseconds in which a reader takes nothing of an answer; then the kernel closes its connection.
UNREAD_MS = 10_000
# Bytes of a request's head, and of the body of a PUT, at most.
MAX_HEAD_BYTES = 16 * 1024
# Until the port is opened again after a defect.
RETRY_S = 1.0
# Between two looks whether there are pages; they come within a moment after models were prepared.
LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One path of the port."""

    read: Callable[[], Any]
    """Called on the main loop, so it is quick."""
    write: Callable[[Any], Response]
    """The answer, made of what `read` returned in the port's own thread."""
    hidden: Callable[[Any], Response] | None = None
    """The answer to a caller without the token; None: such a caller is turned away."""
    change: Callable[[Any], Any] | None = None
    """Called on the main loop with the JSON of a PUT; returns what `read` does. Raises `ConfigurationError`."""


def health_page(word: str, reasons: Callable[[], list[str]]) -> Page:
    """A check that fails while there are `reasons`; callers without the token are not told them."""

    def answer(why: list[str], more: dict[str, Any]) -> Response:
        return JSONResponse({word: not why, **more}, status_code=503 if why else 200)

    return Page(
        read=reasons,
        write=lambda why: answer(why, {"why": why}),
        hidden=lambda why: answer(why, {}),
    )


def json_page(read: Callable[[], dict[str, Any]]) -> Page:
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
        self._thread = _Thread(self._socket, token)
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

    async def run(self, pages: Mapping[str, Page]) -> None:
        """Answer until cancelled."""
        self._thread.answer(pages, trio.lowlevel.current_trio_token())
        self._thread.begin()
        try:
            await trio.sleep_forever()
        finally:
            self._thread.stop()
            self.close()


class _Thread:
    """What the thread of the port does, from `begin` to `stop`."""

    def __init__(self, listener: socket.socket, token: str | None) -> None:
        self._listener = listener
        self._token = token
        self._main_loop: trio.lowlevel.TrioToken | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._begun = False
        self._ends = threading.Event()
        self._stopped = trio.Event()
        self._application: Starlette | None = None

    # ---------------------------------------------------------------- for the main thread

    def answer(self, pages: Mapping[str, Page], main_loop: trio.lowlevel.TrioToken | None) -> None:
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
        config.bind = [f"fd://{os.dup(self._listener.fileno())}"]
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
        if not self._ends.is_set():
            await serve(cast(Any, self._answer), config, shutdown_trigger=self._stopped.wait)

    async def _answer(self, *call: Any) -> None:
        while (application := self._application) is None:  # noqa: ASYNC110 - the main thread sets it, in a moment
            await trio.sleep(LOOK_S)
        await application(*call)

    def _routes(self, pages: Mapping[str, Page]) -> list[Route]:
        return [
            Route(path, self._endpoint(page), methods=["GET", *(["PUT"] if page.change else [])])
            for path, page in pages.items()
        ]

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            write: Callable[[Any], Response] | None = page.write
            if not self._may_see(request):
                write = page.hidden
            if write is None:
                return JSONResponse(
                    {"error": "the token is missing or wrong"},
                    status_code=401,
                    headers={"WWW-Authenticate": "Bearer"},
                )
            read = page.read
            try:
                if request.method == "PUT" and page.change is not None:
                    read = partial(page.change, await _json_of(request))
                found = await self._on_main_loop(read)
            except ConfigurationError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            except trio.TooSlowError:
                why = f"the event loop has not answered for {PATIENCE_S} s"
                return JSONResponse({"error": why}, status_code=503)
            return write(found)

        return endpoint

    def _may_see(self, request: Request) -> bool:
        if self._token is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    async def _on_main_loop(self, read: Callable[[], Any]) -> Any:
        """Call `read` on the main loop. Raises TooSlowError where that does not answer in time, or has ended."""
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
    # Connections inherit this.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
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


_FAMILIES: dict[Kind, Callable[..., Any]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}
_PROCESS = ProcessCollector(registry=None)


def _exposition(found: list[tuple[Metric, list[Sample]]]) -> Response:
    return Response(generate_latest(cast(Any, _Collected(found))), media_type=CONTENT_TYPE_LATEST)


def server_pages(server: Server) -> dict[str, Page]:
    """The pages of a server."""

    def standstill() -> list[str]:
        why = server.standstill()
        return [] if why is None else [why]

    def change_log_level(asked: Any) -> dict[str, str]:
        for level in LEVELS:
            if asked == {"level": level}:
                server.change_logging(level)
                return log_settings()
        raise ConfigurationError([f'expected {{"level": LEVEL}}, with a LEVEL of {", ".join(LEVELS)}'])

    def log_settings() -> dict[str, str]:
        return {"level": PRESENT.level, "format": PRESENT.format}

    return {
        "/health/live": health_page("live", standstill),
        "/health/ready": health_page("ready", server.not_ready),
        "/statistics": json_page(server.statistics),
        "/audit": json_page(server.audit),
        "/logging": Page(read=log_settings, write=JSONResponse, change=change_log_level),
        "/metrics": Page(read=lambda: observe(server.observation()), write=_exposition),
    }

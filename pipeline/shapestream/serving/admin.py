"""The admin port: HTTP for operators, served by a thread with an event loop of its own.

    caller ── HttpServer ──▶ port's thread ── run_sync_soon ──▶ main loop: `Page.read`, quick, or in slices
                                  ▲                                 │
                                  └──────── `Page.write` ◀──────────┘

The thread answers a probe while the main loop is busy, and while models are compiled, before the main loop runs. A slow
reader delays no request. Each answer is read on the main loop and written in the thread. Where the main loop does not
answer within `PATIENCE_S`, the caller gets 503.

The HTTP server limits connections, so that callers cannot use up the process's open files. Without a token, a port on
loopback refuses calls that a browser makes for a page of another site.

admin_pages.py defines the pages. Only these two modules import packages of the extra `[admin]`.

The page is fed by server-sent events (`Feed`): one reading of the main loop per second, for all viewers together. While
there is no viewer, nothing is read. A viewer that falls behind misses readings, but no batch that is still kept.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import outcome
import trio

from shapestream.addresses import is_beyond_loopback
from shapestream.errors import ConfigurationError
from shapestream.serving.admin_pages import EventStream, Page, health_page
from shapestream.serving.readings import MOST_BATCHES
from shapestream.settings import AdminSettings
from shapestream.telemetry.logging import get_logger
from shapestream.transport.guards import admin_connections
from shapestream.transport.http_listener import REFUSED_SITES, is_sent_by_another_site, listen_at, place_of
from shapestream.web.messages import Buffer, HttpError, HttpLimits, HttpRequest, HttpResponse
from shapestream.web.server import HttpServer, for_all, listeners_of
from shapestream.web.tokens import Tokens, read_tokens

log = get_logger()

PATIENCE_S = 0.8
"""Seconds to wait for the main loop: less than the second that Kubernetes gives a probe."""
IDLE_S = 5.0
"""Seconds for the next request, its head or its body to come."""
UNREAD_S = 10.0
"""Seconds after which a reader that takes nothing of an answer is cut off."""
MAX_UNSENT_BYTES = 64 * 1024
"""Bytes that the kernel buffers for a reader. A viewer that does not read is noticed when they are full."""
MAX_HEAD_BYTES = 16 * 1024
"""Largest number of bytes of a request's head, and of the body of a PUT."""
MOST_PAGE_BYTES = 32 * 1024 * 1024
"""Bytes of pages that are not written yet, of all viewers: 1 MiB for each connection, and no page has so many."""
MOST_REFUSALS = 4
"""Connections beyond the limit that get 503. Each is one more descriptor, for seconds."""
RETRY_S = 1.0
"""Seconds until the port is opened again after a defect."""
LOOK_S = 0.02
"""Seconds between two checks whether there are pages; they come soon after models were prepared."""

PREPARING = "models are being prepared"
_WHILE_PREPARING: dict[str, Page | EventStream] = {
    "/health/live": health_page("live", list),
    "/health/ready": health_page("ready", lambda: [PREPARING]),
}
"""The pages while there is no main loop."""


class AdminPort:
    """A port that listens from its construction on. Callers get no answer before `preparing` or `run`."""

    def __init__(self, settings: AdminSettings) -> None:
        """Listen. Raises `ConfigurationError` for an address that cannot be used, and for an unusable token file."""
        file = settings.token_file
        tokens = None if file is None else read_tokens(Path(file), only="admin")
        self._socket = _listen(settings.address)
        self._thread = _Thread(
            self._socket, tokens, by_loopback=not is_beyond_loopback(f"tcp://{settings.address}")
        )
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


class _Thread:
    """The thread of the port, from `begin` to `stop`."""

    def __init__(self, listener: socket.socket, tokens: Tokens | None, *, by_loopback: bool) -> None:
        self._listener = listener
        self._tokens = tokens
        self._by_loopback = by_loopback and tokens is None
        """Whether nothing else protects the port."""
        self._main_loop: trio.lowlevel.TrioToken | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._begun = False
        self._ends = threading.Event()
        self._stopped = trio.Event()
        self._pages: Mapping[str, Page | EventStream] | None = None
        self._nursery: trio.Nursery
        self._slicing: trio.Lock
        """Held by the answer that is read in slices, so that each turn of the main loop reads one slice at most."""
        self._feeds: dict[EventStream, Feed] = {}
        """The feeds that run, each from its first viewer on."""

    # ---------------------------------------------------------------- for the main thread

    def answer(
        self, pages: Mapping[str, Page | EventStream], main_loop: trio.lowlevel.TrioToken | None
    ) -> None:
        """Answer with these pages from now on. Without a `main_loop` the thread reads them; other paths answer 503."""
        self._main_loop = main_loop
        self._pages = pages

    def pause(self) -> None:
        """Let callers wait for the next pages."""
        self._pages = None

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
        trio.run(self._serve)

    async def _serve(self) -> None:
        self._loop = trio.lowlevel.current_trio_token()
        self._slicing = trio.Lock()
        self._feeds.clear()
        limits = HttpLimits(
            max_connections=admin_connections(),
            most_refusals=MOST_REFUSALS,
            max_head_bytes=MAX_HEAD_BYTES,
            max_body_bytes=MAX_HEAD_BYTES,
            most_bodies=MOST_PAGE_BYTES // MAX_HEAD_BYTES,
            idle_s=IDLE_S,
            head_s=IDLE_S,
            body_s=IDLE_S,
            write_s=UNREAD_S,
        )
        server = HttpServer(for_all(self._answer), limits)
        async with trio.open_nursery() as self._nursery:
            if not self._ends.is_set():
                self._nursery.start_soon(server.run, listeners_of(self._listener.dup()))
                await self._stopped.wait()
            self._nursery.cancel_scope.cancel()

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        while (pages := self._pages) is None:  # noqa: ASYNC110 - the main thread sets it soon
            await trio.sleep(LOOK_S)
        if self._by_loopback and is_sent_by_another_site(request.headers):
            raise HttpError(421, REFUSED_SITES)
        page, given = _page_of(pages, request)
        if page is None:
            # While models are prepared nobody knows yet which pages there will be.
            raise HttpError(404, "there is no such page") if self._main_loop else HttpError(503, PREPARING)
        changes = isinstance(page, Page) and page.change is not None
        if request.method not in ("GET", "HEAD", *(["PUT"] if changes else [])):
            allowed = "GET, HEAD, PUT" if changes else "GET, HEAD"
            raise HttpError(405, f"the methods of this page are {allowed}", (("Allow", allowed),))
        sees = self._may_see(request)
        if not sees and (isinstance(page, EventStream) or page.hidden is None):
            raise HttpError(401, "the token is missing or wrong", (("WWW-Authenticate", "Bearer"),))
        if isinstance(page, EventStream):
            return self._events(page)
        write = page.write if sees or page.hidden is None else page.hidden
        read = page.read and partial(page.read, **{name: given[name] for name in page.takes if name in given})
        try:
            if request.method == "PUT" and page.change is not None:
                read = partial(page.change, _json_of(request))
            return write(None if read is None else await self._on_main_loop(read))
        except ConfigurationError as error:
            raise HttpError(400, str(error)) from error
        except trio.TooSlowError:
            raise HttpError(503, f"the event loop has not answered for {PATIENCE_S} s") from None

    def _may_see(self, request: HttpRequest) -> bool:
        """Tell whether a caller showed the token, or none is required."""
        try:
            return self._tokens is None or bool(self._tokens.caller_of(request))
        except HttpError:
            return False

    def _events(self, page: EventStream) -> HttpResponse:
        if page not in self._feeds:
            feed = Feed(lambda batches: self._on_main_loop(partial(page.read, batches)))
            self._feeds[page] = feed
            self._nursery.start_soon(feed.run)
        feed = self._feeds[page]
        if feed.full:
            raise HttpError(503, f"{MOST_VIEWERS} viewers look already")
        return HttpResponse(
            content_type="text/event-stream", headers=(("Cache-Control", "no-store"),), stream=feed.events()
        )

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


def _page_of(
    pages: Mapping[str, Page | EventStream], request: HttpRequest
) -> tuple[Page | EventStream | None, dict[str, str]]:
    """Return the page at a request's path, and what the query and the path give it; None where there is none.

    The last part of a page's path may be a parameter, `{NAME}`.
    """
    given = dict(parse_qsl(request.query, keep_blank_values=True))
    if request.path in pages:
        return pages[request.path], given
    folder, _, last = request.path.rpartition("/")
    for path, page in pages.items():
        if last and path.startswith(f"{folder}/{{"):
            return page, {**given, path[len(folder) + 2 : -1]: last}
    return None, given


def _json_of(request: HttpRequest) -> Any:
    """Read the JSON body of a request. Raises `ConfigurationError` if it is no JSON.

    The content type must be JSON: for that, a browser asks this port first whether another site's page may send it.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ConfigurationError(["expected Content-Type: application/json"])
    try:
        return json.loads(bytes(request.body))
    except (ValueError, RecursionError):
        raise ConfigurationError(["expected JSON"]) from None


def _listen(address: str) -> socket.socket:
    listener = listen_at(address)
    # Accepted connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_UNSENT_BYTES)
    return listener


MOST_VIEWERS = 16
"""Viewers at a time. Each takes a connection, a task, and up to 64 KB/s where batches are many."""
INTERVAL_S = 1.0
"""Seconds between two readings: often enough for an eye, and at about 1 ms each a thousandth of the main loop's time."""


class Feed:
    """The readings, and the viewers of them."""

    def __init__(self, read: Callable[[int], Awaitable[dict[str, Any]]]) -> None:
        """`read`: returns the state with the batches after a number of them; raises TooSlowError."""
        self._read = read
        self._viewers = 0
        self._asked = trio.Event()
        """Set when there is a viewer."""
        self._published = trio.Event()
        """Set by the next reading."""
        self._readings = 0
        self._read_at: float | None = None
        """When the server was last read."""
        self._state: str | None = None
        """The last reading but for the batches: a JSON object. None: no reading since somebody looks."""
        self._batches: deque[list[Any]] = deque(maxlen=MOST_BATCHES)
        self._batches_in_all = 0

    @property
    def full(self) -> bool:
        """Tell whether there is no room for one more viewer."""
        return self._viewers >= MOST_VIEWERS

    async def run(self) -> None:
        """Read while there are viewers, until cancelled."""
        while True:
            if not self._viewers:
                self._forget()
                self._asked = trio.Event()
                await self._asked.wait()
            due = trio.current_time() + INTERVAL_S
            self._publish(await self._reading())
            await trio.sleep_until(due)

    def _forget(self) -> None:
        """Drop the readings: without viewers there are no later ones, so the last one is old to the next viewer."""
        self._state = None
        self._batches.clear()
        self._batches_in_all = 0
        self._read_at = None

    async def _reading(self) -> dict[str, Any]:
        began = trio.current_time()
        try:
            state = await self._read(self._batches_in_all)
        except trio.TooSlowError:
            return self._stalled("the server's event loop does not answer", began)
        except Exception:  # a defect of what is read must not end the health checks
            log.exception("page not read")
            return self._stalled("the server could not be read; its log says why", began)
        self._read_at = trio.current_time()
        return state

    def _stalled(self, why: str, began: float) -> dict[str, Any]:
        """Return what viewers are told instead of a reading. `for_s`: seconds without one."""
        self._read_at = began if self._read_at is None else self._read_at
        return {"stalled": why, "for_s": trio.current_time() - self._read_at}

    def _publish(self, state: dict[str, Any]) -> None:
        self._batches.extend(state.pop("batches", ()))
        self._batches_in_all = state.pop("batches_in_all", self._batches_in_all)
        self._state = json.dumps(state)
        self._readings += 1
        self._published.set()
        self._published = trio.Event()

    async def events(self) -> AsyncGenerator[Buffer, None]:
        """Yield the events of one viewer, as long as it wants more."""
        # A viewer begins with the last reading; where there is none yet, it waits for the first.
        seen, batches = self._readings - (self._state is not None), 0
        self._viewers += 1
        self._asked.set()
        try:
            while True:
                if seen == self._readings:
                    await self._published.wait()
                count = min(len(self._batches), self._batches_in_all - batches)
                new = json.dumps(list(islice(self._batches, len(self._batches) - count, None)))
                seen, batches = self._readings, self._batches_in_all
                yield f'data: {{"batches_in_all":{batches},"batches":{new},"state":{self._state}}}\n\n'.encode()
        finally:
            self._viewers -= 1

"""The tasks of a worker around its session: one connection at a time to its server, until it drains.

    run
    └── one connection           again after `RETRY_S`, for as long as the server is away
        ├── connection.run       watches the socket
        ├── _read                reads entries
        ├── _write               sends messages that the socket did not take at once
        └── _beat                sends heartbeats, and watches for the server's silence

This is the worker's control connection. Its slots have threads and connections of their own (`serving/slot_threads.py`).
`worker_session.py` decides what each message means, and what is sent.
"""

from __future__ import annotations

import enum
import os
from collections import deque
from collections.abc import Callable

import structlog
import trio

from shapestream.errors import ProtocolError
from shapestream.serving.slot_threads import News, SlotThreads, ThreadEnded
from shapestream.transport.interface import Connection
from shapestream.wire.codec import codec_of
from shapestream.wire.messages import Heartbeat, Role
from shapestream.wire.peers import Liveness, silence_of
from shapestream_engine.layout import Buffer
from shapestream_workers.worker_session import WorkerSession

log = structlog.get_logger()

RETRY_S = 0.5
"""Seconds between two connections. They double, up to `RETRY_MAX_S`, while the server refuses this worker."""
RETRY_MAX_S = 10.0
DEFAULT_HEARTBEAT_S = 1.0
"""Seconds between heartbeats until the server has sent its own interval."""
FAREWELL_S = 0.5
"""Seconds to send the last messages of a session; a server that is gone takes none of them."""
ORPHAN_S = 60.0
"""Seconds that a batch of an ended session may hold its slot; after that it counts as hanging."""
_CODEC = codec_of(Role.WORKER)


class WorkerEnd(enum.Enum):
    """The reason why a worker ended."""

    DRAINED = enum.auto()
    REFUSED = enum.auto()
    """The server refused this worker, and no other server will replace it."""
    UNUSABLE = enum.auto()
    """This process has other files or another engine of a model than the server serves, or speaks another version of the
    protocol."""
    SLOT_ENDED = enum.auto()
    """A slot's thread has ended: another process must replace this one."""
    SLOT_HANGS = enum.auto()
    """A slot hangs: only the end of the process frees it."""


class Worker:
    """The slots of one process, which serve one server."""

    def __init__(
        self,
        name: str,
        slots: SlotThreads,
        connect: Callable[[], Connection],
        *,
        ready: Callable[[], None] = lambda: None,
        asks_again: bool = True,
        once: tuple[str, ...] = (),
        advice: str | None = None,
    ) -> None:
        """`connect` makes a connection. `ready` is called each time that the server has welcomed this worker.

        `asks_again`: connect again to a server that refuses this worker, since another server may replace it.
        `once`: the models whose requests must not run twice. `advice`: what to do if no server ever answers.
        """
        self.name = name
        self._slots = slots
        self._connect = connect
        self._ready = ready
        self._drain = trio.Event()
        self._asks_again = asks_again
        self._once = once
        self._advice = advice
        self.end = WorkerEnd.DRAINED
        """The reason for the end of `run`, once that has returned."""
        self._wake_writer = trio.Event()
        self._liveness: Liveness
        """That of the server, on this connection."""
        self._session: WorkerSession
        self._connection: Connection | None = None
        self._writing = trio.CancelScope()
        self._backlog: deque[list[Buffer]] = deque()
        """Messages that the connection has not taken yet: at most two per slot, since heartbeats are skipped then."""

    def drain(self) -> None:
        """Finish the running batches, take no new ones, and leave. Then `run` returns."""
        self._drain.set()

    def not_ready(self) -> list[str]:
        """Return the reasons why this worker gets no batches now; none while a server has welcomed it."""
        if self._drain.is_set():
            return ["this worker drains"]
        welcomed = self._connection is not None and self._session.welcome is not None
        return [] if welcomed and self._session.ended is None else ["no server has welcomed this worker"]

    async def run(self) -> None:
        """Serve until drained, refused or cancelled, or until a slot hangs. The server may restart at any time."""
        self._session = WorkerSession(self.name, os.getpid(), self._slots, self._once)
        self._slots.start(self._handle_news)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_drain)
                nursery.start_soon(self._watch_orphans, nursery.cancel_scope)
                retry_s = RETRY_S
                while not self._drain.is_set():
                    why = await self._serve_one_connection()
                    if self._session.refused is not None:
                        self.end = WorkerEnd.UNUSABLE
                        break
                    welcomed = self._session.welcome is not None
                    turned_away = not welcomed and self._session.ended_by_server
                    if turned_away:
                        why = "the server refuses this worker; its log says why"
                    if welcomed:
                        self._advice = None  # the address is right
                    advice = {} if self._advice is None else {"advice": self._advice}
                    log.info("disconnected", worker=self.name, why=why, **advice)
                    if turned_away and not self._asks_again:
                        self.end = WorkerEnd.REFUSED
                        break
                    retry_s = min(2 * retry_s, RETRY_MAX_S) if turned_away else RETRY_S
                    with trio.move_on_after(retry_s):
                        await self._drain.wait()
                nursery.cancel_scope.cancel()
        finally:
            await self._slots.aclose()

    async def _serve_one_connection(self) -> str:
        """Serve one connection, and return the reason for its end. By then the socket has all messages that it took."""
        connection = self._connection = self._connect()
        self._writing = trio.CancelScope()
        self._backlog.clear()
        now = trio.current_time()
        self._liveness = Liveness(silence_of(DEFAULT_HEARTBEAT_S), now, DEFAULT_HEARTBEAT_S)
        self._session.greet(now)
        self._end_turn()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(connection.run)
                nursery.start_soon(self._beat)
                nursery.start_soon(self._read, connection)
                with self._writing:
                    await self._write(connection)
                nursery.cancel_scope.cancel()
        finally:
            self._connection = None
            connection.close()
        return self._session.ended or "cancelled"

    async def _watch_drain(self) -> None:
        await self._drain.wait()
        log.info("worker drains", worker=self.name)
        self._session.drain()
        self._end_turn()

    async def _watch_orphans(self, scope: trio.CancelScope) -> None:
        """End the process if a batch of an ended session holds its slot for longer than `ORPHAN_S`."""
        while True:
            await trio.sleep(ORPHAN_S / 4)
            since = self._session.occupied_since
            if since is not None and trio.current_time() - since > ORPHAN_S:
                what = "a batch of an ended session does not end: this process ends"
                log.error("slot hangs", worker=self.name, what=what)
                self.end = WorkerEnd.SLOT_HANGS
                scope.cancel()
                return

    async def _read(self, connection: Connection) -> None:
        session = self._session
        while session.ended is None:
            messages = await connection.receive()
            now = self._liveness.heard_at = trio.current_time()
            welcomed = session.welcome
            for frames in messages:
                try:
                    entries = [*_CODEC.read(frames)]
                except ProtocolError as error:
                    session.ended = f"the server sent what cannot be read: {error}"
                    break
                for entry in entries:
                    session.handle_entry(entry, now)
            if session.welcome is not None and session.welcome is not welcomed:
                heartbeat_s = session.welcome.heartbeat_ms / 1000
                self._liveness.silence_s = silence_of(heartbeat_s)
                self._liveness.beat_every(heartbeat_s)
                log.info("worker ready", worker=self.name)
                self._ready()
            self._end_turn()

    def _handle_news(self, news: News) -> None:
        self._session.handle_news(news, trio.current_time())
        if isinstance(news, ThreadEnded) and self.end is not WorkerEnd.SLOT_ENDED:
            self.end = WorkerEnd.SLOT_ENDED
            what = "this process drains and ends"
            log.error("slot ended", worker=self.name, why="its thread has ended", what=what)
            self.drain()
        self._end_turn()

    def _end_turn(self) -> None:
        """Send the session's messages. `_write` sends those that the connection does not take at once."""
        session = self._session
        if session.outgoing and self._connection is not None:
            for frames in _CODEC.pack(session.outgoing):
                try:
                    if self._backlog:
                        raise trio.WouldBlock
                    self._connection.send_nowait(frames)
                except trio.WouldBlock:
                    self._backlog.append(frames)
        session.outgoing.clear()
        if session.ended is not None:
            self._writing.deadline = min(self._writing.deadline, trio.current_time() + FAREWELL_S)
        if self._backlog or session.ended is not None:
            self._wake_writer.set()

    async def _write(self, connection: Connection) -> None:
        """Send the remaining messages until the session has ended and all are sent."""
        while True:
            while self._backlog:
                await connection.send(self._backlog[0])
                self._backlog.popleft()
                self._session.sent(trio.current_time())
            if self._session.ended is not None:
                return
            self._wake_writer = trio.Event()
            await self._wake_writer.wait()

    async def _beat(self) -> None:
        session, liveness = self._session, self._liveness
        while session.ended is None:
            await trio.sleep_until(liveness.next_wakeup())
            now = trio.current_time()
            if session.greeting_waits:
                liveness.heard_at = now  # nothing was sent that the server could answer
            if liveness.is_silent(now):
                # This also covers a greeting that was lost with a server that ended before it answered.
                session.ended = f"the server was silent for {now - liveness.heard_at:.1f} s"
            elif liveness.heartbeat_due(now):
                liveness.sent_at = now
                if session.welcome is not None and not self._backlog:
                    session.outgoing.append(Heartbeat())
            self._end_turn()

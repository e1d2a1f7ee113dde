"""A server without scheduler, workers and engine: it speaks the protocol, answers from scripted models, and remembers.

For tests of clients, ours and yours. It runs on any `PeerSocket`: over memory endpoints within one trio run, or
over ZeroMQ in a thread of its own (`serve_in_thread`). What scripts it may be called from any thread.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import trio

from shapestream.errors import Cancelled, InternalError, InvalidRequest, PeerGone, ProtocolError, RequestError
from shapestream.testing.scripted_model import ScriptedModel
from shapestream.transport.interface import Message, PeerSocket
from shapestream.versions import ONLY, versioned
from shapestream.wire.codec import decode, pack_messages
from shapestream.wire.messages import (
    Cancel,
    Entry,
    Explain,
    Explanation,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    RequestEntry,
    ResultEntry,
    Role,
    StatisticsEntry,
    StatisticsRequest,
    Timings,
    Unknown,
    Welcome,
)

_TIMINGS = Timings(queue_us=0, run_us=0, total_us=0, batch_requests=1, batch_rows=1, worker="scripted/0")


class ScriptedServer:
    """Serves scripted models. `held`, `requests`, `cancelled` and the others may be read from any thread."""

    def __init__(
        self,
        *models: ScriptedModel,
        window_requests: int = 1024,
        window_bytes: int = 1 << 30,
        heartbeat_s: float = 1.0,
    ) -> None:
        self._models = list(models)
        self._window = (window_requests, window_bytes)
        self._heartbeat_s = heartbeat_s
        self._epoch = os.urandom(16)
        self._known: set[bytes] = set()
        self._holding = False
        self._silent = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._replies: defaultdict[bytes, list[Entry]] = defaultdict(list)
        self._socket: PeerSocket | None = None
        self._turn_ended = threading.Condition()
        self.requests: list[RequestEntry] = []
        """Every request that arrived, sent again or not."""
        self.held: list[tuple[bytes, RequestEntry]] = []
        """Requests that are not answered yet, each with its peer."""
        self.cancelled: list[int] = []
        self.errors: list[Exception] = []
        """What scripts raised that is no `RequestError`, and messages that cannot be read: defects of the test itself."""
        self.messages = 0
        """Messages that arrived; each holds one entry or several."""
        self.hellos = 0
        self.goodbyes = 0
        self.restarts = 0

    # ------------------------------------------------------------ the script, from any thread

    def hold(self) -> None:
        """Keep requests unanswered from now on."""
        self._holding = True

    def release(self, count: int | None = None, *, newest_first: bool = False) -> None:
        """Answer so many of the requests that are held (no more than there are), or all of them and what comes after."""

        def answer() -> None:
            if count is None:
                self._holding = False
            for _ in range(len(self.held) if count is None else min(count, len(self.held))):
                self._answer(*self.held.pop(-1 if newest_first else 0))

        self._do(answer)

    def restart(self) -> None:
        """Behave as another process at the same address: nobody is known, nothing is held."""

        def forget() -> None:
            self.restarts += 1
            self._epoch = os.urandom(16)
            self._known.clear()
            self.held.clear()

        self._do(forget)

    def go_silent(self, silent: bool = True) -> None:
        """Say nothing and hear nothing, like a process that hangs."""

        def change() -> None:
            self._silent = silent

        self._do(change)

    def say(self, *entries: Entry) -> None:
        """Say this to every client that is known."""

        def say() -> None:
            for peer in self._known:
                self._replies[peer] += entries

        self._do(say)

    def wait_until(self, condition: Callable[[ScriptedServer], Any], *, timeout_s: float = 10.0) -> None:
        """Block this thread until the condition holds; raises TimeoutError. Not from the server's own thread."""
        with self._turn_ended:
            if not self._turn_ended.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError(f"the condition did not come true; {self!r}")

    def __repr__(self) -> str:
        return (
            f"<ScriptedServer {len(self.requests)} requests, {len(self.held)} held, "
            f"{len(self.cancelled)} cancelled>"
        )

    # ------------------------------------------------------------ the server

    async def run(
        self, socket: PeerSocket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on this socket until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        self._socket = socket
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(socket.run)
            self._nursery.start_soon(self._beat)
            task_status.started()
            while True:
                for peer, frames in await socket.receive():
                    self.messages += 1
                    if not self._silent:
                        self._read(peer, frames)
                self._flush()

    async def _beat(self) -> None:
        while True:
            await trio.sleep(self._heartbeat_s)
            for peer in self._known if not self._silent else ():
                self._replies[peer].append(Heartbeat())
            self._flush()

    def _do(self, act: Callable[[], None]) -> None:
        """Act in the server's loop, and return when that is done: whatever the script sends afterwards finds it done."""
        if self._token is None:
            act()
        elif trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token:
            act()
            self._flush()
        else:
            done: Future[None] = Future()
            self._token.run_sync_soon(self._act_for, act, done)
            done.result()

    def _act_for(self, act: Callable[[], None], done: Future[None]) -> None:
        try:
            act()
            self._flush()
        except Exception as error:  # noqa: BLE001 - it goes to the script's thread
            done.set_exception(error)
        else:
            done.set_result(None)

    def _read(self, peer: bytes, frames: Message) -> None:
        try:
            envelope = decode(frames, role=Role.SERVER_OF_CLIENTS)
        except ProtocolError as error:
            self.errors.append(error)
            self._known.discard(peer)
            self._replies[peer].append(Goodbye())
            return
        for entry in envelope.entries:
            self._take(peer, entry)
        for bad in envelope.bad:
            self.errors.append(ProtocolError(bad.message))
            if bad.id is not None:
                self._replies[peer].append(_failure(bad.id, InvalidRequest(bad.message)))

    def _take(self, peer: bytes, entry: Entry) -> None:
        replies = self._replies[peer]
        if isinstance(entry, Hello):
            self.hellos += 1
            self._known.add(peer)
            replies.append(
                Welcome(
                    epoch=self._epoch,
                    window_requests=self._window[0],
                    window_bytes=self._window[1],
                    heartbeat_ms=int(self._heartbeat_s * 1000),
                )
            )
            return
        if isinstance(entry, Goodbye):
            self.goodbyes += 1
            self._known.discard(peer)
            return
        if peer not in self._known:
            replies.append(Unknown())
            return
        match entry:
            case RequestEntry():
                self.requests.append(entry)
                if self._holding:
                    self.held.append((peer, entry))
                else:
                    self._start(peer, entry)
            case Cancel():
                self._cancel(peer, entry)
            case OpenModel():
                replies.append(self._open(entry.name))
            case Explain():
                values = {"stories": [], "unknown": "a scripted server keeps no stories"}
                replies.append(Explanation(question=entry.question, values=values))
            case StatisticsRequest():
                replies.append(StatisticsEntry(values={"requests": len(self.requests)}))
            case _:
                pass

    def _open(self, name: str) -> Entry:
        for number, model in enumerate(self._models):
            if name in (model.signature.name, versioned(model.signature.name, ONLY)):
                return ModelOpened(name=name, number=number, signature=model.signature.to_dict())
        known = ", ".join(model.signature.name for model in self._models)
        return ModelRefused(name=name, code="invalid", message=f"no model {name!r}; known: {known}")

    def _cancel(self, peer: bytes, entry: Cancel) -> None:
        self.cancelled.append(entry.sequence)
        for held in self.held:
            if held[0] == peer and held[1].sequence == entry.sequence:
                self.held.remove(held)
                self._replies[peer].append(_failure(entry.sequence, Cancelled("withdrawn")))
                return

    def _start(self, peer: bytes, request: RequestEntry) -> None:
        try:
            duration_s = self._models[request.model].duration_of(request.tensors)
        except Exception as error:  # noqa: BLE001 - the edge to the test's code
            self._replies[peer].append(self._defect(request, error))
            return
        if duration_s > 0:
            assert self._nursery is not None
            self._nursery.start_soon(self._answer_later, peer, request, duration_s)
        else:
            self._answer(peer, request)

    async def _answer_later(self, peer: bytes, request: RequestEntry, duration_s: float) -> None:
        await trio.sleep(duration_s)
        self._answer(peer, request)
        self._flush()

    def _answer(self, peer: bytes, request: RequestEntry) -> None:
        try:
            outputs = self._models[request.model].run(request.tensors)
        except RequestError as error:
            self._replies[peer].append(_failure(request.sequence, error))
        except Exception as error:  # noqa: BLE001 - the edge to the test's code
            self._replies[peer].append(self._defect(request, error))
        else:
            self._replies[peer].append(
                ResultEntry(sequence=request.sequence, timings=_TIMINGS, tensors=outputs)
            )

    def _defect(self, request: RequestEntry, error: Exception) -> Failure:
        """Return the answer where a script failed, and keep the error: the client must not wait, its author must know."""
        self.errors.append(error)
        number = request.model
        name = self._models[number].signature.name if number < len(self._models) else str(number)
        words = f"the scripted model {name!r} raised {type(error).__name__}: {error}"
        return _failure(request.sequence, InternalError(words))

    def _flush(self) -> None:
        assert self._socket is not None
        for peer, entries in self._replies.items():
            if self._silent:
                continue
            for frames in pack_messages(entries):
                try:
                    self._socket.send_nowait(peer, frames)
                except PeerGone:
                    self._known.discard(peer)
                    break
        self._replies.clear()
        with self._turn_ended:
            self._turn_ended.notify_all()


def _failure(sequence: int, error: RequestError) -> Failure:
    after_s = error.retry_after_s
    return Failure(
        sequence=sequence,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=None if after_s is None else max(1, round(after_s * 1000)),
    )


@contextmanager
def serve_in_thread(server: ScriptedServer, address: str) -> Iterator[str]:
    """Serve at a ZeroMQ address, from a thread, for the time of the block; gives the address with its port.

    A block that ends well raises the first of `server.errors`, so that no defect of a script goes unnoticed; a test that
    expects them clears the list.
    """
    from shapestream.transport.router import RouterSocket

    started = threading.Event()
    addresses: list[str] = []
    stop: list[Callable[[], None]] = []
    errors: list[Exception] = []

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with RouterSocket() as socket:
                socket.bind(address)
                addresses.extend(socket.addresses)
                token = trio.lowlevel.current_trio_token()
                stop.append(lambda: token.run_sync_soon(scope.cancel))
                async with trio.open_nursery() as nursery:
                    await nursery.start(server.run, socket)
                    started.set()

    def run() -> None:
        try:
            trio.run(main)
        except Exception as error:  # noqa: BLE001 - the thread's edge; raised below, in the caller's thread
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="scripted-server", daemon=True)
    thread.start()
    started.wait()
    try:
        if not errors:
            yield addresses[0]
    finally:
        if thread.is_alive():
            stop[0]()
        thread.join()
    if errors := [*errors, *server.errors]:
        raise errors[0]

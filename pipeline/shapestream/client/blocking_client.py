"""The blocking face: `with shapestream.blocking.connect(address) as client`, no async code needed.

The core runs in a thread of its own. A caller waits on a lock or a queue that a Ctrl-C interrupts; its ticket
is then withdrawn, here and at the server.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, overload

from shapestream.client.connector import Addresses, connector_for
from shapestream.client.core import Core, CoreThread, Withdraw, software
from shapestream.client.link import LinkSettings
from shapestream.client.opened_models import Model
from shapestream.client.request_tags import tags_of
from shapestream.client.results import Result
from shapestream.client.streaming import (
    Item,
    ItemT,
    Nothing,
    OnError,
    StreamOptions,
    StreamState,
    start_pulling,
)
from shapestream.client.tickets import (
    AnyTicket,
    Kind,
    OpenTicket,
    Question,
    RequestTicket,
    StatisticsTicket,
    StoriesTicket,
    WelcomeTicket,
    checked_name,
    checked_priority,
    deadline_at,
    outcome_of,
    stories_asked,
    stories_of,
)
from shapestream.wire.messages import ResultEntry as Answer
from shapestream_engine.signature import ModelSignature

# A Ctrl-C interrupts a lock that is waited for, unless it comes just before: while this thread waits for the
# interpreter, CPython notes the signal and then enters the wait without another look. So waits are cut this short.
_LOOK_FOR_SIGNALS_S = 0.5
# The background thread waits for nothing when it leaves: this bound is for a machine that hangs.
_JOIN_S = 5.0


def connect(
    address: Addresses,
    *,
    connect_timeout: float = 10.0,
    silence: float = 10.0,
    unavailable_after: float = 60.0,
    key: str | Path | None = None,
    server_key: str | Path | None = None,
) -> Client:
    """Connect to a server, without async code: `with shapestream.blocking.connect(address) as client`.

    `address` is `tcp://HOST:PORT` or `ipc://PATH`, or a list of them: servers of the same models, of which the next is
    asked where one is gone or leaves. `connect_timeout` is how many seconds a server may take to answer. Later
    interruptions are healed without notice: a server that says nothing for `silence` seconds is given up and looked for
    anew, and unfinished requests are sent again under the same numbers. After `unavailable_after` seconds without any
    server they fail with `Unavailable`. A server that asks for keys is reached with `key`, the file of your secret key, and
    `server_key`, its public key or a file of that.

    The client is closed by `with`, or by `close()`. Its connection is kept by a thread in the background, which a forked
    child does not have: connect there anew.

    Raises `Unavailable` where no server answers in time, `TransportError` for a bad address, `ConfigurationError` for
    keys that cannot be used, TypeError and ValueError for bad times.
    """
    core = Core(
        connector_for(address, key=key, server_key=server_key),
        software=software("blocking"),
        settings=LinkSettings(silence_s=silence, unavailable_after_s=unavailable_after),
        clock=time.monotonic,
    )
    thread = CoreThread(core)
    client = Client(core, thread)
    welcomed = False
    try:
        thread.start()
        client._ask(bool, WelcomeTicket, deadline=deadline_at(core.clock, connect_timeout))
        welcomed = True
    finally:
        if not welcomed:
            client.close()
    return client


class Client:
    """A connected client, for any number of threads. Made by `connect`."""

    def __init__(self, core: Core, thread: CoreThread) -> None:
        self._core = core
        self._thread = thread
        # Not at the interpreter's end: the thread, a daemon, may then hold a lock without end.
        weakref.finalize(self, _dropped, core, thread).atexit = False

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> Result:
        """Run `model` on `inputs`, a mapping of names to arrays, lists or plain numbers.

        Lists and plain numbers take the element type of the input; an array's is changed only where nothing can be lost.
        Arrays of 64 KiB and more are not copied: leave them unchanged until the result is there. `deadline` is in seconds
        from now, None for none; it covers all waiting, with or without a server. Requests of higher `priority` go first: an
        integer of at most 31 bits and a sign.

        `request_id` is your own id of the request, 1 to 128 printable ASCII characters. `trace` is its place in a trace: a
        mapping with `traceparent` and perhaps `tracestate`, such as the headers of an HTTP request. Without it the current
        OpenTelemetry span counts. Neither changes the result.

        Returns the outputs by name. Raises the `RequestError` that fits: `InvalidRequest` before anything is sent where the
        model's signature tells, `DeadlineExceeded` when the time is over, `Cancelled` where the client is closed meanwhile.
        Raises TypeError and ValueError for a bad name, deadline, priority or id, and RuntimeError
        in a forked child. A call that a Ctrl-C interrupts is cancelled at the server too.
        """
        self._core.check_process()
        priority = checked_priority(priority)
        tags = tags_of(request_id, trace)
        due = deadline_at(self._core.clock, deadline)
        opened = self._core.model(model) or self._open(model, due)
        tensors, nbytes = opened.encode(inputs)
        call = _Call(self._core)
        ticket = RequestTicket(
            call, deadline=due, model=opened, tensors=tensors, nbytes=nbytes, priority=priority, tags=tags
        )
        call.ask(ticket)
        return Result(None, outcome_of(ticket, Answer), opened.outputs, self._core.client, request_id)

    @overload
    def stream(
        self,
        model: str,
        source: Iterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: Literal["raise"] = "raise",
        deadline: float | None = None,
        priority: int = 0,
    ) -> Stream[Result]: ...

    @overload
    def stream(
        self,
        model: str,
        source: Iterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: Literal["yield"],
        deadline: float | None = None,
        priority: int = 0,
    ) -> Stream[Item]: ...

    def stream(
        self,
        model: str,
        source: Iterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: OnError = "raise",
        deadline: float | None = None,
        priority: int = 0,
    ) -> Stream[Result] | Stream[Item]:
        """Run `model` on everything that `source` gives: `with client.stream(…) as results`.

        `source` is an iterable, pulled in a thread; of inputs, or of `(key, inputs)`.
        At most `max_in_flight` items are under way: pulled, and their results not taken yet. Results come in the order of
        `source`, or as they are ready with `ordered=False`. `deadline` is in seconds for each item, from when it was pulled,
        None for none; `priority` is as in `infer`. Leaving the block withdraws unfinished items.

        Gives a `Result` with the item's `key` for each item. A failed item raises its `RequestError` in its place and ends
        the stream; with `on_error="yield"` it is given there as `Failed`, and the stream goes on. An error of `source` is
        raised after the results of earlier items. Raises TypeError and ValueError for bad arguments.
        """
        options = StreamOptions(
            max_in_flight=max_in_flight,
            ordered=ordered,
            on_error=on_error,
            deadline=deadline,
            priority=priority,
        )
        return Stream(self, model, source, options)

    def signature(self, model: str, *, deadline: float | None = None) -> ModelSignature:
        """The inputs and outputs of `model`; asked for once, and then remembered.

        `deadline` is in seconds from now, None for none. Raises `InvalidRequest` for a model that the server does not have,
        `DeadlineExceeded` when the time is over, and any other `RequestError` that fits; RuntimeError in a forked child.
        """
        self._core.check_process()
        due = deadline_at(self._core.clock, deadline)
        opened = self._core.model(model) or self._open(model, due)
        return opened.signature

    def statistics(self, *, deadline: float | None = 10.0) -> dict[str, Any]:
        """The server's counters, as plain data.

        `deadline` is in seconds from now, None for none. Raises `DeadlineExceeded` when the time is over, and any other
        `RequestError` that fits; RuntimeError in a forked child.
        """
        self._core.check_process()
        return self._ask(dict, StatisticsTicket, deadline=deadline_at(self._core.clock, deadline))

    def stories(
        self, request_id: str | None = None, *, slowest: int = 10, deadline: float | None = 10.0
    ) -> list[dict[str, Any]]:
        """The stories of the requests with the id `request_id`, as plain data; without it, those of the `slowest` requests.

        `deadline` is in seconds from now, None for none. Raises `InvalidRequest` for an id of which the server remembers
        nothing, or nothing that this client's key may see, `DeadlineExceeded` when the time is over, and any other
        `RequestError` that fits; TypeError and ValueError for bad arguments; RuntimeError in a forked child.
        """
        self._core.check_process()
        due = deadline_at(self._core.clock, deadline)
        asked = stories_asked(request_id, slowest)
        return stories_of(self._ask(dict, StoriesTicket, deadline=due, **asked))

    def acknowledge_audit(self, model: str, *, deadline: float | None = 10.0) -> dict[str, Any]:
        """Let the requests of a model share calls again, which an audit stopped; the server's counters after that.

        Without effect for a key without the role `admin`. `deadline` and errors are those of `statistics`.
        """
        self._core.check_process()
        due = deadline_at(self._core.clock, deadline)
        return self._ask(dict, StatisticsTicket, deadline=due, acknowledge=checked_name(model))

    def close(self) -> None:
        """End unfinished requests, here and at the server; other threads that wait for them get `Cancelled`."""
        self._core.stop()
        self._thread.join(_JOIN_S)
        self._thread.check()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:

        async def __aenter__(self) -> NoReturn:
            self.close()
            raise TypeError(
                "shapestream.blocking is for code without async: with shapestream.blocking.connect(…) as client; "
                "in an event loop use shapestream.aio.connect (asyncio) or shapestream.connect (trio)"
            )

        async def __aexit__(self, *_: object) -> None:
            """Never called; `async with` looks for it first."""

    def _open(self, name: str, due: float | None) -> Model:
        return self._ask(Model, OpenTicket, deadline=due, name=checked_name(name))

    def _ask(self, kind: type[Kind], question: Callable[..., Question], **fields: Any) -> Kind:
        call = _Call(self._core)
        ticket = question(call, **fields)
        call.ask(ticket)
        return outcome_of(ticket, kind)


def _dropped(core: Core, thread: CoreThread) -> None:
    """Stop a client that was not closed, and that no reference is left to."""
    if thread.is_alive():
        warnings.warn(
            "a client was dropped unclosed; use it by `with`, or call close()", ResourceWarning, stacklevel=2
        )
        core.stop()


class _Call:
    """One thread that waits for one answer."""

    __slots__ = ("_core", "_unanswered", "closed")

    def __init__(self, core: Core) -> None:
        self.closed = False
        self._core = core
        self._unanswered = threading.Lock()
        self._unanswered.acquire()

    def finish(self, tickets: list[AnyTicket]) -> None:
        self._unanswered.release()

    def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when a Ctrl-C interrupts it, the ticket is withdrawn."""
        try:
            self._core.post(ticket)
            while not self._unanswered.acquire(timeout=_LOOK_FOR_SIGNALS_S):
                pass
        finally:
            if ticket.outcome is None:
                self.closed = True
                self._core.post(Withdraw(ticket))


class Stream(Generic[ItemT]):
    """A stream of results: `with` it, then `for` over it, in one thread."""

    def __init__(self, client: Client, model: str, source: Iterable[Any], options: StreamOptions) -> None:
        if not isinstance(source, Iterable):
            raise TypeError(f"a stream's source is an iterable here, not {type(source).__name__}")
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._state: _State[ItemT] | None = None

    def __enter__(self) -> Self:
        client, core = self._client, self._client._core
        core.check_process()
        opened = core.model(self._model) or client._open(self._model, None)
        granted: queue.SimpleQueue[int] = queue.SimpleQueue()
        entered = False
        try:
            self._state = _State(opened, self._options, granted.put, core)
            self._state.begin()
            start_pulling(self._source, self._state, granted)
            entered = True
        finally:
            # A Ctrl-C in here: the block is never entered, so `__exit__` will not be called, yet items may be out.
            if not entered and self._state is not None:
                self._state.close()
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ItemT:
        if self._state is None:
            raise RuntimeError("enter the stream first: with client.stream(…) as results")
        while True:
            item = self._state.take()
            if item is Nothing.YET:
                self._client._core.check_process()
                self._state.wait()
            elif item is Nothing.ANY_MORE:
                raise StopIteration
            else:
                return item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state is not None:
            self._state.close()


class _State(StreamState[ItemT]):
    """A stream's state, and the queue by which the core's thread hands over finished tickets."""

    def __init__(self, *args: Any) -> None:
        # Holds at most max_in_flight tickets and two ends: it needs no bound of its own.
        self._mailbox: queue.SimpleQueue[list[AnyTicket]] = queue.SimpleQueue()
        super().__init__(*args)

    def finish(self, tickets: list[AnyTicket]) -> None:
        self._mailbox.put(tickets)

    def close(self) -> None:
        super().close()
        self._mailbox.put([])

    def wait(self) -> None:
        """Wait until a ticket is finished, or the stream is closed."""
        while not self.closed:
            try:
                finished = self._mailbox.get(timeout=_LOOK_FOR_SIGNALS_S)
            except queue.Empty:
                continue
            super().finish(finished)
            if not finished:  # by `close`: another thread may wait as well
                self._mailbox.put([])
            return

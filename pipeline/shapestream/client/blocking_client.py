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
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    Unpack,
    overload,
)

from shapestream.client.calls import Answered, Asking, Calls, Connected, asked, connects, core_for
from shapestream.client.connector import Addresses
from shapestream.client.core import WITHDRAWN, AnyCore, CoreThread, Withdraw
from shapestream.client.opened_models import Result
from shapestream.client.streaming import (
    NO_TENSORS,
    Item,
    ItemOptions,
    ItemT,
    Nothing,
    StreamOptions,
    StreamState,
    start_pulling,
)
from shapestream.client.tickets import (
    AnyTicket,
    Question,
    RequestTicket,
    named,
)
from shapestream.errors import Cancelled, RequestError
from shapestream.wire.messages import ResultEntry as Answer

# A Ctrl-C interrupts a lock that is waited for, unless it comes just before: while this thread waits for the
# interpreter, CPython notes the signal and then enters the wait without another look. So waits are cut this short.
_LOOK_FOR_SIGNALS_S = 0.5
# The background thread waits for nothing when it leaves: this bound is for a machine that hangs.
_JOIN_S = 5.0

P = ParamSpec("P")


@connects("shapestream.blocking")
def connect(
    address: Addresses,
    *,
    connect_timeout: float = 10.0,
    silence: float = 10.0,
    unavailable_after: float = 60.0,
    key: str | Path | None = None,
    server_key: str | Path | None = None,
    spread: bool = False,
) -> Client:
    """Connect to a server from code without an event loop. A thread keeps the connection.

    `with` or `close()` ends the client and its unfinished requests, here and at the server. A forked child has no such
    thread: connect there anew.
    """
    core = core_for(
        "blocking",
        address,
        silence=silence,
        unavailable_after=unavailable_after,
        key=key,
        server_key=server_key,
        spread=spread,
        clock=time.monotonic,
    )
    thread = CoreThread(core)
    client = Client(core, thread)
    welcomed = False
    try:
        thread.start()
        client._ask(client._calls.welcome(connect_timeout))
        welcomed = True
    finally:
        if not welcomed:
            client.close()
    return client


def waited(
    call: Callable[Concatenate[Calls, P], Asking[Answered]],
) -> Callable[Concatenate[Client, P], Answered]:
    """Make a method of a call, which waits in the caller's thread."""

    def face(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Answered:
        return client._ask(call(client._calls, *arguments, **options))

    return asked(call, face)


class Client(Connected):
    """A connected client, for any number of threads. Made by `connect`."""

    def __init__(self, core: AnyCore, thread: CoreThread) -> None:
        self._core = core
        self._thread = thread
        self._calls = Calls(core, partial(_ThreadCall, core), core.submissions.check_process)
        # Not at the interpreter's end: the thread, a daemon, may then hold a lock without end.
        weakref.finalize(self, _dropped, core, thread).atexit = False

    def _ask(self, asking: Asking[Answered]) -> Answered:
        """Wait for each question of a call, and return its answer."""
        while True:
            try:
                ticket = next(asking)
            except StopIteration as end:
                answer: Answered = end.value
                return answer
            call: Any = ticket.owner
            call.ask(ticket)

    infer = waited(Calls.infer)
    opened = waited(Calls.opened)
    signature = waited(Calls.signature)
    models = waited(Calls.models)
    statistics = waited(Calls.statistics)
    stories = waited(Calls.stories)
    acknowledge_audit = waited(Calls.acknowledge_audit)

    @overload
    def stream(
        self,
        model: str,
        source: Iterable[Any],
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ItemOptions],
    ) -> Stream[Result]: ...

    @overload
    def stream(
        self, model: str, source: Iterable[Any], *, on_error: Literal["yield"], **options: Unpack[ItemOptions]
    ) -> Stream[Item]: ...

    def stream(self, model: str, source: Iterable[Any], **options: Any) -> Stream[Any]:
        return Stream(self, model, source, self._calls.stream(model, source, **options))

    def has_ended(self) -> bool:
        """Tell whether nothing is answered any more: after `close`, or after an error, which `close` raises."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End unfinished requests, here and at the server; other threads that wait for them get `Cancelled`."""
        self._core.stop()
        self._thread.join(_JOIN_S)
        self._thread.check()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
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


asked(Calls.stream, Client.stream)


def _dropped(core: AnyCore, thread: CoreThread) -> None:
    """Stop a client that was not closed, and that no reference is left to."""
    if thread.is_alive():
        warnings.warn(
            "a client was dropped unclosed; use it by `with`, or call close()", ResourceWarning, stacklevel=2
        )
        core.stop()


class Inference:
    """One request. A thread waits for its result, and any other may withdraw it meanwhile."""

    def __init__(self, client: Client, model: str, inputs: Mapping[str, Any], **options: Any) -> None:
        """Check and encode the request; nothing is sent before `result`. Options and errors are those of `Client.infer`."""
        self._client = client
        self._asking = client._calls.infer(model, inputs, **options)
        ticket, call = self._next()
        while type(ticket) is not RequestTicket:
            call.ask(ticket)
            ticket, call = self._next()
        self._ticket, self._call = ticket, call

    def _next(self) -> tuple[Question, Any]:
        """Return the next question, and the call that waits for it."""
        ticket = next(self._asking)
        return ticket, ticket.owner

    def result(self) -> Result:
        """Send the request, and wait for its result. Raises its error, or `Cancelled` where it was withdrawn."""
        self._call.ask(self._ticket)
        return self._client._ask(self._asking)

    def withdraw(self) -> None:
        """Withdraw the request, here and at the server, from any thread, before or after `result` is called."""
        self._call.withdraw(self._ticket)


class _ThreadCall:
    """One thread that waits for one answer."""

    __slots__ = ("_asked", "_core", "_unanswered", "_withdrawn", "closed")

    def __init__(self, core: AnyCore) -> None:
        self.closed = False
        self._core = core
        # Each is set by one thread, and once: the waiting one, and the withdrawing one. One state would take a lock.
        self._asked = False
        self._withdrawn = False
        self._unanswered = threading.Lock()
        self._unanswered.acquire()

    def finish(self, tickets: list[AnyTicket]) -> None:
        self._unanswered.release()

    def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when a Ctrl-C interrupts it, the ticket is withdrawn.

        One that was withdrawn before is not sent.
        """
        withdrawn_before = self._withdrawn
        if withdrawn_before:
            ticket.outcome = Cancelled(WITHDRAWN)
            return
        try:
            self._core.submissions.post(ticket)
            self._asked = True
            if self._withdrawn:
                self._core.submissions.post(Withdraw(ticket))
            while not self._unanswered.acquire(timeout=_LOOK_FOR_SIGNALS_S):
                pass
        finally:
            if ticket.outcome is None:
                self.closed = True
                self._core.submissions.post(Withdraw(ticket))

    def withdraw(self, ticket: Question) -> None:
        """End the wait of another thread by `Cancelled`. The core's thread does that, so it happens once.

        A ticket must not be withdrawn before it is posted. So of this thread and the waiting one, whichever is later posts
        the withdrawal; where both do, the second one has no effect.
        """
        self._withdrawn = True
        if self._asked and ticket.outcome is None:
            self._core.submissions.post(Withdraw(ticket))


class Stream(Generic[ItemT]):
    """A stream of results: `with` it, then `for` over it, in one thread."""

    def __init__(
        self,
        client: Client,
        model: str | None,
        source: Iterable[Any],
        options: StreamOptions,
        *,
        keeps: Callable[[Any, int], None] | None = None,
    ) -> None:
        """Without a model, each item names its own (`OwnItem`).

        `keeps` is called in the client's thread with the key and the bytes of each result, before it is kept for the
        consumer. Where it raises `RequestError`, the result is dropped, and the item fails by that.
        """
        if not isinstance(source, Iterable):
            raise TypeError(f"a stream's source is an iterable here, not {type(source).__name__}")
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._keeps = keeps
        self._state: _ThreadStreamState[ItemT] | None = None

    def __enter__(self) -> Self:
        client, core = self._client, self._client._core
        core.submissions.check_process()
        opened = None if self._model is None else client.opened(named(self._model, self._options.version))
        granted: queue.SimpleQueue[int] = queue.SimpleQueue()
        entered = False
        try:
            self._state = _ThreadStreamState(self._keeps, opened, self._options, granted.put, core)
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
                self._client._core.submissions.check_process()
                self._state.wait()
            elif item is Nothing.ANY_MORE:
                raise StopIteration
            else:
                return item

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Withdraw what is unfinished, here and at the server, from any thread. Iterating over the results ends."""
        if self._state is not None:
            self._state.close()


class _ThreadStreamState(StreamState[ItemT]):
    """A stream's state, and the queue by which the core's thread hands over finished tickets."""

    def __init__(self, keeps: Callable[[Any, int], None] | None, *args: Any) -> None:
        self._keeps = keeps
        # Holds at most max_in_flight tickets and two ends: it needs no bound of its own.
        self._mailbox: queue.SimpleQueue[list[AnyTicket]] = queue.SimpleQueue()
        super().__init__(*args)

    def finish(self, tickets: list[AnyTicket]) -> None:
        if self._keeps is not None:
            for ticket in tickets:
                if type(ticket) is RequestTicket and type(outcome := ticket.outcome) is Answer:
                    ticket.tensors = NO_TENSORS  # its message is not needed any more
                    nbytes = sum(memoryview(buffer).nbytes for buffer in outcome.tensors.buffers)
                    try:
                        self._keeps(ticket.key, nbytes)
                    except RequestError as error:
                        ticket.outcome = error
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

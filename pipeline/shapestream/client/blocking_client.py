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
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, Unpack, overload

from shapestream.client.calls import Calls
from shapestream.client.connector import Addresses, connector_for
from shapestream.client.core import WITHDRAWN, Core, CoreThread, Withdraw, software
from shapestream.client.link import LinkSettings
from shapestream.client.opened_models import Model
from shapestream.client.request_tags import tags_of
from shapestream.client.results import Result
from shapestream.client.streaming import (
    Item,
    ItemOptions,
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
from shapestream.errors import Cancelled
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
    """Connect to a server from code without an event loop. A thread keeps the connection.

    Arguments:
        address: `tcp://HOST:PORT` or `ipc://PATH`; or a list of them, for servers of the same models, used in turn.
        connect_timeout: seconds that a server may take to answer at first.
        silence: seconds without a word after which the client connects anew, and sends unfinished requests again.
        unavailable_after: seconds without any server after which requests fail with `Unavailable`.
        key: path of your secret key, for a server that asks for keys.
        server_key: that server's public key, or the path of its file.

    `with` or `close()` ends the client and its unfinished requests, here and at the server. A forked child has no such
    thread: connect there anew.

    Raises:
        Unavailable: no server answers in time.
        TransportError: no client can connect to such an address.
        ConfigurationError: the keys cannot be used.
        TypeError, ValueError: an argument is wrong.

    Example:
        with shapestream.blocking.connect("ipc://run/shapestream.sock", connect_timeout=5.0) as client:
            print(client.signature("embeddings"))
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


class Client(Calls):
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
        caller: str | None = None,
    ) -> Result:
        inference = Inference(
            self,
            model,
            inputs,
            deadline=deadline,
            priority=priority,
            request_id=request_id,
            trace=trace,
            caller=caller,
        )
        return inference.result()

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
        caller: str | None = None,
    ) -> Stream[Result] | Stream[Item]:
        options = StreamOptions(
            max_in_flight=max_in_flight,
            ordered=ordered,
            on_error=on_error,
            deadline=deadline,
            priority=priority,
            caller=caller,
        )
        return Stream(self, model, source, options)

    def signature(self, model: str, *, deadline: float | None = None) -> ModelSignature:
        return self.opened(model, deadline=deadline).signature

    def opened(self, model: str, *, deadline: float | None = None) -> Model:
        """Return a model that the server has opened, for the items of a stream without a model."""
        self._core.submissions.check_process()
        return self._core.models.get(model) or self._open(model, deadline_at(self._core.clock, deadline))

    def statistics(self, *, deadline: float | None = 10.0) -> dict[str, Any]:
        self._core.submissions.check_process()
        return self._ask(dict, StatisticsTicket, deadline=deadline_at(self._core.clock, deadline))

    def stories(
        self, request_id: str | None = None, *, slowest: int = 10, deadline: float | None = 10.0
    ) -> list[dict[str, Any]]:
        self._core.submissions.check_process()
        due = deadline_at(self._core.clock, deadline)
        asked = stories_asked(request_id, slowest)
        return stories_of(self._ask(dict, StoriesTicket, deadline=due, **asked))

    def acknowledge_audit(self, model: str, *, deadline: float | None = 10.0) -> dict[str, Any]:
        self._core.submissions.check_process()
        due = deadline_at(self._core.clock, deadline)
        return self._ask(dict, StatisticsTicket, deadline=due, acknowledge=checked_name(model))

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

    def _open(self, name: str, due: float | None) -> Model:
        return self._ask(Model, OpenTicket, deadline=due, name=checked_name(name))

    def _ask(self, kind: type[Kind], question: Callable[..., Question], **fields: Any) -> Kind:
        call = _ThreadCall(self._core)
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


class Inference:
    """One request. A thread waits for its result, and any other may withdraw it meanwhile."""

    def __init__(
        self,
        client: Client,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline: float | None,
        priority: int,
        request_id: str | None,
        trace: Mapping[str, str] | None,
        caller: str | None,
    ) -> None:
        """Check and encode the request; nothing is sent before `result`. Raises as `Client.infer` does."""
        core = client._core
        core.submissions.check_process()
        priority = checked_priority(priority)
        tags = tags_of(request_id, trace, caller)
        due = deadline_at(core.clock, deadline)
        self._model = core.models.get(model) or client._open(model, due)
        tensors, nbytes = self._model.encode(inputs)
        self._client = core.client
        self._own_id = request_id
        self._call = _ThreadCall(core)
        self._ticket = RequestTicket(
            self._call,
            deadline=due,
            model=self._model,
            tensors=tensors,
            nbytes=nbytes,
            priority=priority,
            tags=tags,
        )

    def result(self) -> Result:
        """Send the request, and wait for its result. Raises its error, or `Cancelled` where it was withdrawn."""
        self._call.ask(self._ticket)
        answer = outcome_of(self._ticket, Answer)
        model = self._model
        return Result(None, answer, model.outputs, self._client, self._own_id, lists=model.lists)

    def withdraw(self) -> None:
        """Withdraw the request, here and at the server, from any thread, before or after `result` is called."""
        self._call.withdraw(self._ticket)


class _ThreadCall:
    """One thread that waits for one answer."""

    __slots__ = ("_asked", "_core", "_unanswered", "_withdrawn", "closed")

    def __init__(self, core: Core) -> None:
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
        self, client: Client, model: str | None, source: Iterable[Any], options: StreamOptions
    ) -> None:
        """Without a model, each item names its own (`OwnItem`)."""
        if not isinstance(source, Iterable):
            raise TypeError(f"a stream's source is an iterable here, not {type(source).__name__}")
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._state: _ThreadStreamState[ItemT] | None = None

    def __enter__(self) -> Self:
        client, core = self._client, self._client._core
        core.submissions.check_process()
        opened = None
        if self._model is not None:
            opened = core.models.get(self._model) or client._open(self._model, None)
        granted: queue.SimpleQueue[int] = queue.SimpleQueue()
        entered = False
        try:
            self._state = _ThreadStreamState(opened, self._options, granted.put, core)
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

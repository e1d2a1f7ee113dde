"""The calls of a client, once for all three faces: what they ask the server, and their arguments, errors and examples.

A call is a generator (`Asking`). It yields one ticket after the other, and goes on when that is finished; it never waits, so
it knows no event loop and no thread. A face makes a method of each call, with its arguments and types, that waits for each
ticket (`async_face.awaited`, `blocking_client.waited`). The owner of a ticket is made by the face, too.

Editors and `help` show the docstrings of this file for both clients. The examples are for trio and asyncio. For the blocking
face, leave out `await` and `async`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import update_wrapper
from inspect import Signature, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from shapestream.client.connector import Addresses, connector_for
from shapestream.client.core import AnyCore, Core, software
from shapestream.client.model_list import ListedModel, asked_as, listed
from shapestream.client.opened_models import Model, Result
from shapestream.client.session import LinkSettings
from shapestream.client.streaming import OnError, StreamOptions
from shapestream.client.tickets import (
    OpenTicket,
    Owner,
    Question,
    RequestTicket,
    StatisticsTicket,
    StoriesTicket,
    WelcomeTicket,
    checked_name,
    checked_priority,
    deadline_at,
    named,
    outcome_of,
    stories_asked,
    stories_of,
    tags_of,
)
from shapestream.wire.messages import ResultEntry as Answer
from shapestream_engine.signature import ModelSignature

if TYPE_CHECKING:
    from shapestream.client.spreading import SpreadCore

Answered = TypeVar("Answered")
Asking: TypeAlias = Generator[Question, None, Answered]
"""A call: its questions, and what it returns."""

F = TypeVar("F", bound=Callable[..., Any])

_COMMON = """\
Arguments:
    address: `tcp://HOST:PORT` or `ipc://PATH`; or a list of them, for servers of the same models, used in turn.
    connect_timeout: seconds that a server may take to answer at first.
    silence: seconds without a word after which the client connects anew, and sends unfinished requests again.
    unavailable_after: seconds without any server after which requests fail with `Unavailable`.
    key: path of your secret key, for a server that asks for keys.
    server_key: that server's public key, or the path of its file.
    spread: give requests to all servers at a time, each to the one with the least to do for this client. A HOST that is a
        name stands for all its addresses, and is looked up every 10 s.

Raises:
    Unavailable: no server answers in time.
    TransportError: no client can connect to such an address.
    ConfigurationError: the keys cannot be used.
    TypeError, ValueError: an argument is wrong.{raises}

Example:
    {enter} {face}.connect("ipc://run/shapestream.sock", connect_timeout=5.0) as client:
        print({wait}client.signature("embeddings"))
"""


def connects(face: str, library: str = "") -> Callable[[F], F]:
    """Add what the `connect`s of all faces have in common to a docstring; `library`: the event loop of its face, if any."""
    raises = f"\n    RuntimeError: {library} does not run here." if library else ""
    enter, wait = ("async with", "await ") if library else ("with", "")

    def document(connect: F) -> F:
        common = _COMMON.format(raises=raises, enter=enter, face=face, wait=wait)
        connect.__doc__ = f"{cleandoc(connect.__doc__ or '')}\n\n{common}"
        return connect

    return document


def asked(call: Callable[..., Any], face: F) -> F:
    """Return a face's way to wait for a call, with the call's name, docstring and arguments."""
    update_wrapper(face, call)
    face.__signature__ = signature(call).replace(return_annotation=Signature.empty)  # type: ignore[attr-defined]
    return face


def core_for(
    face: str,
    address: Addresses,
    *,
    silence: float,
    unavailable_after: float,
    key: str | Path | None,
    server_key: str | Path | None,
    spread: bool,
    **own: Any,
) -> Core | SpreadCore:
    """Make the core of a client of this face, by the arguments of `connect`. `own`: the clock and the ends of the face."""
    own["software"] = software(face)
    own["settings"] = LinkSettings(silence_s=silence, unavailable_after_s=unavailable_after)
    if spread:
        from shapestream.client.spreading import SpreadCore  # takes long to import

        return SpreadCore(address, key=key, server_key=server_key, **own)
    return Core(connector_for(address, key=key, server_key=server_key), **own)


class Connected:
    """What a connected client is in each face."""

    _core: AnyCore

    @property
    def window_requests(self) -> int:
        """Requests that the server takes of this client without an answer; further ones wait here."""
        return self._core.window_requests


class Calls:
    """The calls of a connected client, for all faces (`asked`)."""

    def __init__(self, core: AnyCore, owner: Callable[[], Owner], check_caller: Callable[[], None]) -> None:
        """`owner` makes the owner of a call's ticket, by which the caller waits.

        `check_caller` raises RuntimeError where no answer would ever arrive.
        """
        self._core = core
        self._owner = owner
        self._check_caller = check_caller

    def welcome(self, timeout_s: float) -> Asking[bool]:
        """Ask for any server; raises `Unavailable` where none answers in time."""
        ticket = WelcomeTicket(self._owner(), deadline=deadline_at(self._core.clock, timeout_s))
        yield ticket
        return outcome_of(ticket, bool)

    def _open(self, name: str, due: float | None) -> Asking[Model]:
        """Ask for a model, unless that was done before."""
        if (known := self._core.models.get(name)) is not None:
            return known
        ticket = OpenTicket(self._owner(), deadline=due, name=checked_name(name))
        yield ticket
        return outcome_of(ticket, Model)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
        trace: Mapping[str, str] | None = None,
        caller: str | None = None,
        together: int = 1,
    ) -> Asking[Result]:
        """Run a model on the inputs of one request, and return its outputs.

        Arguments:
            model: name of the model.
            inputs: arrays, lists or plain numbers by input name. Lists and plain numbers take the element type of the
                input. An array's type is changed only where nothing can be lost. Arrays of 64 KiB and more are not
                copied: leave them unchanged until the result is there.
            version: version of the model, as in its name: `embeddings@4`. None: the server draws one by its shares;
                `result.version` tells which.
            deadline: seconds from now, None for none. It covers all waiting, with or without a server.
            priority: requests of higher priority go first. An integer of at most 31 bits and a sign.
            request_id: your own id of the request, 1 to 128 printable ASCII characters.
            trace: the request's place in a trace: a mapping with `traceparent` and perhaps `tracestate`, such as the
                headers of an HTTP request. Without it the current OpenTelemetry span counts.
            caller: for whom a gateway asks, 1 to 128 printable ASCII characters. The server's fair shares count by this
                name instead of by the gateway, if its key has the role `gateways`; otherwise the name is ignored.
            together: how many requests you submit as one thing, this one included, such as the texts of one call. Your
                shorter work may pass them. 1 to 99,999.

        Returns a `Result`: the outputs by name. A call that is cancelled, or interrupted by Ctrl-C, is cancelled at the
        server too.

        Raises:
            InvalidRequest: there is no such model or version, or the inputs do not fit its signature; then nothing is sent.
            DeadlineExceeded: the time is over.
            Cancelled: the client was closed meanwhile.
            RequestError: any other failure of the request; docs/client.md has the table.
            TypeError, ValueError: a name, deadline, priority, id, caller or `together` is wrong.
            RuntimeError: the call comes from another event loop than the client's, or from a forked child.

        Example:
            inputs = {"input_ids": np.array([[101, 2023, 102]]), "attention_mask": [[1, 1, 1]]}
            result = await client.infer("embeddings", inputs, deadline=5.0)
            print(result["embedding"].shape)
        """
        self._check_caller()
        core = self._core
        priority = checked_priority(priority)
        tags = tags_of(request_id, trace, caller, together)
        due = None if deadline is None else deadline_at(core.clock, deadline)
        name = model if version is None else named(model, version)
        opened = core.models.get(name) or (yield from self._open(name, due))
        tensors, nbytes = opened.encode(inputs)
        ticket = RequestTicket(
            self._owner(),
            deadline=due,
            model=opened,
            tensors=tensors,
            nbytes=nbytes,
            priority=priority,
            tags=tags,
        )
        yield ticket
        answer = outcome_of(ticket, Answer)
        client, opened = ticket.client or core.client, cast("Model", ticket.model)
        return Result(None, answer, opened.outputs, client, request_id, lists=opened.lists)

    def stream(
        self,
        model: str,
        source: Any,
        *,
        version: str | None = None,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: OnError = "raise",
        deadline: float | None = None,
        priority: int = 0,
        caller: str | None = None,
    ) -> StreamOptions:
        """Run a model on every item of a source. Enter the stream, then iterate over its results.

        Arguments:
            model: name of the model.
            source: an iterable, pulled in a thread; or an async iterable, pulled in a task (not in the blocking face).
                Its items are `inputs`, as for `infer`, or `(key, inputs)`.
            version: as for `infer`.
            max_in_flight: bound on the items under way: pulled, and their results not taken yet.
            ordered: results come in the order of the source; with False, as they are ready.
            on_error: "raise" ends the stream with the error of a failed item, in its place. "yield" gives a `Failed` in
                its place, and the stream goes on.
            deadline: seconds for each item, from when it was pulled; None for none.
            priority: as for `infer`.
            caller: as for `infer`.

        Gives a `Result` per item, with the item's `key`. Leaving the block withdraws unfinished items. An error of the
        source is raised after the results of earlier items.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: the stream is entered in another event loop than the client's, or in a forked child.

        Example:
            images = [{"image": np.zeros((1, 1, 24, width), np.float32)} for width in (32, 40, 48)]
            async with client.stream("detector", images, max_in_flight=2) as results:
                async for result in results:
                    print(result.key, result["peaks"].shape)
        """
        return StreamOptions(
            version=version,
            max_in_flight=max_in_flight,
            ordered=ordered,
            on_error=on_error,
            deadline=deadline,
            priority=priority,
            caller=caller,
        )

    def opened(self, model: str, *, deadline: float | None = None) -> Asking[Model]:
        """Return a model that the server has opened, for the items of a stream without a model."""
        self._check_caller()
        return (yield from self._open(model, deadline_at(self._core.clock, deadline)))

    def signature(
        self, model: str, *, version: str | None = None, deadline: float | None = None
    ) -> Asking[ModelSignature]:
        """Return the inputs and outputs of a model (`ModelSignature`). The server is asked once per model.

        Arguments:
            model: name of the model.
            version: as for `infer`.
            deadline: seconds from now, None for none.

        Raises:
            InvalidRequest: there is no such model or version.
            DeadlineExceeded: the time is over.
            RequestError, TypeError, ValueError, RuntimeError: as for `infer`.

        Example:
            signature = await client.signature("embeddings")
            print([port.name for port in signature.inputs])
        """
        return (yield from self.opened(named(model, version), deadline=deadline)).signature

    def models(self, *, deadline: float | None = 10.0) -> Asking[list[ListedModel]]:
        """Return the models of the server: each version with its share, its readiness, and its inputs and outputs.

        Arguments:
            deadline: seconds from now, None for none.

        Raises:
            DeadlineExceeded: the time is over.
            RequestError, RuntimeError: as for `infer`.

        Example:
            for model in await client.models():
                print(model.name, model.version, model.share, model.is_ready, model.signature)
        """
        due = None if deadline is None else deadline_at(self._core.clock, deadline)
        told = yield from self._statistics(deadline, None)
        found = []
        for model in listed(told):
            if model.is_ready:
                opened = yield from self._open(asked_as(model, told), due)
                model = model._replace(signature=opened.signature)
            found.append(model)
        return found

    def statistics(self, *, deadline: float | None = 10.0) -> Asking[dict[str, Any]]:
        """Return the server's counters, as plain data.

        Arguments:
            deadline: seconds from now, None for none.

        Raises:
            DeadlineExceeded: the time is over.
            RequestError, RuntimeError: as for `infer`.

        Example:
            print(await client.statistics())
        """
        return (yield from self._statistics(deadline, None))

    def _statistics(self, deadline: float | None, acknowledge: str | None) -> Asking[dict[str, Any]]:
        self._check_caller()
        due = deadline_at(self._core.clock, deadline)
        ticket = StatisticsTicket(self._owner(), deadline=due, acknowledge=acknowledge)
        yield ticket
        return outcome_of(ticket, dict)

    def stories(
        self, request_id: str | None = None, *, slowest: int = 10, deadline: float | None = 10.0
    ) -> Asking[list[dict[str, Any]]]:
        """Return the stories of requests, as a list of plain data: when each one waited, and where it ran.

        Arguments:
            request_id: id of the requests; None for the slowest of late.
            slowest: number of the slowest requests, where there is no id.
            deadline: seconds from now, None for none.

        Raises:
            InvalidRequest: the server remembers nothing of this id, or nothing that this client's key may see.
            DeadlineExceeded: the time is over.
            RequestError, TypeError, ValueError, RuntimeError: as for `infer`.

        Example:
            for story in await client.stories(slowest=3):
                print(story)
        """
        self._check_caller()
        due = deadline_at(self._core.clock, deadline)
        ticket = StoriesTicket(self._owner(), deadline=due, **stories_asked(request_id, slowest))
        yield ticket
        return stories_of(outcome_of(ticket, dict))

    def acknowledge_audit(self, model: str, *, deadline: float | None = 10.0) -> Asking[dict[str, Any]]:
        """Let the requests of a model share calls again, after an audit stopped that. Returns the server's counters.

        The server ignores this from a key without the role `admin`. Errors are those of `statistics`.

        Arguments:
            model: name of the model.
            deadline: seconds from now, None for none.
        """
        return (yield from self._statistics(deadline, checked_name(model)))

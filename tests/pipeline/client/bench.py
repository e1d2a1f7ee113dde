"""A pure session on its bench: its server is the test, its clock a number, and everything that came out is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.entries import (
    AsksFirst,
    Clock,
    Entry,
    Failure,
    ModelOpened,
    RequestEntry,
    ResultEntry,
    Welcome,
    failure_of,
    result_of,
    timings_of,
)

from shapestream.client.session import Due, LinkSettings, Session
from shapestream.client.tickets import AnyTicket, ModelHandle, OpenTicket, RequestTicket
from shapestream_engine.layout import Tensors

TENSORS = Tensors(layout=((0, "f32", (1, 4)),), buffers=(bytes(16),))
SETTINGS = LinkSettings(greeting_s=1.0, silence_s=10.0, rest_s=0.5, unavailable_after_s=60.0)
SIGNATURE: dict[str, Any] = {"name": "m"}


def numbered(number: int) -> Tensors:
    """The tensors of a request that equals none with another number."""
    return Tensors(layout=TENSORS.layout, buffers=(number.to_bytes(16),))


class Caller:
    """Somebody who waits; the session looks at nothing of it but its identity."""

    closed = False

    def finish(self, tickets: list[AnyTicket]) -> None:
        """The core would call this."""


class Bench:
    """A session, a clock, and everything that came out of it."""

    def __init__(self, settings: LinkSettings = SETTINGS) -> None:
        self.now = 100.0
        self.session = Session(
            client=bytes(16), software="test", server="test://", settings=settings, now=self.now
        )
        self.finished: list[AnyTicket] = []
        self.caller = Caller()

    def turn(self, *, may_send: bool = True) -> Due:
        """One turn; the invariants hold after it, and nothing more is due at once, or a client would spin."""
        turn = self.session.turn(self.now, may_send=may_send)
        self.session.check_invariants()
        assert self.session.next_wakeup() > self.now
        self.finished += turn.finished
        return turn

    def sent(self) -> list[Entry]:
        """What this turn sends, besides what the clock shows, and what comes with each `Hello`."""
        return [entry for entry in self.turn().entries if not isinstance(entry, Clock | AsksFirst)]

    def receive(self, *entries: Entry) -> None:
        """The server says something."""
        self.session.receive(entries, self.now)
        self.session.check_invariants()

    def wait_until_due(self) -> Due:
        """Move the clock to the next wake-up, and take that turn."""
        self.now = self.session.next_wakeup()
        return self.turn()

    def welcome(self, *, epoch: bytes = b"a", requests: int = 8, nbytes: int = 1 << 20) -> None:
        """The server answers `Hello`."""
        self.receive(Welcome(epoch=epoch, window_requests=requests, window_bytes=nbytes, heartbeat_ms=1000))

    def open(
        self, *, requests: int = 8, nbytes: int = 1 << 20, signature: dict[str, Any] = SIGNATURE
    ) -> ModelHandle:
        """Connect, be welcomed, and open the model `m`."""
        self.session.connected(self.now)
        self.turn()
        self.welcome(requests=requests, nbytes=nbytes)
        ticket = OpenTicket(self.caller, name="m")
        self.session.submit(ticket)
        self.turn()
        self.receive(ModelOpened(name="m", number=7, signature=signature))
        self.turn()
        handle = ticket.outcome
        assert isinstance(handle, ModelHandle)
        return handle

    def come_back(
        self, *, epoch: bytes = b"a", number: int = 7, signature: dict[str, Any] = SIGNATURE, **window: int
    ) -> None:
        """A server that knows nothing of this session welcomes it, and opens its model."""
        self.welcome(epoch=epoch, **window)
        self.turn()
        self.receive(ModelOpened(name="m", number=number, signature=signature))

    def submit(
        self,
        model: ModelHandle,
        *,
        nbytes: int = 16,
        timeout: float | None = None,
        tensors: Tensors = TENSORS,
    ) -> RequestTicket:
        """One request."""
        ticket = RequestTicket(
            self.caller,
            model=model,
            tensors=tensors,
            nbytes=nbytes,
            deadline=None if timeout is None else self.now + timeout,
        )
        self.session.submit(ticket)
        self.session.check_invariants()
        return ticket


def result(sequence: int, *, total_us: int = 3) -> ResultEntry:
    """The server's answer to a request."""
    return result_of(sequence, TENSORS, timings_of(total_us=total_us))


def refusal(sequence: int, code: str) -> Failure:
    """The server's answer to a request that it does not take."""
    return failure_of(sequence, code, retryable=True)


def sequences(entries: Iterable[Entry]) -> list[int]:
    """The requests among what was sent."""
    return [entry.sequence for entry in entries if isinstance(entry, RequestEntry)]

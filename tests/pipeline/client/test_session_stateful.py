"""The session against a server that does whatever it likes: hypothesis looks for an order of events that loses something."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.entries import (
    Ask,
    AsksFirst,
    Cancel,
    Credit,
    Entry,
    Failure,
    Goodbye,
    GrantBounds,
    Granted,
    Hello,
    ModelOpened,
    OpenModel,
    RequestEntry,
    RunsAlone,
    StatisticsEntry,
    StatisticsRequest,
    Unknown,
    Welcome,
    failure_of,
    result_of,
)
from tests.pipeline.client.bench import Caller

from shapestream.client.session import LinkSettings, Session
from shapestream.client.tickets import AnyTicket, ModelHandle, OpenTicket, RequestTicket, StatisticsTicket
from shapestream.errors import DeadlineExceeded, Draining, Poisoned, Unavailable, WorkerLost
from shapestream_engine.layout import Tensors

TENSORS = Tensors(layout=(), buffers=())
SETTINGS = LinkSettings(greeting_s=1, silence_s=4, rest_s=0.5, unavailable_after_s=1e6)
SIGNATURES: dict[str, dict[str, Any]] = {"m": {"name": "m"}, "once": {"name": "once", "idempotent": False}}
UNASKED, MOST = 60, 110
"""Bytes of the largest request that is not asked for, and of the largest that is granted. Some have more."""


class AnyServer(RuleBasedStateMachine):
    """A session, and the half of the world that it talks to: one server process at a time, and a wire."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.session = Session(
            client=bytes(16), software="test", server="test://", settings=SETTINGS, now=self.now
        )
        self.caller = Caller()
        self.open: list[AnyTicket] = []
        self.withdrawn: list[AnyTicket] = []
        self.ended: list[AnyTicket] = []
        self.handles: dict[str, ModelHandle] = {}
        self.connected = False
        self.known = False
        self.epoch = 0
        self.window = (3, 100)
        self.at_server: dict[int, RequestEntry] = {}
        self.number = 0
        self.draining = False
        self.given_to: dict[int, int] = {}
        """The epoch whose server accepted a request that may not run twice."""
        self.granting = False
        """Whether the server grants to those that greet it from now on."""
        self.asked: dict[int, bool] = {}
        """The requests that were asked for and have not come, by number, and whether they are granted."""
        self.must_ask = False
        """Whether this connection was told to ask."""
        self.vanished_with: set[int] = set()
        """The requests that a server had which vanished."""
        self.ever_sent: set[int] = set()
        self.alone: int | None = None
        """The request that runs alone at the server, as it has said."""
        self.lone_losses = 0
        self.renewed = False
        """Whether a request got another number, because its reply was lost."""

    # ------------------------------------------------------------ the shell

    def turn(self) -> None:
        """What the core does."""
        turn = self.session.turn(self.now)
        assert self.session.next_wakeup() > self.now, "more is due at once: a client would spin"
        for ticket in turn.finished:
            assert ticket in self.open, "handed back twice, or although it was withdrawn"
            assert ticket.outcome is not None
            self.open.remove(ticket)
            self.ended.append(ticket)
            if isinstance(ticket.outcome, ModelHandle):
                self.handles[ticket.outcome.name] = ticket.outcome
        if turn.entries:
            assert self.connected
            for entry in turn.entries:
                self.serve(entry)
        if turn.reconnect:
            self.connected = self.known = False

    def serve(self, entry: Entry) -> None:
        """What a server does at once; results wait for a rule."""
        if isinstance(entry, RequestEntry):
            suspect = "suspect" in (entry.tags or {})
            assert suspect or entry.sequence not in self.vanished_with, "a server vanished with it"
            assert not suspect or entry.sequence in self.ever_sent or self.renewed, "it was never sent before"
            self.ever_sent.add(entry.sequence)
        if isinstance(entry, Hello):
            self.known = True
            self.must_ask = False
            self.asked.clear()
            self.hear(
                Welcome(
                    epoch=bytes([self.epoch % 256]),
                    window_requests=self.window[0],
                    window_bytes=self.window[1],
                    heartbeat_ms=500,
                )
            )
        elif not self.known:
            self.hear(Unknown())
        elif isinstance(entry, AsksFirst):
            self.must_ask = self.granting
            if self.granting:
                self.hear(GrantBounds(unasked_bytes=UNASKED, most_bytes=MOST))
        elif isinstance(entry, Ask):
            assert self.must_ask
            assert UNASKED < entry.nbytes <= MOST
            assert entry.sequence not in self.asked
            if self.draining:
                self.hear(failure(entry.sequence, "draining"))
            else:
                self.asked[entry.sequence] = False
        elif isinstance(entry, OpenModel):
            number = 2 * self.number + (entry.name == "once")
            self.hear(ModelOpened(name=entry.name, number=number, signature=SIGNATURES[entry.name]))
        elif isinstance(entry, RequestEntry):
            assert self.number == entry.model // 2
            assert entry.remaining_ms is None or entry.remaining_ms >= 1
            granted = self.asked.pop(entry.sequence, None)
            ticket = self.session.in_flight.tickets[entry.sequence]
            assert isinstance(ticket, RequestTicket)
            assert granted is (True if self.must_ask and ticket.nbytes > UNASKED else None)
            if self.draining and entry.sequence not in self.at_server:
                self.hear(failure(entry.sequence, "draining"))
                return
            if entry.model % 2:
                assert self.epoch == self.given_to.setdefault(entry.sequence, self.epoch), "it may run twice"
            self.at_server[entry.sequence] = entry
        elif isinstance(entry, RunsAlone):
            assert self.alone == entry.sequence, "the server has not said so"
        elif isinstance(entry, Cancel):
            known = self.at_server.pop(entry.sequence, None), self.asked.pop(entry.sequence, None)
            if known != (None, None):
                self.hear(failure(entry.sequence, "cancelled"))
        elif isinstance(entry, StatisticsRequest):
            self.hear(StatisticsEntry(values={}))

    def hear(self, *entries: Entry) -> None:
        """The session hears this."""
        self.session.receive(entries, self.now)

    def submit(self, ticket: Any) -> None:
        """Somebody asks."""
        self.open.append(ticket)
        self.session.submit(ticket)

    # ------------------------------------------------------------ the rules

    @initialize()
    def open_the_model(self) -> None:
        """Every run starts with models that somebody has opened."""
        for name in SIGNATURES:
            self.submit(OpenTicket(self.caller, name=name))
        self.connect()

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        """The shell has a connection."""
        self.connected = True
        self.session.connected(self.now)
        for _ in range(4):
            self.turn()

    @rule(
        nbytes=st.integers(0, 120),
        timeout=st.none() | st.floats(0.01, 5),
        name=st.sampled_from(["m", "once"]),
    )
    def ask(self, nbytes: int, timeout: float | None, name: str) -> None:
        """A request."""
        model = self.handles[name]
        deadline = None if timeout is None else self.now + timeout
        self.submit(
            RequestTicket(self.caller, model=model, tensors=TENSORS, nbytes=nbytes, deadline=deadline)
        )

    @rule()
    def ask_for_statistics(self) -> None:
        """Another question."""
        self.submit(StatisticsTicket(self.caller))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A caller gives up."""
        ticket = data.draw(st.sampled_from(self.open))
        if ticket.outcome is None:
            self.open.remove(ticket)
            self.withdrawn.append(ticket)
            self.session.cancel(ticket)  # type: ignore[arg-type]  # no end of a stream is in there

    @rule()
    def begin_or_cease_to_grant(self) -> None:
        """The next greeting meets a newer server, or an older one."""
        self.granting = not self.granting

    @precondition(lambda self: self.connected and self.known and False in self.asked.values())
    @rule(data=st.data(), refuses=st.booleans())
    def grant(self, data: st.DataObject, refuses: bool) -> None:
        """The server has memory for one request, in any order, or will not have it in time."""
        waiting = sorted(sequence for sequence, granted in self.asked.items() if not granted)
        sequence = data.draw(st.sampled_from(waiting))
        if refuses:
            del self.asked[sequence]
            self.hear(failure(sequence, "overloaded"))
        else:
            self.asked[sequence] = True
            self.hear(Granted(sequence=sequence))

    @precondition(lambda self: self.connected and self.at_server)
    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        """The server is done with one request, in any order."""
        sequence = data.draw(st.sampled_from(sorted(self.at_server)))
        del self.at_server[sequence]
        if fails:
            self.hear(failure(sequence, "model_error"))
        else:
            self.hear(result_of(sequence, TENSORS))

    @precondition(lambda self: self.connected and self.at_server)
    @rule(data=st.data())
    def answer_without_the_reply(self, data: st.DataObject) -> None:
        """It was answered on a connection that broke, and the reply is no longer kept."""
        sequence = data.draw(st.sampled_from(sorted(self.at_server)))
        del self.at_server[sequence]
        self.renewed = True
        self.hear(failure(sequence, "answered"))

    @precondition(lambda self: self.connected and self.known)
    @rule(hands_back=st.booleans())
    def drain(self, hands_back: bool) -> None:
        """The server takes nothing new, and perhaps hands back what did not run."""
        self.draining = True
        for sequence in sorted(sequence for sequence, granted in self.asked.items() if not granted):
            del self.asked[sequence]
            self.hear(failure(sequence, "draining"))
        if hands_back:
            for sequence in sorted(self.at_server):
                if self.at_server.pop(sequence).model % 2:
                    self.hear(failure(sequence, "worker_lost"))
                else:
                    self.hear(failure(sequence, "draining"))

    @precondition(lambda self: self.connected and self.known and self.at_server)
    @rule(data=st.data())
    def run_alone(self, data: st.DataObject) -> None:
        """The server says that a request is about to run alone, and hears that this is known."""
        self.alone = data.draw(st.sampled_from(sorted(self.at_server)))
        self.hear(RunsAlone(sequence=self.alone))
        self.turn()

    @rule(nbytes=st.integers(50, 200), requests=st.integers(1, 5))
    def change_the_window(self, nbytes: int, requests: int) -> None:
        """The server grants more, or less."""
        self.window = (requests, nbytes)
        if self.known and self.connected:
            self.hear(Credit(window_requests=requests, window_bytes=nbytes))

    @rule(new_process=st.booleans())
    def forget(self, new_process: bool, leaves: bool = False) -> None:
        """The server forgets this client, or is another process from now on."""
        if new_process and not self.draining and not leaves:
            self.vanished_with |= self.at_server.keys()
        self.known = False
        self.at_server.clear()
        self.asked.clear()
        if new_process:
            self.lone_losses += self.alone is not None
            self.alone = None
            self.epoch += 1
            self.number += 1
            self.draining = False

    @precondition(lambda self: self.connected and self.known)
    @rule()
    def leave(self) -> None:
        """The server says goodbye."""
        self.hear(Goodbye())
        self.forget(new_process=True, leaves=True)

    @rule(seconds=st.floats(0.01, 6))
    def pass_time(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule()
    def take_a_turn(self) -> None:
        """The core looks what is due."""
        self.turn()

    @invariant()
    def books_balance(self) -> None:
        """The session does not contradict itself, and keeps to the window of the moment it sent."""
        self.session.check_invariants()

    def teardown(self) -> None:
        """A server that behaves from now on: everything ends, and by its deadline at the latest."""
        if self.draining:
            self.forget(new_process=True)
            if self.connected:
                self.hear(Goodbye())
        for _ in range(200):
            if not self.connected:
                self.connected = True
                self.session.connected(self.now)
            self.turn()
            for sequence in sorted(self.asked):
                self.asked[sequence] = True
                self.hear(Granted(sequence=sequence))
            for sequence in sorted(self.at_server):
                del self.at_server[sequence]
                self.hear(result_of(sequence, TENSORS))
            if not self.open and not self.session.in_flight.tickets:
                break
            self.now = max(self.now, min(self.session.next_wakeup(), self.now + 0.3))
        assert [] == self.open
        assert {} == self.session.in_flight.tickets
        poisoned = sum(isinstance(ticket.outcome, Poisoned) for ticket in self.ended)
        assert 2 * poisoned <= self.lone_losses, "a loss was counted that was none, or of another request"
        for ticket in self.ended:
            late = isinstance(ticket.outcome, DeadlineExceeded)
            assert not late or ticket.deadline is not None
            assert not isinstance(ticket.outcome, Unavailable | Draining), "nobody stays away for so long"
            lost = isinstance(ticket.outcome, WorkerLost)
            assert not lost or (isinstance(ticket, RequestTicket) and not ticket.model.idempotent)


def failure(sequence: int, code: str) -> Failure:
    """A terminal reply without a result."""
    return failure_of(sequence, code, "")


class TestAnyServer(AnyServer.TestCase):  # type: ignore[name-defined,misc]  # made by hypothesis
    """Whatever happens: every ticket ends once, or is withdrawn; nothing is left behind."""

    settings = settings(
        max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )

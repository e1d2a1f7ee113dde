"""Simulated clients: each is a process with a real core and session, and callers who keep books."""

from __future__ import annotations

from collections.abc import Callable

import trio
from tests.entries import ResultEntry
from tests.pipeline.protocol_simulation.journal import Journal, Question
from tests.pipeline.protocol_simulation.network import Exchange, Line, error_of_clock_s
from tests.pipeline.protocol_simulation.plan import COMMON, RARE
from tests.pipeline.protocol_simulation.slots import answer_of, question_of

from shapestream.client.connector import Connector
from shapestream.client.core import Core, Withdraw
from shapestream.client.opened_models import Model
from shapestream.client.session import LinkSettings
from shapestream.client.tickets import AnyTicket, OpenTicket, RequestTicket, deadline_at
from shapestream.wire.tensor_frames import to_array

SOFTWARE = "simulated"


class _Opening:
    """Waits for a model."""

    closed = False

    def __init__(self, taken: Callable[[AnyTicket], None]) -> None:
        self._taken = taken

    def finish(self, tickets: list[AnyTicket]) -> None:
        """The core hands back."""
        for ticket in tickets:
            self._taken(ticket)


class _Caller:
    """Waits for one answer."""

    closed = False

    def __init__(self, journal: Journal, question: Question) -> None:
        self._journal = journal
        self._question = question

    def finish(self, tickets: list[AnyTicket]) -> None:
        """The core hands back."""
        question = self._question
        right = answer_of(question_of(question.uid, question.ask.rows, question.ask.length))
        for ticket in tickets:
            outcome = ticket.outcome
            answer = None
            if isinstance(outcome, ResultEntry):
                (_, element_type, shape), buffer = outcome.tensors.layout[0], outcome.tensors.buffers[0]
                answer = to_array(element_type, shape, buffer)
            self._journal.ended(question, outcome, answer, right)


class SimulatedClient:
    """One client process after another in the same place: `name` stays, the session does not survive a kill."""

    def __init__(self, name: str, exchange: Exchange, journal: Journal, nursery: trio.Nursery) -> None:
        self.name = name
        self._exchange = exchange
        self._journal = journal
        self._nursery = nursery
        self._lines: list[Line] = []
        self._begin()

    def _begin(self) -> None:
        scope = self._scope = trio.CancelScope()
        self._waiting: dict[str, list[Question]] = {}
        self._tickets: dict[int, RequestTicket] = {}
        self._core = Core(
            Connector([("simulated", lambda: self._connect(scope))]),
            software=SOFTWARE,
            settings=LinkSettings(),
            clock=trio.current_time,
            deliver=lambda tickets: None if scope.cancel_called else _deliver(tickets),
        )
        self._nursery.start_soon(_live, self._core, scope)

    def kill(self) -> None:
        """The process is gone; nobody waits for its answers. Another one begins."""
        for question in self._journal.questions.values():
            if question.client == self.name:
                self._journal.withdrawn(question)
        self.end()
        self._begin()

    def end(self) -> None:
        """The process is gone."""
        self._scope.cancel()
        self.line.kill()

    @property
    def line(self) -> Line:
        """Its present connection."""
        return self._lines[-1]

    @property
    def error_of_clock_s(self) -> float:
        """How far off a server may be about when this client said something: what it knows of the clock outlives a line."""
        return min((error_of_clock_s(line.up) for line in self._lines), default=0.0)

    def ask(self, question: Question) -> None:
        """Somebody asks; where the model is not open yet, it is opened first."""
        question.wanted = True
        name = (RARE if question.ask.rare else COMMON).name
        model = self._core.models.get(name)
        if model is not None:
            self._submit(model, question)
            return
        waiting = self._waiting.setdefault(name, [])
        waiting.append(question)
        if len(waiting) == 1:
            self._core.submissions.post(
                OpenTicket(_Opening(lambda ticket: self._opened(name, ticket)), name=name)
            )

    def withdraw(self, question: Question) -> None:
        """Nobody waits for it any more."""
        for waiting in self._waiting.values():
            if question in waiting:
                waiting.remove(question)
                self._journal.withdrawn(question)
        ticket = self._tickets.get(question.uid)
        if ticket is not None and question.open:
            self._journal.withdrawn(question)
            ticket.owner.closed = True
            self._core.submissions.post(Withdraw(ticket))

    def _opened(self, name: str, ticket: AnyTicket) -> None:
        waiting = self._waiting.pop(name, [])
        if not isinstance(ticket.outcome, Model):
            for question in waiting:
                self._journal.unopened(question, ticket.outcome)
            return
        for question in waiting:
            self._submit(ticket.outcome, question)

    def _submit(self, model: Model, question: Question) -> None:
        ask = question.ask
        inputs = {"x": question_of(question.uid, ask.rows, ask.length)}
        caller = _Caller(self._journal, question)
        due = deadline_at(trio.current_time, ask.timeout_s)
        tensors, nbytes = model.encode(inputs)
        ticket = self._tickets[question.uid] = RequestTicket(
            caller, deadline=due, model=model, tensors=tensors, nbytes=nbytes, priority=ask.priority
        )
        self._journal.asked(question)
        self._core.submissions.post(ticket)

    def _connect(self, scope: trio.CancelScope) -> Line:
        line = self._exchange.connect(self.name)
        if scope.cancel_called:
            line.kill()
        else:
            self._lines.append(line)
        return line


def _deliver(tickets: list[AnyTicket]) -> None:
    for ticket in tickets:
        if not ticket.owner.closed:
            ticket.owner.finish([ticket])


async def _live(core: Core, scope: trio.CancelScope) -> None:
    with scope:
        await core.run()

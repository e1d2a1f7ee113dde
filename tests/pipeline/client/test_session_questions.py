"""Models, counters and the welcome: asked for once, answered for everybody who waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.entries import (
    Entry,
    ModelOpened,
    ModelRefused,
    OpenModel,
    StatisticsEntry,
    StatisticsRequest,
)
from tests.pipeline.client.bench import SIGNATURE, Bench, Caller

from shapestream.client.tickets import AnyTicket, ModelHandle, OpenTicket, StatisticsTicket, WelcomeTicket


def test_a_model_is_asked_for_once_however_many_wait_and_is_known_from_then_on() -> None:
    """Two callers share one question; a third needs none."""
    bench = Bench()
    first, second, third = (OpenTicket(bench.caller, name="m") for _ in range(3))
    bench.session.connected(bench.now)
    bench.turn()
    bench.welcome()
    bench.session.submit(first)
    bench.session.submit(second)
    assert bench.sent() == [OpenModel(name="m")]
    bench.receive(ModelOpened(name="m", number=7, signature=SIGNATURE))
    bench.session.submit(third)
    assert bench.sent() == []
    assert bench.finished == [first, second, third]
    assert first.outcome is second.outcome is third.outcome


def test_statistics_are_asked_for_once_and_shared() -> None:
    """Two callers at a time share one question, and a reconnect asks again."""
    bench = Bench()
    bench.open()
    first, second = StatisticsTicket(bench.caller), StatisticsTicket(bench.caller)
    bench.session.submit(first)
    bench.session.submit(second)
    assert bench.sent() == [StatisticsRequest()]
    bench.welcome(epoch=b"b")
    assert StatisticsRequest() in bench.sent()
    bench.receive(StatisticsEntry(values={"requests": 3}))
    bench.turn()
    assert first.outcome == second.outcome == {"requests": 3}


class Desk:
    """A session with a server that answers its questions when it is told to; no question is out twice."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.session.connected(self.bench.now)
        self.bench.turn()
        self.epoch = 0
        self.bench.welcome()
        self.out: list[Entry] = []
        self.asked: list[AnyTicket] = []

    def ask(self, ticket: OpenTicket | StatisticsTicket | WelcomeTicket) -> None:
        """Somebody asks; nobody asks the server what it was asked already."""
        self.asked.append(ticket)
        self.bench.session.submit(ticket)
        self.send()

    def send(self) -> None:
        """What goes to the server."""
        for entry in self.bench.sent():
            assert entry not in self.out
            self.out.append(entry)

    def reconnect(self) -> None:
        """Another server is here: what the old one was asked it will not answer any more."""
        self.out.clear()
        self.epoch += 1
        self.bench.welcome(epoch=bytes([self.epoch]))
        self.send()

    def answer(self, *, refuse: bool = False) -> None:
        """The server answers the oldest question, if there is one."""
        if not self.out:
            return
        question = self.out.pop(0)
        if isinstance(question, StatisticsRequest):
            self.bench.receive(StatisticsEntry(values={}))
        elif isinstance(question, OpenModel) and refuse:
            self.bench.receive(ModelRefused(name=question.name, code="invalid", message=""))
        elif isinstance(question, OpenModel):
            self.bench.receive(ModelOpened(name=question.name, number=1, signature={"name": question.name}))


STEPS = {
    "open m": lambda desk: desk.ask(OpenTicket(Caller(), name="m")),
    "open n": lambda desk: desk.ask(OpenTicket(Caller(), name="n")),
    "count": lambda desk: desk.ask(StatisticsTicket(Caller())),
    "connect": lambda desk: desk.ask(WelcomeTicket(Caller())),
    "answer": Desk.answer,
    "refuse": lambda desk: desk.answer(refuse=True),
    "reconnect": Desk.reconnect,
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=30))
def test_no_question_is_out_twice_and_everybody_is_answered(steps: list[str]) -> None:
    """Whoever asks, in whatever order, and however often the server is another one."""
    desk = Desk()
    for step in steps:
        STEPS[step](desk)
    while desk.out:
        desk.answer()
    desk.bench.turn()
    finished = desk.bench.finished
    assert len(finished) == len(desk.asked)
    assert set(map(id, finished)) == set(map(id, desk.asked))
    for ticket in desk.asked:
        if isinstance(ticket, OpenTicket) and isinstance(ticket.outcome, ModelHandle):
            assert ticket.name == ticket.outcome.name


def test_what_nobody_asked_is_not_listened_to() -> None:
    """Or a server could fill this client's memory with models, and void those that are open."""
    bench = Bench()
    model = bench.open()
    for number in range(3):
        bench.receive(ModelOpened(name=f"other {number}", number=number, signature=SIGNATURE))
    bench.receive(
        ModelOpened(name="m", number=8, signature={}), ModelRefused(name="m", code="invalid", message="")
    )
    assert (7, False) == (model.number, model.stale)
    assert ["m"] == list(bench.session.models)  # the bound is the point, hence the look inside

"""Models, counters and the welcome: asked for once, answered for everybody who waits."""

from __future__ import annotations

from tests.pipeline.client.bench import SIGNATURE, Bench

from shapestream.client.tickets import (
    OpenTicket,
    StatisticsTicket,
)
from shapestream.errors import (
    InvalidRequest,
)
from shapestream.wire.messages import (
    ModelOpened,
    ModelRefused,
    OpenModel,
    Statistics,
    StatisticsRequest,
)


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


def test_a_refused_model_fails_with_the_servers_code_and_may_be_asked_for_again() -> None:
    """`ModelRefused` becomes the error of its code; the next caller asks anew."""
    bench = Bench()
    bench.open()
    ticket = OpenTicket(bench.caller, name="other")
    bench.session.submit(ticket)
    bench.turn()
    bench.receive(ModelRefused(name="other", code="invalid", message="known models: m"))
    bench.turn()
    assert isinstance(ticket.outcome, InvalidRequest)
    assert "known models: m" in str(ticket.outcome)
    bench.session.submit(OpenTicket(bench.caller, name="other"))
    assert bench.sent() == [OpenModel(name="other")]


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
    bench.receive(Statistics(values={"requests": 3}))
    bench.turn()
    assert first.outcome == second.outcome == {"requests": 3}

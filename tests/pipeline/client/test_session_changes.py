"""A model that a reload changes: the server says so, and the session sends what comes then under the new number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.entries import ModelOpened, ModelRefused, RequestEntry, Unknown
from tests.pipeline.client.bench import SIGNATURE, Bench, sequences
from tests.pipeline.client.changing_server import CLOSED, FORMS, ChangingServer, Talk

from shapestream.client.opened_models import Model
from shapestream.client.tickets import OpenTicket
from shapestream.errors import InvalidRequest, Unavailable
from shapestream_engine.signature import ModelSignature

OTHER = {**SIGNATURE, "other": True}


def numbers(bench: Bench) -> dict[int, int]:
    """The numbers of the models by sequence, of the requests that are sent now."""
    return {entry.sequence: entry.model for entry in bench.sent() if isinstance(entry, RequestEntry)}


def models_at(server: ChangingServer) -> list[int]:
    """For each signature, how many of the requests at the server have its number."""
    at = [server.numbers[entry.model] for entry in server.running.values()]
    return [at.count(form) for form in FORMS]


def test_what_was_never_sent_is_encoded_anew_and_what_was_sent_keeps_its_number() -> None:
    """Two of five are at the server; the others wait for its window. One of an old handle comes afterwards."""
    talk = Talk(ChangingServer(window=2))
    old = talk.model
    for _ in range(5):
        talk.ask()
    talk.turn()
    talk.server.change(FORMS[1])
    talk.exchange()
    talk.ask(old)
    assert [2, 0, 0] == models_at(talk.server)
    for sequence in list(talk.server.running):
        talk.server.answer(sequence)
    talk.exchange()
    assert [0, 2, 0] == models_at(talk.server)
    talk.finish()
    assert all(talk.is_right(ticket) for ticket in talk.outcomes())


@pytest.mark.parametrize("now", FORMS[1:], ids=["order", "type"])
@pytest.mark.parametrize("how", ["connection", "server"])
def test_a_reconnect_while_a_model_changes_answers_all_256_in_flight(how: str, now: ModelSignature) -> None:
    """128 are at the server and 128 wait. It comes back with another signature, as the same process or as another one."""
    talk = Talk(ChangingServer(window=128))
    for _ in range(256):
        talk.ask()
    talk.turn()
    if how == "connection":
        talk.server.break_off()
        talk.server.change(now)
    else:
        talk.server.restart(now)
    talk.finish()
    ended = talk.outcomes()
    assert 256 == len(ended)
    assert [] == [ticket.outcome for ticket in ended if not talk.is_right(ticket)]


def test_what_does_not_fit_the_new_model_ends_with_its_words() -> None:
    """It has one more input, which no request of the old one has. What the server has begun is none of this."""
    talk = Talk(ChangingServer(window=1))
    talk.ask(), talk.ask()
    talk.turn()
    talk.server.answer(1)
    talk.server.change(CLOSED)
    talk.finish()
    first, second = talk.outcomes()
    assert talk.is_right(first)
    assert isinstance(second.outcome, InvalidRequest)
    assert "the model has changed since" in str(second.outcome)
    assert "'c'" in str(second.outcome)


def test_a_model_that_changes_there_and_back_gets_what_its_caller_gave() -> None:
    """Single precision, double, and single again: an array of doubles would be refused."""
    talk = Talk(ChangingServer(window=0))
    talk.ask()
    for form in (FORMS[2], FORMS[0]):
        talk.server.change(form)
        talk.exchange()
    talk.server.window = 8
    talk.server.break_off()
    talk.finish()
    assert [True] == [talk.is_right(ticket) for ticket in talk.outcomes()]


def test_small_arrays_may_change_once_they_were_submitted() -> None:
    """What is encoded anew is what was encoded, not the caller's array as it is by then."""
    talk = Talk(ChangingServer())
    model, array = talk.model, np.float32([5.0])
    encoded, _ = model.encode({"a": array, "b": array})
    array[:] = 9.0
    changed = Model("m", FORMS[2].to_dict(), 9)
    anew, nbytes = changed.encoded_anew(model, encoded)
    assert ([5.0], 16) == (np.frombuffer(anew.buffers[0], np.float64).tolist(), nbytes)


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("turn"), st.none()),
    st.tuples(st.just("hear"), st.none()),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("change"), st.integers(0, 2)),
    st.tuples(st.just("break"), st.none()),
    st.tuples(st.just("restart"), st.integers(0, 2)),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, max_size=40), window=st.integers(1, 4))
def test_a_number_stands_for_one_ordered_signature_over_reloads_and_reconnects(
    steps: list[Any], window: int
) -> None:
    """Two inputs of one type and shape, in another order: each request has one answer, right by the names of its ports.

    Doubles that a caller gave are no single precision, and are refused where that is wanted by then.
    """
    talk = Talk(ChangingServer(window=window))
    first = talk.model
    for step, value in steps:
        match step:
            case "ask":
                talk.ask(first if value else None)
            case "turn":
                talk.turn()
            case "hear":
                talk.exchange()
            case "answer" if talk.server.running:
                running = sorted(talk.server.running)
                talk.server.answer(running[value % len(running)])
            case "change":
                talk.server.change(FORMS[value])
            case "break":
                talk.server.break_off()
            case "restart":
                talk.server.restart(FORMS[value])
    talk.finish()
    for ticket in talk.outcomes():
        _, given = ticket.given or (None, ticket.tensors)
        doubles = given.layout[0][1] == "f64"
        assert talk.is_right(ticket) or (doubles and "takes f32, not float64" in str(ticket.outcome))


def test_a_model_that_is_refused_ends_the_requests_of_the_one_before_too() -> None:
    """One request has the number of the signature before; the server that comes back has no such model any more."""
    bench = Bench()
    model = bench.open()
    sent = bench.submit(model)
    bench.turn()
    bench.receive(ModelOpened(name="m", number=9, signature=OTHER))
    bench.receive(Unknown())
    bench.turn()
    bench.welcome()
    bench.turn()
    bench.receive(ModelRefused(name="m", code="unavailable", message="gone"))
    bench.turn()
    assert isinstance(sent.outcome, Unavailable)


def test_what_no_ticket_asked_for_is_not_listened_to() -> None:
    """A server could fill the memory with models."""
    bench = Bench()
    bench.open()
    bench.receive(ModelOpened(name="unknown", number=9, signature=OTHER))
    assert ["m"] == [*bench.session.models]


def test_a_connection_that_breaks_while_a_model_changes_loses_nothing_at_the_same_server() -> None:
    """256 requests in flight: the server is asked for the model again, and each goes out under its old numbers."""
    bench = Bench()
    model = bench.open(requests=512)
    for _ in range(256):
        bench.submit(model)
    assert dict.fromkeys(range(1, 257), 7) == numbers(bench)
    bench.receive(Unknown())
    bench.turn()
    bench.come_back(number=9, signature=OTHER, requests=512)
    changed = bench.session.models["m"]
    bench.submit(changed)
    assert {**dict.fromkeys(range(1, 257), 7), 257: 9} == numbers(bench)
    bench.receive(Unknown())  # once more, with the replaced model still in use
    bench.turn()
    bench.come_back(number=9, signature=OTHER, requests=512)
    assert [*range(1, 258)] == sequences(bench.sent())
    assert [] == [ticket for ticket in bench.finished if not isinstance(ticket, OpenTicket)]

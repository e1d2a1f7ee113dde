"""A model that a reload changes: the server says so, and the session sends what comes then under the new number."""

from __future__ import annotations

from tests.entries import ModelOpened, RequestEntry, Unknown
from tests.pipeline.client.bench import SIGNATURE, Bench, result, sequences

from shapestream.client.tickets import OpenTicket

OTHER = {**SIGNATURE, "other": True}


def numbers(bench: Bench) -> dict[int, int]:
    """The numbers of the models by sequence, of the requests that are sent now."""
    return {entry.sequence: entry.model for entry in bench.sent() if isinstance(entry, RequestEntry)}


def test_requests_on_their_way_keep_the_old_number_and_later_ones_have_the_new_one() -> None:
    """Sent or not: they were checked against the old signature, whose number the server knows."""
    bench = Bench()
    model = bench.open(requests=1)
    bench.submit(model), bench.submit(model)
    assert {1: 7} == numbers(bench)
    bench.receive(ModelOpened(name="m", number=9, signature=OTHER))
    changed = bench.session.models["m"]
    assert (changed is not model, changed.number, model.number) == (True, 9, 7)
    bench.submit(changed)
    bench.receive(result(1))
    assert {2: 7} == numbers(bench)
    bench.receive(result(2))
    assert {3: 9} == numbers(bench)
    bench.receive(result(3))
    bench.turn()
    assert [True, True, True] == [
        type(ticket.outcome).__name__ == "ResultEntry" for ticket in bench.finished[-3:]
    ]


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


def test_another_server_knows_neither_number() -> None:
    """What was checked against another signature than its own fails; the last one is asked for again."""
    bench = Bench()
    model = bench.open()
    bench.submit(model)
    bench.sent()
    bench.receive(ModelOpened(name="m", number=9, signature=OTHER))
    bench.submit(bench.session.models["m"])
    bench.sent()
    bench.receive(Unknown())
    bench.turn()
    bench.come_back(epoch=b"b", number=3, signature=OTHER)
    assert {2: 3} == numbers(bench)
    assert model.stale
    (failed,) = [ticket for ticket in bench.finished if not isinstance(ticket, OpenTicket)]
    assert "another signature" in str(failed.outcome)

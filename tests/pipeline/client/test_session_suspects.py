"""What a session suspects when a server vanishes, which losses it counts, and when it gives a request up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.entries import Entry, Goodbye, Heartbeat, ModelOpened, RequestEntry, RunsAlone, Unknown
from tests.pipeline.client.bench import SETTINGS, SIGNATURE, Bench, numbered, refusal, result, sequences

from shapestream.client.session import Session
from shapestream.client.tickets import SETTLED_S, RequestTicket
from shapestream.errors import Poisoned, WorkerLost
from shapestream.quarantine import KEEP_S


def suspects(entries: list[Entry]) -> dict[int, str | None]:
    """Return the requests among what was sent, each with its tag."""
    return {
        entry.sequence: (entry.tags or {}).get("suspect")
        for entry in entries
        if isinstance(entry, RequestEntry)
    }


def vanish(bench: Bench, epoch: bytes) -> None:
    """Let another process take the server's place, without a word."""
    bench.receive(Unknown())
    bench.turn()
    bench.come_back(epoch=epoch)


def ask(bench: Bench, count: int) -> list[RequestTicket]:
    """Connect, and send so many requests."""
    model = bench.open()
    tickets = [bench.submit(model, tensors=numbered(number)) for number in range(count)]
    bench.turn()
    return tickets


def run_alone(bench: Bench, sequence: int) -> list[Entry]:
    """Let the server say that this request is about to run alone. Return the answer."""
    bench.receive(RunsAlone(sequence=sequence))
    return bench.sent()


def test_what_a_server_had_that_vanished_is_sent_again_as_a_suspect() -> None:
    """What was answered, or is asked later, is none."""
    bench = Bench()
    ask(bench, 3)
    bench.receive(result(1))
    vanish(bench, b"b")
    bench.submit(bench.session.models["m"])
    assert {2: "0", 3: "0", 4: None} == suspects(bench.sent())


def test_what_a_server_had_that_has_only_forgotten_its_client_is_no_suspect() -> None:
    """The process is the same, so it did not end."""
    bench = Bench()
    ask(bench, 1)
    vanish(bench, b"a")
    assert {1: None} == suspects(bench.sent())


@pytest.mark.parametrize("word", [Goodbye(), refusal(2, "draining")], ids=["goodbye", "draining"])
def test_what_a_server_had_that_left_with_a_word_is_no_suspect(word: Entry) -> None:
    """It ended because it was asked to."""
    bench = Bench()
    ask(bench, 2)
    bench.receive(word, Goodbye())
    assert bench.wait_until_due().reconnect
    bench.session.connected(bench.now)
    bench.turn()
    bench.come_back(epoch=b"b")
    assert {1: None, 2: None} == suspects(bench.sent())


def test_a_goodbye_that_a_server_did_not_mean_excuses_no_later_end() -> None:
    """It cut a connection off, and was there again: when it vanishes, what it has is suspected."""
    bench = Bench()
    ask(bench, 1)
    bench.receive(Goodbye())
    assert bench.wait_until_due().reconnect
    bench.session.connected(bench.now)
    bench.turn()
    bench.come_back()
    assert {1: None} == suspects(bench.sent())
    vanish(bench, b"b")
    assert {1: "0"} == suspects(bench.sent())


def test_that_a_request_runs_alone_is_repeated_at_once() -> None:
    """The server begins after that."""
    bench = Bench()
    ask(bench, 2)
    assert [RunsAlone(sequence=1)] == run_alone(bench, 1)
    bench.receive(RunsAlone(sequence=None))
    assert [] == bench.sent()


def test_only_a_loss_while_it_ran_alone_is_counted() -> None:
    """Neither one among others, nor one after the server has said that it runs no more, nor one of another request."""
    bench = Bench()
    ask(bench, 2)
    for round_ in range(5):
        vanish(bench, bytes([round_]))
        assert {1: "0", 2: "0"} == suspects(bench.sent())
        run_alone(bench, 1)
        bench.receive(RunsAlone(sequence=None))
    run_alone(bench, 2)
    vanish(bench, b"z")
    assert {1: "0"} == suspects(bench.sent())
    bench.now += SETTLED_S
    assert {2: "1"} == suspects(bench.sent())


def test_a_request_is_poisoned_after_two_losses_alone() -> None:
    """It is not sent to a third server, and the others are."""
    bench = Bench()
    guilty, other = ask(bench, 2)
    for epoch in (b"b", b"c"):
        bench.now += SETTLED_S
        bench.turn()
        run_alone(bench, 1)
        vanish(bench, epoch)
    assert {2: "0"} == suspects(bench.sent())
    assert isinstance(guilty.outcome, Poisoned)
    assert other.outcome is None


def test_what_equals_a_poison_is_not_sent_for_a_while() -> None:
    """It is poisoned at once; another request of the same model is sent, and so is an equal one later."""
    bench = Bench()
    ask(bench, 1)
    for epoch in (b"b", b"c"):
        bench.now += SETTLED_S
        bench.turn()
        run_alone(bench, 1)
        vanish(bench, epoch)
    model = bench.session.models["m"]
    alike, _ = [bench.submit(model, tensors=numbered(number)) for number in range(2)]
    assert [3] == sequences(bench.sent())
    assert isinstance(alike.outcome, Poisoned)
    bench.now += KEEP_S
    bench.receive(Heartbeat())
    bench.submit(model, tensors=numbered(0))
    assert [4] == sequences(bench.sent())


def test_a_suspect_that_is_answered_is_cleared() -> None:
    """A later request has no part in the losses of an earlier one."""
    bench = Bench()
    (ticket,) = ask(bench, 1)
    run_alone(bench, 1)
    vanish(bench, b"b")
    bench.now += SETTLED_S
    bench.turn()
    run_alone(bench, 1)
    bench.receive(result(1))
    bench.submit(bench.session.models["m"])
    bench.turn()
    assert result(1) == ticket.outcome
    vanish(bench, b"c")
    assert {2: "0"} == suspects(bench.sent())


def test_a_request_of_which_a_loss_was_counted_waits_until_its_server_has_settled() -> None:
    """A server that ends again before that does not get it, so its end is no loss."""
    bench = Bench()
    ask(bench, 2)
    run_alone(bench, 1)
    for round_ in range(4):
        vanish(bench, bytes([round_]))
        assert [2] == sequences(bench.sent())
        bench.now += SETTLED_S / 2
        assert [] == sequences(bench.sent())
    bench.now += SETTLED_S / 2
    assert bench.session.next_wakeup() <= bench.now
    assert {1: "1"} == suspects(bench.sent())


def test_a_server_has_settled_although_its_connection_breaks() -> None:
    """On a way that breaks every few seconds the request would wait for ever."""
    bench = Bench()
    ask(bench, 1)
    run_alone(bench, 1)
    vanish(bench, b"b")
    for _ in range(2):
        assert [] == sequences(bench.sent())
        bench.now += SETTLED_S / 2
        bench.receive(Unknown())  # the same server, to which this client is a new one
        bench.turn()
        bench.come_back(epoch=b"b")
    assert {1: "1"} == suspects(bench.sent())


def test_what_must_not_run_twice_is_lost_with_its_server() -> None:
    """It is not sent again, as a suspect or otherwise."""
    bench = Bench()
    ticket = bench.submit(bench.open(signature={**SIGNATURE, "idempotent": False}))
    bench.turn()
    vanish(bench, b"b")
    assert [] == sequences(bench.sent())
    assert isinstance(ticket.outcome, WorkerLost)


class Fleet(Bench):
    """A bench with three addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(
            client=bytes(16),
            software="test",
            server="test://",
            settings=replace(SETTINGS, others=2),
            now=self.now,
        )

    def move(self, place: int, epoch: bytes) -> None:
        """Connect to the server at this place, which knows nothing of this client."""
        self.session.connected(self.now, place)
        self.turn()
        self.welcome(epoch=epoch)
        self.turn()
        self.receive(ModelOpened(name="m", number=7, signature=SIGNATURE))

    def lose(self) -> None:
        """Let the connection break, because the server has ended."""
        self.session.broke(self.now)
        assert self.turn().reconnect

    def lose_two(self) -> tuple[RequestTicket, RequestTicket]:
        """Lose two servers with two requests, the second while the first ran alone, and come to the third."""
        guilty, other = ask(self, 2)
        self.lose()
        self.move(1, b"b")
        self.turn()
        run_alone(self, 1)
        self.lose()
        self.move(2, b"c")
        return guilty, other

    def look_for_others(self) -> None:
        """Wait until this server has answered all, and is left for another one."""
        self.receive(result(2))
        while not (due := self.wait_until_due()).reconnect:
            assert [] == sequences(due.entries)
            self.receive(Heartbeat())


def test_the_last_server_is_spared() -> None:
    """Others are looked for, while nothing new is sent; if the same server answers again, the request is poisoned."""
    bench = Fleet()
    guilty, other = bench.lose_two()
    assert [2] == sequences(bench.sent())
    bench.look_for_others()
    late = bench.submit(bench.session.models["m"], tensors=numbered(9))
    bench.move(2, b"c")
    assert [3] == sequences(bench.sent())
    bench.receive(result(3))
    bench.turn()
    assert isinstance(guilty.outcome, Poisoned)
    assert (result(2), result(3)) == (other.outcome, late.outcome)


def test_a_server_that_has_come_back_gets_what_the_last_one_was_spared() -> None:
    """It may have been killed for another reason: an innocent request is answered."""
    bench = Fleet()
    innocent, _ = bench.lose_two()
    bench.turn()
    bench.look_for_others()
    bench.move(0, b"d")
    assert [] == sequences(bench.sent())
    bench.now += SETTLED_S
    assert {1: "1"} == suspects(bench.sent())
    bench.receive(result(1))
    bench.turn()
    assert result(1) == innocent.outcome


def test_a_spared_server_is_not_left_for_a_request_that_has_ended() -> None:
    """Its caller has withdrawn it."""
    bench = Fleet()
    guilty, other = bench.lose_two()
    bench.turn()
    bench.session.cancel(guilty)
    bench.receive(result(2))
    for _ in range(100):
        assert not bench.wait_until_due().reconnect
        bench.receive(Heartbeat())
    assert result(2) == other.outcome

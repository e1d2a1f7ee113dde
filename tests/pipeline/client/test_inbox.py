"""What faces hand to the core: taken in order, or refused after the end, whichever thread notices."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing
from tests.pipeline.client.bench import Caller

from shapestream.client.core import Attend, Inbox, Posted, Withdraw, WithdrawAll
from shapestream.client.tickets import AnyTicket, EndTicket, OpenTicket
from shapestream.errors import Cancelled

OWNER = Caller()


def ticket() -> OpenTicket:
    """A question."""
    return OpenTicket(OWNER, name="m")


def test_everything_is_taken_in_order_also_what_comes_meanwhile() -> None:
    """A turn takes what there is at its end, not at its beginning."""
    refused: list[AnyTicket] = []
    inbox = Inbox(refused.extend, lambda: None)
    first, second = ticket(), ticket()
    inbox.post(first)
    taken: list[Posted] = []
    for item in inbox.take():
        taken.append(item)
        if item is first:
            inbox.post(second)
    assert [first, second] == taken
    assert [] == list(inbox.take())
    assert [] == refused


@pytest.mark.parametrize("when", ["before the end", "after the end"])
def test_what_is_left_at_the_end_is_refused(when: str) -> None:
    """Questions are cancelled, streams are told, and who waits no more is not."""
    refused: list[AnyTicket] = []
    inbox = Inbox(refused.extend, lambda: None)
    question, answered, end = ticket(), ticket(), EndTicket(OWNER, place=3, outcome=True)
    answered.outcome = True
    if when == "after the end":
        inbox.close()
    for item in (question, Withdraw(question), answered, Attend(OWNER), WithdrawAll(OWNER), end):
        inbox.post(item)
    inbox.close()
    assert isinstance(question.outcome, Cancelled)
    assert (True, True) == (answered.outcome, end.outcome)
    told = refused[2]
    assert isinstance(told, EndTicket)
    assert isinstance(told.outcome, Cancelled)
    assert (told.owner, told.place) == (OWNER, -1)
    assert [question, answered, told, end] == refused


def test_while_it_closes_each_thing_is_taken_or_refused_once() -> None:
    """Four threads post for as long as it takes; nothing is lost between the last turn and the end."""
    refused: list[AnyTicket] = []
    inbox = Inbox(refused.extend, lambda: None)
    posted = [[ticket() for _ in range(500)] for _ in range(4)]
    start = threading.Barrier(5)

    def poster(tickets: list[OpenTicket]) -> None:
        start.wait()
        for one in tickets:
            inbox.post(one)

    threads = [threading.Thread(target=poster, args=(tickets,)) for tickets in posted]
    for thread in threads:
        thread.start()
    start.wait()
    taken: list[Posted] = []
    while len(taken) < 300:
        taken += inbox.take()
    inbox.close()
    for thread in threads:
        thread.join()
    fates = sorted(id(item) for item in [*taken, *refused])
    assert sorted(id(one) for tickets in posted for one in tickets) == fates


async def test_a_post_from_another_thread_wakes_the_core_and_a_second_one_does_not_again() -> None:
    """What comes before the turn begins is taken by that turn; a withdrawal always wakes."""
    turns: list[int] = []
    inbox = Inbox(lambda tickets: None, lambda: turns.append(len(inbox)))
    inbox.open()
    await trio.to_thread.run_sync(inbox.post, ticket())
    await trio.testing.wait_all_tasks_blocked()
    assert [1] == turns
    await trio.to_thread.run_sync(inbox.post, ticket())
    await trio.testing.wait_all_tasks_blocked()
    assert [1] == turns
    await trio.to_thread.run_sync(inbox.post, Withdraw(ticket()))
    await trio.testing.wait_all_tasks_blocked()
    assert [1, 3] == turns
    assert 3 == len(list(inbox.take()))

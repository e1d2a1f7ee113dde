"""What faces hand to the core: taken in order, or refused after the end, whichever thread notices."""

from __future__ import annotations

import threading

import trio
import trio.testing
from tests.pipeline.client.bench import Caller

from shapestream.client.core import Inbox, Posted, Withdraw
from shapestream.client.tickets import AnyTicket, OpenTicket

OWNER = Caller()


def ticket() -> OpenTicket:
    """A question."""
    return OpenTicket(OWNER, name="m")


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

"""Turns of the event loop, shared by callers: whose request is begun next where many come at once."""

from __future__ import annotations

import itertools

import pytest
import trio
from tests.pipeline.gateway.http_site import GET, Peer, Site, served
from tests.pipeline.serving.clocks import virtual_time
from trio.testing import wait_all_tasks_blocked

from shapestream.web.messages import HttpError, HttpRequest
from shapestream.web.turns import MOST, TURN_S, LoopTurns

MANY = 5 * MOST


def long_turns() -> LoopTurns:
    """On a clock by which each turn is long already when a request comes."""
    return LoopTurns(itertools.count(0.0, TURN_S).__next__)


async def waiting(turns: LoopTurns, nursery: trio.Nursery, *callers: str) -> list[str]:
    """Have a request of each wait, in this order. The list gets those that are begun."""
    begun: list[str] = []

    async def ask(caller: str) -> None:
        await turns.wait(caller)
        begun.append(caller)

    for caller in callers:
        nursery.start_soon(ask, caller)
        await wait_all_tasks_blocked()
    return begun


@virtual_time
async def test_a_caller_with_few_requests_waits_for_one_turn() -> None:
    """Although it comes after hundreds of another caller; nobody's requests are forgotten."""
    turns = long_turns()
    async with trio.open_nursery() as nursery:
        begun = await waiting(turns, nursery, *["one"] * MANY, "two", "three", "two")
        nursery.start_soon(turns.run)
        await wait_all_tasks_blocked()
        assert MANY + 3 == len(begun)
        first = begun[:MOST]
        assert {"one": MOST - 3, "two": 2, "three": 1} == {name: first.count(name) for name in set(first)}
        nursery.cancel_scope.cancel()


@virtual_time
async def test_who_gives_up_makes_others_wait_no_longer() -> None:
    """The last one of a caller, too."""
    turns = long_turns()
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as gone:
            await waiting(turns, gone, "one", "two", "two")
            gone.cancel_scope.cancel()
        begun = await waiting(turns, nursery, "two")
        nursery.start_soon(turns.run)
        await wait_all_tasks_blocked()
        assert ["two"] == begun
        nursery.cancel_scope.cancel()


@virtual_time
async def test_nobody_waits_in_a_short_turn() -> None:
    """Until it has become long; the next turn is short again."""
    now = 0.0
    turns = LoopTurns(lambda: now)
    assert not turns.is_full()
    now = TURN_S
    assert turns.is_full()
    turns.after_io_wait(0.0)
    assert not turns.is_full()
    async with trio.open_nursery() as nursery:
        await waiting(turns, nursery, "one")
        assert turns.is_full(), "who came before has not begun"
        nursery.start_soon(turns.run)
        await wait_all_tasks_blocked()
        assert not turns.is_full()
        nursery.cancel_scope.cancel()


def refused(request: HttpRequest) -> str:
    """The caller, who is unknown where the path says so."""
    if request.path == "/unknown":
        raise HttpError(401, "who are you?")
    return request.path


UNKNOWN = GET.replace(b"/ ", b"/unknown ")


@served(caller_of=refused, turns=long_turns())
async def test_each_request_is_answered_in_the_end(site: Site) -> None:
    """Also a refused one, of somebody unknown. Peers that leave while they wait cost nobody else anything."""
    peers = [await site.connect() for _ in range(MANY)]
    for number, peer in enumerate(peers):
        await peer.send(UNKNOWN if number % 3 else GET)
    for peer in peers[::5]:
        await peer.stream.aclose()

    async def check(number: int, peer: Peer) -> None:
        answer = await peer.answer()
        assert (401 if number % 3 else 200) == answer.status

    async with trio.open_nursery() as nursery:
        for number, peer in enumerate(peers):
            if number % 5:
                nursery.start_soon(check, number, peer)


@pytest.mark.parametrize("data", [GET, GET + GET], ids=["one", "two at once"])
@served(turns=long_turns())
async def test_a_stop_answers_what_waits(site: Site, data: bytes) -> None:
    """As it answers whatever has begun to arrive."""
    peer = await site.connect()
    await peer.send(data)
    site.server.stop(30.0)
    assert 200 == (await peer.answer()).status

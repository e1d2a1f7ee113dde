"""What callers may hold of a whole: the rule, and requests in flight by it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.gateway.gateway_site import Reply, asked, double, x_request
from trio.testing import MockClock, wait_all_tasks_blocked

import shapestream
from shapestream.gateway.routes import Routes
from shapestream.testing import MemoryEndpoint, ScriptedModel, ScriptedServer, identity_signature
from shapestream.web.quotas import BeyondQuota, Quotas, held_at_most
from shapestream.web.tokens import Tokens


def taken(quotas: Quotas, caller: str) -> int:
    """How often a caller can take one, until it is refused."""
    for number in range(1000):
        try:
            quotas.take(caller)
        except BeyondQuota:
            return number
    raise AssertionError("nothing is refused")


@pytest.mark.parametrize(("callers", "parts"), [(1, [60]), (2, [60, 30]), (3, [60, 30, 15])])
def test_each_caller_gets_half_of_what_those_before_it_leave(callers: int, parts: list[int]) -> None:
    """Where each takes as much as it can, one after the other."""
    quotas = Quotas(lambda: 120, "things")
    assert parts == [taken(quotas, str(number)) for number in range(callers)]


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param(64 << 30, 512 << 20, id="a large machine"),
        pytest.param(900_000_000, 112_500_000, id="a container"),
        pytest.param(256 << 20, 64 << 20, id="no room for one"),
    ],
)
def test_bodies_are_bounded_by_the_memory_too(memory: int, expected: int) -> None:
    """Eight of 64 MiB, an eighth of the memory, or one."""
    assert expected == held_at_most(8, 64 << 20, memory)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.booleans()), max_size=60))
def test_a_caller_without_any_finds_room(steps: list[tuple[int, int, bool]]) -> None:
    """Whatever five others take and give back, in pieces of any size that is not their first."""
    quotas = Quotas(lambda: 200, "things")
    held = {str(number): 0 for number in range(5)}
    for caller, amount, gives_back in steps:
        name = str(caller)
        if gives_back and held[name]:
            quotas.give_back(name, held[name])
            held[name] = 0
            continue
        amount = amount if held[name] else 1
        try:
            quotas.take(name, amount)
        except BeyondQuota:
            assert held[name] + amount > 200 - sum(held.values()) - amount
        else:
            held[name] += amount
        assert sum(held.values()) == quotas.held <= 200
    quotas.take("one more")
    assert taken(quotas, "one more") >= (200 - sum(held.values())) // 2 - 1


def test_a_first_piece_is_taken_where_it_is_free_and_at_any_size_where_nothing_is_held() -> None:
    """So the last place is used, and an answer that is larger than the whole is sent; nothing else beside it."""
    quotas = Quotas(lambda: 1, "calls")
    quotas.take("one")
    with pytest.raises(BeyondQuota, match="1 calls, more than the rest of the 1"):
        quotas.take("two")
    quotas.give_back("one")
    quotas.take("two", 5)
    with pytest.raises(BeyondQuota):
        quotas.take("one")
    assert 5 == quotas.held


def test_a_thread_waits_for_its_turn_or_gives_up() -> None:
    """It goes on as soon as the caller has given one back."""
    quotas = Quotas(lambda: 2, "things")
    quotas.take("one")
    assert not quotas.take_in_turn("one", 1, iter([False, True]).__next__, look_s=0)
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(quotas.take_in_turn("one", 1, lambda: False, look_s=100))
    )
    thread.start()
    quotas.give_back("one")
    thread.join()
    assert ([True], 1) == (found, quotas.held)


def test_requests_of_two_callers_leave_room_at_the_server_for_a_third() -> None:
    """Of a window of 12 requests they have six and three; others are refused with a time to try again."""
    replies: dict[str, list[Reply]] = {"a": [], "b": [], "c": []}

    async def main() -> None:
        slow = ScriptedModel(identity_signature("slow", "batch:1..64, n"), double, duration_s=30)
        idle = ScriptedModel(identity_signature("idle", "batch:1..64, n"), double)
        server, endpoint = ScriptedServer(slow, idle, window_requests=12), MemoryEndpoint()
        body = json.dumps(x_request()).encode()
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, endpoint.bind())
            async with shapestream.connect(endpoint.connect) as client:
                routes = Routes(client, tokens=Tokens("a 1\nb 2\nc 3\n"))

                async def ask(caller: str, token: str, model: str) -> None:
                    headers = {"authorization": f"Bearer {token}"}
                    path = f"/v2/models/{model}/infer"
                    replies[caller].append(await asked(routes, "POST", path, body, headers))

                async with trio.open_nursery() as asking:
                    for caller, token in (("a", "1"), ("b", "2")):
                        for _ in range(20):
                            asking.start_soon(ask, caller, token, "slow")
                        await wait_all_tasks_blocked()
                    await ask("c", "3", "idle")
                    assert [429] * 31 == [reply.status for reply in (*replies["a"], *replies["b"])]
                    assert {"1"} == {reply.headers["Retry-After"] for reply in replies["a"]}
                await ask("a", "1", "idle")
            nursery.cancel_scope.cancel()
        assert [] == server.errors

    trio.run(main, clock=MockClock(autojump_threshold=0))
    statuses: dict[str, Any] = {caller: [reply.status for reply in got] for caller, got in replies.items()}
    assert {"a": [429] * 14 + [200] * 7, "b": [429] * 17 + [200] * 3, "c": [200]} == statuses

"""What networks do to connections, each as a function that does it once to everything that passes a proxy."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from tests.e2e.chaos.client import Load
from tests.e2e.network.proxy import DOWN, UP, Proxy

SILENCE_S = 1.0
"""After which the processes of these tests take each other for gone."""
BETWEEN = 24
"""Requests that end between two faults: twice as many as are under way."""

Fault: TypeAlias = Callable[[Proxy, random.Random], Awaitable[None]]


async def close(proxy: Proxy, chance: random.Random) -> None:
    """An orderly end, in the middle of whatever message passes."""
    for passage in list(proxy.passages):
        passage.break_after(chance.choice((UP, DOWN)), chance.randint(1, 250_000), "close")
    await trio.sleep(0.1)


async def reset(proxy: Proxy, chance: random.Random) -> None:
    """The same with a reset."""
    for passage in list(proxy.passages):
        passage.break_after(chance.choice((UP, DOWN)), chance.randint(1, 250_000), "reset")
    await trio.sleep(0.1)


async def reset_while_greeting(proxy: Proxy, chance: random.Random) -> None:
    """Connections end before they are of any use: in ZeroMQ's own greeting, or in ours."""
    for passage in list(proxy.passages):
        passage.reset()
    await newcomer(proxy, 2.0)
    for passage in list(proxy.passages):
        passage.break_after(chance.choice((UP, DOWN)), chance.randint(1, 300), "reset")
    await trio.sleep(0.2)


async def half_open(proxy: Proxy, chance: random.Random) -> None:
    """Bytes vanish in one direction or in both; no end of the connection is ever seen."""
    directions = chance.choice(((UP,), (DOWN,), (UP, DOWN)))
    for passage in list(proxy.passages):
        passage.swallow(*directions)
    # Nobody is told, so only silence shows it. A new connection is sound.
    await newcomer(proxy, 6.0)
    await trio.sleep(0.3)


async def short_stall(proxy: Proxy, chance: random.Random) -> None:
    """Everything is late, and nothing is lost."""
    proxy.stall(*chance.choice(((UP,), (DOWN,), (UP, DOWN))))
    await trio.sleep(SILENCE_S * 0.4)
    proxy.resume()
    await trio.sleep(0.1)


async def long_stall(proxy: Proxy, chance: random.Random) -> None:
    """The client gives the connection up, and what it held reaches the server after the client's new one."""
    proxy.stall(*chance.choice(((UP,), (DOWN,), (UP, DOWN))))
    await trio.sleep(SILENCE_S * 2.2)
    proxy.resume()
    await trio.sleep(0.5)


async def unreachable(proxy: Proxy, chance: random.Random) -> None:
    """For a while nobody can connect."""
    proxy.refuse(True)
    for passage in list(proxy.passages):
        passage.reset()
    await trio.sleep(0.7)
    proxy.refuse(False)
    await trio.sleep(0.5)


async def newcomer(proxy: Proxy, patience_s: float) -> None:
    """Until somebody connects anew, or does not in reasonable time."""
    seen = proxy.accepted
    with trio.move_on_after(patience_s):
        while proxy.accepted == seen or not proxy.passages:  # noqa: ASYNC110 - nothing is told when it happens
            await trio.sleep(0.002)


FAULTS: list[tuple[Fault, int]] = [
    (close, 12),
    (reset, 12),
    (reset_while_greeting, 8),
    (half_open, 4),
    (short_stall, 6),
    (long_stall, 2),
    (unreachable, 2),
]
"""Each with how often a test injects it."""


async def misbehave(proxies: list[Proxy], fault: Fault, times: int, load: Load) -> None:
    """Injects the fault so many times while requests are under way, at the proxies in turn.

    Each comes when the last one is behind the load: some requests that were sent since have their answers.
    """
    chance = random.Random(fault.__name__)
    await trio.sleep(0.2)
    for number in range(times):
        while not load.under_way:  # noqa: ASYNC110 - nothing announces it
            await trio.sleep(0.001)
        await fault(proxies[number % len(proxies)], chance)
        await load.more_ends(BETWEEN)

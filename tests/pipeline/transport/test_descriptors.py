"""Few descriptors left: the ipc path is hidden before libzmq would end the process, and comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from shapestream.transport import guards
from shapestream.transport.guards import (
    ARRIVALS_PER_S,
    MAX_LOOK_S,
    RESERVE,
    Doorkeeper,
    free_descriptors,
    until_reserve_s,
)
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import DealerSocket


@pytest.mark.parametrize(
    ("free", "limit", "closed"), [(255, 1024, True), (256, 1024, False), (15, 64, True), (16, 64, False)]
)
def test_the_door_closes_while_few_descriptors_are_left(free: int, limit: int, closed: bool) -> None:
    """Fewer than 256, or than a quarter of a small limit."""
    keeper = Doorkeeper(lambda: None, lambda: None)
    keeper.look(free, limit)
    assert closed == keeper.closed


def test_the_door_does_not_flap() -> None:
    """It opens when half as many more are free, and is moved once for each change."""
    moves: list[str] = []
    keeper = Doorkeeper(lambda: moves.append("close"), lambda: moves.append("open"))
    for free in (RESERVE, RESERVE - 1, 0, RESERVE, 3 * RESERVE // 2, RESERVE, 0):
        keeper.look(free, 1024)
    assert ["close", "open", "close"] == moves


def test_the_door_is_looked_after_before_a_flood_can_reach_the_reserve() -> None:
    """Often near the limit, five times a second far from it."""
    assert 0.0 == until_reserve_s(RESERVE, 1024) == until_reserve_s(0, 1024)
    assert 500 / ARRIVALS_PER_S == until_reserve_s(RESERVE + 500, 1024)
    assert MAX_LOOK_S == until_reserve_s(1_000_000, 1 << 20)


@pytest.mark.parametrize("beyond", [0, 1, 10, 100, 1000])
def test_a_flood_between_two_looks_leaves_descriptors(beyond: int) -> None:
    """Also where a look takes long: libzmq would end the process, and the listener's queue still gets in afterwards."""
    keeper = Doorkeeper(lambda: None, lambda: None)
    flood_per_s, queue = 18_000, 100
    arrivals = flood_per_s * keeper.pause_s(RESERVE + beyond, 10_000, took_s=0.003)
    assert arrivals + queue < RESERVE + beyond


def test_descriptors_are_counted() -> None:
    """An open file is one fewer."""
    before = free_descriptors()
    with open("/dev/null"):
        during = free_descriptors()
    assert before is not None
    assert (before[0] - 1, before[1]) == during


def test_a_hidden_path_keeps_its_connections_and_takes_new_ones_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is there goes on; who comes finds no file, tries again by itself, and gets in once it is back."""
    address = f"ipc://{tmp_path}/s"
    free = [1024]
    monkeypatch.setattr(guards, "free_descriptors", lambda: (free[0], 1024))

    async def hide() -> None:
        free[0] = RESERVE - 1
        while (tmp_path / "s").exists():
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with RouterSocket() as router, DealerSocket() as early, DealerSocket() as late:
            async with trio.open_nursery() as nursery:
                router.bind(address)
                await nursery.start(router.run)
                early.connect(address)
                early.send_nowait([b"before"])
                with trio.fail_after(120):
                    await router.receive()
                    await hide()
                    late.connect(address)
                    late.send_nowait([b"late"])
                    early.send_nowait([b"hidden"])
                    ((_, frames),) = await router.receive()
                    assert [b"hidden"] == frames
                    free[0] = 1024
                    ((_, frames),) = await router.receive()
                    assert [b"late"] == frames
                    await hide()
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert ["s.lock"] == [path.name for path in tmp_path.iterdir()]


def test_the_limit_is_raised_to_what_the_system_allows() -> None:
    """In a process of its own, as limits are the process's."""
    code = (
        "import resource\n"
        "from shapestream.transport.guards import raise_descriptor_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "raise_descriptor_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode

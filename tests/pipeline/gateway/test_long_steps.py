"""The turns of long steps in one event loop, on a clock that only steps and waits move."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shapestream.slices import LONG_BYTES, LONGEST_REST_S, LongSteps, Slices


def on_virtual_clock(test: Callable[[MockClock], Awaitable[None]]) -> None:
    """Run a test that moves the clock; waits take no time."""
    clock = MockClock(autojump_threshold=0)
    trio.run(test, clock, clock=clock)


def test_after_a_long_step_the_next_one_waits_as_long() -> None:
    """Three steps of 30 ms end after 30, 90 and 150 ms: in the order of their asking, with half of the time left free."""
    ended: list[tuple[str, float]] = []

    async def main(clock: MockClock) -> None:
        steps, began = LongSteps(), trio.current_time()

        async def ask(name: str) -> None:
            result = await steps.run(LONG_BYTES, lambda: clock.jump(0.03) or name)  # type: ignore[func-returns-value]
            ended.append((result, round(trio.current_time() - began, 6)))

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(ask, name)
                await wait_all_tasks_blocked()

    on_virtual_clock(main)
    assert [("a", 0.03), ("b", 0.09), ("c", 0.15)] == ended


def test_a_short_step_never_waits() -> None:
    """It is done at once between long ones, and makes none of them wait."""

    async def main(clock: MockClock) -> None:
        steps, began = LongSteps(), trio.current_time()
        await steps.run(LONG_BYTES, lambda: clock.jump(0.03))
        await steps.run(LONG_BYTES - 1, lambda: clock.jump(0.01))
        assert 0.04 == pytest.approx(trio.current_time() - began)
        await steps.run(LONG_BYTES, lambda: None)
        assert 0.06 == pytest.approx(trio.current_time() - began)

    on_virtual_clock(main)


def test_a_step_that_fails_has_taken_its_time() -> None:
    """Malformed JSON takes the event loop as well, and the next step is not lost with it."""

    async def main(clock: MockClock) -> None:
        steps, began = LongSteps(), trio.current_time()

        def fail() -> None:
            clock.jump(0.03)
            raise ValueError("malformed")

        with pytest.raises(ValueError, match="malformed"):
            await steps.run(LONG_BYTES, fail)
        assert 0.03 == pytest.approx(trio.current_time() - began)
        assert 7 == await steps.run(LONG_BYTES, lambda: 7)
        assert 0.06 == pytest.approx(trio.current_time() - began)

    on_virtual_clock(main)


def test_a_machine_that_stood_still_costs_a_bounded_rest() -> None:
    """A step of a minute is an interruption, not a minute of work."""

    async def main(clock: MockClock) -> None:
        steps, began = LongSteps(), trio.current_time()
        await steps.run(LONG_BYTES, lambda: clock.jump(60))
        await steps.run(LONG_BYTES, lambda: None)
        assert 60 + LONGEST_REST_S == pytest.approx(trio.current_time() - began)

    on_virtual_clock(main)


def test_a_caller_that_leaves_gives_its_turn_to_the_next() -> None:
    """A request that is cancelled while it waits does no step."""

    async def main(clock: MockClock) -> None:
        steps, done = LongSteps(), []

        async def ask(name: str, scope: trio.CancelScope) -> None:
            with scope:
                await steps.run(LONG_BYTES, lambda: done.append(name))

        await steps.run(LONG_BYTES, lambda: clock.jump(0.03))
        async with trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in "abc"]
            for name, scope in zip("abc", scopes, strict=True):
                nursery.start_soon(ask, name, scope)
            scopes[1].cancel()
        assert {"a", "c"} == set(done)

    on_virtual_clock(main)


def test_work_in_slices_takes_a_turn_for_each() -> None:
    """Three slices of 2 ms end after 10 ms, and another step has its turn between them; short work is done at once."""
    done: list[str] = []

    async def main(clock: MockClock) -> None:
        steps, began = LongSteps(), trio.current_time()

        def work(name: str) -> Slices[str]:
            for _ in range(2):
                clock.jump(0.002)
                done.append(name)
                yield
            clock.jump(0.002)
            return name

        assert "long" == await steps.run_slices(LONG_BYTES, work("long"))
        assert 0.01 == pytest.approx(trio.current_time() - began)
        async with trio.open_nursery() as nursery:
            for name in "ab":
                nursery.start_soon(steps.run_slices, LONG_BYTES, work(name))
        assert {"a", "b"} == set(done[2:4])
        began = trio.current_time()
        assert "short" == await steps.run_slices(LONG_BYTES - 1, work("short"))
        assert 0.006 == pytest.approx(trio.current_time() - began)

    on_virtual_clock(main)
    assert ["long"] * 2 == done[:2]

"""What a server learned about costs is written down now and then, and at its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from shapestream.serving.server import KEEP_EVERY_S, CostKeeper
from shapestream_engine.calibration import CostCache
from shapestream_engine.cost_table import LearnedCosts

LEARNED = LearnedCosts(table="t" * 40, batches=1, saved_at=0.0)


class Watched(CostCache):
    """A folder that remembers what was written, and may be held up as a slow disk is."""

    __setattr__ = object.__setattr__  # the folder itself is frozen, what a test watches is not

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: list[LearnedCosts] = []
        self.answers: trio.Event | None = None

    def keep_learned(self, learned: LearnedCosts) -> None:
        """As ever, once the disk answers."""
        if self.answers is not None:
            trio.from_thread.run(self.answers.wait)
        super().keep_learned(learned)
        self.written.append(learned)


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> None:
    """Runs it on a clock that jumps to what is waited for, past threads that run, too."""
    trio.run(test, clock=MockClock(autojump_threshold=0))


def test_it_is_written_now_and_then_where_something_changed(tmp_path):
    """Once a minute, not where no batch came since; what another server reads is what was learned."""
    cache = Watched(tmp_path / "costs")
    asked: list[float] = []
    batches = iter([0, 1, 1, 2])

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            def learned(saved_at: float) -> list[LearnedCosts]:
                asked.append(trio.current_time())
                count = next(batches, None)
                if count is None:
                    nursery.cancel_scope.cancel()
                return [replace(LEARNED, batches=count, saved_at=saved_at)] if count else []

            began = trio.current_time()
            nursery.start_soon(CostKeeper(cache).run, learned)
        assert [began + KEEP_EVERY_S * turn for turn in range(1, 6)] == pytest.approx(asked)

    in_virtual_time(main)
    assert [1, 2] == [one.batches for one in cache.written]
    assert {LEARNED.table: cache.written[-1]} == CostKeeper(CostCache(cache.folder)).read()


def test_what_came_since_is_written_at_the_end(tmp_path):
    """The end does not wait for the minute, and `run` returns."""
    cache = Watched(tmp_path / "costs")

    async def main() -> None:
        keeper = CostKeeper(cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run, lambda saved_at: [LEARNED])
            await keeper.aclose()
            assert [LEARNED] == cache.written

    trio.run(main, clock=MockClock())  # it stands still: no time passes while the thread writes


@pytest.mark.parametrize("begun_s", [0.0, KEEP_EVERY_S + 1.0])
def test_a_disk_that_does_not_answer_holds_no_server_up(tmp_path, begun_s):
    """Neither where the last write hangs nor where one before it does: a while, and a line in the log."""
    cache = Watched(tmp_path / "costs")

    async def main() -> None:
        answers = cache.answers = trio.Event()
        keeper = CostKeeper(cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run, lambda saved_at: [LEARNED])
            await trio.sleep(begun_s)
            await keeper.aclose()
            assert [] == cache.written
            answers.set()

    with capture_logs() as log:
        in_virtual_time(main)
    assert ["learned costs not kept"] == [line["event"] for line in log if line["log_level"] == "warning"]
    assert [LEARNED] == cache.written


def test_what_came_while_it_was_written_is_written_too(tmp_path):
    """A server that ends in the middle of a write has learned more since that began."""
    cache = Watched(tmp_path / "costs")
    clock = MockClock()
    batches = [1, 2]

    async def main() -> None:
        answers = cache.answers = trio.Event()
        keeper = CostKeeper(cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run, lambda saved_at: [replace(LEARNED, batches=batches.pop(0))])
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(KEEP_EVERY_S)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(keeper.aclose)
            await trio.testing.wait_all_tasks_blocked()
            answers.set()

    trio.run(main, clock=clock)
    assert [1, 2] == [one.batches for one in cache.written]

"""The feed of the page: readings only for viewers, and one per second for all."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shapestream.serving.event_stream import INTERVAL_S, MOST_VIEWERS, Feed


class Source:
    """What the feed reads: it counts how often."""

    def __init__(self) -> None:
        self.readings: list[int] = []
        self.batches = 0
        self.error: Exception | None = None

    async def read(self, known: int) -> dict[str, Any]:
        """The batches after the first `known` are numbers here."""
        self.readings.append(known)
        if self.error is not None:
            raise self.error
        return {
            "at": trio.current_time(),
            "batches": list(range(known, self.batches)),
            "batches_in_all": self.batches,
        }


class Browser:
    """A viewer, as the HTTP server speaks for it: it asks for the next event once the last one has left."""

    def __init__(self, feed: Feed) -> None:
        self.events: list[dict[str, Any]] = []
        self.deaf = trio.Event()
        self.deaf.set()
        self.scope = trio.CancelScope()
        self._stream = feed.events()

    async def run(self) -> None:
        """Look, until it has left."""
        with self.scope:
            async with aclosing(self._stream) as events:
                async for event in events:
                    await self.deaf.wait()
                    text = bytes(event).decode()
                    assert text.startswith("data: ")
                    assert text.endswith("\n\n")
                    self.events.append(json.loads(text[6:]))


def played(play: Callable[[Feed, Source, trio.Nursery], Awaitable[None]]) -> None:
    """Run a feed on virtual time."""

    async def main() -> None:
        source = Source()
        feed = Feed(source.read)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run)
            await play(feed, source, nursery)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_nothing_is_read_while_nobody_looks() -> None:
    """Neither before the first viewer nor after the last; one that comes again is told all that is kept."""

    async def play(feed: Feed, source: Source, nursery: trio.Nursery) -> None:
        source.batches = 3
        await trio.sleep(100)
        assert [] == source.readings
        for _ in range(2):
            source.readings.clear()
            browser = Browser(feed)
            nursery.start_soon(browser.run)
            await trio.sleep(2.5 * INTERVAL_S)
            assert [0, 3, 3] == source.readings
            assert [[0, 1, 2], [], []] == [event["batches"] for event in browser.events]
            browser.scope.cancel()
            await trio.sleep(100)
            assert 3 <= len(source.readings) <= 4

    played(play)


def test_viewers_share_the_readings() -> None:
    """A later one begins with the last reading, and all batches so far; there is room for so many."""

    async def play(feed: Feed, source: Source, nursery: trio.Nursery) -> None:
        source.batches = 2
        browsers = [Browser(feed) for _ in range(MOST_VIEWERS)]
        nursery.start_soon(browsers[0].run)
        await trio.sleep(1.5 * INTERVAL_S)
        source.batches = 5
        for browser in browsers[1:]:
            assert not feed.full
            nursery.start_soon(browser.run)
            await wait_all_tasks_blocked()
        assert feed.full
        await trio.sleep(INTERVAL_S)
        assert [0, 2, 2] == source.readings
        assert [[0, 1], [], [2, 3, 4]] == [event["batches"] for event in browsers[0].events]
        for browser in browsers[1:]:
            assert [[0, 1], [2, 3, 4]] == [event["batches"] for event in browser.events]
            assert browsers[0].events[-1]["state"] == browser.events[-1]["state"]

    played(play)


def test_viewers_that_come_at_once_wait_for_the_first_reading() -> None:
    """None of them is shown an empty page, or what was read for those before them."""

    async def play(feed: Feed, source: Source, nursery: trio.Nursery) -> None:
        for seen in (1, 2):
            source.batches = seen
            browsers = [Browser(feed) for _ in range(3)]
            for browser in browsers:
                nursery.start_soon(browser.run)
            await trio.sleep(0.5 * INTERVAL_S)
            now = trio.current_time() - 0.5 * INTERVAL_S
            for browser in browsers:
                assert [(list(range(seen)), now)] == [
                    (event["batches"], event["state"]["at"]) for event in browser.events
                ]
                browser.scope.cancel()
            await trio.sleep(100)

    played(play)


def test_a_viewer_that_falls_behind_misses_readings_and_no_batch() -> None:
    """The others are told on meanwhile."""

    async def play(feed: Feed, source: Source, nursery: trio.Nursery) -> None:
        slow, quick = Browser(feed), Browser(feed)
        nursery.start_soon(slow.run)
        nursery.start_soon(quick.run)
        await trio.sleep(0.5 * INTERVAL_S)
        slow.deaf = trio.Event()
        for _ in range(4):
            source.batches += 1
            await trio.sleep(INTERVAL_S)
        slow.deaf.set()
        await trio.sleep(INTERVAL_S)
        assert [[], [0], [1, 2, 3]] == [event["batches"] for event in slow.events][:3]
        slow.deaf = trio.Event()
        told = len(quick.events)
        await trio.sleep(3 * INTERVAL_S)
        assert told + 3 == len(quick.events)

    played(play)


def test_a_reading_that_fails_is_told_and_the_next_one_is_tried() -> None:
    """A main loop that stands still, and a defect of what is read."""

    async def play(feed: Feed, source: Source, nursery: trio.Nursery) -> None:
        browser = Browser(feed)
        source.error = trio.TooSlowError()
        nursery.start_soon(browser.run)
        await trio.sleep(0.5 * INTERVAL_S)
        source.error = ValueError("a defect")
        await trio.sleep(INTERVAL_S)
        source.error = None
        await trio.sleep(INTERVAL_S)
        still, broken, well = [event["state"] for event in browser.events]
        assert ("event loop" in still["stalled"], 0.0) == (True, still["for_s"])
        assert ("log" in broken["stalled"], INTERVAL_S) == (True, broken["for_s"])
        assert "at" in well

    played(play)


def test_a_viewer_that_comes_late_is_told_for_how_long_nothing_was_read() -> None:
    """Counted from the last reading; without viewers nothing was read, so time without them does not count."""

    async def play(feed: Feed, source: Source, nursery: trio.Nursery) -> None:
        first, late, after = Browser(feed), Browser(feed), Browser(feed)
        nursery.start_soon(first.run)
        await trio.sleep(0.5 * INTERVAL_S)
        source.error = trio.TooSlowError()
        await trio.sleep(7.0 * INTERVAL_S)
        nursery.start_soon(late.run)
        await trio.sleep(INTERVAL_S)
        assert [7.0 * INTERVAL_S, 8.0 * INTERVAL_S] == [event["state"]["for_s"] for event in late.events]
        first.scope.cancel()
        late.scope.cancel()
        await trio.sleep(100.0)
        nursery.start_soon(after.run)
        await trio.sleep(0.5 * INTERVAL_S)
        assert [0.0] == [event["state"]["for_s"] for event in after.events]

    played(play)

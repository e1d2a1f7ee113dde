"""Streams, through each of the three faces, from plain and from async sources."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from shapestream import Failed
from shapestream.errors import Cancelled, DeadlineExceeded, InvalidRequest, ModelError


def rows(value: float) -> dict[str, Any]:
    """Inputs for the model `double`."""
    return {"x": np.full((1, 3), value, np.float32)}


def value_of(result: Any) -> float:
    """What `double` made of `rows(...)`, halved."""
    return float(result["y"][0, 0]) / 2


async def as_async(items: Any) -> AsyncIterator[Any]:
    """The items, from an async generator."""
    for item in items:
        yield item


async def collect(stream: Any) -> list[Any]:
    """Everything that a stream gives."""
    return [item async for item in stream]


async def collect_into(seen: list[Any], stream: Any) -> None:
    """The same, as far as it goes."""
    async for item in stream:
        seen.append(item)


class Counted:
    """Gives `rows(0)`, `rows(1)`, …, and counts how many were pulled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pulled = 0

    def __iter__(self) -> Iterator[Any]:
        for value in range(self.number):
            self.pulled += 1
            yield rows(value)


@pytest.mark.parametrize("max_in_flight", [1, 3, 64])
async def test_every_item_comes_back_in_order(sourced: Any, max_in_flight: int) -> None:
    """Each result belongs to its item, in the producer's order; keys are positions where none are given."""
    async with sourced.connect() as client:
        async with client.stream(
            "double", sourced.as_source(Counted(200)), max_in_flight=max_in_flight
        ) as results:
            items = await collect(results)
        assert list(range(200)) == [item.key for item in items]
        assert list(range(200)) == [value_of(item) for item in items]


async def test_items_may_bring_their_own_keys(sourced: Any) -> None:
    """`(key, inputs)` comes back under its key, whatever object that is."""
    key = object()

    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source([("a", rows(1)), (key, rows(2))])) as results:
            assert ["a", key] == [item.key for item in await collect(results)]


async def test_an_empty_source_gives_nothing(sourced: Any) -> None:
    """No items, no results, no waiting."""
    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source([])) as results:
            assert [] == await collect(results)
            assert [] == await collect(results)


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_slow_head_holds_up_only_an_ordered_stream(face: Any, ordered: bool) -> None:
    """Answered last to first, an ordered stream still gives first to last; an unordered one as they come."""
    face.server.hold()
    async with face.connect() as client:
        async with client.stream("double", Counted(4), ordered=ordered) as results:
            await face.until(lambda server: len(server.held) == 4)
            for _ in range(4):
                face.server.release(1, newest_first=True)
            keys = [item.key for item in await collect(results)]
    assert ([0, 1, 2, 3] if ordered else [3, 2, 1, 0]) == keys


async def test_the_producer_is_pulled_at_most_max_in_flight_ahead(sourced: Any) -> None:
    """With the server holding everything the producer stops at the limit; each result taken lets one more in."""
    source = Counted(100)

    sourced.server.hold()
    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source(source), max_in_flight=4) as results:
            await sourced.until(lambda server: len(server.held) == 4)
            assert 4 == source.pulled
            for taken in range(1, 20):
                sourced.server.release(1)
                await anext(results)
                await sourced.until(lambda server, sent=taken + 4: len(server.requests) == sent)
                assert taken + 4 == source.pulled


async def test_results_that_nobody_takes_hold_the_producer_back(sourced: Any) -> None:
    """Finished items count too until they are taken, so that nothing piles up before a slow consumer."""
    source = Counted(1000)

    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source(source), max_in_flight=8) as results:
            await sourced.until(lambda server: len(server.requests) == 8)
            taken = 0
            async for _ in results:
                taken += 1
                assert source.pulled <= taken + 8
            assert 1000 == taken


async def test_a_failed_item_raises_in_its_place(sourced: Any) -> None:
    """Results before it are given first; after it the stream is over, and the client goes on."""
    items = [rows(1), rows(2), rows(-1), rows(3)]
    async with sourced.connect() as client:
        seen: list[Any] = []
        async with client.stream("double", sourced.as_source(items)) as results:
            with pytest.raises(ModelError, match="overwhelm"):
                await collect_into(seen, results)
            assert [] == await collect(results)
        assert [1, 2] == [value_of(item) for item in seen]
        await client.infer("double", rows(1))


async def test_failed_items_can_be_yielded_in_their_places(sourced: Any) -> None:
    """With `on_error="yield"` neither the server's refusals nor the client's end the stream."""
    items = [("a", rows(1)), ("b", rows(-1)), ("c", {"z": 1}), ("d", "nonsense"), ("e", rows(2))]
    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source(items), on_error="yield") as results:
            seen = await collect(results)
    assert ["a", "b", "c", "d", "e"] == [item.key for item in seen]
    assert [True, False, False, False, True] == [item.ok for item in seen]
    failed = [item for item in seen if isinstance(item, Failed)]
    assert [ModelError, InvalidRequest, InvalidRequest] == [type(item.error) for item in failed]


@pytest.mark.parametrize("on_error", ["raise", "yield"])
async def test_what_the_producer_raises_surfaces_after_the_results_before_it(
    sourced: Any, on_error: str
) -> None:
    """The items that it gave are answered; then its own exception is raised in the block."""
    error = LookupError("out of pictures")

    def source() -> Iterator[Any]:
        yield rows(1)
        yield rows(2)
        raise error

    async with sourced.connect() as client:
        seen: list[Any] = []
        async with client.stream("double", sourced.as_source(source()), on_error=on_error) as results:
            with pytest.raises(LookupError, match="out of pictures") as caught:
                await collect_into(seen, results)
        assert error is caught.value
        assert [1, 2] == [value_of(item) for item in seen]


async def test_leaving_early_withdraws_what_is_unfinished(sourced: Any) -> None:
    """The server hears a cancel for everything that it still has; the client goes on."""
    sourced.server.hold()
    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source(Counted(1000)), max_in_flight=5) as results:
            await sourced.until(lambda server: len(server.held) == 5)
            sourced.server.release(1)
            await anext(results)
            await sourced.until(lambda server: len(server.held) == 5)
        await sourced.until(lambda server: len(server.cancelled) == 5)
        sourced.server.release()
        await client.infer("double", rows(1))
    assert [2, 3, 4, 5, 6] == sorted(sourced.server.cancelled)


async def test_a_generator_that_is_left_early_is_closed(sourced: Any) -> None:
    """Its clean-up runs, in the thread or task that pulled it."""
    closed = threading.Event()

    def source() -> Iterator[Any]:
        try:
            while True:
                yield rows(1)
        finally:
            closed.set()

    async with sourced.connect() as client:
        async with client.stream("double", sourced.as_source(source()), max_in_flight=2) as results:
            await anext(results)
        assert await sourced.in_thread(closed.wait, 10)


async def test_a_server_that_restarts_in_the_middle_is_not_noticed(face: Any) -> None:
    """What the old one had is sent to the new one; no result is lost, doubled or out of order."""
    face.server.hold()
    async with face.connect() as client:
        async with client.stream("double", Counted(100), max_in_flight=10) as results:
            await face.until(lambda server: len(server.held) == 10)
            face.server.release(3)
            face.server.restart()
            await face.until(lambda server: len(server.held) >= 7)
            face.server.release()
            assert list(range(100)) == [value_of(item) for item in await collect(results)]


@pytest.mark.parametrize("under_way", [2, 0])
async def test_a_stream_that_outlives_its_client_is_cut_off(face: Any, under_way: int) -> None:
    """Iterating on after the client was closed raises `Cancelled`, also where the source gives nothing more."""
    face.server.hold()
    end = threading.Event()

    def source() -> Iterator[Any]:
        yield from Counted(under_way)
        end.wait()

    connecting = face.connect()
    client = await connecting.__aenter__()
    async with client.stream("double", source()) as results:
        await face.until(lambda server: len(server.held) == under_way)
        await connecting.__aexit__(None, None, None)
        with pytest.raises(Cancelled, match="closed"):
            await collect(results)
    end.set()


async def test_wrong_arguments_are_refused_where_they_are_given(face: Any) -> None:
    """Not when the first item comes, but when `stream` is called."""
    async with face.connect() as client:
        with pytest.raises(TypeError, match="iterable"):
            client.stream("double", 7 if face.has_async_sources else as_async([]))
        with pytest.raises(ValueError, match="max_in_flight"):
            client.stream("double", [], max_in_flight=0)
        with pytest.raises(TypeError, match="max_in_flight"):
            client.stream("double", [], max_in_flight=True)
        with pytest.raises(ValueError, match="on_error"):
            client.stream("double", [], on_error="ignore")
        with pytest.raises(RuntimeError, match=r"with client\.stream"):
            await anext(client.stream("double", []))


async def test_each_item_has_a_deadline_of_its_own_from_when_it_was_pulled(sourced: Any) -> None:
    """Whoever pulls it, a thread or a task: the item fails in its place, and the stream goes on."""
    async with sourced.connect() as client:
        await client.signature("double")
        sourced.server.hold()
        options: dict[str, Any] = {"on_error": "yield", "max_in_flight": 2}
        async with client.stream(
            "double", sourced.as_source(Counted(4)), deadline=0.02, **options
        ) as results:
            late = await collect(results)
        sourced.server.release()
        async with client.stream(
            "double", sourced.as_source(Counted(4)), deadline=600.0, **options
        ) as results:
            in_time = await collect(results)
        assert [0, 1, 2, 3] == [item.key for item in late] == [item.key for item in in_time]
        assert all(isinstance(item.error, DeadlineExceeded) for item in late)
        assert all(item.ok for item in in_time)

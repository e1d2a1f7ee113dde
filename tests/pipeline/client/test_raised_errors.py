"""What an error keeps alive after its caller has handled it: nothing, also before the garbage collector runs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import trio
from tests.pipeline.client.virtual_time import serving

import shapestream
from shapestream.errors import DeadlineExceeded, InvalidRequest
from shapestream.testing import ScriptedModel, identity_signature

WIDE = ScriptedModel(identity_signature("wide", "batch:1..64, n"))


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """The garbage collector does not run, so only what no reference is left to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def noted(kept: list[weakref.ref[Any]]) -> dict[str, Any]:
    """Inputs of 4 MiB, which the client does not copy, and a note of their array."""
    x = np.zeros((1, 1 << 20), np.float32)
    kept.append(weakref.ref(x))
    return {"x": x}


def test_an_error_that_was_raised_keeps_no_tensors() -> None:
    """The frames of a failed call hold its inputs; they go when the error has been handled."""

    async def main() -> None:
        async with serving(WIDE) as (_, endpoint), shapestream.connect(endpoint.connect) as client:
            await client.signature("wide")
            with without_collector():
                kept: list[weakref.ref[Any]] = []
                with contextlib.suppress(DeadlineExceeded):
                    await client.infer("wide", noted(kept), deadline=0)
                    raise AssertionError("the deadline was over before")
                await trio.lowlevel.checkpoint()
                assert [True] == [note() is None for note in kept]

    trio.run(main)


class Broke(Exception):
    """A producer's own error."""


Notes = list[weakref.ref[Any]]


def late(kept: Notes) -> Iterator[Any]:
    """One good item, whose deadline is over."""
    yield noted(kept)


def misnamed(kept: Notes) -> Iterator[Any]:
    """One item that the model does not take."""
    yield {"z": noted(kept)["x"]}


def broken(kept: Notes) -> Iterator[Any]:
    """Its own error, while it holds tensors."""
    held = noted(kept)
    raise Broke(len(held))
    yield


async def broken_task(kept: Notes) -> AsyncIterator[Any]:
    """The same in a task."""
    held = noted(kept)
    raise Broke(len(held))
    yield


@pytest.mark.parametrize(
    ("source", "deadline", "error"),
    [
        (late, 0, DeadlineExceeded),
        (misnamed, None, InvalidRequest),
        (broken, None, Broke),
        (broken_task, None, Broke),
    ],
)
def test_an_error_of_a_stream_keeps_no_tensors(
    source: Callable[[Notes], Any], deadline: float | None, error: type[Exception]
) -> None:
    """Of the item that failed, of the one that the model does not take, and of a producer that broke off."""

    async def main() -> None:
        async with serving(WIDE) as (_, endpoint), shapestream.connect(endpoint.connect) as client:
            await client.signature("wide")
            with without_collector():
                kept: Notes = []
                with contextlib.suppress(error):
                    async with client.stream("wide", source(kept), deadline=deadline) as results:
                        async for _ in results:
                            pass
                    raise AssertionError("it failed before")
                del results
                await freed(kept)

    trio.run(main)


def test_a_failed_item_keeps_no_tensors() -> None:
    """A caller may collect the failures of a long stream."""

    async def main() -> None:
        async with serving(WIDE) as (_, endpoint), shapestream.connect(endpoint.connect) as client:
            with without_collector():
                kept: Notes = []
                items = misnamed(kept)
                async with client.stream("wide", items, on_error="yield") as results:
                    failures = [item async for item in results]
                assert [False] == [item.ok for item in failures]
                del results, items
                await freed(kept)

    trio.run(main)


async def freed(kept: Notes) -> None:
    """Waits for a producer's thread to leave, and for the core to forget a ticket."""
    with trio.fail_after(100):
        while [note for note in kept if note() is not None]:
            await trio.lowlevel.checkpoint()
    assert 1 == len(kept)

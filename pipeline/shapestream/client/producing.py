"""The producer's side of a stream: pulls the caller's iterable, never further ahead than the stream permits.

Permits go to the producer in handfuls, and items to the core one by one, without waiting for company. The
core takes whatever has gathered by its next turn: tiny items share a turn, and the item of a slow producer
leaves at once.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol

from shapestream.client.inbox import Posted
from shapestream.client.tickets import EndTicket, Owner, RequestTicket

__all__ = ["AsyncPermits", "ItemMaker", "Permits", "ThreadPermits", "pull_async", "start_pulling"]


class ItemMaker(Owner, Protocol):
    """A stream, as its producer sees it."""

    def make(self, item: Any, place: int) -> RequestTicket:
        """The ticket for one item of the caller's iterable."""


class Permits(Protocol):
    """How many more items the producer may pull. Granted by the consumer, in its thread."""

    def grant(self, number: int) -> None:
        """So many more."""

    def stop(self) -> None:
        """None any more."""


class AsyncPermits(Permits, Protocol):
    """Permits that a coroutine waits for, under whichever event loop."""

    available: int

    async def wait(self) -> None:
        """Returns when `available` is above 0."""


class ThreadPermits:
    """Permits that a thread waits for."""

    def __init__(self) -> None:
        # Unbounded, but it holds only what the stream has granted, which is at most max_in_flight in all.
        self._granted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def grant(self, number: int) -> None:
        """So many more."""
        self._granted.put(number)

    def stop(self) -> None:
        """None any more: the producer ends where it next asks."""
        self._granted.put(0)

    def take(self) -> int:
        """Wait for permits; 0 is the end."""
        return self._granted.get()


def start_pulling(
    source: Iterable[Any], stream: ItemMaker, permits: ThreadPermits, post: Callable[[Posted], None]
) -> None:
    """Pull `source` in a thread of its own, in the caller's context.

    The thread cannot be interrupted: when the stream is left, it ends after the `next()` that it is in. It is
    a daemon, so a producer that waits for ever keeps no process alive.
    """
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run,
        args=(_pull, source, stream, permits, post),
        name="shapestream-producer",
        daemon=True,
    ).start()


def _pull(
    source: Iterable[Any], stream: ItemMaker, permits: ThreadPermits, post: Callable[[Posted], None]
) -> None:
    place = 0
    # What is told when the thread is ended otherwise, such as by SystemExit: the consumer must not wait on.
    error: Exception | None = RuntimeError("the stream's producer was ended from outside")
    iterator: Iterator[Any] | None = None
    try:
        iterator = iter(source)
        while allowed := permits.take():
            before = place
            for item in islice(iterator, allowed):
                if stream.closed:
                    break
                post(stream.make(item, place))
                place += 1
            if place - before < allowed:
                break
        error = None
    except Exception as raised:  # noqa: BLE001 - the edge to the caller's code; raised in its block
        error = raised
    except BaseException as raised:
        # It ends this thread and must not end the consumer's: that learns of it as the cause of its own error.
        if error is not None:
            error.__cause__ = raised
        raise
    finally:
        post(EndTicket(stream, place=place, outcome=error))
        if stream.closed and isinstance(iterator, GeneratorType):
            iterator.close()


async def pull_async(
    source: AsyncIterable[Any], stream: ItemMaker, permits: AsyncPermits, post: Callable[[Posted], None]
) -> None:
    """Pull `source` in this task until it ends, or the task is cancelled."""
    place = 0
    error: Exception | None = RuntimeError("the stream's producer was cancelled from outside")
    iterator: AsyncIterator[Any] | None = None
    try:
        iterator = aiter(source)
        while not stream.closed:
            if permits.available < 1:
                await permits.wait()
            permits.available -= 1
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                break
            post(stream.make(item, place))
            place += 1
        error = None
    except Exception as raised:  # noqa: BLE001 - the edge to the caller's code; raised in its block
        error = raised
    finally:
        post(EndTicket(stream, place=place, outcome=error))
        if isinstance(iterator, AsyncGeneratorType):
            await iterator.aclose()

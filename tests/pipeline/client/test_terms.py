"""Deadlines and priorities: what callers may give, and from when on a deadline counts."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.client.virtual_time import ROW, serving
from trio.testing import MockClock

import shapestream
from shapestream.client.session import LinkSettings
from shapestream.client.tickets import checked_deadline, checked_priority, deadline_at
from shapestream.errors import DeadlineExceeded
from shapestream.wire.limits import MAX_PRIORITY

NOW = 100.0


@given(st.floats(-1e6, 1e6))
def test_a_deadline_is_so_many_seconds_from_now(seconds: float) -> None:
    """Also where it has passed already: the session says so, with the reason."""
    assert NOW + seconds == deadline_at(lambda: NOW, seconds)


@pytest.mark.parametrize("never", [None, math.inf, 1e9, 10**300])
def test_who_gives_more_time_than_there_is_sets_no_deadline(never: float | None) -> None:
    """Infinity says it; numbers that the wire cannot carry mean it."""
    assert checked_deadline(never) is None


@pytest.mark.parametrize(
    ("seconds", "error"),
    [(math.nan, ValueError), ("1", TypeError), ([], TypeError), (1j, TypeError), (10**400, TypeError)],
)
def test_what_is_no_deadline_is_refused(seconds: Any, error: type[Exception]) -> None:
    """The message says what one is, and what was given."""
    with pytest.raises(error, match=r"a deadline is a number of seconds from now.*not "):
        checked_deadline(seconds)


def test_numpys_numbers_are_deadlines_too() -> None:
    """They come out as plain ones."""
    assert 0.5 == checked_deadline(np.float32(0.5))  # type: ignore[arg-type]  # as good as a float
    assert type(checked_deadline(np.float64(0.5))) is float


def test_a_priority_is_what_the_server_can_read() -> None:
    """The bound is the codec's, at both ends."""
    assert MAX_PRIORITY == checked_priority(MAX_PRIORITY)
    assert -MAX_PRIORITY == checked_priority(-MAX_PRIORITY)


@pytest.mark.parametrize(
    ("priority", "error"),
    [(1 << 31, ValueError), (-(1 << 70), ValueError), (1.0, TypeError), ("high", TypeError)],
)
def test_what_is_no_priority_is_refused(priority: Any, error: type[Exception]) -> None:
    """What the server cannot read would have no answer; what cannot be written would end the client."""
    with pytest.raises(error, match="a priority is an integer"):
        checked_priority(priority)


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0])
@pytest.mark.parametrize("name", ["silence_s", "unavailable_after_s"])
def test_patience_is_above_zero(name: str, seconds: float) -> None:
    """With none the client would do nothing but look for another server."""
    with pytest.raises(ValueError, match="a number of seconds above 0"):
        LinkSettings(**{name: seconds})


async def test_a_call_with_impossible_arguments_fails_alone(face: Any) -> None:
    """In each face, single or as a stream: the server could not answer, and some could not be encoded."""
    terms: tuple[dict[str, Any], ...] = (
        {"deadline": math.nan},
        {"deadline": "soon"},
        {"priority": 1 << 70},
        {"priority": 1.5},
    )
    async with face.connect() as client:
        for options in terms:
            with pytest.raises((TypeError, ValueError), match=r"a (deadline|priority) is"):
                await client.infer("identity", ROW, **options)
            with pytest.raises((TypeError, ValueError), match=r"a (deadline|priority) is"):
                client.stream("identity", [ROW], **options)
        for name in ("x" * 513, "\ud800", b"identity", 7):
            with pytest.raises((TypeError, ValueError), match="a model's name"):
                await client.infer(name, ROW)
            with pytest.raises((TypeError, ValueError), match="a model's name"):
                async with client.stream(name, [ROW]) as results:
                    [result async for result in results]
        assert (await client.infer("identity", ROW, deadline=math.inf)).ok


class SlowInputs(dict[str, Any]):
    """Inputs that take five seconds to be read: somebody stops the process there."""

    def __init__(self, clock: MockClock) -> None:
        super().__init__(ROW)
        self._clock = clock

    def get(self, name: str, default: Any = None) -> Any:
        """One of them, after a while."""
        self._clock.jump(5)
        return super().get(name, default)


async def test_a_call_that_stands_still_before_it_is_sent_has_no_more_time_for_that() -> None:
    """The deadline counts from the call: the server never hears of a request that is late before it leaves."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        with pytest.raises(DeadlineExceeded, match="never sent"):
            await client.infer("identity", SlowInputs(clock), deadline=3)
        assert [] == server.requests


@pytest.mark.parametrize("where", ["while it is encoded", "behind it"])
async def test_an_item_that_stands_still_before_it_is_sent_has_no_more_time_for_that(where: str) -> None:
    """It counts from when the item was pulled, not from when the core next looks at its clock."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)

    async def stops() -> AsyncIterator[Any]:
        yield SlowInputs(clock) if where == "while it is encoded" else ROW
        if where == "behind it":
            clock.jump(5)  # with no checkpoint since the item was handed over

    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        async with client.stream("identity", stops(), deadline=3) as results:
            with pytest.raises(DeadlineExceeded, match="never sent"):
                await anext(results)
        assert [] == server.requests

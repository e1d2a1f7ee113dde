"""The quarantine of requests that killed workers: bounded, expiring, exact, and by content alone."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.held import held
from tests.pipeline.serving.echo_model import echo_tensors

from shapestream.quarantine import FIRST_BYTES, Quarantine
from shapestream_engine.layout import Tensors

NOTHING = len(held(Quarantine(max_requests=1024, keep_s=600.0)))
"""Objects that a quarantine holds which has no requests."""


def _blob(data: bytes) -> Tensors:
    return Tensors(layout=((0, "u8", (len(data),)),), buffers=(data,))


def test_what_is_kept_is_held_and_nothing_else() -> None:
    """The same bytes of another model, in another layout, or with one bit changed are another request."""
    quarantine = Quarantine(max_requests=1024, keep_s=600.0)
    assert not quarantine
    poison = echo_tensors(2, 4, 3.0)
    quarantine.keep("m", poison, 0.0)
    assert quarantine.holds("m", echo_tensors(2, 4, 3.0), 1.0)
    others = [
        ("n", poison),
        ("m", echo_tensors(1, 8, 3.0)),
        ("m", echo_tensors(2, 4, 3.5)),
        ("m", Tensors(layout=poison.layout, buffers=tuple(reversed(poison.buffers)))),
    ]
    assert [False] * 4 == [quarantine.holds(model, tensors, 1.0) for model, tensors in others]


@pytest.mark.parametrize(
    ("data", "other"),
    [(bytes(FIRST_BYTES) + b"a", bytes(FIRST_BYTES) + b"b"), (b"", b"x")],
    ids=["a difference behind the bytes that are compared first", "no bytes"],
)
def test_all_bytes_count(data: bytes, other: bytes) -> None:
    """The first bytes only spare digests; a request without elements has a digest like any other."""
    quarantine = Quarantine(max_requests=1024, keep_s=600.0)
    quarantine.keep("m", _blob(data), 0.0)
    assert [True, False] == [quarantine.holds("m", _blob(blob), 0.0) for blob in (data, other)]


def test_time_ends_it() -> None:
    """After `keep_s` it may come again; when it kills again its time begins anew."""
    quarantine = Quarantine(max_requests=1024, keep_s=10.0)
    for number in range(3):
        quarantine.keep("m", _blob(b"%d" % number), float(number))
    quarantine.keep("m", _blob(b"0"), 5.0)
    assert [True, False, True] == [quarantine.holds("m", _blob(b"%d" % number), 11.0) for number in range(3)]
    assert not quarantine.holds("m", _blob(b"0"), 15.0)
    assert (0, NOTHING) == (len(quarantine), len(held(quarantine)))


@pytest.mark.parametrize(("max_requests", "keep_s"), [(0, 600.0), (1024, 0.0)])
def test_it_can_be_switched_off(max_requests: int, keep_s: float) -> None:
    """Nothing is kept, and nothing refused."""
    quarantine = Quarantine(max_requests, keep_s)
    quarantine.keep("m", _blob(b"x"), 0.0)
    assert (0, False) == (len(quarantine), quarantine.holds("m", _blob(b"x"), 0.0))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.floats(0.0, 4.0)), max_size=40),
    st.integers(1, 4),
)
def test_it_agrees_with_a_plain_list(steps: list[tuple[bool, int, float]], room: int) -> None:
    """The last `room` different ones that were kept within 5 s are held, whatever came in between."""
    quarantine, now = Quarantine(max_requests=room, keep_s=5.0), 0.0
    kept: list[tuple[int, float]] = []
    for keeps, number, passed_s in steps:
        now += passed_s
        blob = _blob(bytes([number % 3]) * (1 + number // 3))
        if keeps:
            quarantine.keep("m", blob, now)
            kept = [pair for pair in kept if pair[0] != number][-(room - 1) :] if room > 1 else []
            kept.append((number, now))
        else:
            kept = [pair for pair in kept if pair[1] + 5.0 > now]
            assert quarantine.holds("m", blob, now) == (number in [pair[0] for pair in kept])
        assert len(quarantine) <= room
    assert not quarantine.holds("m", _blob(b""), now + 5.0)
    assert len(held(quarantine)) == NOTHING, "something of a request that expired is kept"


def test_a_received_frame_is_its_bytes() -> None:
    """However a tensor came, inline, as a view or as a frame of its own, the request is the same."""
    data = bytes(range(200))
    quarantine = Quarantine(max_requests=1024, keep_s=600.0)
    quarantine.keep("m", _blob(data), 0.0)
    for buffer in (zmq.Frame(data), memoryview(b"x" + data)[1:], bytearray(data)):
        assert quarantine.holds("m", Tensors(layout=_blob(data).layout, buffers=(buffer,)), 0.0)

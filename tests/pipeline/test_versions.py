"""Versions of a name: shares, the draw, and what stays when shares change."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.versions import (
    WHOLE,
    Versions,
    answering,
    canaries,
    parted,
    point_of,
    spell_share,
    versioned,
)

CLIENT = bytes(range(16))
SHARES = st.lists(st.integers(0, WHOLE // 8), min_size=0, max_size=7)
CLIENTS = st.binary(min_size=16, max_size=16)
SEQUENCES = st.integers(0, (1 << 63) - 1)


def versions_of(shares: list[int], by: str = "request") -> Versions:
    """The versions 2, 3, … with these shares, and 1 with the rest."""
    stated = [("1", None), *((str(number + 2), share) for number, share in enumerate(shares))]
    return Versions.of("m", stated, by)  # type: ignore[arg-type] - as a file says it


@given(SHARES)
def test_the_shares_make_all_requests_and_the_rest_comes_last(shares: list[int]) -> None:
    """Whatever the order of the file, in which the others are drawn."""
    versions = versions_of(shares)
    assert WHOLE == sum(versions.shares.values())
    assert [*(str(number + 2) for number in range(len(shares))), "1"] == list(versions.shares)
    assert "1" == versions.rest


@given(SHARES, CLIENTS, SEQUENCES)
def test_the_draw_is_the_place_of_the_request_among_the_shares(
    shares: list[int], client: bytes, sequence: int
) -> None:
    """Counted by hand, as docs/protocol.md states it."""
    digest = blake2b(client + sequence.to_bytes(8, "little") + b"m", digest_size=8).digest()
    place = int.from_bytes(digest, "little") * 1_000_000 >> 64
    expected, end = "1", 0
    for number, share in enumerate(shares):
        if end <= place < end + share:
            expected = str(number + 2)
        end += share
    assert expected == versions_of(shares).draw(client, sequence)


@given(st.integers(0, WHOLE), st.integers(0, WHOLE), CLIENTS, SEQUENCES)
def test_a_share_that_grows_takes_requests_from_the_rest_alone(
    less: int, more: int, client: bytes, sequence: int
) -> None:
    """Who had the canary keeps it."""
    less, more = sorted((less, more))
    if "2" == versions_of([less]).draw(client, sequence):
        assert "2" == versions_of([more]).draw(client, sequence)


@given(SHARES, CLIENTS, SEQUENCES, SEQUENCES)
def test_a_caller_keeps_its_version(shares: list[int], client: bytes, one: int, other: int) -> None:
    """With `traffic_by: caller`, whatever it asks."""
    versions = versions_of(shares, "caller")
    assert versions.draw(client, one) == versions.draw(client, other)


def test_no_requests_of_a_share_of_nothing_and_all_of_everything() -> None:
    """The ends are exact."""
    none, every = versions_of([0]), versions_of([WHOLE])
    assert {"1"} == {none.draw(CLIENT, number) for number in range(5_000)}
    assert {"2"} == {every.draw(CLIENT, number) for number in range(5_000)}


def test_fixed_bytes_have_a_fixed_count() -> None:
    """Five per cent of 20,000 requests, within four standard deviations, and the same in each run."""
    versions = versions_of([WHOLE // 20])
    seen = Counter(versions.draw(CLIENT, number) for number in range(20_000))
    assert seen["2"] == sum(point_of("m", CLIENT, number) < WHOLE // 20 for number in range(20_000))
    assert 974 == seen["2"]
    assert abs(seen["2"] - 1_000) < 4 * (20_000 * 0.05 * 0.95) ** 0.5


def test_without_a_rest_the_largest_share_announces_the_signature() -> None:
    """The first of equal ones."""
    assert "b" == Versions.of("m", [("a", 300_000), ("b", 700_000)]).rest
    assert "a" == Versions.of("m", [("a", 500_000), ("b", 500_000)]).rest


def test_names_and_versions() -> None:
    """Taken apart, put together, and listed as people count."""
    assert ("a/b@c", "4") == parted(versioned("a/b@c", "4"))
    assert ("m", None) == parted("m")
    versions = Versions.of(
        "m", [(version, None if version == "9" else 0) for version in ("10", "9", "2b", "2a")]
    )
    assert ["2a", "2b", "9", "10"] == versions.listed
    assert {"m@10": "m@9", "m@2b": "m@9", "m@2a": "m@9"} == canaries({"m": versions})
    assert ["m", "m@3", "m@3"] == [answering("m", None), answering("m", "3"), answering("m@3", "3")]


@pytest.mark.parametrize(
    ("share", "text"), [(50_000, "5%"), (125_000, "12.5%"), (1, "0.0001%"), (0, "0%"), (WHOLE, "100%")]
)
def test_shares_are_spelt_as_they_are_written(share: int, text: str) -> None:
    """Without zeros at the end."""
    assert text == spell_share(share)

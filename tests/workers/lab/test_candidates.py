"""What is tried: placements that fit the machine, choices of shapes that fit the model and the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import parse_strategy
from shapestream_workers.lab import candidates
from shapestream_workers.lab.candidates import (
    best_boundaries,
    hot_shapes,
    placements,
    powers_of_two,
    propose,
)


def signature_of(shape: str, **pad: Any) -> ModelSignature:
    """One input of that shape, and one output with its rows."""
    return ModelSignature.from_dict(
        {
            "name": "m",
            "inputs": [{"name": "x", "element_type": "f32", "shape": shape, "pad": pad}],
            "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, 4", "rule": {"rule": "rows"}}],
        }
    )


def requests_of(*sizes: tuple[int, ...]) -> list[TraceRequest]:
    """One request per millisecond."""
    return [TraceRequest(number / 1000, 0, 0, each) for number, each in enumerate(sizes)]


def test_two_cpus_are_divided_in_all_ways_that_make_sense() -> None:
    """In process: 1 x 1, 1 x 2 and 2 x 2; two worker processes of one thread each besides."""
    inside = {(place.processes, place.slots, place.threads) for place in placements(2, workers=False)}
    assert {(None, 1, 1), (None, 1, 2), (None, 2, 2)} == inside
    outside = {(place.processes, place.slots, place.threads) for place in placements(2, workers=True)}
    assert {(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 1)} == outside


@given(cpus=st.integers(1, 256), workers=st.booleans())
def test_placements_fit_the_cpus(cpus: int, workers: bool) -> None:
    """None asks for more threads than there are CPUs, or has slots without a thread; none comes twice."""
    found = placements(cpus, workers=workers)
    assert found
    assert len(set(found)) == len(found)
    for place in found:
        assert place.threads * (place.processes or 1) <= cpus
        assert 1 <= place.slots <= place.threads
        assert (place.processes is not None) == workers


def test_what_pads_is_proposed_only_where_padding_is_allowed() -> None:
    """And it says why it was left out."""
    requests = requests_of(*[(1, 8), (1, 16), (1, 24)] * 4)
    padded, _ = propose(requests, signature_of("batch:1..8, seq:1..64", seq=0), {}, max_batch=8)
    assert {None, "bucketed", "partitioned"} == {choice.get("strategy") for choice in padded}
    plain, left_out = propose(requests, signature_of("batch:1..8, seq:1..64"), {}, max_batch=8)
    assert "bucketed" not in [choice.get("strategy") for choice in plain]
    assert any("bucketed" in line for line in left_out)


def test_learned_sizes_refuse_nothing_that_was_served_before() -> None:
    """The last bucket is what the model takes, not what the trace happened to hold; without a bound there are none."""
    requests = requests_of(*[(1, 8), (1, 16), (1, 24)] * 4)
    found, _ = propose(requests, signature_of("batch:1..8, seq:1..64", seq=0), {}, max_batch=8)
    learned = [(name, choice[name]) for choice in found for name in ("seq", "batch") if name in choice]
    assert learned
    for name, sizes in learned:
        assert {"seq": 64, "batch": 8}[name] == sizes[-1]
    endless, left_out = propose(requests, signature_of("batch:1..8, seq", seq=0), {}, max_batch=8)
    assert not [choice for choice in endless if "seq" in choice]
    assert any("no upper bound" in line for line in left_out)


def test_the_baseline_is_not_proposed_again() -> None:
    """Native comes back where the file has something else; keys that are not tuned stay."""
    requests = requests_of(*[(1, 8)] * 4)
    signature = signature_of("batch:1..8, seq:1..64")
    for native in ({}, {"strategy": "native"}):
        assert {} not in propose(requests, signature, native, max_batch=8)[0]
    other = {"strategy": "partitioned", "batch": [1, 8], "warm_up": True}
    assert {"warm_up": True} in propose(requests, signature, other, max_batch=8)[0]


def test_hot_shapes_are_those_that_come_often() -> None:
    """The most frequent first, eight at most; rare ones have no model of their own."""
    often = {(1, 8 * number): 100 - number for number in range(10)}
    assert [(1, 8 * number) for number in range(8)] == hot_shapes(Counter(often))
    assert [(1, 8)] == hot_shapes(Counter({(1, 8): 99, (1, 9): 1}))


COUNTS = st.dictionaries(st.integers(1, 20), st.integers(0, 9), max_size=7)


def padded_elements(counts: Mapping[int, int], boundaries: tuple[int, ...]) -> int:
    """Elements that these ascending boundaries add to the observed sizes."""
    return sum(
        count * (next(boundary for boundary in boundaries if boundary >= size) - size)
        for size, count in counts.items()
    )


@given(counts=COUNTS, most=st.integers(1, 5), beyond=st.integers(0, 3))
def test_no_choice_of_boundaries_pads_less(counts: dict[int, int], most: int, beyond: int) -> None:
    """Every set of observed sizes that ends with the largest is tried, also those with fewer boundaries."""
    largest = max(counts, default=1) + beyond
    best = best_boundaries(counts, most, largest)
    assert len(best) <= most
    assert largest == best[-1]
    assert sorted(set(best)) == list(best)
    others = [size for size in counts if size != largest]
    least = min(
        padded_elements(counts, (*sorted(chosen), largest))
        for number in range(min(most, len(others) + 1))
        for chosen in combinations(others, number)
    )
    assert least == padded_elements(counts, best)


@given(counts=COUNTS)
def test_as_many_boundaries_as_sizes_pad_nothing(counts: dict[int, int]) -> None:
    """And none is spent on what nobody sends."""
    seen = {size for size, count in counts.items() if count}
    best = best_boundaries(counts, 20, 20)
    assert 0 == padded_elements(counts, best)
    assert seen | {20} == set(best)


def test_many_distinct_sizes_are_looked_at_as_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters need two boundaries, whatever the resolution."""
    monkeypatch.setattr(candidates, "MAX_DISTINCT", 16)
    counts = dict.fromkeys((*range(100, 200), *range(900, 1000)), 1)
    first, last = best_boundaries(counts, 2, 1000)
    assert 199 <= first < 260
    assert 1000 == last


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_rows_are_powers_of_two_up_to_the_most(most: int, expected: tuple[int, ...]) -> None:
    """The most is one of them, so that full batches take one call."""
    assert expected == powers_of_two(most)


def test_nothing_is_proposed_for_the_bytes_of_strings() -> None:
    """No size, no static shape and no cap: none is possible. Rows in set numbers are."""
    text = InputPort("text", "str", NamedShape.parse("batch:1..8"))
    signature = ModelSignature("m", (text,), (OutputPort("y", "f32", NamedShape.parse("batch"), Rows()),))
    found, left_out = propose(requests_of(*[(1, 8)] * 9), signature, {}, max_batch=8)
    assert [{"strategy": "partitioned", "batch": [1, 2, 4, 8]}] == [choice for choice in found if choice]
    assert {"static shapes", "max_prepared", "bucketed"} <= {line.partition(":")[0] for line in left_out}
    for choice in found:
        ModelSignature("m", signature.inputs, signature.outputs, parse_strategy(choice))

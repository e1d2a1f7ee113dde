"""What is tried: placements that fit the machine, choices of shapes that fit the model and the trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.tune_candidates import (
    Candidate,
    Placement,
    ShapeChoice,
    edits_of,
    placements,
    shape_settings,
)
from shapestream_workers.lab.tune_proposals import propose
from shapestream_workers.lab.tune_workload import Workload, hot_shapes


def signature_of(shape: str, **pad: Any) -> ModelSignature:
    """One input of that shape, and one output with its rows."""
    return ModelSignature.from_dict(
        {
            "name": "m",
            "inputs": [{"name": "x", "element_type": "f32", "shape": shape, "pad": pad}],
            "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, 4", "rule": {"rule": "rows"}}],
        }
    )


def workload_of(*sizes: tuple[int, ...]) -> Workload:
    """One request per millisecond."""
    return Workload(
        model="m",
        dimensions=("batch", "seq"),
        requests=tuple(TraceRequest(number / 1000, 0, 0, each) for number, each in enumerate(sizes)),
    )


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
        assert place.all_threads <= cpus
        assert 1 <= place.slots <= place.threads
        assert (place.processes is not None) == workers


def test_settings_say_no_more_than_they_must() -> None:
    """Native is not spelled out; static shapes that differ in the last dimension share an entry; other keys stay."""
    dimensions = ("batch", "seq")
    assert shape_settings(ShapeChoice(), dimensions) is None
    static = ShapeChoice(static=((1, 16), (2, 16), (1, 8)), others={"warm_up": True})
    expected = {"static": [{"batch": 1, "seq": [8, 16]}, {"batch": 2, "seq": 16}], "warm_up": True}
    assert expected == shape_settings(static, dimensions)
    bucketed = ShapeChoice(strategy="bucketed", sizes={"seq": (8, 64)}, max_prepared=4)
    assert {"strategy": "bucketed", "seq": [8, 64], "max_prepared": 4} == shape_settings(bucketed, dimensions)


def test_the_file_as_it_is_is_not_edited() -> None:
    """However its settings would be spelled by us."""
    place = Placement(processes=None, slots=2, threads=2)
    candidate = Candidate(placement=place, shapes=ShapeChoice(max_prepared=8), is_baseline=True)
    assert {} == edits_of(candidate, model=0, group=None, dimensions=())
    assert {} != edits_of(candidate.with_shapes(ShapeChoice()), model=0, group=None, dimensions=())


def test_what_pads_is_proposed_only_where_padding_is_allowed() -> None:
    """And it says why it was left out."""
    workload = workload_of(*[(1, 8), (1, 16), (1, 24)] * 4)
    padded = propose(workload, signature_of("batch:1..8, seq:1..64", seq=0), ShapeChoice(), max_batch=8)
    strategies = [choice.strategy for choice in padded.choices]
    assert {"native", "bucketed", "partitioned"} == set(strategies)
    plain = propose(workload, signature_of("batch:1..8, seq:1..64"), ShapeChoice(), max_batch=8)
    assert "bucketed" not in [choice.strategy for choice in plain.choices]
    assert any("bucketed" in line for line in plain.left_out)


def test_learned_sizes_refuse_nothing_that_was_served_before() -> None:
    """The last bucket is what the model takes, not what the trace happened to hold; without a bound there are none."""
    workload = workload_of(*[(1, 8), (1, 16), (1, 24)] * 4)
    found = propose(workload, signature_of("batch:1..8, seq:1..64", seq=0), ShapeChoice(), max_batch=8)
    for choice in found.choices:
        for name, sizes in choice.sizes.items():
            assert {"seq": 64, "batch": 8}[name] == sizes[-1]
    endless = propose(workload, signature_of("batch:1..8, seq", seq=0), ShapeChoice(), max_batch=8)
    assert not [choice for choice in endless.choices if "seq" in choice.sizes]
    assert any("no upper bound" in line for line in endless.left_out)


def test_the_baseline_is_not_proposed_again() -> None:
    """Native comes back where the file has something else."""
    workload = workload_of(*[(1, 8)] * 4)
    signature = signature_of("batch:1..8, seq:1..64")
    assert ShapeChoice() not in propose(workload, signature, ShapeChoice(), max_batch=8).choices
    other = ShapeChoice(strategy="partitioned", sizes={"batch": (1, 8)}, others={"warm_up": True})
    assert ShapeChoice(others={"warm_up": True}) in propose(workload, signature, other, max_batch=8).choices


def test_hot_shapes_are_those_that_come_often() -> None:
    """The most frequent first; rare ones have no model of their own."""
    workload = workload_of(*[(1, 8)] * 5, *[(1, 16)] * 3, (1, 99), (1, 98))
    assert ((1, 8), (1, 16)) == hot_shapes(workload, most=4, least_share=0.2)
    assert ((1, 8),) == hot_shapes(workload, most=1, least_share=0.2)


@pytest.mark.parametrize("cap", [64, 16])
def test_a_cap_changes_no_call(cap: int) -> None:
    """Candidates that differ in it alone share what was measured; others do not."""
    place = Placement(processes=None, slots=2, threads=2)
    plain = Candidate(placement=place, shapes=ShapeChoice())
    assert plain.calls_key == plain.with_shapes(ShapeChoice(max_prepared=cap)).calls_key
    assert plain.calls_key != plain.with_shapes(ShapeChoice(static=((1, cap),))).calls_key

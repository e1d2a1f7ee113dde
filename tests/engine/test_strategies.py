"""Strategies and their planners: which call shapes there are, and how a batch is made of them."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine import InputPort, ModelSignature, NamedShape, OutputPort, Rows, ShapeError, Whole
from shapestream_engine.batching.calls import CallPlanner, PlannedCall
from shapestream_engine.errors import SignatureError
from shapestream_engine.strategy import Strategy, parse_strategy


def model(strategy: Strategy, shape: str = "batch:1..64, seq:1..512", pad: bool = True) -> ModelSignature:
    """A model with one input, run by a strategy."""
    return ModelSignature(
        "m",
        (InputPort("x", "f32", NamedShape.parse(shape), {"seq": 0} if pad and "seq" in shape else {}),),
        (OutputPort("y", "f32", NamedShape.parse(shape), Rows() if "batch" in shape else Whole()),),
        strategy,
    )


def planner(strategy: Strategy, shape: str = "batch:1..64, seq:1..512") -> CallPlanner:
    """The planner of such a model."""
    return CallPlanner(model(strategy, shape))


def test_native_runs_every_shape_as_it_comes() -> None:
    """In one call, with or without a cap: a scheduler rounds sizes, the engine does not."""
    signature = model(Strategy())
    assert (PlannedCall((3, 77), 0, 3),) == planner(Strategy()).plan((3, 77))
    assert (PlannedCall((3, 77), 0, 3),) == planner(Strategy(max_prepared=2)).plan((3, 77))
    request = signature.resolve(((0, "f32", (3, 77)),))
    assert (3, 77) == request.rounded
    assert 231 == request.elements


def test_dimensions_without_sizes_take_any() -> None:
    """Buckets of one dimension leave the other as the requests need it, also where models are prepared."""
    bucketed = planner(Strategy({"seq": (32, 64)}))
    assert (PlannedCall((13, 64), 0, 13),) == bucketed.plan((13, 33))
    assert (None, 64) == bucketed.prepared_sizes((13, 64))


def test_requests_are_rounded_without_their_rows() -> None:
    """Requests of one bucket share a call, and their rows add up."""
    signature = model(Strategy({"batch": (4, 8), "seq": (32, 64)}))
    assert (3, 64) == signature.resolve(((0, "f32", (3, 33)),)).rounded


def test_a_size_beyond_the_largest_is_refused_with_its_name() -> None:
    """Nothing is cut off, and the caller learns what would fit."""
    signature = model(Strategy({"seq": (32, 64)}))
    with pytest.raises(ShapeError, match=r"dimension 'seq' is 65, which is more than 64, the largest size"):
        signature.resolve(((0, "f32", (3, 65)),))


def test_without_a_batch_axis_there_is_one_call() -> None:
    """A request runs alone, at the next size."""
    bucketed = planner(Strategy({"seq": (32, 64)}), "seq:1..64, 3")
    assert (PlannedCall((64,), 0, 1),) == bucketed.plan((40,))


def test_no_rows_take_the_smallest_call() -> None:
    """A request without rows still gets outputs of the right shape."""
    partitioned = planner(Strategy({"batch": (2, 4)}, partitioned=True), "batch:0..64, seq:1..512")
    assert (PlannedCall((2, 7), 0, 0),) == partitioned.plan((0, 7))


sizes_of = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(
    lambda sizes: tuple(sorted(sizes))
)


@given(data=st.data(), rows=st.integers(0, 90), kind=st.sampled_from(["bucketed", "partitioned", "padded"]))
def test_every_row_is_in_one_call_of_an_allowed_shape(data: st.DataObject, rows: int, kind: str) -> None:
    """Calls follow each other without a gap, have room for their rows, and only allowed sizes; seq is the next one."""
    batch, seq = data.draw(sizes_of), data.draw(sizes_of)
    if kind == "padded":
        batch, seq = batch[:1], seq[:1]
    length = data.draw(st.integers(1, seq[-1]))
    calls = planner(
        parse_strategy({"strategy": kind, "batch": batch, "seq": seq}), "batch:0..64, seq:1..512"
    ).plan((rows, length))
    assert [0, *[call.stop for call in calls]] == [*[call.start for call in calls], rows]
    for call in calls:
        assert call.sizes[0] in batch
        assert call.stop - call.start <= call.sizes[0]
        assert min(size for size in seq if size >= length) == call.sizes[1]
    assert all(call.stop - call.start == call.sizes[0] for call in calls[:-1])


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (
            {"strategy": "bucket"},
            "unknown strategy 'bucket'; known are native, padded, bucketed, partitioned",
        ),
        ({"strategy": "native", "seq": 8}, "strategy native: 'seq': any size is run as it comes"),
        ({"strategy": "native", "max_prepared": 1}, "max_prepared is an integer from 2"),
        ({"strategy": "padded"}, "strategy padded: name the dimensions to pad"),
        ({"strategy": "padded", "seq": [8, 16]}, "'seq' takes one size; several are the strategy bucketed"),
        ({"strategy": "bucketed"}, "name the dimensions and their sizes"),
        ({"strategy": "bucketed", "seq": []}, "'seq': there is no size; write at least one"),
        ({"strategy": "bucketed", "seq": [64, 32]}, "'seq': sizes ascend; 32 comes after 64"),
        ({"strategy": "bucketed", "seq": [32, 32]}, "'seq': 32 is listed twice"),
        ({"strategy": "bucketed", "seq": [0, 32]}, "'seq': 0 is no size; write an integer from 1"),
        ({"strategy": "bucketed", "seq": [True]}, "'seq': True is no size"),
        ({"strategy": "bucketed", "seq": "32"}, "'seq': '32' is no size"),
        ({"strategy": "partitioned", "seq": [32]}, "name the sizes of batch"),
        (
            {"strategy": "bucketed", "seq": [32, 1024]},
            "'seq': 1024 is not within 1..512, which the model takes",
        ),
        (
            {"strategy": "bucketed", "width": [32]},
            "'width' is no dynamic dimension of the model; it has batch, seq",
        ),
        ({"strategy": "bucketed", 7: [32]}, "shapes are a mapping such as"),
    ],
)
def test_what_cannot_be_meant_is_refused(strategy: dict[str, object], why: str) -> None:
    """When the signature is made, with the dimension and what to do."""
    with pytest.raises(SignatureError, match=why.replace(".", r"\.")):
        model(parse_strategy(strategy))


def test_padding_that_is_not_allowed_is_refused() -> None:
    """A strategy pads nothing that `pad` does not allow."""
    with pytest.raises(SignatureError, match=r"'seq' may not be padded, .* pad: \{seq: VALUE\}"):
        model(Strategy({"seq": (32,)}), pad=False)


def test_rows_cannot_be_filled_up_without_a_batch_axis() -> None:
    """Of an input without `batch` nobody could say what belongs to the filling."""
    with pytest.raises(SignatureError, match="'batch' is not the batch axis of every input"):
        ModelSignature(
            "m",
            (
                InputPort("x", "f32", NamedShape.parse("batch:1..8")),
                InputPort("table", "f32", NamedShape.parse("n:1..8")),
            ),
            (OutputPort("y", "f32", NamedShape.parse("batch"), Whole()),),
            Strategy({"batch": (1, 2)}, partitioned=True),
        )


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(max_prepared=8),
        Strategy(max_prepared=8, fill_rows=True),
        Strategy(most_rows=1),
        Strategy(most_rows=8),
        Strategy({"seq": (4,)}, most_rows=1),
        Strategy({"seq": (512,), "batch": (8,)}),
        Strategy({"seq": (32, 64)}),
        Strategy({"batch": (1, 2, 4)}, partitioned=True),
    ],
)
def test_a_signature_travels_with_its_strategy(strategy: Strategy) -> None:
    """A server knows the strategies of its workers' models, and a client that of the server's."""
    signature = model(strategy)
    assert signature == ModelSignature.from_dict(signature.to_dict())
    assert strategy == ModelSignature.from_dict(signature.to_dict()).strategy


@pytest.mark.parametrize("name", ["most_rows", "fill_rows"])
def test_a_dimension_may_be_called_like_a_flag(name: str) -> None:
    """No size is `True`."""
    assert Strategy({name: (4, 8)}) == parse_strategy({"strategy": "bucketed", name: [4, 8]})


@pytest.mark.parametrize(
    "plain",
    [
        {"strategy": "padded", "batch": 4, "most_rows": 1},
        {"strategy": "partitioned", "batch": [1], "most_rows": 1},
        {"max_prepared": 4, "most_rows": 1, "fill_rows": True},
        {"max_prepared": 4, "most_rows": 8, "fill_rows": True},
        {"strategy": "bucketed", "seq": 4, "fill_rows": True},
    ],
)
def test_requests_that_run_alone_are_not_filled_up_or_divided(plain: dict[str, object]) -> None:
    """A strategy that contradicts itself is refused, wherever it comes from."""
    with pytest.raises(SignatureError, match="fill"):
        parse_strategy(plain)


def test_a_signature_describes_its_allowed_shapes() -> None:
    """What `shapestream models` prints."""
    lines = model(Strategy({"batch": (1, 2, 4), "seq": (64, 128)}, partitioned=True)).describe()
    assert "  batch: 1..64, divided into calls of 1, 2 or 4, as few as possible" in lines
    assert "  seq: 1..512, padded to 64 or 128" in lines
    assert (
        "  shapes: native, rounded up so that there are at most 8"
        in model(Strategy(max_prepared=8, fill_rows=True)).describe()
    )


def test_plans_of_many_calls_do_not_fill_the_memory() -> None:
    """How many rows a request has, and so how many calls, a client chooses."""
    ones = planner(Strategy({"batch": (1,)}, partitioned=True), "batch, seq:1..512")
    tracemalloc.start()
    try:
        for rows in range(9_995, 10_000):
            assert rows == len(ones.plan((rows, 7)))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 << 20, "five plans took 7 MiB"


def test_a_cap_on_shapes_needs_bounds() -> None:
    """There is nothing to round up to otherwise, and memory would grow without end."""
    with pytest.raises(SignatureError, match="'batch' has no upper bound, and max_prepared needs one"):
        model(Strategy(max_prepared=4, fill_rows=True), "batch, seq:1..8")

"""Requests without elements: they have no bytes, and no tensor is made for the sizes that they claim."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.engine.slot_bench import SlotBench

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, ShapeError, Strategy, compile_model

Array = np.ndarray[Any, Any]
HUGE = 1 << 40


def find(x: Array) -> dict[str, Array]:
    """Elements above a half, told in every way that needs nothing but the elements."""
    found = np.argwhere(x > 0.5)
    counts = (x > 0.5).sum(axis=1)
    table = np.zeros((*x.shape, 2), np.float32)
    return {
        "y": x * 2,
        "places": found.astype(np.int64),
        "values": x[tuple(found.T)],
        "count": counts.astype(np.int64),
        "concatenated": x[tuple(found.T)],
        "table": table,
        "total": np.array([len(found)], np.int64),
    }


PORTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "y": ("batch, n", "f32", {"rule": "rows"}),
    "places": ("?, 2", "i64", {"rule": "index_column"}),
    "values": ("?", "f32", {"rule": "with", "output": "places"}),
    "count": ("batch", "i64", {"rule": "rows"}),
    "concatenated": ("?", "f32", {"rule": "counts", "output": "count"}),
    "table": ("batch, ?, 2", "f32", {"rule": "padded_counts", "output": "count"}),
    "total": ("1", "i64", {"rule": "recount", "output": "places"}),
}


class Bench(SlotBench):
    """A slot that runs a function on `x` [batch, n], and the shapes that the function was given."""

    def __init__(
        self, strategy: Strategy, shape: str, function: Any, ports: Mapping[str, tuple[str, str, Any]]
    ) -> None:
        self.seen: list[tuple[int, ...]] = []

        def called(x: Array) -> Any:
            self.seen.append(x.shape)
            return function(x)

        outputs = {
            name: OutputSpec(shape=own, element_type=kind, rule=rule)
            for name, (own, kind, rule) in ports.items()
        }
        inputs = {"x": InputSpec(shape=shape, element_type="f32", pad={"n": 0})}
        super().__init__(
            compile_model(
                ModelSpec(name="m", model=called, strategy=strategy, inputs=inputs, outputs=outputs)
            )
        )


@contextmanager
def bench(
    strategy: Strategy,
    shape: str = "batch, n",
    function: Any = find,
    ports: Mapping[str, tuple[str, str, Any]] = PORTS,
) -> Iterator[Bench]:
    """A bench; the process gets 2 GiB of memory beside what it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    made = Bench(strategy, shape, function, ports)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), limits[1]))
    try:
        yield made
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


STRATEGIES = [
    Strategy(),
    Strategy(most_rows=1),
    Strategy({"batch": (4, 1 << 20)}),
    Strategy({"batch": (1, 2, 4)}, partitioned=True),
    Strategy({"batch": (1 << 20,)}),
]


def empty(*shape: int) -> Array:
    """No elements, of whatever sizes."""
    return np.empty(shape, np.float32)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_no_rows_are_answered_without_a_call(strategy: Strategy) -> None:
    """With what the model gives for no rows, in every shape and type, however long the rows that are not there."""
    expected = find(empty(0, 7))
    with bench(strategy) as made:
        for size in (7, HUGE):
            (found,) = made.results(empty(0, size))
            for name, array in expected.items():
                shape = (0, size) if name == "y" else (0, 0, 2) if name == "table" else array.shape
                assert (shape, array.dtype) == (found[name].shape, found[name].dtype), name
            assert [0] == found["total"].tolist()
        assert [] == made.seen


@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if not strategy.alone], ids=str)
def test_company_is_not_padded_to_rows_that_are_not_there(strategy: Strategy) -> None:
    """A neighbour of four elements runs as four elements."""
    row = np.array([[0.25, 0.75, 1.0, 0.0]], np.float32)
    with bench(strategy) as made:
        report = made.results(empty(0, HUGE), row, empty(0, 3), sizes=(1, 4))
        assert [(0, HUGE), (1, 4), (0, 3)] == [own["y"].shape for own in report]
        assert [[0, 1], [0, 2]] == report[1]["places"].tolist()
        assert [4] == [columns for _, columns in made.seen]
        if strategy == Strategy():
            made.results(row, empty(0, HUGE), sizes=(1, HUGE))
            assert (1, 4) == made.seen[-1], "a batch that was to be as long as the claim"


def test_rows_without_elements_are_answered_where_all_outputs_are_empty_too() -> None:
    """However many rows they claim to be."""
    ports = {"y": ("batch, n", "f32", {"rule": "rows"})}
    for strategy in (Strategy(), Strategy({"n": (8,)}), Strategy({"batch": (1, 2)}, partitioned=True)):
        with bench(strategy, function=lambda x: x, ports=ports) as made:
            (found,) = made.results(empty(HUGE, 0))
            assert ((HUGE, 0), []) == (found["y"].shape, made.seen)


def test_the_model_is_asked_where_the_ports_do_not_tell_and_the_call_has_no_elements() -> None:
    """Of rows without elements only the model knows the mean; of no rows it knows what every request shares."""
    ports = {"y": ("batch", "f32", {"rule": "rows"})}
    with bench(Strategy(), function=lambda x: x.sum(axis=1), ports=ports) as made:
        (found,) = made.results(empty(3, 0))
        assert ([0, 0, 0], [(3, 0)]) == (found["y"].tolist(), made.seen)
    ports = {**ports, "anchors": ("3", "f32", {"rule": "shared"})}

    def anchored(x: Array) -> dict[str, Array]:
        return {"y": x.sum(axis=1), "anchors": np.arange(3, dtype=np.float32)}

    with bench(Strategy(), function=anchored, ports=ports) as made:
        (found,) = made.results(empty(0, 5))
        assert ([0, 1, 2], [(0, 5)]) == (found["anchors"].tolist(), made.seen)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        (Strategy({"n": (8, 1 << 30)}), (HUGE, 0)),
        (Strategy({"batch": (1, 2)}, partitioned=True), (HUGE, 0)),
        (Strategy({"batch": (4,)}), (3, 0)),
        (Strategy(max_prepared=4), (HUGE, 0)),
    ],
)
def test_what_would_be_a_call_of_nothing_but_padding_is_refused(
    strategy: Strategy, shape: tuple[int, ...]
) -> None:
    """With the output that needs it, before anything is planned for so many rows."""
    ports = {"y": ("batch", "f32", {"rule": "rows"})}
    with (
        bench(strategy, "batch, n:0..1073741824", function=lambda x: x.sum(axis=1), ports=ports) as made,
        pytest.raises(ShapeError, match="output 'y' needs a call"),
    ):
        made.run(empty(*shape))


def test_a_mask_is_not_made_for_what_has_no_elements() -> None:
    """It would be larger than the request by any factor."""
    spec = ModelSpec(
        name="m",
        model=lambda x, mask: mask.sum(axis=1),
        inputs={
            "x": InputSpec(shape="batch, n, c", element_type="f32", pad={"n": 0}),
            "mask": InputSpec(shape="batch, n", element_type="i64", mask_of="x"),
        },
        outputs={"y": OutputSpec(shape="batch", element_type="i64")},
    )
    signature = compile_model(spec).signature
    with pytest.raises(ShapeError, match="send the mask 'mask'"):
        signature.resolve(((0, "f32", (1, HUGE, 0)),))
    assert 24 == signature.resolve(((0, "f32", (1, 3, 0)), (1, "i64", (1, 3)))).total_nbytes


def test_an_answer_that_no_array_can_have_is_refused() -> None:
    """Its sizes other than 0 come to more bytes than there are."""
    ports = {"y": ("batch, n, n", "f32", {"rule": "rows"})}
    with (
        bench(Strategy(), function=lambda x: x[:, :, None] * x[:, None], ports=ports) as made,
        pytest.raises(ShapeError, match="needs more than"),
    ):
        made.run(empty(0, HUGE))


def test_without_a_batch_axis_the_same_holds() -> None:
    """Everything is the request's own there."""
    ports = {"y": ("n, k", "f32", {"rule": "whole"})}
    with bench(Strategy(), "n, k", lambda x: x * 2, ports) as made:
        (found,) = made.results(empty(HUGE, 0))
        assert ((HUGE, 0), []) == (found["y"].shape, made.seen)


def test_no_rows_are_not_rounded_up_under_a_cap() -> None:
    """There is no row to copy: what all requests share is not told for none of them, whatever ran before."""
    ports = {"anchors": ("n", "f32", {"rule": "shared"})}

    def anchors(x: Array) -> Array:
        return np.arange(x.shape[1], dtype=np.float32)

    strategy = Strategy(max_prepared=2, fill_rows=True)
    with bench(strategy, "batch:0..8, n:0..8", anchors, ports) as made:
        for size in range(1, 5):
            with pytest.raises(ShapeError, match="output 'anchors' needs a call"):
                made.run(empty(0, size))
            assert [*range(size)] == made.results(np.ones((1, size), np.float32))[0]["anchors"].tolist()

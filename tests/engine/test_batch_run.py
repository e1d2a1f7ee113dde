"""Batches that take several calls, on a slot, with a function as the model: what runs, what is left out, what fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest
from tests.engine.slot_bench import SlotBench

from shapestream_engine import BatchReport, InputSpec, ModelSpec, OutputSpec, Strategy, compile_model

Array = np.ndarray[Any, Any]


class Bench(SlotBench):
    """A slot that runs a function on `x` [batch, seq] by a strategy, and the shapes that the function was given."""

    def __init__(self, strategy: Strategy, function: Callable[[Array, Array], Array]) -> None:
        self.seen: list[tuple[int, ...]] = []

        def called(x: Array, mask: Array) -> Array:
            self.seen.append(x.shape)
            return function(x, mask)

        super().__init__(
            compile_model(
                ModelSpec(
                    name="m",
                    model=called,
                    strategy=strategy,
                    inputs={
                        "x": InputSpec(shape="batch:0..32, seq:0..64", element_type="f32", pad={"seq": 9}),
                        "mask": InputSpec(shape="batch, seq", element_type="boolean", mask_of="x"),
                    },
                    outputs={"y": OutputSpec(shape="batch, seq", element_type="f32")},
                )
            )
        )


@contextmanager
def bench(
    strategy: Strategy, function: Callable[[Array, Array], Array] = lambda x, mask: x + mask
) -> Iterator[Bench]:
    """A bench for one test."""
    yield Bench(strategy, function)


def results(report: BatchReport) -> list[Array | None]:
    """The only output of each member."""
    assert (None, "") == (report.code, report.message)
    assert report.outputs is not None
    return [
        None
        if tensors is None
        else np.frombuffer(tensors.buffers[0], np.float32).reshape(tensors.layout[0][2])
        for tensors in report.outputs
    ]


def check(found: list[Array | None], *given: Array) -> None:
    """Every element of each request, and no other, has one more than it was given."""
    for own, array in zip(found, given, strict=True):
        assert own is not None
        np.testing.assert_array_equal(array + 1, own, strict=True)


def numbers(*shape: int) -> Array:
    """An array in which every element is another."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_requests_are_divided_and_put_together_again() -> None:
    """Three requests of 2, 6 and 3 rows, as 8 + 2 + 1: the second and third lie in two calls each."""
    given = numbers(2, 7), numbers(6, 5), numbers(3, 7)
    with bench(Strategy({"batch": (1, 2, 8), "seq": (4, 8)}, partitioned=True)) as made:
        report = made.run(*given)
        check(results(report), *given)
        assert [(8, 8), (2, 8), (1, 8)] == made.seen
        assert ((1, (8, 8)), (1, (2, 8)), (1, (1, 8))) == report.calls
        assert 3 == report.preparations
        assert 0 == made.run(*given).preparations


def test_a_request_without_rows_gets_an_empty_result() -> None:
    """No call is made for it, alone or with others."""
    with bench(Strategy({"batch": (2, 4)})) as made:
        check(results(made.run(numbers(0, 5))), numbers(0, 5))
        check(results(made.run(numbers(2, 5), numbers(0, 5))), numbers(2, 5), numbers(0, 5))
        assert [(2, 5)] == made.seen


def test_under_a_cap_a_batch_runs_at_the_sizes_that_were_chosen_for_it() -> None:
    """Sizes are rounded by a scheduler. One that chose others before costs a preparation, which is counted."""
    given = numbers(3, 5)
    with bench(Strategy(max_prepared=2, fill_rows=True)) as made:
        for sizes in ((4, 8), (8, 16), (8, 64)):
            report = made.run(given, sizes=sizes)
            check(results(report), given)
            assert 1 == report.preparations
        assert 0 == made.run(given, sizes=(4, 8)).preparations
        assert [(4, 8), (8, 16), (8, 64), (4, 8)] == made.seen


@pytest.mark.parametrize(("fill_rows", "rows"), [(True, 6), (False, 2)])
def test_what_is_left_of_a_batch_meets_no_new_shape_under_a_cap(fill_rows: bool, rows: int) -> None:
    """It keeps the batch's sizes: deadlines would else make as many shapes as there are lengths."""
    given = numbers(4, 7), numbers(2, 5)
    with bench(Strategy(max_prepared=2, fill_rows=fill_rows)) as made:
        report = made.run(*given, sizes=(6, 8), start_before=(monotonic() - 1, None))
        assert report.outputs is not None
        assert report.outputs[0] is None
        check(results(report)[1:], given[1])
        assert [(rows, 8)] == made.seen


@pytest.mark.parametrize(
    "strategy", [Strategy(most_rows=1), Strategy({"seq": (8, 64)}, most_rows=1)], ids=str
)
def test_requests_that_run_alone_get_no_company_from_the_engine(strategy: Strategy) -> None:
    """Whatever a batch asks for: other requests, or rows of copies. The slot goes on."""
    with bench(strategy) as made:
        assert "run alone" in made.run(numbers(1, 5), numbers(2, 5)).message
        assert "run alone" in made.run(numbers(2, 5), sizes=(4, 5)).message
        check(results(made.run(numbers(0, 5), numbers(3, 5))), numbers(0, 5), numbers(3, 5))
        assert 1 == len(made.seen)


def test_requests_share_no_call_of_more_rows_than_were_tried() -> None:
    """Whatever a batch asks for; a request alone may have more."""
    with bench(Strategy(most_rows=3)) as made:
        check(results(made.run(numbers(1, 5), numbers(2, 5))), numbers(1, 5), numbers(2, 5))
        assert "up to 3 rows" in made.run(numbers(2, 5), numbers(2, 5)).message
        check(results(made.run(numbers(4, 5))), numbers(4, 5))


def test_a_batch_is_run_at_the_sizes_that_it_was_given_where_these_are_larger() -> None:
    """The strategy decides over the calls for these; rows that nobody has are filled up, or not run at all."""
    given = numbers(1, 3), numbers(2, 5)
    with bench(Strategy({"batch": (1, 4), "seq": (4, 8, 16)}, partitioned=True)) as made:
        check(results(made.run(*given, sizes=(4, 9))), *given)
        assert [(4, 16)] == made.seen
        check(results(made.run(*given, sizes=(6, 8))), *given)
        assert [(4, 16), (4, 8)] == made.seen, "calls without a row of theirs are not run"
    with bench(Strategy(max_prepared=4, fill_rows=True)) as made:
        check(results(made.run(*given, sizes=(8, 64))), *given)
        assert [(8, 64)] == made.seen


def test_larger_sizes_do_not_hold_for_what_is_left_over() -> None:
    """A request that is late takes its share of the rounding along."""
    given = numbers(1, 3), numbers(2, 5)
    with bench(Strategy({"batch": (1, 4), "seq": (4, 8, 16)}, partitioned=True)) as made:
        report = made.run(*given, sizes=(4, 9), start_before=(None, monotonic() - 1))
        assert report.outputs is not None
        assert report.outputs[1] is None
        check(results(report)[:1], given[0])
        assert [(1, 4)] == made.seen


def test_a_batch_without_rows_is_not_filled_up() -> None:
    """Whatever sizes it is to have."""
    with bench(Strategy({"batch": (2, 4)})) as made:
        check(results(made.run(numbers(0, 5), sizes=(4, 5))), numbers(0, 5))
        assert [] == made.seen


def test_a_time_that_passes_between_two_calls_ends_a_request() -> None:
    """No call starts after it; who has time goes on from where they were."""
    late = monotonic() + 3600
    clock = [late]

    def slow(x: Array, mask: Array) -> Array:
        clock[0] = monotonic() - 1
        return x + mask

    class Times(tuple[float, ...]):
        """The second member's time passes during the first call."""

        __slots__ = ()

        def __iter__(self) -> Iterator[float]:
            return iter((late, clock[0]))

        def __getitem__(self, place: Any) -> Any:
            return (late, clock[0])[place]

    given = numbers(3, 4), numbers(3, 4)
    with bench(Strategy({"batch": (1, 2, 4)}, partitioned=True), slow) as made:
        report = made.run(*given, start_before=Times((late, late)))
        found = results(report)
        check(found[:1], given[0])
        assert found[1] is None
        assert [(4, 4)] == made.seen


def test_a_call_that_fails_fails_the_batch() -> None:
    """With the model's own words; the slot goes on."""
    calls = []

    def fails_second(x: Array, mask: Array) -> Array:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no")
        return x + mask

    with bench(Strategy({"batch": (1, 2)}, partitioned=True), fails_second) as made:
        report = made.run(numbers(3, 2))
        assert ("model_error", "ValueError: no", None) == (report.code, report.message, report.outputs)
        check(results(made.run(numbers(3, 2))), numbers(3, 2))


def test_a_cancelled_batch_starts_no_further_call() -> None:
    """A function cannot be interrupted, but what was not begun is not."""
    made: list[Bench] = []

    def cancels(x: Array, mask: Array) -> Array:
        made[0].slots[0].cancel(1)
        return x + mask

    with bench(Strategy({"batch": (1, 2)}, partitioned=True), cancels) as own:
        made.append(own)
        assert "cancelled" == own.run(numbers(3, 2)).code
        assert 1 == len(own.seen)

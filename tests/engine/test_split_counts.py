"""Outputs that another output counts: concatenated rows, padded tables, totals; and what is shared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError, ShapeError
from shapestream_engine.ports import (
    Counts,
    IndexColumn,
    InputPort,
    OutputPort,
    PaddedCounts,
    Recount,
    Rows,
    Shared,
    With,
)
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]


def model_of(*outputs: OutputPort) -> ModelSignature:
    """A model of these outputs, with one input that may be padded along `seq`."""
    return ModelSignature("m", (InputPort("x", "f32", NamedShape.parse("batch, seq"), {"seq": 0}),), outputs)


def output_port(name: str, shape: str, rule: Any, element_type: str = "f32") -> OutputPort:
    """An output, its shape given as text."""
    return OutputPort(name, element_type, NamedShape.parse(shape), rule)


def split(
    model: ModelSignature, members: list[tuple[int, int]], *outputs: Array, rows: int | None = None
) -> list[list[Any]]:
    """Each request's outputs as plain lists. `rows`: of the call, if more than the members' own."""
    shapes = [model.resolve(((0, "f32", sizes),)) for sizes in members]
    own = sum(count for count, _ in members)
    sizes = (own if rows is None else rows, max(seq for _, seq in members))
    return [
        [
            np.frombuffer(buffer, dtype_of(element_type)).reshape(shape).tolist()
            for (_, element_type, shape), buffer in zip(result.layout, result.buffers, strict=True)
        ]
        for result in Assembly(model).split(sizes, shapes, outputs)
    ]


ONE, TWO, NONE = (1, 5), (2, 5), (0, 5)
COUNTED = model_of(
    output_port("found", "?, 2", Counts("count")),
    output_port("scores", "?", With("found")),
    output_port("total", "1", Recount("scores"), "i64"),
    output_port("count", "batch", Rows(), "i32"),
)
FOUND = np.arange(8, dtype="f4").reshape(4, 2)
SCORES = np.arange(4, dtype="f4")


def test_concatenated_rows_go_by_their_counts() -> None:
    """A request of several rows gets those of all of them, in order; one without any gets none."""
    count = np.array([1, 0, 2, 1], "i4")
    results = split(COUNTED, [ONE, ONE, TWO], FOUND, SCORES, np.array([4]), count)
    assert [
        [[[0, 1]], [0], [1], [1]],
        [[], [], [0], [0]],
        [[[2, 3], [4, 5], [6, 7]], [1, 2, 3], [3], [2, 1]],
    ] == results


@pytest.mark.parametrize("members", [[ONE], [ONE, TWO], [NONE, ONE, NONE], [NONE]])
def test_nothing_found_is_an_ordinary_result(members: list[tuple[int, int]]) -> None:
    """No row at all, and a total of 0, for however many rows; requests of no rows too."""
    rows = sum(count for count, _ in members)
    outputs = FOUND[:0], SCORES[:0], np.array([0]), np.zeros(rows, "i4")
    expected = [[[], [], [0], [0] * count] for count, _ in members]
    assert expected == split(COUNTED, members, *outputs)


def test_a_request_without_rows_among_others_takes_nothing() -> None:
    """It stands between rows of others, and none of what was found is its own."""
    results = split(COUNTED, [ONE, NONE, ONE], FOUND, SCORES, np.array([4]), np.array([3, 1], "i4"))
    assert [[3], [0], [1]] == [result[2] for result in results]
    assert [[0, 1, 2], [], [3]] == [result[1] for result in results]


@pytest.mark.parametrize("counts", [[1, 2], [1, 4], [0, 0], [4, 4]])
def test_counts_that_do_not_sum_up_are_refused(counts: list[int]) -> None:
    """A row too many or too few, and every request behind it would get another's."""
    with pytest.raises(RuleError, match=rf"'found' has 4 rows, and 'count', .*, sums up to {sum(counts)}"):
        split(COUNTED, [ONE, ONE], FOUND, SCORES, np.array([4]), np.array(counts, "i4"))


@pytest.mark.parametrize("wrong", [-1, 0.5, math.nan, math.inf, -math.inf, 2.0**24])
@pytest.mark.parametrize("rule", [Counts("count"), PaddedCounts("count")])
def test_what_is_no_count_is_refused(wrong: float, rule: Any) -> None:
    """Negative, fractional, no number, or so large that it may be its neighbour: the row is named."""
    shape = "?, 2" if isinstance(rule, Counts) else "batch, ?"
    model = model_of(output_port("count", "batch", Rows()), output_port("y", shape, rule))
    with pytest.raises(RuleError, match=r"output 'count': .* is no count, in row 1 of the batch"):
        split(model, [ONE, ONE], np.array([2, wrong], "f4"), np.zeros((2, 2), "f4"))


def test_a_negative_integer_is_no_count() -> None:
    """Even where it makes the sum come out right."""
    with pytest.raises(RuleError, match="-1 is no count, in row 0 of the batch"):
        split(COUNTED, [ONE, ONE], FOUND, SCORES, np.array([4]), np.array([-1, 5], "i4"))


@pytest.mark.parametrize(
    ("rule", "output"),
    [(Counts("count"), np.zeros((2, 1), "f4")), (PaddedCounts("count"), np.zeros((3, 4), "f4"))],
)
def test_a_negative_count_that_was_wrapped_is_no_count(rule: Any, output: Array) -> None:
    """Though it would sum up: nobody gets a row that is not theirs."""
    shape = "?, 1" if isinstance(rule, Counts) else "batch, 4"
    model = model_of(output_port("y", shape, rule), output_port("count", "batch", Rows(), "u64"))
    with pytest.raises(RuleError, match=f"{2**64 - 1} is no count, in row 0 of the batch"):
        split(model, [ONE, ONE, ONE], output, np.array([2**64 - 1, 1, 2], "u8"))


@pytest.mark.parametrize("element_type", ["i8", "u8", "i32", "i64", "u64", "f16", "f32", "f64", "bf16"])
@pytest.mark.parametrize("shape", ["batch", "batch, 1", "1, batch", "batch, ?"])
def test_a_count_may_be_of_any_numeric_type_and_shape_that_has_one_per_row(
    element_type: str, shape: str
) -> None:
    """Detectors count in integers and in floats, and keep axes of size 1."""
    pytest.importorskip("ml_dtypes")
    model = model_of(
        output_port("count", shape, Rows(), element_type), output_port("y", "?", Counts("count"))
    )
    count = np.array([1, 3]).astype(dtype_of(element_type))
    count = count.reshape([2 if part == "batch" else 1 for part in shape.split(", ")])
    assert [[0], [1, 2, 3]] == [result[1] for result in split(model, [ONE, ONE], count, SCORES)]


def test_two_numbers_per_row_are_no_count() -> None:
    """Where the port leaves it open, the data may still show it."""
    model = model_of(output_port("count", "batch, ?", Rows()), output_port("y", "?", Counts("count")))
    with pytest.raises(RuleError, match="'count' counts 4 rows as float32; the call has 2"):
        split(model, [ONE, ONE], np.ones((2, 2), "f4"), SCORES)


@pytest.mark.parametrize("counter_first", [True, False])
def test_counts_of_another_type_are_refused(counter_first: bool) -> None:
    """Whichever output is divided first."""
    ports = [output_port("count", "batch", Rows(), "i32"), output_port("y", "?", Counts("count"))]
    outputs = [np.ones(1, "i8"), np.zeros(1, "f4")]
    order = slice(None, None, 1 if counter_first else -1)
    with pytest.raises(RuleError, match=r"'count'.* int(64|8)"):
        split(model_of(*ports[order]), [ONE], *outputs[order])


TABLES = model_of(
    output_port("boxes", "batch, 3, 2", PaddedCounts("count")),
    output_port("classes", "3, batch", PaddedCounts("count"), "i64"),
    output_port("total", "", Recount("boxes"), "f16"),
    output_port("count", "batch, 1", Rows(), "i32"),
)


def tables(*counts: int) -> tuple[Array, ...]:
    """Outputs of `TABLES` with these counts, and -1 beyond them."""
    filled = np.arange(3) < np.array(counts)[:, None]
    serial = 10 * np.arange(len(counts))[:, None] + np.arange(3)
    boxes = np.where(filled[:, :, None], np.stack([serial, -serial], 2), -1).astype("f4")
    classes = np.where(filled, serial, -1).T.astype("i8")
    return boxes, classes, np.array(sum(counts), "f2"), np.array(counts, "i4").reshape(-1, 1)


def test_tables_are_trimmed_to_their_counts() -> None:
    """Each request of one row gets as many entries as it has, none included."""
    assert [
        [[[[0, 0], [1, -1]]], [[0], [1]], 2, [[2]]],
        [[[]], [], 0, [[0]]],
        [[[[20, -20], [21, -21], [22, -22]]], [[20], [21], [22]], 3, [[3]]],
    ] == split(TABLES, [ONE, ONE, ONE], *tables(2, 0, 3))


def test_the_tables_of_several_rows_are_as_long_as_the_largest_count() -> None:
    """Its own largest, not the batch's; and 0 stands beyond each row's count, not what the model has left there."""
    results = split(TABLES, [ONE, TWO], *tables(3, 1, 2))
    assert [
        [[[10, -10], [0, 0]], [[20, -20], [21, -21]]],
        [[10, 20], [0, 21]],
        3,
        [[1], [2]],
    ] == results[1]


def test_the_models_own_table_stays_as_it_is() -> None:
    """Only the copy is blanked: the output may be a view of an input."""
    outputs = tables(1, 2)
    for output in outputs:
        output.flags.writeable = False
    split(TABLES, [TWO], *outputs)
    assert -1 == outputs[0][0, 2, 0]


@pytest.mark.parametrize("members", [[NONE], [NONE, ONE, NONE]])
def test_tables_of_no_rows_are_empty(members: list[tuple[int, int]]) -> None:
    """A request of no rows has no largest count, and gets a table of no length."""
    rows = sum(count for count, _ in members)
    boxes, classes, total, count = tables(*[1] * rows)
    shapes = [TABLES.resolve(((0, "f32", sizes),)) for sizes in members]
    result, *_ = Assembly(TABLES).split((rows, 5), shapes, [boxes, classes, total, count])
    assert [(0, 0, 2), (0, 0), (), (0, 1)] == [shape for _, _, shape in result.layout]


def test_a_count_beyond_the_table_is_refused() -> None:
    """What it counts is not there."""
    boxes, classes, total, count = tables(1, 3)
    count[1] = 4
    with pytest.raises(
        RuleError, match=r"'boxes' has room for 3 in row 1 of the batch, and 'count' counts 4"
    ):
        split(TABLES, [ONE, ONE], boxes, classes, total, count)


def test_a_table_longer_than_its_counts_can_say_is_refused() -> None:
    """300 in a u8 is 44: no count of that type can be believed."""
    model = model_of(
        output_port("count", "batch", Rows(), "u8"), output_port("y", "batch, ?", PaddedCounts("count"))
    )
    assert [[[[0, 0]]]] == [
        [result[1]] for result in split(model, [ONE], np.array([2], "u1"), np.zeros((1, 255), "f4"))
    ]
    with pytest.raises(RuleError, match="'y' has room for 256, which its counts, 'count' of type u8"):
        split(model, [ONE], np.array([2], "u1"), np.zeros((1, 256), "f4"))


LABELS = model_of(
    output_port("count", "batch", Rows(), "i32"),
    output_port("labels", "batch, seq", PaddedCounts("count"), "i32"),
    output_port("masks", "?, seq", Counts("count"), "i32"),
)


def test_a_table_may_be_as_long_as_a_padded_input() -> None:
    """It is trimmed to its counts, as before, and what was found is trimmed along the padding."""
    outputs = np.array([2, 0], "i4"), np.array([[7, 8, 9], [7, 8, 9]], "i4"), np.ones((2, 3), "i4")
    assert [
        [[2], [[7, 8]], [[1, 1], [1, 1]]],
        [[0], [[]], []],
    ] == split(LABELS, [(1, 2), (1, 3)], *outputs)


def test_what_is_counted_in_the_padding_is_refused() -> None:
    """A request alone has no more entries than its own size."""
    outputs = np.array([0, 3], "i4"), np.zeros((2, 4), "i4"), np.ones((3, 4), "i4")
    with pytest.raises(RuleError, match=r"'labels' has room for 2 in row 1 of the batch, .* counts 3"):
        split(LABELS, [(1, 4), (1, 2)], *outputs)


def test_a_table_of_another_length_than_its_dimension_is_refused() -> None:
    """An axis that is named like an input's has the size that it has there."""
    outputs = np.array([1], "i4"), np.zeros((1, 9), "i4"), np.ones((1, 4), "i4")
    with pytest.raises(RuleError, match=r"'labels' has 9 along 'seq' \(axis 1\) in a call of 4"):
        split(LABELS, [(1, 4)], *outputs)


PEAKS = model_of(
    output_port("total", "?", Recount("peaks"), "i32"),
    output_port("peaks", "?, 2", IndexColumn()),
)


@pytest.mark.parametrize("total", [0, 1, 3])
def test_a_total_that_is_another_is_refused(total: int) -> None:
    """Either the rows or their number would be wrong, and nobody can tell which."""
    peaks = np.array([[1, 7], [0, 8]], "f4")
    with pytest.raises(RuleError, match=f"'total' says {total}, and 'peaks', which it counts, has 2"):
        split(PEAKS, [ONE, ONE], np.array([total], "i4"), peaks)
    assert [[[1], [[0, 8]]], [[1], [[0, 7]]]] == split(PEAKS, [ONE, ONE], np.array([2], "i4"), peaks)


@pytest.mark.parametrize("size", [0, 2])
def test_a_total_is_one_number(size: int) -> None:
    """Where the port leaves it open, the data may still show it."""
    with pytest.raises(RuleError, match=rf"'total' is not one number; its shape is \[{size}\]"):
        split(PEAKS, [ONE], np.zeros(size, "i4"), np.zeros((0, 2), "f4"))


@pytest.mark.parametrize(("counts", "exact"), [((4095, 1), False), ((2048, 2048), True)])
def test_a_total_whose_parts_its_type_cannot_say_is_refused(counts: tuple[int, int], exact: bool) -> None:
    """f16 holds 4096, and not 4095."""
    model = model_of(
        output_port("count", "batch", Rows(), "i32"),
        output_port("y", "?", Counts("count")),
        output_port("total", "", Recount("y"), "f16"),
    )
    outputs = np.array(counts, "i4"), np.zeros(4096, "f4"), np.array(4096, "f2")
    if exact:
        assert list(counts) == [result[2] for result in split(model, [ONE, ONE], *outputs)]
        return
    with pytest.raises(RuleError, match="'total': f16 has no exact number for one of the requests"):
        split(model, [ONE, ONE], *outputs)


def test_a_total_that_is_no_number_is_refused() -> None:
    """NaN is data, but it is no total."""
    model = model_of(output_port("y", "?", IndexColumn()), output_port("total", "1", Recount("y")))
    with pytest.raises(RuleError, match="'total' says nan"):
        split(model, [ONE], np.zeros(0, "f4"), np.array([math.nan], "f4"))


def test_what_is_shared_goes_to_all() -> None:
    """Each gets a copy of all of it, trimmed along what was padded for it."""
    model = model_of(output_port("anchors", "2, seq", Shared()), output_port("names", "?", Shared(), "u8"))
    anchors, names = np.arange(6, dtype="f4").reshape(2, 3), np.array([1, 2, 3, 4], "u1")
    results = split(model, [(1, 3), (2, 2), (0, 3)], anchors, names)
    assert [
        [[[0, 1, 2], [3, 4, 5]], [1, 2, 3, 4]],
        [[[0, 1], [3, 4]], [1, 2, 3, 4]],
        [[[0, 1, 2], [3, 4, 5]], [1, 2, 3, 4]],
    ] == results
    with pytest.raises(RuleError, match=r"'anchors' has 4 along 'seq' \(axis 1\) in a call of 3"):
        split(model, [(1, 3)], np.zeros((2, 4), "f4"), names)


ALL = model_of(
    output_port("rows", "batch", Rows(), "i32"),
    output_port("count", "batch", Rows(), "i32"),
    output_port("found", "?", Counts("count"), "i32"),
    output_port("table", "batch, 2", PaddedCounts("count"), "i32"),
    output_port("peaks", "?, 2", IndexColumn(), "i32"),
    output_port("beside", "?", With("peaks"), "i32"),
    output_port("total", "1", Recount("peaks"), "i32"),
    output_port("anchors", "2", Shared(), "i32"),
)


def test_rows_that_only_fill_the_batch_up_belong_to_nobody() -> None:
    """By no rule does anything of them reach a request; whatever is checked is checked with them."""
    outputs = [
        np.array([5, 6, 7]),
        np.array([1, 0, 2]),
        np.array([10, 11, 12]),
        np.array([[20, -1], [-1, -1], [21, 22]]),
        np.array([[2, 30], [0, 31], [2, 32], [1, 33]]),
        np.array([40, 41, 42, 43]),
        np.array([4]),
        np.array([50, 51]),
    ]
    results = split(ALL, [ONE, ONE], *[output.astype("i4") for output in outputs], rows=3)
    assert [
        [[5], [1], [10], [[20]], [[0, 31]], [41], [1], [50, 51]],
        [[6], [0], [], [[]], [[0, 33]], [43], [1], [50, 51]],
    ] == results


def test_requests_of_more_rows_than_the_call_are_refused() -> None:
    """Somebody would get nothing, and nobody would say so."""
    with pytest.raises(ShapeError, match="the requests have 3 rows, the call 2"):
        split(COUNTED, [ONE, TWO], FOUND, SCORES, np.array([4]), np.array([4, 0], "i4"), rows=2)

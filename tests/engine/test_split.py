"""Splitting: what is copied, and which outputs are refused.

That every request gets its own, by every rule and in every type, is the matter of test_any_signature and
test_division_by_rule.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.engine.slot_bench import arrays_of

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError, ShapeError
from shapestream_engine.output_rules import Counts, IndexColumn, PaddedCounts, Recount, Rows, With
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]


def model_of(*outputs: OutputPort, inputs: str = "batch, seq") -> ModelSignature:
    """A model of these outputs, with one input that may be padded along `seq`."""
    pad = {"seq": 0} if "seq" in inputs else {}
    return ModelSignature("m", (InputPort("x", "f32", NamedShape.parse(inputs), pad),), outputs)


def output_port(name: str, shape: str, rule: Any, element_type: str = "f32") -> OutputPort:
    """An output, its shape given as text."""
    return OutputPort(name, element_type, NamedShape.parse(shape), rule)


def split(
    model: ModelSignature, members: list[tuple[int, ...]], *outputs: Array, rows: int | None = None
) -> list[list[Array]]:
    """Each request's outputs. `rows`: of the call, if others than the members' own."""
    shapes = [model.resolve(((0, "f32", sizes),)) for sizes in members]
    counts, *others = zip(*[shape.sizes for shape in shapes], strict=True)
    sizes = (sum(counts) if rows is None else rows, *map(max, others))
    return [
        list(arrays_of(model, result).values()) for result in Assembly(model).split(sizes, shapes, outputs)
    ]


def listed(*arguments: Any, **more: Any) -> list[list[Any]]:
    """The same as plain lists, which compare by value."""
    return [[array.tolist() for array in result] for result in split(*arguments, **more)]


ROWS = model_of(output_port("y", "batch, 2", Rows()), inputs="batch, 3")
PEAKS = model_of(
    output_port("scores", "?", With("peaks"), "f64"),
    output_port("peaks", "?, 3", IndexColumn(1)),
    inputs="batch, 3",
)


@pytest.mark.parametrize("width", [2, 3000], ids=["small", "large"])
@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (2, 0, 1, 3), (0,)])
def test_rows_go_back_to_where_they_came_from(width: int, counts: tuple[int, ...]) -> None:
    """Consecutive rows, whatever their number and size, none at all included."""
    model = model_of(output_port("y", f"batch, {width}", Rows()), inputs="batch, 3")
    y = np.random.default_rng(0).random((sum(counts), width), "f4")
    results = split(model, [(count, 3) for count in counts], y)
    ends = np.cumsum(counts)
    assert [y[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)] == [
        result[0].tolist() for result in results
    ]


def test_results_are_copies() -> None:
    """What the engine writes next into its tensors reaches no result."""
    y = np.ones((2, 2), "f4")
    results = split(ROWS, [(1, 3), (1, 3)], y)
    y[...] = 0
    assert [[[[1, 1]]], [[[1, 1]]]] == [[array.tolist() for array in result] for result in results]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "out of order"])
def test_the_engines_outputs_stay_as_they_are(order: list[int]) -> None:
    """An index is rewritten in the copy: the engine's memory may be read-only, or read by somebody else."""
    peaks = np.array([[7, index, 0] for index in order], "f4")
    peaks.flags.writeable = False
    results = split(PEAKS, [(1, 3), (1, 3)], np.zeros(2), peaks)
    assert [[[7, 0, 0]], [[7, 0, 0]]] == [result[1].tolist() for result in results]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            np.zeros((3, 2), "f4"),
            r"output 'y' has 3 along 'batch' \(axis 0\) in a call of 2; its shape is \[3, 2\]",
        ),
        (np.zeros((0, 2), "f4"), r"has 0 along 'batch'"),
        (np.zeros((2, 2), "f8"), r"output 'y' is of type float64, its port says f32"),
        (np.zeros(2, "f4"), r"output 'y' has the shape \[2\], its port says \[batch, 2\]"),
    ],
)
def test_rows_that_are_not_the_calls_are_refused(y: Array, message: str) -> None:
    """An output of another batch size, type or rank cannot be divided with certainty."""
    with pytest.raises(RuleError, match=message):
        split(ROWS, [(1, 3), (1, 3)], y)


def test_a_padded_dimension_that_the_output_does_not_follow_is_refused() -> None:
    """An axis that is named like an input's dimension and has another size contradicts its name."""
    model = model_of(output_port("y", "batch, seq", Rows()))
    with pytest.raises(RuleError, match=r"has 4 along 'seq' \(axis 1\) in a call of 3"):
        split(model, [(1, 3), (1, 1)], np.zeros((2, 4), "f4"))


def test_a_missing_output_is_refused() -> None:
    """As many outputs as the signature has, or none of them can be trusted."""
    with pytest.raises(RuleError, match="gave 2 outputs, its signature has 1"):
        split(ROWS, [(1, 3)], np.zeros((1, 2), "f4"), np.zeros((1, 2), "f4"))


def test_many_large_rows_are_sorted_too() -> None:
    """Above the size at which rows are copied one by one nothing changes."""
    rng = np.random.default_rng(3)
    model = model_of(output_port("y", "?, 500", IndexColumn()), inputs="batch, 3")
    y = rng.random((200, 500), "f4")
    y[:, 0] = rng.integers(0, 4, 200)
    for number, (result,) in enumerate(split(model, [(1, 3)] * 4, y)):
        expected = y[y[:, 0] == number].copy()
        expected[:, 0] = 0
        assert expected.tobytes() == result.tobytes()


@pytest.mark.parametrize("wrong", [-1, 2, 0.5, math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("element_type", ["f32", "f64", "f16"])
@pytest.mark.parametrize("members", [[(2, 3)], [(1, 3), (1, 3)]], ids=["alone", "in company"])
def test_an_index_outside_the_batch_is_refused(
    wrong: float, element_type: str, members: list[tuple[int, ...]]
) -> None:
    """Negative, too large, fractional or no number: the whole batch is refused, and the row is named."""
    model = model_of(output_port("y", "?, 2", IndexColumn(), element_type), inputs="batch, 3")
    with np.errstate(over="ignore"):
        y = np.array([[0, 0], [wrong, 0]]).astype(dtype_of(element_type))
    with pytest.raises(RuleError, match=r"output 'y': index .* in row 1 is outside the batch of 2 rows"):
        split(model, members, y)


@pytest.mark.parametrize("wrong", [-1, 2, 2**62, -(2**63)])
def test_an_integer_index_outside_the_batch_is_refused(wrong: int) -> None:
    """Integers are held to the same bounds."""
    model = model_of(output_port("y", "?", IndexColumn(), "i64"), inputs="batch, 3")
    with pytest.raises(RuleError, match=f"index {wrong} in row . is outside the batch of 2 rows"):
        split(model, [(1, 3), (1, 3)], np.array([wrong]))


def test_an_index_into_an_empty_batch_is_refused() -> None:
    """No row can belong to nobody."""
    with pytest.raises(RuleError, match="outside the batch of 0 rows"):
        split(PEAKS, [(0, 3)], np.zeros(1), np.zeros((1, 3), "f4"))


@pytest.mark.parametrize(("element_type", "rows"), [("f16", 2049), ("bf16", 257), ("i8", 128), ("u8", 256)])
def test_rows_that_the_index_type_cannot_tell_apart_are_refused(element_type: str, rows: int) -> None:
    """Where counting stops being exact, or starts again at 0, one request's rows would become another's."""
    pytest.importorskip("ml_dtypes")
    model = model_of(output_port("y", "?", IndexColumn(), element_type), inputs="batch, 3")
    y = np.zeros(1, dtype_of(element_type))
    assert 1 == split(model, [(rows - 1, 3), (1, 3)], y)[0][0].size
    with pytest.raises(RuleError, match=f"cannot tell {rows + 1} rows apart"):
        split(model, [(rows, 3), (1, 3)], y)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_parallel_outputs_of_another_length_are_refused(count: int) -> None:
    """Scores that do not stand beside the peaks belong to nobody."""
    peaks = np.zeros((2, 3), "f4")
    with pytest.raises(RuleError, match=f"output 'scores' has {count} rows, and 'peaks', .*, 2"):
        split(PEAKS, [(1, 3)], np.zeros(count), peaks)


def test_a_column_that_the_output_does_not_have_is_refused() -> None:
    """Where the number of columns depends on the data, the index may be missing."""
    model = model_of(output_port("y", "?, ?", IndexColumn(2)), inputs="batch, 3")
    with pytest.raises(RuleError, match=r"has no column 2; its shape is \[1, 2\]"):
        split(model, [(1, 3)], np.zeros((1, 2), "f4"))


# ------------------------------------------------------------ outputs that another output counts

ONE, TWO, NONE = (1, 5), (2, 5), (0, 5)
COUNTED = model_of(
    output_port("found", "?, 2", Counts("count")),
    output_port("scores", "?", With("found")),
    output_port("total", "1", Recount("scores"), "i64"),
    output_port("count", "batch", Rows(), "i32"),
)
FOUND = np.arange(8, dtype="f4").reshape(4, 2)
SCORES = np.arange(4, dtype="f4")


@pytest.mark.parametrize("counts", [[1, 2], [1, 4], [0, 0], [4, 4]])
def test_counts_that_do_not_sum_up_are_refused(counts: list[int]) -> None:
    """A row too many or too few, and every request behind it would get another's."""
    with pytest.raises(RuleError, match=rf"'found' has 4 rows, and 'count', .*, sums up to {sum(counts)}"):
        listed(COUNTED, [ONE, ONE], FOUND, SCORES, np.array([4]), np.array(counts, "i4"))


@pytest.mark.parametrize("wrong", [-1, 0.5, math.nan, math.inf, -math.inf, 2.0**24])
@pytest.mark.parametrize("rule", [Counts("count"), PaddedCounts("count")])
def test_what_is_no_count_is_refused(wrong: float, rule: Any) -> None:
    """Negative, fractional, no number, or so large that it may be its neighbour: the row is named."""
    shape = "?, 2" if isinstance(rule, Counts) else "batch, ?"
    model = model_of(output_port("count", "batch", Rows()), output_port("y", shape, rule))
    with pytest.raises(RuleError, match=r"output 'count': .* in row 1 of the batch is no count"):
        listed(model, [ONE, ONE], np.array([2, wrong], "f4"), np.zeros((2, 2), "f4"))


def test_a_negative_integer_is_no_count() -> None:
    """Even where it makes the sum come out right."""
    with pytest.raises(RuleError, match="-1 in row 0 of the batch is no count"):
        listed(COUNTED, [ONE, ONE], FOUND, SCORES, np.array([4]), np.array([-1, 5], "i4"))


@pytest.mark.parametrize(
    ("rule", "output"),
    [(Counts("count"), np.zeros((2, 1), "f4")), (PaddedCounts("count"), np.zeros((3, 4), "f4"))],
)
def test_a_negative_count_that_was_wrapped_is_no_count(rule: Any, output: Array) -> None:
    """Though it would sum up: nobody gets a row that is not theirs."""
    shape = "?, 1" if isinstance(rule, Counts) else "batch, 4"
    model = model_of(output_port("y", shape, rule), output_port("count", "batch", Rows(), "u64"))
    with pytest.raises(RuleError, match=f"{2**64 - 1} in row 0 of the batch is no count"):
        listed(model, [ONE, ONE, ONE], output, np.array([2**64 - 1, 1, 2], "u8"))


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
    assert [[0], [1, 2, 3]] == [result[1] for result in listed(model, [ONE, ONE], count, SCORES)]


def test_two_numbers_per_row_are_no_count() -> None:
    """Where the port leaves it open, the data may still show it."""
    model = model_of(output_port("count", "batch, ?", Rows()), output_port("y", "?", Counts("count")))
    with pytest.raises(RuleError, match="'count' counts 4 rows as float32; the call has 2"):
        listed(model, [ONE, ONE], np.ones((2, 2), "f4"), SCORES)


@pytest.mark.parametrize("counter_first", [True, False])
def test_counts_of_another_type_are_refused(counter_first: bool) -> None:
    """Whichever output is divided first."""
    ports = [output_port("count", "batch", Rows(), "i32"), output_port("y", "?", Counts("count"))]
    outputs = [np.ones(1, "i8"), np.zeros(1, "f4")]
    order = slice(None, None, 1 if counter_first else -1)
    with pytest.raises(RuleError, match=r"'count'.* int(64|8)"):
        listed(model_of(*ports[order]), [ONE], *outputs[order])


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


def test_the_models_own_table_stays_as_it_is() -> None:
    """Only the copy is blanked: the output may be a view of an input."""
    outputs = tables(1, 2)
    for output in outputs:
        output.flags.writeable = False
    listed(TABLES, [TWO], *outputs)
    assert -1 == outputs[0][0, 2, 0]


def test_a_count_beyond_the_table_is_refused() -> None:
    """What it counts is not there."""
    boxes, classes, total, count = tables(1, 3)
    count[1] = 4
    with pytest.raises(
        RuleError, match=r"'boxes' has room for 3 in row 1 of the batch, and 'count' counts 4"
    ):
        listed(TABLES, [ONE, ONE], boxes, classes, total, count)


def test_a_table_longer_than_its_counts_can_say_is_refused() -> None:
    """300 in a u8 is 44: no count of that type can be believed."""
    model = model_of(
        output_port("count", "batch", Rows(), "u8"), output_port("y", "batch, ?", PaddedCounts("count"))
    )
    assert [[[[0, 0]]]] == [
        [result[1]] for result in listed(model, [ONE], np.array([2], "u1"), np.zeros((1, 255), "f4"))
    ]
    with pytest.raises(RuleError, match=r"'y' has room for 256 entries, and 'count', .* the type u8"):
        listed(model, [ONE], np.array([2], "u1"), np.zeros((1, 256), "f4"))


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
    ] == listed(LABELS, [(1, 2), (1, 3)], *outputs)


def test_what_is_counted_in_the_padding_is_refused() -> None:
    """A request alone has no more entries than its own size."""
    outputs = np.array([0, 3], "i4"), np.zeros((2, 4), "i4"), np.ones((3, 4), "i4")
    with pytest.raises(RuleError, match=r"'labels' has room for 2 in row 1 of the batch, .* counts 3"):
        listed(LABELS, [(1, 4), (1, 2)], *outputs)


def test_a_table_of_another_length_than_its_dimension_is_refused() -> None:
    """An axis that is named like an input's has the size that it has there."""
    outputs = np.array([1], "i4"), np.zeros((1, 9), "i4"), np.ones((1, 4), "i4")
    with pytest.raises(RuleError, match=r"'labels' has 9 along 'seq' \(axis 1\) in a call of 4"):
        listed(LABELS, [(1, 4)], *outputs)


TOTALLED = model_of(
    output_port("total", "?", Recount("peaks"), "i32"),
    output_port("peaks", "?, 2", IndexColumn()),
)


@pytest.mark.parametrize("total", [0, 1, 3])
def test_a_total_that_is_another_is_refused(total: int) -> None:
    """Either the rows or their number would be wrong, and nobody can tell which."""
    peaks = np.array([[1, 7], [0, 8]], "f4")
    with pytest.raises(RuleError, match=f"'total' says {total}, and 'peaks', which it counts, has 2"):
        listed(TOTALLED, [ONE, ONE], np.array([total], "i4"), peaks)
    assert [[[1], [[0, 8]]], [[1], [[0, 7]]]] == listed(TOTALLED, [ONE, ONE], np.array([2], "i4"), peaks)


@pytest.mark.parametrize("size", [0, 2])
def test_a_total_is_one_number(size: int) -> None:
    """Where the port leaves it open, the data may still show it."""
    with pytest.raises(RuleError, match=rf"'total' is not one number; its shape is \[{size}\]"):
        listed(TOTALLED, [ONE], np.zeros(size, "i4"), np.zeros((0, 2), "f4"))


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
        assert list(counts) == [result[2] for result in listed(model, [ONE, ONE], *outputs)]
        return
    with pytest.raises(RuleError, match="'total': f16 has no exact number for one of the requests"):
        listed(model, [ONE, ONE], *outputs)


def test_a_total_that_is_no_number_is_refused() -> None:
    """NaN is data, but it is no total."""
    model = model_of(output_port("y", "?", IndexColumn()), output_port("total", "1", Recount("y")))
    with pytest.raises(RuleError, match="'total' says nan"):
        listed(model, [ONE], np.zeros(0, "f4"), np.array([math.nan], "f4"))


def test_requests_of_more_rows_than_the_call_are_refused() -> None:
    """Somebody would get nothing, and nobody would say so."""
    with pytest.raises(ShapeError, match="the requests have 3 rows, the call 2"):
        listed(COUNTED, [ONE, TWO], FOUND, SCORES, np.array([4]), np.array([4, 0], "i4"), rows=2)

"""Splitting: every request gets its own rows, as copies, or the batch is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import IndexColumn, InputPort, OutputPort, Rows, Whole, With
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]


def model_of(*outputs: OutputPort, inputs: str = "batch, seq, height") -> ModelSignature:
    """A model of these outputs, with one input that may be padded along `seq`."""
    pad = {"seq": 0} if "seq" in inputs else {}
    return ModelSignature("m", (InputPort("x", "f32", NamedShape.parse(inputs), pad),), outputs)


def output_port(name: str, shape: str, rule: Any, element_type: str = "f32") -> OutputPort:
    """An output, its shape given as text."""
    return OutputPort(name, element_type, NamedShape.parse(shape), rule)


def split(model: ModelSignature, members: list[tuple[int, ...]], *outputs: Array) -> list[list[Array]]:
    """Each request's outputs as arrays; the call is the smallest that holds the members."""
    shapes = [model.resolve(((0, "f32", sizes),)) for sizes in members]
    sizes = (
        (sum(sizes[0] for sizes in members), *(max(column) for column in zip(*members, strict=True)))[:1]
        + tuple(max(column) for column in list(zip(*members, strict=True))[1:])
        if model.has_batch
        else members[0]
    )
    return [as_arrays(result) for result in Assembly(model).split(sizes, shapes, outputs)]


def as_arrays(result: Tensors) -> list[Array]:
    """The tensors of a result, in the order of their port numbers."""
    assert list(range(len(result.layout))) == [number for number, _, _ in result.layout]
    return [
        np.frombuffer(buffer, dtype_of(element_type)).reshape(shape)
        for (_, element_type, shape), buffer in zip(result.layout, result.buffers, strict=True)
    ]


def lists(results: list[list[Array]]) -> list[list[Any]]:
    """Plain lists, which compare by value."""
    return [[array.tolist() for array in result] for result in results]


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
    assert [[[[1, 1]]], [[[1, 1]]]] == lists(results)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "out of order"])
def test_the_engines_outputs_stay_as_they_are(order: list[int]) -> None:
    """An index is rewritten in the copy: the engine's memory may be read-only, or read by somebody else."""
    peaks = np.array([[7, index, 0] for index in order], "f4")
    peaks.flags.writeable = False
    results = split(PEAKS, [(1, 3), (1, 3)], np.zeros(2), peaks)
    assert [[[7, 0, 0]], [[7, 0, 0]]] == [result[1].tolist() for result in results]


@pytest.mark.parametrize("members", [[(1, 3, 2), (2, 1, 2), (1, 0, 2)], [(2, 2, 2)], [(1, 2, 2), (1, 2, 2)]])
def test_padded_dimensions_are_trimmed_back(members: list[tuple[int, ...]]) -> None:
    """An output axis named like a padded dimension has each request's own size in its result."""
    model = model_of(output_port("y", "batch, 2, seq", Rows()), output_port("z", "seq, batch, seq", Rows()))
    rows, longest = sum(member[0] for member in members), max(member[1] for member in members)
    y = np.random.default_rng(1).random((rows, 2, longest), "f4")
    z = np.random.default_rng(2).random((longest, rows, longest), "f4")
    start, expected = 0, []
    for count, seq, _ in members:
        block = slice(start, start + count)
        expected.append([y[block, :, :seq].tolist(), z[:seq, block, :seq].tolist()])
        start += count
    assert expected == lists(split(model, members, y, z))


@pytest.mark.parametrize("shape", ["3, batch, 2", "1, batch, 2", "2, batch"])
def test_the_batch_axis_of_an_output_may_stand_anywhere(shape: str) -> None:
    """Rows are cut along the axis named batch."""
    model = model_of(output_port("y", shape, Rows()), inputs="batch, 3")
    sizes = [3 if part == "batch" else int(part) for part in shape.split(", ")]
    y = np.arange(np.prod(sizes), dtype="f4").reshape(sizes)
    assert [[y[:, :2].tolist()], [y[:, 2:].tolist()]] == lists(split(model, [(2, 3), (1, 3)], y))


def test_an_output_that_is_not_contiguous_is_read_as_it_looks() -> None:
    """Functions may return views of any strides."""
    y = np.arange(8, dtype="f4").reshape(2, 4)[:, ::2]
    assert [[[[0, 2]]], [[[4, 6]]]] == lists(split(ROWS, [(1, 3), (1, 3)], y))


def test_without_a_batch_axis_outputs_are_whole() -> None:
    """The only request takes every output as it is, scalars and empty ones too."""
    model = model_of(
        output_port("a", "?, 2", Whole()),
        output_port("b", "", Whole(), "i64"),
        output_port("c", "?", Whole()),
        inputs="n",
    )
    outputs = np.ones((3, 2), "f4"), np.array(7), np.zeros(0, "f4")
    assert [[output.tolist() for output in outputs]] == lists(split(model, [(5,)], *outputs))


def test_the_only_request_of_a_padded_call_is_trimmed_too() -> None:
    """A model without a batch axis may run at a larger, prepared size."""
    model = model_of(output_port("y", "seq", Whole()), inputs="seq")
    shape = model.resolve(((0, "f32", (2,)),))
    (result,) = Assembly(model).split((4,), [shape], [np.arange(4, dtype="f4")])
    assert [[0, 1]] == [array.tolist() for array in as_arrays(result)]


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
        split(model, [(1, 3, 2), (1, 1, 2)], np.zeros((2, 4), "f4"))


def test_a_missing_output_is_refused() -> None:
    """As many outputs as the signature has, or none of them can be trusted."""
    with pytest.raises(RuleError, match="gave 2 outputs, its signature has 1"):
        split(ROWS, [(1, 3)], np.zeros((1, 2), "f4"), np.zeros((1, 2), "f4"))


def test_rows_are_sorted_to_their_requests_by_index() -> None:
    """Selection is stable, the index is rewritten to the request's own, and parallel outputs follow."""
    peaks = np.array([[10, 2, 0], [11, 0, 0], [12, 1, 0], [13, 2, 1], [14, 0, 1], [15, 1, 1]], "f4")
    scores = np.arange(6.0)
    assert [
        [[1, 4], [[11, 0, 0], [14, 0, 1]]],
        [[0, 2, 3, 5], [[10, 1, 0], [12, 0, 0], [13, 1, 1], [15, 0, 1]]],
    ] == lists(split(PEAKS, [(1, 3), (2, 3)], scores, peaks))


def test_no_result_is_an_ordinary_result() -> None:
    """A request without detections, or a whole batch without any, gets empty tensors of the right shape."""
    one = np.array([[1, 1, 1]], "f4")
    none = np.zeros((0, 3), "f4")
    assert [(0,), (0, 3), (1,), (1, 3)] == [
        array.shape for result in split(PEAKS, [(1, 3), (1, 3)], np.ones(1), one) for array in result
    ]
    assert [[[], []], [[], []]] == lists(split(PEAKS, [(1, 3), (1, 3)], np.zeros(0), none))


def test_requests_without_rows_get_none() -> None:
    """Requests of no rows share a starting row with the next one, and do not take its detections."""
    peaks = np.array([[0, 0, 5], [0, 1, 6]], "f4")
    results = split(PEAKS, [(0, 3), (2, 3), (0, 3)], np.array([1.0, 2.0]), peaks)
    assert [[[], []], [[1, 2], [[0, 0, 5], [0, 1, 6]]], [[], []]] == lists(results)


@pytest.mark.parametrize("element_type", ["i8", "u8", "i32", "i64", "u64", "f16", "f32", "f64", "bf16"])
def test_an_index_may_be_of_any_numeric_type(element_type: str) -> None:
    """Detectors write indices among integers and among floats."""
    pytest.importorskip("ml_dtypes")
    model = model_of(output_port("y", "?, 2", IndexColumn(), element_type), inputs="batch, 3")
    y = np.array([[1, 7], [0, 8], [2, 9]]).astype(dtype_of(element_type))
    results = split(model, [(1, 3), (2, 3)], y)
    assert [[[0, 8]], [[0, 7], [1, 9]]] == [result[0].astype("i8").tolist() for result in results]


def test_an_output_may_be_nothing_but_indices() -> None:
    """An output of one axis is its own index column."""
    model = model_of(output_port("y", "?", IndexColumn(), "i64"), inputs="batch, 3")
    assert [[[0, 0]], [[0]]] == lists(split(model, [(1, 3), (1, 3)], np.array([0, 1, 0])))
    assert [[[]], [[]]] == lists(split(model, [(1, 3), (1, 3)], np.zeros(0, "i8")))


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
    with pytest.raises(RuleError, match=r"output 'y': .* is no row of a batch of 2, in row 1"):
        split(model, members, y)


@pytest.mark.parametrize("wrong", [-1, 2, 2**62, -(2**63)])
def test_an_integer_index_outside_the_batch_is_refused(wrong: int) -> None:
    """Integers are held to the same bounds."""
    model = model_of(output_port("y", "?", IndexColumn(), "i64"), inputs="batch, 3")
    with pytest.raises(RuleError, match=f"{wrong} is no row of a batch of 2"):
        split(model, [(1, 3), (1, 3)], np.array([wrong]))


def test_an_index_into_an_empty_batch_is_refused() -> None:
    """No row can belong to nobody."""
    with pytest.raises(RuleError, match="no row of a batch of 0"):
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

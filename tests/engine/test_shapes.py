"""The algebra and the spellings of dimensions and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine.errors import ShapeError
from shapestream_engine.shapes import MAX_SIZE, Dimension, NamedShape, PartialShape, exact_nbytes

sizes = st.integers(0, 40) | st.integers(0, MAX_SIZE)


@st.composite
def dimensions(draw: st.DrawFn) -> Dimension:
    """Any dimension: open, static, or bounded on one or both sides."""
    low = draw(sizes)
    return Dimension(low, draw(st.none() | st.integers(low, MAX_SIZE)))


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
named_shapes = st.lists(st.tuples(st.none() | names, dimensions()), max_size=5).map(
    lambda entries: NamedShape(tuple(name for name, _ in entries), tuple(size for _, size in entries))
)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("?", Dimension()),
        ("-1", Dimension()),
        (-1, Dimension()),
        ("8", Dimension(8, 8)),
        (8, Dimension(8, 8)),
        (0, Dimension(0, 0)),
        (np.int64(8), Dimension(8, 8)),
        ("1..10", Dimension(1, 10)),
        (" 1 .. 10 ", Dimension(1, 10)),
        ("..512", Dimension(0, 512)),
        ("8..", Dimension(8)),
        ("<=25", Dimension(0, 25)),
        ("<= 25", Dimension(0, 25)),
        ((1, 10), Dimension(1, 10)),
        ([1, 10], Dimension(1, 10)),
        ((2, None), Dimension(2)),
        ((2, -1), Dimension(2)),
        ((None, 9), Dimension(0, 9)),
        (Dimension(3, 4), Dimension(3, 4)),
        (str(MAX_SIZE), Dimension(MAX_SIZE, MAX_SIZE)),
    ],
)
def test_every_spelling_of_a_dimension(spelling: Any, expected: Dimension) -> None:
    """OpenVINO's spellings, XLA's bound, integers and pairs are understood."""
    assert expected == Dimension.parse(spelling)


@pytest.mark.parametrize(
    "spelling",
    [
        "", "x", "..", "...", "1..2..3", "-2", "1.5", "5..3", "<=", "<=-1", "8 8", "٣", "1..-1", "+1", "1_0",
        str(MAX_SIZE + 1), "9" * 39, "9" * 10_000, f"1..{MAX_SIZE + 1}",
        -2, 1.0, True, False, None, np.float64(1), np.bool_(True), MAX_SIZE + 1, (5, 3), (1, 2, 3), (True, 3), (-3, 4), {},
    ],
)  # fmt: skip
def test_what_is_no_dimension_is_a_shape_error(spelling: Any) -> None:
    """Negative, reversed, overflowing and non-integer sizes are refused, whatever their type."""
    with pytest.raises(ShapeError):
        Dimension.parse(spelling)


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_too_long_to_print_are_shape_errors_too(sign: int) -> None:
    """Python raises an error of its own when it is asked to print an integer of 5000 digits."""
    with pytest.raises(ShapeError, match="a size lies within 0"):
        Dimension.parse(sign * 10**5000)


@pytest.mark.parametrize(
    ("low", "high"), [(-1, None), (0, -1), (3, 2), (True, None), (1.0, None), (0, MAX_SIZE + 1)]
)
def test_a_dimension_checks_itself(low: Any, high: Any) -> None:
    """The constructor is as strict as the parser."""
    with pytest.raises(ShapeError):
        Dimension(low, high)


@given(dimensions())
def test_a_printed_dimension_reads_back(dimension: Dimension) -> None:
    """str and parse are inverse to each other."""
    assert dimension == Dimension.parse(str(dimension))


@given(dimensions(), dimensions(), sizes)
def test_an_intersection_admits_what_both_admit(one: Dimension, other: Dimension, size: int) -> None:
    """Membership in the intersection is membership in both, and an empty one is an error."""
    try:
        both = one.intersection(other)
    except ShapeError:
        assert not (size in one and size in other)
    else:
        assert (size in one and size in other) == (size in both)


def test_an_empty_intersection_names_both_sides() -> None:
    """Whoever reads the message sees what contradicts what."""
    with pytest.raises(ShapeError, match=r"^no size is both 1\.\.4 and 8\.\.$"):
        Dimension(1, 4).intersection(Dimension(8))


@given(dimensions(), dimensions())
def test_intersections_commute_and_are_idempotent(one: Dimension, other: Dimension) -> None:
    """The order of the ports of a model does not matter to its bounds."""
    assert one == one.intersection(one)
    assert one == one.intersection(Dimension())
    try:
        both = one.intersection(other)
    except ShapeError:
        with pytest.raises(ShapeError):
            other.intersection(one)
    else:
        assert both == other.intersection(one)
        assert both == both.intersection(one)


@pytest.mark.parametrize("size", [True, 1.0, "1", None, np.int64(1)])
def test_only_an_int_is_in_a_dimension(size: Any) -> None:
    """What merely equals a size is none."""
    assert size not in Dimension(1, 1)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("[?,1..10,384]", "[?,1..10,384]"),
        ("?, 3", "[?,3]"),
        (" [ 1 , <=25 ] ", "[1,..25]"),
        ("", "[]"),
        ("[]", "[]"),
        ([-1, (1, 10), "8..", Dimension(2, 2)], "[?,1..10,8..,2]"),
        ((1, 10), "[1,10]"),
        ([], "[]"),
    ],
)
def test_every_spelling_of_a_partial_shape(spelling: Any, expected: str) -> None:
    """Strings with and without brackets, and sequences of dimensions, are understood."""
    assert expected == str(PartialShape.parse(spelling))


@given(st.lists(dimensions(), max_size=5))
def test_a_printed_partial_shape_reads_back(entries: list[Dimension]) -> None:
    """str and parse are inverse to each other, for scalars too."""
    shape = PartialShape(tuple(entries))
    assert shape == PartialShape.parse(str(shape))
    assert shape == PartialShape.parse(shape)


@pytest.mark.parametrize("spelling", ["...", "[...]", "[?,...]"])
def test_an_open_rank_is_refused_clearly(spelling: str) -> None:
    """Shapes of any rank are not supported, and the message says so."""
    with pytest.raises(ShapeError, match="leaves the rank open, which is not supported"):
        PartialShape.parse(spelling)


@pytest.mark.parametrize("spelling", ["1,,2", ",", "[1", "1]", "[1],[2]"])
def test_malformed_lists_are_refused(spelling: str) -> None:
    """A missing entry or bracket is no shape."""
    with pytest.raises(ShapeError):
        PartialShape.parse(spelling)


def test_a_partial_shape_admits_shapes_of_its_rank_and_bounds() -> None:
    """A shape fits when the rank is the same and every size is within its dimension."""
    shape = PartialShape.parse("[?,1..10]")
    admitted = [(0, 1), (7, 10)]
    refused = [(), (1,), (1, 0), (1, 11), (1, 1, 1), (-1, 1), (True, 1)]
    assert (admitted, []) == (
        [sizes for sizes in admitted if shape.admits(sizes)],
        [sizes for sizes in refused if shape.admits(sizes)],
    )


def test_a_partial_shape_answers_as_a_sequence() -> None:
    """rank, len, iteration and indexing agree."""
    shape = PartialShape.parse("?,3")
    assert (2, 2, "?", "3") == (shape.rank, len(shape), *map(str, shape))
    assert Dimension(3, 3) == shape[1] == shape[-1]
    assert (True, False) == (shape.is_dynamic, shape.is_static)
    assert (False, True) == (PartialShape(()).is_dynamic, PartialShape(()).is_static)


@pytest.mark.parametrize(
    ("spelling", "expected_names", "expected_shape"),
    [
        ("batch:1..64, seq:1..512, 384", ("batch", "seq", None), "[1..64,1..512,384]"),
        ("batch, seq", ("batch", "seq"), "[?,?]"),
        ("[batch, ?, n : <=25]", ("batch", None, "n"), "[?,?,..25]"),
        ("channels:3", ("channels",), "[3]"),
        ("n, n", ("n", "n"), "[?,?]"),
        ("", (), "[]"),
    ],
)
def test_every_spelling_of_a_named_shape(
    spelling: str, expected_names: tuple[str | None, ...], expected_shape: str
) -> None:
    """Names stand before a colon, or alone for an open size; the empty string is a scalar."""
    shape = NamedShape.parse(spelling)
    assert (expected_names, expected_shape) == (shape.names, str(shape.partial_shape))


@given(named_shapes)
def test_a_printed_named_shape_reads_back(shape: NamedShape) -> None:
    """str and parse are inverse to each other, names included."""
    assert shape == NamedShape.parse(str(shape))
    assert shape == NamedShape.parse(shape)
    assert shape.rank == len(shape) == len(shape.partial_shape)
    assert shape.is_dynamic == shape.partial_shape.is_dynamic


@pytest.mark.parametrize(
    "spelling", [":3", "a b:3", "3:a", "a:", "a:b", "a:1:2", "a-b", "ä", "a.0", "...", "batch:-2"]
)
def test_what_is_no_named_shape_is_a_shape_error(spelling: str) -> None:
    """A name is an identifier, and what follows the colon is a dimension."""
    with pytest.raises(ShapeError):
        NamedShape.parse(spelling)


def test_names_and_dimensions_are_parallel() -> None:
    """A shape cannot be made with a name too many."""
    with pytest.raises(ShapeError, match="2 names for 1 dimensions"):
        NamedShape(("a", "b"), (Dimension(),))


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 4), ((0,), 0), ((2, 3), 24), ((2**61 - 1,), 2**63 - 4), ((2**40, 0), 0)]
)
def test_bytes_are_counted_exactly(shape: tuple[int, ...], expected: int) -> None:
    """The size of a tensor is exact up to the largest that there can be."""
    assert expected == exact_nbytes(4, shape)


@pytest.mark.parametrize("shape", [(2**61,), (2**32, 2**32), (2**40, 2**40, 0), (2**63 - 1, 2**63 - 1)])
def test_no_tensor_exceeds_what_can_be_addressed(shape: tuple[int, ...]) -> None:
    """Products that overflow 64 bits are refused, even where a size of 0 makes the tensor empty."""
    with pytest.raises(ShapeError, match="more than 9223372036854775807 bytes"):
        exact_nbytes(4, shape)

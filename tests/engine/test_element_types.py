"""Element types: OpenVINO's names, NumPy's types, and nothing that could not travel."""

from __future__ import annotations

import numpy as np
import pytest

from shapestream_engine.element_types import ELEMENT_TYPES, dtype_of, element_type_of
from shapestream_engine.errors import ElementTypeError, ShapeError


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_every_name_leads_back_to_itself(name: str) -> None:
    """dtype_of and element_type_of are inverse to each other."""
    assert name == element_type_of(dtype_of(name))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, "f32"),
        (bool, "boolean"),
        (np.dtype("longlong"), "i64"),
        (np.intp, "i64"),
        (np.dtype("<u2"), "u16"),
    ],
)
def test_numpy_spellings_of_one_type_have_one_name(dtype: type, expected: str) -> None:
    """Aliases of a NumPy type are the same element type."""
    assert expected == element_type_of(dtype)


def test_bfloat16_is_known_where_ml_dtypes_is_installed() -> None:
    """NumPy has no bfloat16 of its own; ml_dtypes brings it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert "bf16" == element_type_of(np.dtype(ml_dtypes.bfloat16))


def test_all_types_are_little_endian_as_on_the_wire() -> None:
    """What arrives is used without conversion."""
    assert not [name for name, dtype in ELEMENT_TYPES.items() if dtype.byteorder == ">"]


@pytest.mark.parametrize(
    "dtype",
    [object, str, np.dtype("S3"), np.dtype("M8[s]"), np.dtype([("a", "f4")]), complex, np.dtype("V2")],
)
def test_types_whose_bytes_mean_nothing_elsewhere_are_refused(dtype: type) -> None:
    """Object, text, date, structured and complex arrays are refused, and the known types are listed."""
    with pytest.raises(ElementTypeError, match=r"cannot be sent; known are boolean, i8"):
        element_type_of(dtype)


def test_big_endian_is_refused_with_the_remedy() -> None:
    """A big-endian array is converted by its owner, knowingly."""
    with pytest.raises(ElementTypeError, match=r"big-endian; convert with"):
        element_type_of(np.dtype(">f4"))


@pytest.mark.parametrize("name", ["float32", "", "F32", None, 3, ["f32"]])
def test_unknown_names_are_refused_and_the_known_ones_listed(name: object) -> None:
    """Only OpenVINO's names are known; whatever else is asked for is one kind of error."""
    with pytest.raises(ElementTypeError, match=r"unknown element type .*known are boolean"):
        dtype_of(name)  # type: ignore[arg-type]


def test_an_element_type_error_is_a_shape_error_and_a_value_error() -> None:
    """Whoever handles a description that does not fit handles both at once."""
    assert issubclass(ElementTypeError, ShapeError)
    assert issubclass(ElementTypeError, ValueError)

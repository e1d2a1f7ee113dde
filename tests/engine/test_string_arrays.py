"""String tensors as one buffer: lengths, then contents."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine import ElementTypeError, ShapeError
from shapestream_engine.string_arrays import LENGTH, PIECE_NBYTES, check, nbytes_of, pack, unpack

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


def objects(elements: list[Any], shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
    """Return an array of objects."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array if shape is None else array.reshape(shape)


@given(st.sampled_from([(0,), (1,), (3,), (2, 3), (), (2, 0)]), st.data())
def test_what_is_packed_is_unpacked(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Any elements in any shape; the longest is told."""
    element_type, elements = data.draw(st.sampled_from([("str", TEXTS), ("bytes", st.binary(max_size=12))]))
    given_ = objects(data.draw(st.lists(elements, min_size=prod(shape), max_size=prod(shape))), shape)
    sizes, buffer = pack(element_type, given_)
    assert sizes[:-1] == shape
    assert len(buffer) == nbytes_of(sizes)
    read = unpack(element_type, sizes, buffer)
    assert read.shape == shape
    assert read.tolist() == given_.tolist()
    lengths = [len(each.encode() if isinstance(each, str) else each) for each in given_.ravel().tolist()]
    assert check(element_type, sizes, buffer) == max(lengths, default=0)


def test_the_bytes_are_those_of_the_document() -> None:
    """Two texts: `é` and nothing."""
    assert pack("str", objects(["é", ""])) == ((2, 2), bytes.fromhex("02000000 00000000 c3a9"))


@pytest.mark.parametrize("array", [np.array(["a", "bc"]), np.array(["a", "bc"], np.dtypes.StringDType())])
def test_texts_of_numpys_types_are_read(array: np.ndarray[Any, Any]) -> None:
    """Not only arrays of objects."""
    assert pack("str", array) == ((2, 3), bytes.fromhex("01000000 02000000 616263"))


@pytest.mark.parametrize(
    ("element_type", "element", "words"),
    [
        ("str", b"a", "str, not bytes"),
        ("bytes", "a", "bytes, not str"),
        ("str", None, "not NoneType"),
        ("str", "\ud800", "lone surrogate"),
    ],
)
def test_other_elements_are_refused(element_type: str, element: Any, words: str) -> None:
    """With the type that came."""
    with pytest.raises(ElementTypeError, match=words):
        pack(element_type, objects([element]))


@pytest.mark.parametrize(
    ("shape", "buffer", "words"),
    [
        ((1, 2), "01000000 6162", "lengths of 1 bytes in all, but 2"),
        ((2, 2), "03000000 ffffffff 6162", "lengths of 4294967298"),
        ((1, 2), "02000000 61", "have 6 bytes, not 5"),
        ((2, 2), "01000000 01000000 c3a9", "element 1 is no UTF-8: it begins within"),
        ((2, 2), "01000000 01000000 61ff", "element 1 is no UTF-8"),
        ((2, 1), "00000000 01000000 ff", "element 1 is no UTF-8"),
    ],
)
def test_wrong_buffers_are_refused(shape: tuple[int, ...], buffer: str, words: str) -> None:
    """By `check`, which makes no objects, and by `unpack`."""
    with pytest.raises(ShapeError, match=words):
        check("str", shape, bytes.fromhex(buffer))
    with pytest.raises(ShapeError):
        unpack("str", shape, bytes.fromhex(buffer))


def test_bytes_may_be_anything() -> None:
    """Only `str` is UTF-8."""
    assert check("bytes", (2, 3), bytes.fromhex("02000000 01000000 c300ff")) == 2
    assert unpack("bytes", (2, 3), bytes.fromhex("02000000 01000000 c300ff")).tolist() == [
        b"\xc3\x00",
        b"\xff",
    ]


@pytest.mark.parametrize("character", ["a", "é", "語", "😀"])
@pytest.mark.parametrize("before", range(5))
def test_long_texts_are_checked_in_pieces(character: str, before: int) -> None:
    """Wherever a piece ends, it may cut a character. A wrong byte is told by its element, in any piece and between two."""
    texts = ["x" * before, character * (2 * PIECE_NBYTES), "", character]
    sizes, buffer = pack("str", objects(texts))
    assert len(texts[1].encode()) == check("str", sizes, buffer)
    contents = LENGTH.itemsize * len(texts)
    for place in (PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, len(buffer) - contents - 1):
        wrong = bytearray(buffer)
        wrong[contents + place] = 0xFF
        element = 1 if place < len((texts[0] + texts[1]).encode()) else 3
        with pytest.raises(ShapeError, match=f"element {element} is no UTF-8"):
            check("str", sizes, wrong)
    with pytest.raises(ShapeError, match="element 0 is no UTF-8: unexpected end"):
        check(
            "str",
            (1, PIECE_NBYTES),
            LENGTH.type(PIECE_NBYTES).tobytes() + b"x" * (PIECE_NBYTES - 1) + b"\xc3",
        )

"""The book of checked layouts: correct, and bounded whatever arrives."""

from __future__ import annotations

import numpy as np
import pytest
from tests.held import held

from shapestream.wire import tensor_entries
from shapestream.wire.tensor_entries import LayoutBook, LayoutError
from shapestream_engine.layout import Layout

LAYOUT: Layout = (
    (0, "f32", (2, 3)),
    (1, "boolean", ()),
    (2, "f16", (0, 5)),
    (3, "str", (2, 3, 40)),
    (4, "bytes", (7,)),
)


def test_a_layout_is_read_as_it_was_written() -> None:
    """The bytes of a layout give it back, with the exact length of each tensor."""
    written = LayoutBook().write(LAYOUT)
    read = LayoutBook().read(written.packed)
    assert (LAYOUT, (24, 1, 0, 64, 11)) == (read.layout, read.nbytes)
    assert written == read


def test_a_known_layout_is_the_same_object() -> None:
    """A repeated layout costs one lookup, and no second copy is kept alive."""
    book = LayoutBook()
    packed = book.write(LAYOUT).packed
    assert book.read(packed) is book.read(bytes(bytearray(packed)))
    assert book.write(LAYOUT) is book.write(tuple(LAYOUT))


def test_layouts_that_msgpack_can_encode_in_several_ways_are_all_read() -> None:
    """A client need not use msgpack's shortest forms."""
    long_form = b"\xdc\x00\x01\x93\xcc\x00\xd9\x03f32\xdc\x00\x01\xcf" + (4).to_bytes(8, "big")
    assert ((0, "f32", (4,)),) == LayoutBook().read(long_form).layout


@pytest.mark.parametrize(
    "bad",
    [
        ((0, "f32", (np.int64(3),)),),
        ((0, "f32", (True,)),),
        ((0, "f32", (2.0,)),),
        ((0, "text", (2,)),),
        ((0, "str", ()),),
        ((0, "str", (1,) * 34),),
        ((0, "str", (2**61, 2)),),
        ((0, "bytes", (1, 2**63 - 4)),),
    ],
)
def test_a_wrong_layout_is_not_written(bad: Layout) -> None:
    """Our own defects are found before they travel, and are not remembered as good ones."""
    book = LayoutBook()
    with pytest.raises(LayoutError):
        book.write(bad)
    assert ((0, "f32", (1,)),) == LayoutBook().read(book.write(((0, "f32", (1,)),)).packed).layout


def test_strings_have_one_size_more_than_numbers() -> None:
    """The last is the bytes of all of them: the largest rank and the most bytes are taken."""
    for shape, nbytes in ((1,) * 32 + (9,), 13), ((0, 2**63 - 5), 2**63 - 5), ((1, 2**63 - 5), 2**63 - 1):
        assert (nbytes,) == LayoutBook().write(((0, "str", shape),)).nbytes


def test_an_equal_layout_is_written_as_the_integers_that_it_equals() -> None:
    """After a good layout, one that equals it with other types is written as the good one."""
    book = LayoutBook()
    good = book.write(((0, "f32", (1,)),))
    assert good is book.write(((0, "f32", (True,)),))


def test_the_book_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless new layouts, or very long ones, do not grow the book without end."""
    monkeypatch.setattr(tensor_entries, "MAX_REMEMBERED", 10)
    book = LayoutBook()
    for size in range(100):
        layout = ((0, "u8", (size,)),)
        assert layout == book.read(book.write(layout).packed).layout
    long_one = tuple((port, "u8", (2**60, 0)) for port in range(64))
    assert long_one == book.read(book.write(long_one).packed).layout
    remembered = [thing.layout for thing in held(book) if isinstance(thing, tensor_entries.CheckedLayout)]
    assert len(remembered) <= 2 * 10, "as they are read, and as they are written"
    assert long_one not in remembered

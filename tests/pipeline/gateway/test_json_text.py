"""JSON that is read in pieces, against orjson, which reads it whole; and the most work of one slice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.gateway import json_text
from shapestream.gateway.json_text import (
    DROPPED_CONTAINER,
    MOST_CONTAINERS,
    MOST_JSON_BYTES,
    MOST_MEMBERS,
    PIECE_BYTES,
    SLICE_NUMBERS,
    dropped,
    read_json,
    read_object,
)
from shapestream.slices import Slices, at_once
from shapestream.web.messages import HttpError

FRAGMENTS = [
    *("[", "]", "{", "}", ",", ",", ":", '"', '\\"', "\\\\", '"a"', '"a":', '"b":', '""', '"[,{"'),
    *("1", "-2.5e3", "true", "null", " ", "\n", "\\", "\\u00e9", "é", '"a,b":"c,d"', "[1,2]", '{"a":1},'),
]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of eight bytes, so that short texts have many."""
    monkeypatch.setattr(json_text, "PIECE_BYTES", 8)


def whole(text: bytes) -> Any:
    """The value as orjson has it, or its refusal."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return HttpError


def in_pieces(text: bytes) -> Any:
    """The value as it is read in pieces, or the refusal."""
    try:
        return at_once(read_json(text))
    except HttpError as error:
        return HttpError if error.status == 400 else error


def next_of(work: Slices[Any]) -> Any:
    """Do a slice. The result of the work, or None where it goes on."""
    try:
        next(work)
    except StopIteration as end:
        return end.value
    return None


def has_a_name_twice(text: bytes) -> bool:
    """Whether an object of this JSON has two members of one name."""

    found: list[bool] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(len({name for name, _ in pairs}) < len(pairs))
        return dict(pairs)

    json.loads(text, object_pairs_hook=note)
    return any(found)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=6),
    max_leaves=60,
)


@pytest.mark.usefixtures("small_pieces")
@given(VALUES, st.booleans(), st.booleans())
def test_a_value_is_read_in_pieces_as_it_is_read_whole(value: Any, ascii_only: bool, wide: bool) -> None:
    """Any nesting, strings with commas, brackets and escapes; with blanks and without."""
    separators = None if wide else (",", ":")
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode("utf-8", "surrogatepass")
    assert repr(whole(text)) == repr(in_pieces(text))


@pytest.mark.usefixtures("small_pieces")
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=40))
def test_what_is_no_json_is_none_in_pieces(fragments: list[str]) -> None:
    """Texts of fragments, nearly none of which is JSON: commas, brackets and quotes too many and too few."""
    text = "".join(fragments).encode()
    wanted, found = whole(text), in_pieces(text)
    assert wanted == found or (found is HttpError and has_a_name_twice(text))


@pytest.mark.usefixtures("small_pieces")
@given(VALUES.filter(lambda value: isinstance(value, list | dict)), st.data())
def test_json_with_a_mistake_is_none_in_pieces(value: Any, data: st.DataObject) -> None:
    """A byte is left out, doubled or exchanged."""
    text = json.dumps(value).encode()
    place = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.sampled_from([b"", b",", b"[", b"]", b"{", b"}", b'"', b":", b"\\", b"0", b" "]))
    text = text[:place] + byte + text[place + data.draw(st.integers(0, 1)) :]
    wanted, found = whole(text), in_pieces(text)
    assert repr(wanted) == repr(found) or (found is HttpError and has_a_name_twice(text))


@pytest.mark.usefixtures("small_pieces")
def test_a_long_member_that_stands_twice_is_refused() -> None:
    """Which one counts would depend on where the text is cut."""
    with pytest.raises(HttpError, match="has a member twice"):
        at_once(read_json(b'{"a": 1, "b": 2, "a": [3, 4, 5, 6, 7, 8, 9]}'))


LARGE = {
    "numbers": b"[" + b",".join([b"1"] * 1_000_000) + b"]",
    "wide numbers": b'{"a":[' + b",".join([b"1000"] * 400_000) + b"]}",
    "strings": b"[" + b",".join([b'","'] * 400_000) + b"]",
    "lists": b"[" + b",".join([b"[1]"] * 49_000) + b"]",
    "members": b"{" + b",".join(b'"%d":{}' % number for number in range(49_000)) + b"}",
    "escapes": b'["' + b'\\"' * 1_000_000 + b'"]',
    "one string": b'{"a":"' + b"a" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("kind", list(LARGE))
def test_no_slice_reads_more_than_a_piece(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bytes that orjson gets in a slice; a string alone is read at once."""
    sizes: list[int] = []
    loads = orjson.loads

    def counted(text: bytes) -> Any:
        sizes[-1] += len(text)
        return loads(text)

    monkeypatch.setattr(orjson, "loads", counted)

    work = read_json(LARGE[kind])
    value = None
    while value is None:
        sizes.append(0)
        value = next_of(work)
    assert loads(LARGE[kind]) == value
    longest = len(LARGE[kind]) if kind in ("escapes", "one string") else PIECE_BYTES
    assert max(sizes) <= longest + 200  # the brackets and marks that make a piece whole
    assert len(sizes) >= len(LARGE[kind]) // longest


def elements(value: Any) -> Iterator[Any]:
    """The elements of a value, itself included."""
    yield value
    for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from elements(each)


@pytest.mark.parametrize("kind", list(LARGE))
def test_no_slice_drops_much(kind: str) -> None:
    """What was read is empty at the end."""
    value = orjson.loads(LARGE[kind])
    containers = [each for each in elements(value) if isinstance(each, list | dict)]
    left = sum(map(len, containers))
    for _ in dropped(value):
        now = sum(map(len, containers))
        assert left - now <= 2 * SLICE_NUMBERS
        left = now
    assert not value


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b",".join([b"[]"] * 49_000) + b"]",
        b"[" + b",".join([b'{"a":1}'] * 49_000) + b"]",
        b"{" + b",".join(b'"%d":[1]' % number for number in range(49_000)) + b"}",
    ],
    ids=["lists", "objects", "members"],
)
def test_containers_count_for_more_than_numbers(text: bytes) -> None:
    """Each takes longer than the numbers in it."""
    value = orjson.loads(text)
    containers = [each for each in elements(value) if isinstance(each, list | dict)]
    assert sum(1 for _ in dropped(value)) >= len(containers) * DROPPED_CONTAINER // SLICE_NUMBERS
    assert not any(containers)


def test_what_a_reader_refuses_is_dropped_in_slices() -> None:
    """A mistake at the end of a long text, too many lists, and a list where an object is wanted."""
    for text in (
        LARGE["wide numbers"][:-1] + b",]",
        b"[[" + b",".join([b"1000"] * 300_000) + b"]" + b",[]" * MOST_CONTAINERS + b"]",
        b"[" + b",".join([b"1000"] * 300_000) + b"]",
    ):
        slices = []
        with pytest.raises(HttpError):
            slices.extend(read_object(text))
        assert len(slices) >= len(text) // PIECE_BYTES + 300_000 // SLICE_NUMBERS


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"[" + b"[]," * MOST_CONTAINERS + b"1]", "lists and objects"),
        (b"[" * 100_000, "lists and objects"),
        (b'{"a":{' + b'"":1,' * MOST_MEMBERS + b'"":1}}', "members"),
        (b" " * MOST_JSON_BYTES + b"1", "bytes of JSON"),
    ],
)
def test_too_much_is_refused_before_it_is_read(text: bytes, word: str) -> None:
    """By the brackets and colons of each piece, and by the length."""
    with pytest.raises(HttpError, match=word) as refused:
        at_once(read_json(text))
    assert 413 == refused.value.status


def test_marks_in_strings_do_not_count() -> None:
    """Brackets, colons and commas of texts, escaped quotes between them."""
    texts = ['[{:,\\"]}' * 1000 for _ in range(100)]
    assert texts == at_once(read_json(json.dumps(texts).encode()))


@pytest.mark.parametrize("seed", range(20))
def test_long_texts_are_read_in_pieces_as_whole(seed: int) -> None:
    """Some MB of random nesting, in pieces of the real size."""
    random.seed(seed)

    def value(depth: int) -> Any:
        match random.randrange(6 if depth < 6 else 3):
            case 0:
                return random.random()
            case 1:
                return "".join(random.choices('ab,:[]{}"\\é€😀\n', k=random.randrange(20)))
            case 2:
                return random.choice([None, True, 2**63, -1])
            case 3 | 4:
                return [value(depth + 1) for _ in range(random.randrange(8))]
            case _:
                return {str(number): value(depth + 1) for number in range(random.randrange(8))}

    text = orjson.dumps([value(0) for _ in range(2000)])[:MOST_JSON_BYTES]
    assert whole(text) == in_pieces(text) or MOST_CONTAINERS < text.count(b"[")

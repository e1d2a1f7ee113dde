"""JSON, read and written by orjson, in slices where it is long.

It refuses what JSON does not have (NaN, numbers beyond f64, lone surrogates) and nesting of more than 1,024 levels. On this
project's reference machine it writes the numbers of an answer 20 times as fast as the standard library, and reads them 2.4
times as fast. Meanwhile the event loop stands still, and a thread would not help: orjson and `array` keep the interpreter.

So a long text is read in pieces. It is cut at commas outside of strings, whatever is open there: each piece is given the
brackets that its beginning lacks and those that its end leaves open, and is a JSON text of its own. What orjson makes of it
continues the lists and objects that the last piece left open (the *spine*). A piece that is no JSON makes the whole text
none, and the other way round: an element that stands in place of the comma, `_BEGIN` or `_END`, keeps a list or an object
that ends or begins just there from being taken for one without the comma.

To drop a million numbers takes as long as to read them. So who has read a long text drops it in slices as well (`dropped`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from shapestream.errors import RequestError
from shapestream.slices import Slices, T
from shapestream.web.messages import Buffer, HttpError

MOST_JSON_BYTES = 2 * 1024 * 1024
"""Bytes of JSON in one request. A string of so many bytes, which is never cut, takes 3 ms."""
MOST_CONTAINERS = 50_000
"""Lists and objects in one request. So many lists of one number take 20 ms."""
MOST_MEMBERS = 50_000
"""Members of all objects in one request. So many members take 15 ms."""
AS_BINARY = "send tensors as binary data"
"""The way to send more than `MOST_JSON_BYTES`, of tensors."""

PIECE_BYTES = 64 * 1024
"""Bytes of JSON that are read in a turn of the event loop: 0.3 to 1.5 ms."""
SLICE_NUMBERS = 32 * 1024
"""Numbers that are made an array, written or dropped in a turn of the event loop: 0.5 to 1.5 ms."""

Container: TypeAlias = list[Any] | dict[str, Any]
_CONTAINERS = frozenset({list, dict})


def read_json(text: Buffer, advice: str = AS_BINARY) -> Slices[Any]:
    """Return the value of a JSON text. Raises `HttpError`: 413 for a text that is too large, 400 for one that is no JSON.

    `advice` says how to send more.
    """
    if len(text) > MOST_JSON_BYTES:
        raise HttpError(413, f"{len(text)} bytes of JSON; at most {MOST_JSON_BYTES} are taken: {advice}")
    try:
        if len(text) <= PIECE_BYTES:  # it has no room for too many lists, objects or members
            return orjson.loads(bytes(text))
        return (yield from _LongText(bytes(text)).read())
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the request is no JSON: {error}") from None


_BEGIN, _END = secrets.token_hex(16), secrets.token_hex(16)
"""Names that no text has, as nobody knows them: of what stands before a piece, and behind it."""
_OPENING = {b"["[0]: b"[", b"{"[0]: b'{"%s":' % _BEGIN.encode()}
_INNERMOST_OPENING = {b"["[0]: b"[0,", b"{"[0]: b'{"%s":0,' % _BEGIN.encode()}
_CLOSING = {b"["[0]: b"]", b"{"[0]: b"}"}
_INNERMOST_CLOSING = {b"["[0]: b',"%s"]' % _END.encode(), b"{"[0]: b',"%s":0}' % _END.encode()}
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRUCTURE = (b"[", b"]", b"{", b"}", b":")
_MOST_TRIES = 8
"""Commas that are tried. In JSON the third one from the end at most is outside of strings."""
_MOST_PAIRINGS = 8
"""Passes that drop empty pairs of brackets, each in C. What they leave, of deep nesting, is walked."""


class _LongText:
    """A text that is read in pieces."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._containers = self._members = 0
        self._value: Any = None
        self._open: list[int] = []
        """The brackets that are open where the next piece begins, the outermost first."""
        self._spine: list[Container] = []
        """The lists and objects that they have opened."""

    def read(self) -> Slices[Any]:
        """Return the value. Raises as `read_json` does, and drops in slices what it has read until then."""
        try:
            begin = 0
            while begin <= len(self._text):
                begin += 1 + self._take(begin, (yield from self._piece(begin)))
                yield
        except (orjson.JSONDecodeError, HttpError):
            yield from dropped(self._value)
            raise
        return self._value

    def _piece(self, begin: int) -> Slices[bytes]:
        """Return the text from `begin` to a comma outside of strings, or to its end, without escapes of one letter."""
        nbytes = PIECE_BYTES
        while begin + nbytes < len(self._text):
            found = _without_escapes(self._text[begin : begin + nbytes])
            if (comma := _last_comma(found)) is not None:
                return found[:comma]
            nbytes *= 2
            yield
        return _without_escapes(self._text[begin:])

    def _take(self, begin: int, piece: bytes) -> int:
        """Read a piece. Return its bytes. Raises orjson's error."""
        end = begin + len(piece)
        closed, opened = self._count(piece)
        kept = max(0, len(self._open) - closed)
        still_open = [*self._open[:kept], *opened]
        before = b"".join([_OPENING[kind] for kind in self._open[:-1]])
        before += b"".join([_INNERMOST_OPENING[kind] for kind in self._open[-1:]])
        behind = b""
        if end < len(self._text):
            behind = b"".join([_INNERMOST_CLOSING[kind] for kind in still_open[-1:]]) or b","
            behind += b"".join([_CLOSING[kind] for kind in still_open[-2::-1]])
        try:
            value = orjson.loads(b"".join((before, self._text[begin:end], behind)))
        except orjson.JSONDecodeError as error:
            place = begin + min(max(0, error.pos - len(before)), len(piece))
            raise HttpError(400, f"the request is no JSON: {error.msg}, near its byte {place}") from None
        if self._open:
            _continue(self._spine, value)
        else:
            self._value = value
        self._open = still_open
        if still_open:
            self._spine = _spine(self._value, self._spine[:kept], still_open)
        return len(piece)

    def _count(self, piece: bytes) -> tuple[int, list[int]]:
        """Return the number of brackets that a piece closes and has not opened, and those that it leaves open.

        Raises `HttpError` 413 for too many lists, objects and members, those in strings not counted.
        """
        if not any(mark in piece for mark in _STRUCTURE):
            return 0, []
        outside = b"".join(piece.split(b'"')[::2])
        brackets = outside.translate(None, _NO_BRACKETS)
        self._containers += brackets.count(b"[") + brackets.count(b"{")
        self._members += outside.count(b":")
        if self._containers > MOST_CONTAINERS:
            raise HttpError(
                413,
                f"the JSON has more than {MOST_CONTAINERS} lists and objects: send the data as flat lists",
            )
        if self._members > MOST_MEMBERS:
            raise HttpError(413, f"the JSON has more than {MOST_MEMBERS} members of objects")
        for _ in range(_MOST_PAIRINGS):
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        closed, opened = 0, []
        for bracket in brackets:
            if bracket in _OPENING:
                opened.append(bracket)
            elif opened:
                opened.pop()  # orjson sees whether they fit
            else:
                closed += 1
        return closed, opened


def _without_escapes(text: bytes) -> bytes:
    r"""Return a text, which begins outside of a string, with letters in place of \\ and \"."""
    return text.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in text else text


def _last_comma(text: bytes) -> int | None:
    """Return the place of the last comma outside of strings, or None where it is not found soon."""
    end = len(text)
    for _ in range(_MOST_TRIES):
        comma = text.rfind(b",", 0, end)
        if comma < 0:
            return None
        if text.count(b'"', 0, comma) % 2 == 0:
            return comma
        end = text.rfind(b'"', 0, comma)
    return None


def _continue(spine: Sequence[Container], value: Any) -> None:
    """Add to the lists and objects of the spine what a piece has of each."""
    for own in spine:
        if isinstance(own, list):
            inner = value[0]
            del value[0]
            own += value
        else:
            inner = value.pop(_BEGIN)
            own.update(value)
        value = inner


def _spine(value: Any, kept: list[Container], still_open: Sequence[int]) -> list[Container]:
    """Return the lists and objects that are open, without the mark at the innermost one's end.

    `kept` are the outermost of them, those that were open before. Raises `HttpError` 400 where an object has the open member
    twice: its place is that of the first.
    """
    spine = [*kept]
    try:
        while len(spine) < len(still_open):
            if spine:
                own = spine[-1]
                value = own[-1] if isinstance(own, list) else next(reversed(own.values()))
            spine.append(value)
        own = spine[-1]
        mark = own.pop() if isinstance(own, list) else own.pop(_END) or _END
    except (LookupError, AttributeError, StopIteration):
        mark = None
    if mark != _END:
        raise HttpError(400, "an object of the request has a member twice")
    return spine


DROPPED_CONTAINER = 8
"""Numbers of a list that are dropped in the time in which a list or object, or a member of one, is looked at."""


def dropped(value: Any) -> Slices[None]:
    """Empty a value of lists and objects in slices: to drop a million numbers at once takes 7 ms.

    What stands in its lists and objects elsewhere, as an array made of it, stays.
    """
    waiting = [value]
    taken = 0
    while waiting:
        own = waiting[-1]
        taken += DROPPED_CONTAINER
        if isinstance(own, list) and own:
            part = own[-SLICE_NUMBERS // 2 :]
            del own[-SLICE_NUMBERS // 2 :]
        elif isinstance(own, dict) and own:
            part = [own.popitem()[1] for _ in range(min(len(own), SLICE_NUMBERS // (2 * DROPPED_CONTAINER)))]
            taken += len(part) * DROPPED_CONTAINER
        else:
            waiting.pop()
            part = []
        if not _CONTAINERS.isdisjoint(map(type, part)):
            waiting += [each for each in part if type(each) in _CONTAINERS]
        taken += len(part)
        del part
        if taken >= SLICE_NUMBERS // 2:
            taken = 0
            yield


def dropped_after(nbytes: int, content: Any, work: Slices[T]) -> Slices[T]:
    """Return the result of work that reads the value of a text of so many bytes.

    The value of a long one is dropped in slices afterwards, also where the work fails.
    """
    if nbytes <= PIECE_BYTES:
        return (yield from work)
    try:
        result = yield from work
    except (HttpError, RequestError):
        yield from dropped(content)
        raise
    yield from dropped(content)
    return result


def read_object(text: Buffer, advice: str = AS_BINARY) -> Slices[dict[str, Any]]:
    """Return the object of a JSON text. Raises `HttpError` as `read_json` does, and where it is no object."""
    value = yield from read_json(text, advice)
    if not isinstance(value, dict):
        yield from dropped(value)
        raise HttpError(400, f"the request is a JSON object, not {type_name(value)}")
    return value


def write_json(value: Any) -> bytes:
    """Return the text of a value of plain data and contiguous arrays. NaN and infinities become null."""
    text: bytes = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return text


def joined_lists(lists: Sequence[bytes]) -> list[bytes]:
    """Return the pieces of the elements of these lists, which are texts and not empty, for one list.

    They stay apart: to join the numbers of a long answer would take as long as to write them.
    """
    pieces: list[bytes] = []
    for text in lists:
        pieces += (text[1:-1], b",")
    return pieces[:-1]


def flat_numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements of an array as `write_json` takes them: one axis, aligned, of a type that it knows."""
    if array.dtype.kind == "V":
        array = array.astype(np.float32)  # bf16; f32 holds all its values
    return np.require(array.reshape(-1), requirements=["C", "A"])


def type_name(value: Any) -> str:
    """Return the name of a JSON value's type, for messages."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}

"""The texts of a request that embeds or tokenises them, as OpenAI's and text-embeddings-inference's bodies have them, and
the vectors of its answer.

A client that has tokenised a text itself sends the numbers of its tokens instead. A list has texts or tokens, not both.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shapestream.gateway.errors import EmptyList, UnusableVectors, WrongField
from shapestream.gateway.json_text import SLICE_NUMBERS, dropped_after, read_object, type_name, write_json
from shapestream.slices import Slices
from shapestream.web.messages import Buffer
from shapestream.wire.limits import MAX_INTEGER
from shapestream_engine.layout import value

T = TypeVar("T")

MOST_TEXTS = 2048
"""Texts of one request, at most, as at OpenAI."""
FEWER_TEXTS = "send fewer texts at once"
"""The way to send more than one request may have."""


@value
class Texts:
    """Texts, in their order."""

    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)


@value
class TokenLists:
    """The tokens of each text."""

    lists: Sequence[npt.NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.lists)


def read_texts(field: str, content: Any) -> Slices[Texts | TokenLists]:
    """Return what a field of a body has: a text, a list of texts, the tokens of one text, or a list of such lists.

    Raises `WrongField`. An empty text is a text.
    """
    if isinstance(content, str):
        return Texts(texts=(content,))
    if not isinstance(content, list):
        raise _wrong(field, f"not {type_name(content)}")
    if not content:
        raise EmptyList(field, f'"{field}" is an empty list: send at least one text')
    if len(content) > MOST_TEXTS and type(content[0]) is not int:
        raise WrongField(field, f'"{field}" has {len(content)} entries; at most {MOST_TEXTS} are taken')
    kinds = set(map(type, content[:MOST_TEXTS]))
    if kinds == {int}:
        return TokenLists(lists=((yield from _tokens(field, content)),))
    if kinds == {str}:
        return Texts(texts=tuple(content))
    if kinds == {list}:
        lists = []
        tokens_of_slice = 0
        for tokens in content:
            lists.append((yield from _tokens(field, tokens)))
            tokens_of_slice += len(tokens)
            if tokens_of_slice > SLICE_NUMBERS:
                tokens_of_slice = 0
                yield
        return TokenLists(lists=lists)
    if len(kinds) > 1:
        raise _wrong(field, "not several of these in one list")
    raise _wrong(field, f"not a list of which an entry is {type_name(content[0])}")


def _tokens(field: str, tokens: list[Any]) -> Slices[npt.NDArray[np.int64]]:
    if not tokens:
        raise WrongField(field, f'"{field}" has a list without tokens')
    numbers = np.empty(len(tokens), np.int64)
    for begin in range(0, len(tokens), SLICE_NUMBERS):
        if begin:
            yield
        some = tokens[begin : begin + SLICE_NUMBERS]
        if set(map(type, some)) != {int}:
            raise _wrong(field, "not a list of lists of other things")
        try:
            numbers[begin : begin + len(some)] = array("q", some)
        except OverflowError:
            numbers[begin] = -1
    if numbers.min() < 0:
        raise WrongField(field, f'"{field}": the number of a token is from 0 to {MAX_INTEGER}')
    return numbers


def _wrong(field: str, but: str) -> WrongField:
    return WrongField(
        field, f'"{field}" is a text, a list of texts, the tokens of a text or a list of such lists, {but}'
    )


def read_flag(content: dict[str, Any], field: str) -> bool | None:
    """Return a field that is true, false, or absent (None). Raises `WrongField`."""
    flag = content.get(field)
    if flag is not None and not isinstance(flag, bool):
        raise WrongField(field, f'"{field}" is true or false, not {type_name(flag)}')
    return flag


def read_dimensions(content: dict[str, Any]) -> int | None:
    """Return the field `dimensions`, the wished size of vectors, or None. Raises `WrongField`."""
    wish = content.get("dimensions")
    if wish is not None and (type(wish) is not int or wish < 1):
        raise WrongField("dimensions", '"dimensions" is an integer from 1 on')
    return wish


Matrix = npt.NDArray[np.float32]
"""Vectors, a row for each text, contiguous and aligned."""
SMALLEST_LENGTH = 1e-12
"""The length that a vector of zeros is divided by, as PyTorch's `normalize` has it: it stays zeros."""


@value
class VectorForm:
    """The form in which a caller wants its vectors."""

    dimensions: int | None = None
    """The first numbers of each vector, made a vector of length 1, also if they are all. None: as the model gives them."""
    normalize: bool = False
    """True if vectors are made to have length 1."""


def matrix_of(output: npt.NDArray[Any] | list[npt.NDArray[Any]], texts: int) -> Matrix:
    """Return the vectors of so many texts. Raises `UnusableVectors` where the output is not a vector for each."""
    if isinstance(output, list):
        # A stage that had one request for each text may give its row as [1, size].
        rows = [each.reshape(-1) if each.ndim and each.size == each.shape[-1] else each for each in output]
        if len({each.shape for each in rows}) > 1:
            raise UnusableVectors("the model gave vectors of different sizes")
        output = np.stack(rows) if rows else np.empty((0, 0), np.float32)
    if output.ndim != 2 or len(output) != texts:
        raise UnusableVectors(f"the model gave [{', '.join(map(str, output.shape))}] for {texts} texts")
    return np.require(output.astype(np.float32, copy=False), requirements=["C", "A"])


def check_dimensions(form: VectorForm, size: int) -> None:
    """Raise `WrongField` where a caller wants more numbers than the model's vectors have."""
    if form.dimensions is not None and form.dimensions > size:
        raise WrongField(
            "dimensions", f'"dimensions" is {form.dimensions}; the model\'s vectors have {size} numbers'
        )


def vector_slices(matrix: Matrix, form: VectorForm) -> Iterator[tuple[int, Matrix]]:
    """Yield the vectors in the form that is wanted, some rows at a time, with the number of the first.

    Raises `UnusableVectors` where a number is NaN or infinite: nobody can use such a vector, and JSON has no word for it.
    """
    rows = max(1, SLICE_NUMBERS // max(1, matrix.shape[1]))
    for begin in range(0, len(matrix), rows):
        part = matrix[begin : begin + rows]
        finite = np.isfinite(part).all(axis=1)
        if not finite.all():
            raise UnusableVectors(f"the model gave NaN or infinity for text {begin + int(finite.argmin())}")
        yield begin, _in_form(part, form)


def reads_object(read: Callable[[dict[str, Any]], Slices[T]]) -> Callable[[Buffer], Slices[T]]:
    """Make a reader of a body of one that reads its JSON object. It also raises `HttpError` for a body that is none."""

    @wraps(read)
    def of_body(body: Buffer) -> Slices[T]:
        content = yield from read_object(body, FEWER_TEXTS)
        return (yield from dropped_after(len(body), content, read(content)))

    return of_body


def written_rows(
    matrix: Matrix, form: VectorForm, plain: Callable[[int, Matrix], Any]
) -> Slices[list[Buffer]]:
    """Return the vectors as the elements of a JSON list, written in slices: `plain` makes data of some, from a number on."""
    pieces: list[Buffer] = []
    for begin, part in vector_slices(matrix, form):
        if begin:
            pieces.append(b",")
            yield
        pieces.append(write_json(plain(begin, part))[1:-1])
    return pieces


def _in_form(part: Matrix, form: VectorForm) -> Matrix:
    if form.dimensions is not None:
        part = part[:, : form.dimensions]
    if form.dimensions is not None or form.normalize:
        lengths = np.linalg.norm(part, axis=1, keepdims=True)
        part = part / np.maximum(lengths, np.float32(SMALLEST_LENGTH))
    return np.ascontiguousarray(part)

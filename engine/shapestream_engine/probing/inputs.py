"""Inputs of a proof's requests: realistic values, drawn or read, and extreme values.

Values are ranges, distributions or samples. Inputs without a description get defaults by element type. Samples come from
an .npz with arrays named like the inputs: `ids`, or several per input, `ids.0`, `ids.1`. All drawn values depend on a seed
only, so a proof can be repeated.

Texts are words of ASCII and of other scripts, of exactly the bytes asked for. Bytes are the same texts, and every second
element is noise. Texts that the user gave are taken as they are, except where a measurement needs texts of other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias
from zipfile import BadZipFile, ZipInfo

import numpy as np

from shapestream_engine.arrays import sent_array
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import SignatureError
from shapestream_engine.files import open_regular
from shapestream_engine.layout import Tensors
from shapestream_engine.machine import memory_bytes
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

Extreme: TypeAlias = Literal["smallest", "largest", "huge", "not a number"]

_BLOCK = 8
"""Elements per block, along each of the last two axes of a blocky picture."""
_SPREAD = 3
"""Usual number of requests: they take samples from the beginning, the middle and the end."""
_FAR = 4.0
"""Standard deviations from the mean to an extreme value."""
_HUGE = {"f16": 1e4}
"""Extreme value per float type, by default 1e6; f16 holds no such number."""


# ---------------------------------------------------------------- texts

_WORDS = (
    "the",
    "of",
    "a",
    "in",
    "model",
    "Paris",
    "2024",
    "\n",
    "it's",
    "naïve",
    "Ωmega",
    "日本語",
    "\U0001f600",
)
_MOST_WORDS = 64
"""Words of one text; a longer text repeats them."""
_ENDS = {
    "str": {"smallest": b"\0", "largest": "\U0010ffff".encode()},
    "bytes": {"smallest": b"\0", "largest": b"\xff"},
}
"""Texts of one character: the first and the last of all."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Strings of one element type, of words, each of at most so many bytes."""

    element_type: str
    at_most_bytes: int

    def draw(self, shape: Sequence[int], random: np.random.Generator) -> Array:
        """Draw independent strings; `shape` has the bytes of all together last."""
        lengths = _lengths(prod(shape[:-1]), shape[-1], self.at_most_bytes, random)
        return _objects([self._drawn(number, length, random) for number, length in enumerate(lengths)], shape)

    def _drawn(self, number: int, length: int, random: np.random.Generator) -> Any:
        if self.element_type == "bytes" and number % 2:
            return random.bytes(length)
        count = min(_MOST_WORDS, length // 2 + 1)
        words = " ".join(_WORDS[word] for word in random.integers(len(_WORDS), size=count))
        return _of_length(self.element_type, words.encode(), length)

    def __str__(self) -> str:
        return "words" if self.element_type == "str" else "words and noise"


def extreme_texts(element_type: str, kind: str, shape: Sequence[int]) -> Array:
    """Return strings that repeat the first or the last character; `shape` has the bytes of all together last."""
    ends = _ENDS[element_type]
    lengths = _even(prod(shape[:-1]), shape[-1])
    return _objects(
        [_of_length(element_type, ends.get(kind, ends["largest"]), each) for each in lengths], shape
    )


def has_extreme(kind: str) -> bool:
    """Tell whether strings have this kind of extreme value."""
    return kind in _ENDS["str"]


def given_texts(element_type: str, given: Array, nbytes: int | None) -> Array:
    """Return a sample's strings as objects; with `nbytes`, repeated or cut so that they have so many bytes in all."""
    own = given.astype(object)
    encoded = [each.encode() if isinstance(each, str) else bytes(each) for each in own.ravel().tolist()]
    lengths = list(map(len, encoded)) if nbytes is None else _even(len(encoded), nbytes)
    strings = [_of_length(element_type, each, length) for each, length in zip(encoded, lengths, strict=True)]
    return _objects(strings, (*own.shape, 0))


def _objects(strings: Sequence[Any], shape: Sequence[int]) -> Array:
    array = np.empty(len(strings), object)
    array[:] = strings
    return array.reshape(tuple(shape[:-1]))


def _even(count: int, total: int) -> list[int]:
    """Return lengths that are equal, or differ by 1."""
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _lengths(count: int, total: int, most: int, random: np.random.Generator) -> list[int]:
    """Return different lengths of this sum, up to half as long again as their mean."""
    lengths = np.array(_even(count, total), np.int64)
    order = random.permutation(count)
    longer, shorter = order[: count // 2], order[count // 2 : count // 2 * 2]
    room = np.minimum(lengths[shorter] // 2, np.maximum(most - lengths[longer], 0))
    moved = random.integers(0, room, endpoint=True)
    lengths[longer] += moved
    lengths[shorter] -= moved
    return lengths.tolist()  # type: ignore[no-any-return]  # of integers


def _of_length(element_type: str, text: bytes, length: int) -> Any:
    """Return a text of this length, repeated or cut; where a character would be cut, `x` takes its place."""
    repeated = (text or b"x") * (length // max(1, len(text)) + 1)
    if element_type == "bytes":
        return repeated[:length]
    whole = repeated[:length].decode(errors="ignore")
    return whole + "x" * (length - len(whole.encode()))


# ---------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class _Bounded:
    is_whole: ClassVar[bool] = False
    """True if all values are whole numbers."""
    low: float
    high: float

    def range(self) -> tuple[float, float]:
        """Return the smallest and the largest ordinary value."""
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class Uniform(_Bounded):
    """Numbers between `low` and `high`, equally distributed."""

    def draw(self, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        """Draw independent elements."""
        return random.uniform(self.low, self.high, shape)

    def __str__(self) -> str:
        return f"uniform {self.low:g}..{self.high:g}"


@dataclass(frozen=True, slots=True)
class Integers(_Bounded):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    is_whole: ClassVar[bool] = True

    def draw(self, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        """Draw independent elements."""
        return random.integers(self.low, self.high, shape, endpoint=True)

    def __str__(self) -> str:
        return f"integers {self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class Normal:
    """Numbers with a normal distribution."""

    mean: float
    std: float

    is_whole: ClassVar[bool] = False

    def draw(self, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        """Draw independent elements."""
        return random.normal(self.mean, self.std, shape)

    def range(self) -> tuple[float, float]:
        """Return the smallest and the largest ordinary value."""
        return self.mean - _FAR * self.std, self.mean + _FAR * self.std

    def __str__(self) -> str:
        return f"normal {self.mean:g} +- {self.std:g}"


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Real inputs of one row each; they are cut or repeated to the shape that is needed."""

    rows: tuple[Array, ...]
    batch_axis: int | None

    @property
    def is_whole(self) -> bool:
        """Tell whether all values are whole numbers."""
        return all(bool((row == np.rint(row)).all()) for row in self.rows)

    def cut(self, shape: tuple[int, ...], number: int) -> Array:
        """Return the rows spread over all samples; equal numbers take rows that belong together, in every input."""
        first = number * max(1, len(self.rows) // _SPREAD)
        count = 1 if self.batch_axis is None else shape[self.batch_axis]
        drawn = [
            _fitted(self.rows[(first + row) % len(self.rows)], shape, self.batch_axis) for row in range(count)
        ]
        if self.batch_axis is None:
            return drawn[0]
        return np.concatenate(drawn, self.batch_axis) if drawn else np.zeros(shape, self.rows[0].dtype)

    def range(self) -> tuple[float, float]:
        """Return the smallest and the largest ordinary value."""
        return float(min(row.min() for row in self.rows)), float(max(row.max() for row in self.rows))

    def __str__(self) -> str:
        return f"{len(self.rows)} sample{'s' if len(self.rows) != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers of an input that requests have in common; each is tried by itself."""

    numbers: tuple[float, ...]

    @property
    def is_whole(self) -> bool:
        """Tell whether all values are whole numbers."""
        return all(number == int(number) for number in self.numbers)

    def draw(self, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        """Draw one for all elements."""
        return np.full(shape, random.choice(self.numbers))

    def range(self) -> tuple[float, float]:
        """Return the smallest and the largest of them."""
        return min(self.numbers), max(self.numbers)

    def __str__(self) -> str:
        return f"one of {', '.join(f'{number:g}' for number in self.numbers)}"


Values: TypeAlias = Integers | Uniform | Normal | Samples | Texts | Constants

COMMON_VALUES = (1, 0, 2, 10, 100, 1000, 8000, 16000)
"""Numbers of an input that requests have in common and nobody described: switches, counts and rates, the likely first."""


def default_values(signature: ModelSignature, port: InputPort) -> tuple[Values, ...]:
    """Return default values of an input without a description, the most likely first."""
    if port.value is not None:
        return (Constants((port.value,)),)
    if signature.is_common(port):
        # A model may refuse what is no rate: so the last of them comes first, at the second try.
        return (Constants(COMMON_VALUES), Constants(COMMON_VALUES[::-1]))
    if port.at_most_bytes is not None:
        return (Texts(port.element_type, port.at_most_bytes),)
    match port.element_type:
        case "boolean":
            return (Integers(0, 1),)
        case "u8":
            return (Integers(0, 255),)
        case "i8":
            return (Integers(-128, 127), Integers(0, 1))
        case "f16" | "bf16" | "f32" | "f64":
            return (Normal(0.0, 1.0), Uniform(0.0, 1.0), Uniform(0.0, 255.0))
        case _:
            # Most are indices: every table has the small ones.
            return (Integers(0, 1), Integers(0, 99))


def complete_values(signature: ModelSignature, given: Mapping[str, Values]) -> dict[str, Values]:
    """Return the values of every input; inputs without given values get the first default of their element type."""
    return {
        port.name: given.get(port.name) or default_values(signature, port)[0] for port in signature.inputs
    }


def drawn(
    values: Values, element_type: str, shape: tuple[int, ...], random: np.random.Generator, *, number: int
) -> Array:
    """Draw an input of numbers. Every second picture is blocky, because many models see nothing in noise."""
    assert not isinstance(values, Texts)  # they are drawn for inputs of strings only
    dtype = dtype_of(element_type)
    if isinstance(values, Samples):
        return values.cut(shape, number).astype(dtype)
    is_picture = len(shape) >= 3 and (dtype.kind not in "iub" or element_type == "u8")
    if number % 2 == 0 or not is_picture:
        return held(values.draw(shape, random), dtype)
    coarse = (*shape[:-2], -(-shape[-2] // _BLOCK), -(-shape[-1] // _BLOCK))
    blocks = values.draw(coarse, random).repeat(_BLOCK, -2).repeat(_BLOCK, -1)
    return held(blocks[..., : shape[-2], : shape[-1]], dtype)


def drawn_texts(
    port: InputPort,
    values: Values,
    shape: tuple[int, ...],
    random: np.random.Generator,
    *,
    number: int,
    exact: bool = False,
) -> Array:
    """Draw an input of strings; `shape` has the bytes of all together last. Samples have them only if `exact`.

    Raises `SignatureError` for values that are numbers.
    """
    if isinstance(values, Samples):
        return given_texts(port.element_type, values.cut(shape[:-1], number), shape[-1] if exact else None)
    if not isinstance(values, Texts):
        raise SignatureError(
            f"input {port.name!r} is {port.element_type}, and its values are {values}; give samples, or leave them out"
        )
    return values.draw(shape, random)


def extremes(values: Values, element_type: str) -> Iterator[tuple[Extreme, float]]:
    """Yield extreme values for a whole input of numbers; only floats go beyond their range."""
    assert not isinstance(values, Texts)
    low, high = values.range()
    yield "smallest", low
    yield "largest", high
    if dtype_of(element_type).kind not in "iub":
        yield "huge", _HUGE.get(element_type, 1e6)
        yield "not a number", float("nan")


def filled(value: float, element_type: str, shape: tuple[int, ...]) -> Array:
    """Return an input in which every element is `value`."""
    return held(np.full(shape, value), dtype_of(element_type))


def _fitted(row: Array, shape: tuple[int, ...], batch_axis: int | None) -> Array:
    if row.ndim != len(shape):
        raise SignatureError(f"a sample has {row.ndim} axes, {list(row.shape)}; the input has {len(shape)}")
    for axis, size in enumerate(shape):
        if axis != batch_axis and row.shape[axis] != size:
            row = row.take(range(size), axis, mode="wrap")
    return row


def held(array: Array, dtype: np.dtype[Any]) -> Array:
    """Convert the array to the element type; values beyond its range are clipped."""
    if dtype.kind == "b":
        return np.not_equal(array, 0)
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return np.asarray(array.astype(dtype))
    limits = np.iinfo(dtype)
    if array.dtype.kind == "f":
        whole = np.nan_to_num(np.rint(array))
        # The limits of 64-bit types, as floats, lie outside the types.
        least, most = np.nextafter(float(limits.min), 0), np.nextafter(float(limits.max), 0)
        held: Array = np.asarray(np.clip(whole, least, most)).astype(dtype)
        held[whole <= limits.min], held[whole >= limits.max] = limits.min, limits.max
        return held
    return np.asarray(np.clip(array, limits.min, limits.max).astype(dtype))


def read_samples(
    path: Path, batch_axes: Mapping[str, int | None], *, only: str | None = None
) -> dict[str, Samples]:
    """Return the samples of all inputs, or of the input `only`. Each array is a request; each of its rows is a sample.

    `batch_axes` has the batch axis of each input. Raises `SignatureError` for unusable files and names.
    """
    rows: dict[str, list[Array]] = {}
    for name, array in _arrays(path):
        port = _port_of(name, batch_axes)
        if port is None:
            first = next(iter(batch_axes), "x")
            known = ", ".join(batch_axes)
            raise SignatureError(
                f"{path}: {name!r} is no input (name arrays {known}; several {first}.0, {first}.1)"
            )
        if only not in (None, port):
            continue
        axis = batch_axes[port]
        if array.size == 0 or (axis is not None and axis >= array.ndim):
            raise SignatureError(f"{path}: {name!r} has the shape {list(array.shape)}, which has no rows")
        own = [array] if axis is None else np.split(array, array.shape[axis], axis)
        rows.setdefault(port, []).extend(own)
    if only is not None and only not in rows:
        raise SignatureError(f"{path}: there is no array {only!r}, nor {only}.0 and so on")
    return {port: Samples(tuple(own), batch_axes[port]) for port, own in rows.items()}


def _arrays(path: Path) -> list[tuple[str, Array]]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            _check_size(archive.zip.infolist())
            return [(name, archive[name]) for name in sorted(archive.files, key=_in_order)]
    except (OSError, ValueError, EOFError, BadZipFile, AttributeError, MemoryError) as error:
        raise SignatureError(f"cannot read samples from {path}: {error}") from error


def _check_size(members: Iterable[ZipInfo]) -> None:
    """Raise `ValueError` for an archive that would not fit in memory unpacked."""
    unpacked, most = sum(member.file_size for member in members), memory_bytes()
    if unpacked > most:
        raise ValueError(f"{unpacked} bytes unpacked, and this machine's memory has {most}")


def _in_order(name: str) -> tuple[str, int]:
    port, _, number = name.rpartition(".")
    return (port, int(number)) if number.isdigit() else (name, 0)


def _port_of(name: str, known: Mapping[str, int | None]) -> str | None:
    if name in known:
        return name
    port, _, number = name.rpartition(".")
    return port if number.isdigit() and port in known else None


def make_request(
    signature: ModelSignature,
    values: Mapping[str, Values],
    sizes: tuple[int, ...],
    *,
    number: int = 0,
    seed: int = 0,
    exact: bool = False,
    variant: int = 0,
) -> Tensors:
    """Make a request of these sizes. Every second request lacks the masks that the server can make.

    Only requests of the same `variant` have equal common inputs, and share calls.
    Texts of samples keep their lengths, whatever the sizes say, unless `exact`.
    """
    random = np.random.default_rng([seed, number, *sizes])

    def array(port: InputPort, shape: tuple[int, ...]) -> Array | None:
        if is_alike(signature, port):
            return alike_array(port, values[port.name], variant)
        if port.is_string:
            return drawn_texts(port, values[port.name], shape, random, number=number, exact=exact)
        if port.mask_of is None:
            return drawn(values[port.name], port.element_type, shape, random, number=number)
        return None if number % 2 == 0 else filled(1, port.element_type, shape)

    return request_of(signature, sizes, array)


def extreme_request(
    signature: ModelSignature,
    values: Mapping[str, Values],
    sizes: tuple[int, ...],
    kind: Extreme,
    *,
    variant: int = 0,
) -> Tensors | None:
    """Make a request whose inputs all have one extreme value; None if no input has such a value."""
    known: dict[str, dict[Extreme, float]] = {
        port.name: dict(extremes(values[port.name], port.element_type))
        for port in signature.inputs
        if port.mask_of is None and not port.is_string and not is_alike(signature, port)
    }
    has_texts = has_extreme(kind) and any(port.is_string for port in signature.inputs)
    if not has_texts and not any(kind in each for each in known.values()):
        return None

    def array(port: InputPort, shape: tuple[int, ...]) -> Array | None:
        if is_alike(signature, port):
            return alike_array(port, values[port.name], variant)
        if port.is_string:
            return extreme_texts(port.element_type, kind, shape)
        own = known.get(port.name)
        return None if own is None else filled(own.get(kind, own["largest"]), port.element_type, shape)

    return request_of(signature, sizes, array)


def is_alike(signature: ModelSignature, port: InputPort) -> bool:
    """Tell whether the requests of a call have equal bytes of this input."""
    return port.value is not None or signature.is_common(port)


def alike_array(port: InputPort, values: Values, variant: int) -> Array:
    """Return an input that the requests of a call have alike; every `variant` may be another one."""
    shape = tuple(dimension.minimum for dimension in port.shape.dimensions)
    if port.value is not None:
        return filled(port.value, port.element_type, shape)
    if isinstance(values, Samples):
        return _fitted(values.rows[variant % len(values.rows)], shape, None).astype(
            dtype_of(port.element_type)
        )
    if isinstance(values, Constants):
        return filled(values.numbers[variant % len(values.numbers)], port.element_type, shape)
    return drawn(values, port.element_type, shape, np.random.default_rng(variant), number=0)


def request_of(
    signature: ModelSignature,
    sizes: tuple[int, ...],
    make: Callable[[InputPort, tuple[int, ...]], Array | None],
) -> Tensors:
    """Make a request of the arrays that `make` returns for each input and its shape; None leaves a mask out.

    The shape of strings ends with the bytes of all.
    """
    layout, buffers = [], []
    for number, (port, shape) in enumerate(zip(signature.inputs, signature.sent_shapes(sizes), strict=True)):
        if (array := make(port, shape)) is not None:
            own, buffer = sent_array(port.element_type, array)
            layout.append((number, port.element_type, own))
            buffers.append(buffer)
    return Tensors(layout=tuple(layout), buffers=buffers)

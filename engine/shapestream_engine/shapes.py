"""Shapes with open sizes: an interval per axis, and a name where sizes must be equal.

The syntax is OpenVINO's (`?`, `-1`, `8`, `1..10`, `..512`, `8..`) or XLA's bound (`<=25`); shapes are printed as OpenVINO
prints them. A *static* dimension admits one size, a *dynamic* dimension several.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shapestream_engine.errors import ShapeError

BATCH = "batch"
"""The name of the axis along which requests share calls."""
MAX_SIZE = 2**63 - 1
"""The largest size of an axis, and of a tensor in bytes: the largest signed 64-bit integer."""

# Digits are limited, because converting a long number takes quadratic time.
_NUMBER = r"[0-9]{1,40}"
_EXACT = re.compile(_NUMBER)
_INTERVAL = re.compile(rf"(?P<low>{_NUMBER})?\s*\.\.\s*(?P<high>{_NUMBER})?")
_AT_MOST = re.compile(rf"<=\s*(?P<high>{_NUMBER})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exact_nbytes(item_nbytes: int, shape: Sequence[int]) -> int:
    """Return the exact size in bytes of a tensor of this shape; Python's integers do not overflow.

    Raises `ShapeError` if the product of the nonzero sizes exceeds `MAX_SIZE`: array libraries refuse such a shape even if
    another size is 0.
    """
    extent = math.prod([size or 1 for size in shape], start=item_nbytes)
    if extent > MAX_SIZE:
        raise ShapeError(f"a tensor of this shape needs more than {MAX_SIZE} bytes")
    return 0 if 0 in shape else extent


DimensionLike: TypeAlias = "Dimension | int | str | tuple[int | None, int | None] | list[int | None]"

ShapeLike: TypeAlias = "str | PartialShape | NamedShape | Iterable[DimensionLike]"
"""A shape in any form: `"1, ?"`, `[1, -1]`, `[(1, 10), "8.."]`, `"batch:1..64, 384"`."""


def checked_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape as Python integers, which do not overflow; NumPy integers are accepted.

    Raises `ShapeError` for an invalid size.
    """
    sizes = []
    for given in shape:
        size = _integer(given)
        if not 0 <= size <= MAX_SIZE:
            raise ShapeError(f"a size lies within 0..{MAX_SIZE}")
        sizes.append(size)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Dimension:
    """The sizes that one axis may take: `minimum` to `maximum`, both included; None is no upper limit.

        Dimension.parse("1..64") == Dimension(1, 64)

    Raises `ShapeError` unless 0 <= minimum <= maximum < 2**63, all integers and no bool.
    """

    minimum: int = 0
    maximum: int | None = None

    def __post_init__(self) -> None:
        for size in (self.minimum,) if self.maximum is None else (self.minimum, self.maximum):
            if type(size) is not int:
                raise ShapeError(f"a size is an integer, not {size!r}")
            if not 0 <= size <= MAX_SIZE:
                # The number is left out, because Python refuses to print integers of thousands of digits.
                raise ShapeError(
                    f"a size lies within 0..{MAX_SIZE}; this one is {'negative' if size < 0 else 'too large'}"
                )
        if self.maximum is not None and self.maximum < self.minimum:
            raise ShapeError(f"no size is at least {self.minimum} and at most {self.maximum}")

    @classmethod
    def parse(cls, value: DimensionLike) -> Dimension:
        """Parse a dimension: a string in the module's syntax, a size (-1: any), or a pair of bounds.

        In a pair, None or -1 is no upper limit. Raises `ShapeError`.
        """
        match value:
            case Dimension():
                return value
            case str():
                return cls._parse_text(value.strip())
            case (low, high):
                return cls(0 if low is None else _integer(low), _upper(high))
            case _:
                size = _integer(value)
                return cls() if size == -1 else cls(size, size)

    @classmethod
    def _parse_text(cls, text: str) -> Dimension:
        if text in ("?", "-1"):
            return cls()
        if _EXACT.fullmatch(text):
            return cls(int(text), int(text))
        match = _INTERVAL.fullmatch(text) or _AT_MOST.fullmatch(text)
        if match is None or text == "..":
            raise ShapeError(f"{text!r} is not a dimension; write ?, -1, 8, 1..10, ..512, 8.. or <=25")
        groups = match.groupdict()
        return cls(int(groups.get("low") or 0), _upper(groups["high"] and int(groups["high"])))

    @property
    def is_static(self) -> bool:
        """Tell whether exactly one size is admitted."""
        return self.minimum == self.maximum

    @property
    def is_dynamic(self) -> bool:
        """Tell whether more than one size is admitted."""
        return self.minimum != self.maximum

    def __contains__(self, size: object) -> bool:
        if type(size) is not int:
            return False
        return self.minimum <= size <= (MAX_SIZE if self.maximum is None else self.maximum)

    def intersection(self, other: Dimension) -> Dimension:
        """Return the sizes that both dimensions admit; raises `ShapeError` if there are none."""
        uppers = [dimension.maximum for dimension in (self, other) if dimension.maximum is not None]
        low, high = max(self.minimum, other.minimum), min(uppers, default=None)
        if high is not None and high < low:
            raise ShapeError(f"no size is both {self} and {other}")
        return Dimension(low, high)

    def __str__(self) -> str:
        if self.maximum is None:
            return f"{self.minimum}.." if self.minimum else "?"
        if self.is_static:
            return str(self.minimum)
        return f"{self.minimum or ''}..{self.maximum}"


class _Axes:
    """Base of the shapes: what follows from a dimension per axis."""

    __slots__ = ()
    dimensions: tuple[Dimension, ...]

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.dimensions)

    @property
    def is_dynamic(self) -> bool:
        """Tell whether more than one shape is admitted."""
        return any(dimension.is_dynamic for dimension in self.dimensions)

    def admits(self, shape: Sequence[int]) -> bool:
        """Tell whether the shape has the same rank and each size lies within its dimension."""
        if len(shape) != len(self.dimensions):
            return False
        for size, dimension in zip(shape, self.dimensions, strict=True):  # noqa: SIM110 - hot; `all` takes twice as long
            if size not in dimension:
                return False
        return True

    def __len__(self) -> int:
        return len(self.dimensions)


@dataclass(frozen=True, slots=True)
class PartialShape(_Axes):
    """The shapes that a tensor may take: a dimension per axis. `PartialShape(())` is a scalar's.

    PartialShape.parse("?, 1..10, 384").admits((7, 4, 384))  # True
    """

    dimensions: tuple[Dimension, ...]

    @classmethod
    def parse(cls, value: str | PartialShape | Iterable[DimensionLike]) -> PartialShape:
        """Parse a shape: `"[?,1..10,384]"`, `"?, 3"` or `[-1, (1, 10), "8.."]`. Raises `ShapeError`."""
        if isinstance(value, PartialShape):
            return value
        parts = _split_text(value) if isinstance(value, str) else list(value)
        return cls(tuple(Dimension.parse(part) for part in parts))

    @property
    def is_static(self) -> bool:
        """Tell whether exactly one shape is admitted."""
        return not self.is_dynamic

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self.dimensions)

    def __getitem__(self, axis: int) -> Dimension:
        return self.dimensions[axis]

    def __str__(self) -> str:
        return f"[{','.join(map(str, self.dimensions))}]"


@dataclass(frozen=True, slots=True)
class NamedShape(_Axes):
    """A `PartialShape` whose axes may have names: `batch:1..64, seq:1..512, 384`.

    Axes of the same name have the same size, within a tensor and across the inputs of a request. `names` is parallel to
    `dimensions`; None is an axis without a name. A name alone (`batch, seq`) leaves the size open.
    """

    names: tuple[str | None, ...]
    dimensions: tuple[Dimension, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.dimensions):
            raise ShapeError(f"{len(self.names)} names for {len(self.dimensions)} dimensions")
        for name in self.names:
            if name is not None and not _NAME.fullmatch(name):
                raise ShapeError(f"{name!r} cannot name a dimension; use letters, digits and underscores")

    @classmethod
    def of(cls, value: ShapeLike) -> NamedShape:
        """Make a named shape from any form; only text can name axes. Raises `ShapeError`."""
        if isinstance(value, str | NamedShape):
            return cls.parse(value)
        dimensions = PartialShape.parse(value).dimensions
        return cls((None,) * len(dimensions), dimensions)

    @classmethod
    def parse(cls, value: str | NamedShape) -> NamedShape:
        """Parse a named shape; `""` is a scalar. Raises `ShapeError`."""
        if isinstance(value, NamedShape):
            return value
        entries = [_parse_named(part) for part in _split_text(value)]
        return cls(tuple(name for name, _ in entries), tuple(dimension for _, dimension in entries))

    @property
    def partial_shape(self) -> PartialShape:
        """The dimensions without their names."""
        return PartialShape(self.dimensions)

    @property
    def batch_axis(self) -> int | None:
        """The dynamic axis named `batch`; None without one."""
        for axis, (name, dimension) in enumerate(zip(self.names, self.dimensions, strict=True)):
            if name == BATCH and dimension.is_dynamic:
                return axis
        return None

    def __str__(self) -> str:
        return ", ".join(map(_named_text, self.names, self.dimensions))


def _parse_named(text: str) -> tuple[str | None, Dimension]:
    name, colon, size = (part.strip() for part in text.partition(":"))
    if colon:
        if not name:
            raise ShapeError(f"{text!r} has a colon but no name before it")
        return name, Dimension.parse(size)
    if _NAME.fullmatch(name):
        return name, Dimension()
    return None, Dimension.parse(name)


def _named_text(name: str | None, dimension: Dimension) -> str:
    if name is None:
        return str(dimension)
    return name if dimension == Dimension() else f"{name}:{dimension}"


def _split_text(text: str) -> list[str]:
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    if "..." in inner:
        raise ShapeError(
            f"{text!r} leaves the rank open, which is not supported; write one dimension per axis"
        )
    return [part.strip() for part in inner.split(",")] if inner else []


def _integer(value: Any) -> int:
    # Integers of NumPy and other libraries are accepted, bools and floats are not.
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ShapeError(f"a size is an integer, not {value!r}")


def _upper(value: Any) -> int | None:
    if value is None:
        return None
    size = _integer(value)
    return None if size == -1 else size

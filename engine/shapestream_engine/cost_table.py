"""Measured seconds of calls and their corrections by traffic: the costs that a scheduler plans with.

Both are plain data, for files, for the wire and for a simulator. A calibration measures a `CostTable`. A scheduler returns
`LearnedCosts`, the corrections of one server's life, and the next server reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, TypeAlias

from shapestream_engine.errors import EngineError

Sizes: TypeAlias = tuple[int, ...]

MAX_POINTS = 4096
"""Largest number of points of a table; a calibration measures fewer."""
MAX_SECONDS = 30 * 86_400.0
MAX_ELEMENTS = 1 << 53
"""Largest number of elements of a call; larger numbers are no measurement and would overflow."""
MAX_ENDS = 2
"""Points that define a straight line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """The measured cost of one call shape."""

    sizes: tuple[int, ...]
    """The call's size of each of the table's dimensions."""
    seconds: float
    """Seconds per call of a shape that the device knows, with all slots of the process busy."""
    first_seconds: float | None = None
    """Seconds of the first call of this shape, preparation included; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The costs of one model's calls on one kind of slot; raises `EngineError` for impossible values."""

    key: str
    """Identifies model, device, settings and versions; slots with equal keys are alike."""
    dimensions: tuple[str, ...]
    """The model's dynamic dimensions, `batch` first where it has a batch axis."""
    points: tuple[CostPoint, ...] = ()
    """The points in any order, no shape twice. Empty: costs are learned from traffic alone."""

    def __post_init__(self) -> None:
        if len(self.points) > MAX_POINTS:
            raise EngineError(f"a cost table has {MAX_POINTS} points at most, not {len(self.points)}")
        if len({point.sizes for point in self.points}) != len(self.points):
            raise EngineError("a cost table names each shape once")
        for point in self.points:
            if len(point.sizes) != len(self.dimensions) or any(
                type(size) is not int or size < 0 for size in point.sizes
            ):
                raise EngineError(f"{point.sizes} are no sizes of {', '.join(self.dimensions) or 'nothing'}")
            if prod([size or 1 for size in point.sizes]) > MAX_ELEMENTS:
                raise EngineError(f"{point.sizes} are more than anything computes")
            for seconds in (point.seconds, point.first_seconds):
                if seconds is not None and not 0.0 <= seconds <= MAX_SECONDS:
                    raise EngineError(f"{seconds!r} are no seconds of a call")

    @property
    def digest(self) -> str:
        """A digest of the table; another measurement under the same key has another digest."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:40]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file or the wire; `from_dict` makes an equal table of it."""
        return {
            "key": self.key,
            "dimensions": list(self.dimensions),
            "points": [[list(point.sizes), point.seconds, point.first_seconds] for point in self.points],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CostTable:
        """Return the table that `plain`, data of any origin, describes; raises `EngineError` for other data."""
        try:
            match plain:
                case {"key": str(key), "dimensions": [*dimensions], "points": [*points]}:
                    return cls(
                        key=key,
                        dimensions=tuple([_name(name) for name in dimensions]),
                        points=tuple(
                            CostPoint(
                                sizes=tuple(sizes),
                                seconds=_number(seconds),
                                first_seconds=None if first is None else _number(first),
                            )
                            for sizes, seconds, first in points
                        ),
                    )
                case _:
                    raise EngineError("a cost table has key, dimensions and points")
        except (TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"a cost table that cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedCosts:
    """The corrections of one table; raises `EngineError` for impossible values."""

    table: str
    """`CostTable.digest` of the corrected table; a new measurement starts without corrections."""
    batches: int
    """Number of batches behind the corrections, those of earlier servers included."""
    saved_at: float
    """Seconds since the epoch."""
    seconds: Mapping[Sizes, float] = field(default_factory=dict)
    """Corrected seconds of calls, by their sizes, where they differ from the table."""
    preparation: Mapping[float, float] = field(default_factory=dict)
    """Extra seconds of a call with a new shape, by elements: the ends of a straight line."""

    def __post_init__(self) -> None:
        if self.batches < 0 or len(self.seconds) > MAX_POINTS or len(self.preparation) > MAX_ENDS:
            raise EngineError(f"corrections of {MAX_POINTS} calls at most, by a number of batches")
        numbers = [self.saved_at, *self.seconds.values(), *self.preparation, *self.preparation.values()]
        if not all(isfinite(number) and number >= 0.0 for number in numbers):
            raise EngineError("corrections are finite, and nothing takes less than no time")
        if max([*self.seconds.values(), *self.preparation.values()], default=0.0) > MAX_SECONDS:
            raise EngineError(f"no call takes more than {MAX_SECONDS:g} s")
        computed = [prod([size or 1 for size in sizes]) for sizes in self.seconds]
        if max([*computed, *self.preparation], default=0) > MAX_ELEMENTS:
            raise EngineError("no call computes so much")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `from_dict` makes an equal value of it."""
        return {
            "table": self.table,
            "batches": self.batches,
            "saved_at": self.saved_at,
            "seconds": [[list(sizes), seconds] for sizes, seconds in self.seconds.items()],
            "preparation": [list(end) for end in self.preparation.items()],
        }

    @classmethod
    def from_dict(cls, plain: Any) -> LearnedCosts:
        """Read the corrections from plain data of any origin. Raises `EngineError` for wrong ones."""
        try:
            match plain:
                case {
                    "table": str(table),
                    "batches": int(batches),
                    "saved_at": saved_at,
                    "seconds": [*seconds],
                }:
                    return cls(
                        table=table,
                        batches=batches,
                        saved_at=float(saved_at),
                        seconds={tuple(map(int, sizes)): float(value) for sizes, value in seconds},
                        preparation={float(at): float(value) for at, value in plain.get("preparation", [])},
                    )
                case _:
                    raise EngineError("corrections name their table, batches, time and seconds")
        except (TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"corrections that cannot be read: {error}") from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value

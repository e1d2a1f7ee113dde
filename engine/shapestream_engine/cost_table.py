"""Measured seconds of calls and their corrections by traffic: the costs that a scheduler plans with.

Both are plain data, for files, for the wire and for a simulator. A calibration measures a `CostTable`. A scheduler returns
`LearnedCosts`, the corrections of one server's life, and the next server reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod
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
                wanted = f"a size from 0 for each of ({', '.join(self.dimensions)})"
                raise EngineError(f"a point of a cost table has {wanted}, not {point.sizes}")
            _check_elements(prod([size or 1 for size in point.sizes]))
            _check_seconds(point.seconds)
            _check_seconds(point.first_seconds or 0.0)

    @property
    def digest(self) -> str:
        """A digest of the table; another measurement under the same key has another digest."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:40]

    def corrected(self, learned: LearnedCosts) -> CostTable:
        """Return the table as traffic has corrected it; preparations take as much more as they were measured to."""
        known = {point.sizes: point for point in self.points}
        moved = [
            CostPoint(
                sizes=sizes,
                seconds=seconds,
                first_seconds=None
                if (extra := _preparation_s(known.get(sizes))) is None
                else seconds + extra,
            )
            for sizes, seconds in learned.seconds.items()
        ]
        points = {**known, **{point.sizes: point for point in moved}}
        return replace(self, points=tuple([*points.values()][:MAX_POINTS]))

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
        if self.batches < 0 or not 0.0 <= self.saved_at < inf:
            raise EngineError(
                f"corrections have a number of batches and a time from 0, not {self.batches} and {self.saved_at}"
            )
        if len(self.seconds) > MAX_POINTS or len(self.preparation) > MAX_ENDS:
            raise EngineError(
                f"corrections are of {MAX_POINTS} calls and {MAX_ENDS} ends of a line at most, not of "
                f"{len(self.seconds)} and {len(self.preparation)}"
            )
        for seconds in (*self.seconds.values(), *self.preparation.values()):
            _check_seconds(seconds)
        for elements in (*[prod([size or 1 for size in sizes]) for sizes in self.seconds], *self.preparation):
            _check_elements(elements)

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


def _preparation_s(point: CostPoint | None) -> float | None:
    if point is None or point.first_seconds is None:
        return None
    return max(0.0, point.first_seconds - point.seconds)


def _check_seconds(seconds: float) -> None:
    if not 0.0 <= seconds <= MAX_SECONDS:
        raise EngineError(f"a call takes from 0 to {MAX_SECONDS:g} s, not {seconds!r}")


def _check_elements(elements: float) -> None:
    if not 0 <= elements <= MAX_ELEMENTS:
        raise EngineError(f"a call has from 0 to {MAX_ELEMENTS} elements, not {elements!r}")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value

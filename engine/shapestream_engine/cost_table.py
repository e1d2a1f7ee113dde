"""Measured seconds of calls, and what traffic made of them: what a scheduler plans with.

Plain data, so that it can be saved, sent by a worker to its server, and read by a simulator. A calibration measures a
`CostTable`; a scheduler hands out `LearnedCosts`, the corrections of one server's life, and the next one takes them back.
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
"""Points of a table, at most: more than a calibration ever measures."""
MAX_SECONDS = 30 * 86_400.0
MAX_ELEMENTS = 1 << 53
"""Elements of a call, at most. More than these is no measurement, and would overflow where costs are fitted."""
MAX_ENDS = 2
"""Points of a straight line that say all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """One call shape, as measured."""

    sizes: tuple[int, ...]
    """The call's size of each of the table's dimensions."""
    seconds: float
    """Seconds of a slot per call, once the shape is known to the device, with all slots of the process busy."""
    first_seconds: float | None = None
    """Seconds of the first call of this shape, preparation included; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Costs of one model's calls on one kind of slot. Raises `EngineError` for values that cannot be a table."""

    key: str
    """Names what was measured: model, device, settings, versions. Equal keys mean slots that are alike."""
    dimensions: tuple[str, ...]
    """The model's dynamic dimensions, `batch` first where it has a batch axis."""
    points: tuple[CostPoint, ...] = ()
    """In no order, no shape twice. Empty: nothing was measured, costs are learned from traffic alone."""

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
        """Names this very table: another measurement of what the same key names has another one."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:40]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file or the wire, that `from_dict` turns into an equal table."""
        return {
            "key": self.key,
            "dimensions": list(self.dimensions),
            "points": [[list(point.sizes), point.seconds, point.first_seconds] for point in self.points],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CostTable:
        """The table that `plain` describes; it may come from anywhere. Raises `EngineError` for what is wrong."""
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
    """Corrections of one table, and of no other. Raises `EngineError` for what cannot be one."""

    table: str
    """The `CostTable.digest` of the table that they correct: measured anew, a model begins with what was measured."""
    batches: int
    """Batches that the corrections rest on, those of earlier servers included."""
    saved_at: float
    """Seconds since the epoch."""
    seconds: Mapping[Sizes, float] = field(default_factory=dict)
    """Seconds of calls, by their size of each dimension, where these differ from the table's."""
    preparation: Mapping[float, float] = field(default_factory=dict)
    """Extra seconds of a call with a new shape, by its elements: the ends of a straight line."""

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
        """Plain data that `from_dict` turns into the same again."""
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

"""Measured seconds of calls: what a calibration finds out about a model, and what a scheduler plans with.

Plain data, so that it can be saved, sent by a worker to its server, and read by a simulator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from shapestream_engine.errors import EngineError

__all__ = ["MAX_POINTS", "CostPoint", "CostTable"]

MAX_POINTS = 4096
"""More than a calibration ever measures; a table from elsewhere may not hold more."""
MAX_SECONDS = 30 * 86_400.0
MAX_ELEMENTS = 1 << 53
"""Of a call. What is larger than these is no measurement, and would overflow where costs are fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """One call shape, as measured."""

    sizes: tuple[int, ...]
    """The call's size of each of the table's dimensions."""
    seconds: float
    """Of a slot's time per call, once the shape is known to the device, with all slots of the process busy."""
    first_seconds: float | None = None
    """Of the first call of this shape, preparation included; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What calls of one model cost on one kind of slot. Raises `EngineError` for what cannot be a table."""

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


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value

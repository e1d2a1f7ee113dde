"""What traffic made of a cost table: corrections of one server's life, so that the next one need not learn them again.

Plain data, as the table itself: a scheduler hands it out and takes it back, a file holds it in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, TypeAlias

from shapestream_engine.cost_table import MAX_ELEMENTS, MAX_POINTS, MAX_SECONDS
from shapestream_engine.errors import EngineError

__all__ = ["LearnedCosts"]

Sizes: TypeAlias = tuple[int, ...]

MAX_ENDS = 2
"""Points of a straight line that say all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedCosts:
    """Corrections of one table, and of no other. Raises `EngineError` for what cannot be one."""

    table: str
    """The `CostTable.digest` of the table that they correct: measured anew, a model begins with what was measured."""
    batches: int
    """That they rest on, those of earlier servers included."""
    saved_at: float
    """Seconds since the epoch."""
    seconds: Mapping[Sizes, float] = field(default_factory=dict)
    """Of calls, by their size of each of the table's dimensions, where they are off what the table says."""
    preparation: Mapping[float, float] = field(default_factory=dict)
    """What it costs extra that a call is new, in seconds, by its elements: the ends of a straight line."""

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
        """What `plain` describes; it may come from anywhere. Raises `EngineError` for what is wrong."""
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

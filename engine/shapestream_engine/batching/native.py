"""The strategy `native`: every shape as the requests need it, or, under a cap, rounded up to one of a few."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

from shapestream_engine.batching.rounding import RoundingTable
from shapestream_engine.batching.strategy import PlannedCall, Planner, Sizes, Strategy
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import SignatureError

__all__ = ["Native", "RoundingPlanner"]


@dataclass(frozen=True, slots=True)
class Native(Strategy):
    """Any shape. With `max_prepared`, no more than so many different ones: late ones are rounded up where they may be."""

    NAME: ClassVar[str] = "native"

    max_prepared: int | None = None

    def _check_own(self) -> None:
        for dimension in self.sizes:
            raise SignatureError(
                f"{self.about(dimension)}: any size is run as it comes; sizes are for the others"
            )
        if self.max_prepared is not None and (type(self.max_prepared) is not int or self.max_prepared < 2):
            raise SignatureError(f"strategy {self.NAME}: max_prepared is an integer from 2")

    def bind(self, table: DimensionTable) -> RoundingPlanner | None:
        """None without a cap. Raises `SignatureError` where a dimension that may be rounded has no upper bound."""
        if self.max_prepared is None or not table.names:
            return None
        for name, bounds, paddable in zip(table.names, table.bounds, table.paddable, strict=True):
            if (paddable or (name == BATCH and table.has_batch)) and bounds.maximum is None:
                raise SignatureError(
                    f"{self.about(name)} has no upper bound, and max_prepared needs one to round up to; "
                    f'state it in the shape of an input: "{name}:1..64"'
                )
        return RoundingPlanner(table, self.max_prepared)

    def words(self, dimension: str) -> str | None:
        """Nothing special is done."""
        return None

    def __str__(self) -> str:
        return (
            self.NAME
            if self.max_prepared is None
            else f"native, rounded up so that there are at most {self.max_prepared}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse_strategy` turns into an equal strategy."""
        cap = {} if self.max_prepared is None else {"max_prepared": self.max_prepared}
        return {"strategy": self.NAME, **cap}


class RoundingPlanner(Planner):
    """Keeps what it was asked for: plans depend on the shapes that came before. One per process and model."""

    def __init__(self, table: DimensionTable, cap: int) -> None:
        self._has_batch = table.has_batch
        self._most_rows = table.bounds[0].maximum if table.has_batch else None
        self._lock = threading.Lock()
        self.table = RoundingTable(
            cap,
            [
                bounds if paddable or (table.has_batch and number == 0) else None
                for number, (bounds, paddable) in enumerate(zip(table.bounds, table.paddable, strict=True))
            ],
        )

    def round_up(self, sizes: Sizes) -> Sizes:
        """As it is: whether it is rounded depends on what it shares a call with."""
        return sizes

    def plan(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        """One call, or several where there are more rows than one may have."""
        if not self._has_batch:
            with self._lock:
                return (PlannedCall(self.table.round_up(sizes), 0, 1),)
        most = self._most_rows or 1
        rows = sizes[0]
        calls = []
        with self._lock:
            for start in range(0, max(1, rows), most):
                stop = min(rows, start + most)
                calls.append(PlannedCall(self.table.round_up((stop - start, *sizes[1:])), start, stop))
        return tuple(calls)

    def prepared_sizes(self, sizes: Sizes) -> None:
        """Nothing is prepared ahead: the dynamic model runs every shape."""

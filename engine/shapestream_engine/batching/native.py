"""The strategy `native`: every shape as the requests need it, or, under a cap, rounded up to one of a few.

Beside the dynamic model, which runs every shape, single call shapes can have a static model of their own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

from shapestream_engine.batching.rounding import RoundingTable, calibration_shapes, escape_shapes
from shapestream_engine.batching.static_shapes import (
    StaticShape,
    bind_static,
    check_static,
    plain_static,
)
from shapestream_engine.batching.strategy import PlannedCall, Planner, Sizes, Strategy
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import SignatureError

__all__ = ["Native", "NativePlanner", "RoundingPlanner", "StaticPlanner"]


@dataclass(frozen=True, slots=True)
class Native(Strategy):
    """Any shape. With `max_prepared`, no more than so many different ones: late ones are rounded up where they may be.

    Calls of exactly one of `static_shapes` run on a model that is prepared for it alone, where the engine makes such.
    """

    NAME: ClassVar[str] = "native"

    max_prepared: int | None = None
    static_shapes: tuple[StaticShape, ...] = ()
    """Each a size for every dynamic dimension, by name and in the order of the names."""
    fill_rows: bool = False
    """Under `max_prepared` rows may be rounded up too, by copies of a row: only for a model whose rows are independent."""

    @property
    def chosen_shapes(self) -> int | None:
        """Different call shapes that a scheduler may choose: what is left of `max_prepared` is each process's own."""
        if self.max_prepared is None:
            return None
        served = _served_shapes(self.max_prepared)
        return served - escape_shapes(served)

    def _check_own(self) -> None:
        for dimension in self.sizes:
            raise SignatureError(
                f"{self.about(dimension)}: any size is run as it comes; sizes are for the others",
                key=("strategy", dimension),
            )
        if self.max_prepared is not None and (type(self.max_prepared) is not int or self.max_prepared < 2):
            raise SignatureError(
                f"strategy {self.NAME}: max_prepared is an integer from 2", key=("strategy", "max_prepared")
            )
        if self.most_rows is not None and self.fill_rows:
            raise SignatureError(
                f"strategy {self.NAME}: fill_rows fills calls up to the bound of the rows, so there is no most_rows",
                key=("strategy",),
            )
        check_static(self.static_shapes)

    def bind(self, table: DimensionTable) -> NativePlanner | None:
        """None where nothing is rounded and nothing is static.

        Raises `SignatureError` where a dimension that may be rounded has no upper bound, and for a static shape
        that the model does not take.
        """
        static = bind_static(self.static_shapes, table)
        if self.max_prepared is None or not table.names:
            return StaticPlanner(table, static) if static else None
        for name, bounds, paddable in zip(table.names, table.bounds, table.paddable, strict=True):
            if (paddable or (name == BATCH and self.fill_rows)) and bounds.maximum is None:
                raise SignatureError(
                    f"{self.about(name)} has no upper bound, and max_prepared needs one to round up to; "
                    f'state it in the shape of an input: "{name}:1..64"',
                    key=("strategy", name),
                )
        return RoundingPlanner(table, self.max_prepared, static, fill_rows=self.fill_rows)

    def words(self, dimension: str) -> str | None:
        """Nothing special is done."""
        return None

    def __str__(self) -> str:
        words = [self.NAME]
        if self.max_prepared is not None:
            rows = "" if self.fill_rows else " for each number of rows"
            words.append(f"rounded up so that there are at most {self.max_prepared}{rows}")
        if self.static_shapes:
            shapes = [" x ".join(f"{name} {size}" for name, size in shape) for shape in self.static_shapes]
            words.append(f"static models for {', '.join(shapes)}")
        return ", ".join([*words, *self._words_of_limit()])

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse_strategy` turns into an equal strategy."""
        cap = {} if self.max_prepared is None else {"max_prepared": self.max_prepared}
        static = {"static": plain_static(self.static_shapes)} if self.static_shapes else {}
        fills = {"fill_rows": True} if self.fill_rows else {}
        return {"strategy": self.NAME, **cap, **static, **fills, **self._plain_limit()}


def _served_shapes(cap: int) -> int:
    """What calibration leaves."""
    return cap - calibration_shapes(cap)


class NativePlanner(Planner):
    """Any shape, on the dynamic model, but for the static ones."""

    def __init__(self, table: DimensionTable, static: tuple[Sizes, ...]) -> None:
        self._has_batch = table.has_batch
        self.static_shapes = static
        """Call shapes with a model of their own, in the order in which they were named."""
        self._static = frozenset(static)

    def round_up(self, sizes: Sizes) -> Sizes:
        """As it is: whether it is rounded depends on what it shares a call with."""
        return sizes

    def prepared_sizes(self, sizes: Sizes) -> Sizes | None:
        """These sizes where they have a model of their own; the dynamic model runs every other shape."""
        return sizes if sizes in self._static else None

    def runs_exactly(self, sizes: Sizes) -> bool:
        """Always."""
        return True


class StaticPlanner(NativePlanner):
    """Takes every shape as it is asked for."""

    def plan(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        """One call."""
        return (PlannedCall(sizes, 0, sizes[0] if self._has_batch else 1),)


class RoundingPlanner(NativePlanner):
    """Keeps what it was asked for: plans depend on the shapes that came before. One per process and model.

    A scheduler that rounds has chosen before: its shapes are run as they are, while there is room for them. This is
    the guard, for whoever does not round, and for what is left of another scheduler's choices.
    """

    def __init__(
        self, table: DimensionTable, cap: int, static: tuple[Sizes, ...] = (), *, fill_rows: bool
    ) -> None:
        """`fill_rows`: rows may be rounded up as well. Otherwise shapes of other rows have a cap of their own."""
        super().__init__(table, static)
        self._most_rows = table.bounds[0].maximum if table.has_batch else None
        self._lock = threading.Lock()
        self.table = RoundingTable(
            _served_shapes(cap),
            [
                bounds if paddable or (fill_rows and table.has_batch and number == 0) else None
                for number, (bounds, paddable) in enumerate(zip(table.bounds, table.paddable, strict=True))
            ],
            on_grid=escape_shapes(_served_shapes(cap)),
        )

    def plan(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        """One call, or several where there are more rows than one may have."""
        if not self._has_batch:
            return (PlannedCall(self._rounded(sizes), 0, 1),)
        rows = sizes[0]
        most = self._most_rows or max(1, rows)
        calls = []
        for start in range(0, max(1, rows), most):
            stop = min(rows, start + most)
            calls.append(PlannedCall(self._rounded((stop - start, *sizes[1:])), start, stop))
        return tuple(calls)

    def runs_exactly(self, sizes: Sizes) -> bool:
        """Never: what is rounded depends on what came before."""
        return False

    def _rounded(self, sizes: Sizes) -> Sizes:
        if sizes in self._static:
            return sizes  # the dynamic model never sees it
        with self._lock:
            return self.table.round_up(sizes)

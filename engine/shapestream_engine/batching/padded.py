"""The strategy `padded`: one fixed shape, to which everything is padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shapestream_engine.batching.row_cover import RowCover
from shapestream_engine.batching.strategy import SizesPlanner, Strategy
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import SignatureError

__all__ = ["Padded"]


@dataclass(frozen=True, slots=True)
class Padded(Strategy):
    """One size per dimension, such as `{seq: 512, batch: 8}`; a mask tells the model what is padding.

    A batch of more rows takes several calls; the last of them is filled up.
    """

    NAME: ClassVar[str] = "padded"

    def _check_own(self) -> None:
        if not self.sizes:
            raise SignatureError(
                f"strategy {self.NAME}: name the dimensions to pad, each with its size: seq: 512",
                key=("strategy",),
            )
        for dimension, sizes in self.sizes.items():
            if len(sizes) > 1:
                raise SignatureError(
                    f"{self.about(dimension)} takes one size; several are the strategy bucketed",
                    key=("strategy", dimension),
                )

    def bind(self, table: DimensionTable) -> SizesPlanner:
        """Raises `SignatureError` where the model cannot be run at these sizes."""
        self.check_against(table)
        rows = self.sizes.get(BATCH)
        return SizesPlanner(self, table, None if rows is None else RowCover(rows, whole_first=False))

    def words(self, dimension: str) -> str | None:
        """What is done along a dimension, for a human."""
        sizes = self.sizes.get(dimension)
        if sizes is None:
            return None
        return f"filled up to calls of {sizes[0]}" if dimension == BATCH else f"padded to {sizes[0]}"

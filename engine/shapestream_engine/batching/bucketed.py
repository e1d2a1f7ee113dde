"""The strategy `bucketed`: several prepared shapes, of which the most suitable is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shapestream_engine.batching.row_cover import RowCover
from shapestream_engine.batching.strategy import SizesPlanner, Strategy, listed
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import SignatureError

__all__ = ["Bucketed"]


@dataclass(frozen=True, slots=True)
class Bucketed(Strategy):
    """Several sizes per dimension, such as `{seq: [32, 64, 128]}`; everything is padded to the next of them.

    Rows are filled up to the next size too. More rows than the largest size take as few calls as possible.
    """

    NAME: ClassVar[str] = "bucketed"

    def _check_own(self) -> None:
        if not self.sizes:
            raise SignatureError(
                f"strategy {self.NAME}: name the dimensions and their sizes: seq: [32, 64, 128]",
                key=("strategy",),
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
        if dimension == BATCH:
            return f"filled up to calls of {listed(sizes)}"
        return f"padded to {listed(sizes)}"

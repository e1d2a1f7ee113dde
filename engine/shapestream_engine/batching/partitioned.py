"""The strategy `partitioned`: a batch is divided into calls of prepared numbers of rows, as few as possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shapestream_engine.batching.row_cover import RowCover
from shapestream_engine.batching.strategy import SizesPlanner, Strategy, listed
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import SignatureError

__all__ = ["Partitioned"]


@dataclass(frozen=True, slots=True)
class Partitioned(Strategy):
    """Sizes of `batch`, such as `{batch: [1, 2, 4, 8]}`: 5 rows run as 4 + 1. Other dimensions are padded as in buckets.

    Rows are filled up only where no sum of the sizes is their number, which a size of 1 rules out.
    """

    NAME: ClassVar[str] = "partitioned"

    def _check_own(self) -> None:
        if BATCH not in self.sizes:
            raise SignatureError(
                f"strategy {self.NAME}: name the sizes of batch: batch: [1, 2, 4, 8]", key=("strategy",)
            )

    def bind(self, table: DimensionTable) -> SizesPlanner:
        """Raises `SignatureError` where the model cannot be run at these sizes."""
        self.check_against(table)
        return SizesPlanner(self, table, RowCover(self.sizes[BATCH], whole_first=True))

    def words(self, dimension: str) -> str | None:
        """What is done along a dimension, for a human."""
        sizes = self.sizes.get(dimension)
        if sizes is None:
            return None
        if dimension == BATCH:
            return f"divided into calls of {listed(sizes)}, as few as possible"
        return f"padded to {listed(sizes)}"

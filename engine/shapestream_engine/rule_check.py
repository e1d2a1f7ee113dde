"""Whether an output's rule can hold at all: asked when a signature is made, before anything runs.

What only the data shows, an index outside the batch or counts that do not sum up, is checked on every batch where
outputs are divided (`batching/split*.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import SignatureError
from shapestream_engine.ports import OutputPort
from shapestream_engine.rules import (
    Counts,
    IndexColumn,
    PaddedCounts,
    Recount,
    Rows,
    Rule,
    Shared,
    Whole,
    With,
)
from shapestream_engine.shapes import Dimension

__all__ = ["check_rule"]


def check_rule(output: OutputPort, outputs: Sequence[OutputPort], table: DimensionTable) -> None:
    """Raises `SignatureError` that names the output, its rule, and what the rule would need."""
    where = f"output {output.name!r}: the rule {output.rule.NAME}"
    if isinstance(output.rule, Whole) == table.has_batch:
        remedy = (
            "the model has a batch axis; say by rule whose rows are whose"
            if table.has_batch
            else "the model has no batch axis, so its outputs are taken whole"
        )
        raise SignatureError(f"{where} cannot hold: {remedy}")
    match output.rule:
        case Rows():
            _check_batch_axis(where, output)
        case IndexColumn(column=column):
            _check_index_column(where, output, column)
        case With(output=name):
            _check_leader(where, name, outputs, (IndexColumn, Counts))
            if output.shape.rank == 0:
                raise SignatureError(f"{where} needs rows; the output is a scalar")
        case Counts(output=name):
            _check_counter(where, output, name, outputs)
            _check_concatenated(where, output, table)
        case PaddedCounts(output=name):
            _check_counter(where, output, name, outputs)
            _check_batch_axis(where, output)
            if output.shape.rank < 2:
                raise SignatureError(f"{where} needs the shape [batch, max, ...], not [{output.shape}]")
        case Recount(output=name):
            _check_leader(where, name, outputs, (IndexColumn, With, Counts, PaddedCounts))
            _check_total(where, output)
        case Shared():
            if BATCH in output.shape.names:
                raise SignatureError(
                    f"{where} cannot hold: [{output.shape}] follows the batch; that is the rule rows"
                )
        case Whole():
            pass


def _check_batch_axis(where: str, output: OutputPort) -> None:
    if output.shape.names.count(BATCH) != 1 or output.batch_axis is None:
        raise SignatureError(f"{where} needs one dynamic axis named batch; there is none in [{output.shape}]")


def _check_index_column(where: str, output: OutputPort, column: int) -> None:
    if output.shape.rank not in (1, 2):
        raise SignatureError(f"{where} needs the shape [rows, columns] or [rows], not [{output.shape}]")
    columns = Dimension(1, 1) if output.shape.rank == 1 else output.shape.dimensions[1]
    if column < 0 or (columns.maximum is not None and column >= columns.maximum):
        raise SignatureError(f"{where}: there is no column {column} in [{output.shape}]")
    if output.element_type == "boolean":
        raise SignatureError(f"{where}: a boolean is no index")


def _check_leader(
    where: str, name: str, outputs: Sequence[OutputPort], kinds: tuple[type[Rule], ...]
) -> None:
    leader = next((other for other in outputs if other.name == name), None)
    if leader is None or not isinstance(leader.rule, kinds):
        *first, last = [kind.NAME for kind in kinds]
        raise SignatureError(
            f"{where} follows {name!r}, which is no output with the rule {', '.join(first)} or {last}"
        )


def _check_counter(where: str, output: OutputPort, name: str, outputs: Sequence[OutputPort]) -> None:
    """Counts are an output of their own: one number per row of the batch."""
    counter = next((other for other in outputs if other.name == name), None)
    if counter is None or not isinstance(counter.rule, Rows):
        raise SignatureError(f"{where} is counted by {name!r}, which is no output with the rule rows")
    others = [size for axis, size in enumerate(counter.shape.dimensions) if axis != counter.batch_axis]
    if any(1 not in size for size in others):
        raise SignatureError(
            f"{where} is counted by {name!r}, which has more than one number per row: [{counter.shape}]"
        )
    if counter.element_type == "boolean":
        raise SignatureError(f"{where} is counted by {name!r}: a boolean is no count")


def _check_concatenated(where: str, output: OutputPort, table: DimensionTable) -> None:
    if output.shape.rank == 0:
        raise SignatureError(f"{where} needs rows; the output is a scalar")
    if output.shape.names[0] in table.names:
        raise SignatureError(
            f"{where} needs rows in a number that depends on the data; "
            f"in [{output.shape}] it is that of {output.shape.names[0]!r}"
        )


def _check_total(where: str, output: OutputPort) -> None:
    if any(1 not in size for size in output.shape.dimensions):
        raise SignatureError(f"{where} needs one number, [] or [1], not [{output.shape}]")
    if BATCH in output.shape.names:
        raise SignatureError(f"{where} needs a total over the batch; [{output.shape}] has a number per row")
    if output.element_type == "boolean":
        raise SignatureError(f"{where}: a boolean is no count")

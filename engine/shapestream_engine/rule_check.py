"""The check of an output's rule, when the signature of its model is made.

A rule fits if the output has the axes and the element type that the rule divides, if the output that it follows exists and
has rows or counts to follow, and if the inputs have the dimensions that it names. What no signature shows is left to
the proof, and to the check of each batch. Nothing is changed here: a rule that does not fit is a `SignatureError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.output_rules import (
    Counts,
    Crop,
    Extent,
    FollowingRule,
    IndexColumn,
    List,
    PaddedCounts,
    Recount,
    Rows,
    Shared,
    Whole,
    With,
)
from shapestream_engine.ports import DimensionTable, OutputPort, list_ports
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.string_arrays import STRING_TYPES

_UNCOUNTED = ("boolean", *STRING_TYPES)
"""Element types that hold no counts."""


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """An output whose rule is checked, with the other outputs and the dimensions."""

    output: OutputPort
    outputs: Sequence[OutputPort]
    """All outputs of the model."""
    table: DimensionTable

    def run(self) -> None:
        """Raise `SignatureError` if the rule does not fit the output; the message names the remedy."""
        if isinstance(self.output.rule, Whole) == self.table.has_batch:
            remedy = (
                "the model has a batch axis; state the rule that divides the output among requests"
                if self.table.has_batch
                else "the model has no batch axis, so its outputs are taken whole"
            )
            raise SignatureError(f"{self._where} cannot hold: {remedy}")
        match self.output.rule:
            case Rows():
                self._check_batch_axis()
            case Crop() as rule:
                self._check_crop(rule)
            case IndexColumn(column=column):
                self._check_index_column(column)
            case With() as rule:
                self._check_with(rule)
            case Counts(output=counter):
                self._check_counts(counter)
            case PaddedCounts(output=counter):
                self._check_padded_counts(counter)
            case Recount() as rule:
                self._check_recount(rule)
            case Shared():
                self._check_shared()
            case List() as rule:
                self._check_list(rule)
            case Whole():
                pass
            case _:
                raise AssertionError(f"no check for the rule {self.output.rule.NAME}")

    # ---------------------------------------------------------------- a check per rule

    def _check_crop(self, rule: Crop) -> None:
        """Refuse invalid entries, and entries that do not fit their axes."""
        self._check_batch_axis()
        where, output, table = self._where, self.output, self.table
        texts = rule.to.split(",")
        if len(texts) != output.shape.rank:
            raise SignatureError(f"{where} has {len(texts)} entries for the axes of [{output.shape}]")
        for axis, (text, extent) in enumerate(zip(texts, output.extents, strict=True)):
            shown, admitted = output.shape.names[axis], output.shape.dimensions[axis]
            if extent is None:
                if text.strip() != "?" and int(text) not in admitted:
                    raise SignatureError(f"{where}: axis {axis} is {admitted}, not {text.strip()}")
            elif extent.dimension not in table.names:
                known = ", ".join(table.names)
                raise SignatureError(
                    f"{where}: the inputs have no dimension {extent.dimension!r}; they have {known}"
                )
            elif (axis == output.batch_axis) != (extent == Extent(dimension=BATCH)):
                raise SignatureError(
                    f"{where}: axis {axis} of [{output.shape}] has the entry {text.strip()!r}; the batch axis, and no "
                    f"other, has the entry batch"
                )
            elif admitted.is_static:
                raise SignatureError(f"{where}: axis {axis} is always {admitted}, and cannot follow {extent}")
            elif shown in table.names and extent != Extent(dimension=shown):
                raise SignatureError(f"{where}: axis {axis} is as large as {shown!r}, not {extent}")

    def _check_index_column(self, column: int) -> None:
        """Refuse a column that does not exist or cannot hold an index."""
        shape, where = self.output.shape, self._where
        if shape.rank not in (1, 2):
            raise SignatureError(f"{where} needs the shape [rows, columns] or [rows], not [{shape}]")
        columns = Dimension(1, 1) if shape.rank == 1 else shape.dimensions[1]
        if column < 0 or (columns.maximum is not None and column >= columns.maximum):
            raise SignatureError(f"{where}: there is no column {column} in [{shape}]")
        self._check_can_count("index")

    def _check_with(self, rule: With) -> None:
        """Refuse another output without rows that this one can follow."""
        self._check_leader(rule)
        if self.output.shape.rank == 0:
            raise SignatureError(f"{self._where} needs rows; the output is a scalar")

    def _check_counts(self, counter: str) -> None:
        """Refuse another output that does not count, and rows whose number the data does not decide."""
        self._check_counter(counter)
        shape = self.output.shape
        if shape.rank == 0:
            raise SignatureError(f"{self._where} needs rows; the output is a scalar")
        if shape.names[0] in self.table.names:
            raise SignatureError(
                f"{self._where} needs rows in a number that depends on the data; "
                f"in [{shape}] it is that of {shape.names[0]!r}"
            )

    def _check_padded_counts(self, counter: str) -> None:
        """Refuse another output that does not count, and this output without a table of numbers per row."""
        self._check_counter(counter)
        self._check_batch_axis()
        if self.output.is_string:
            raise SignatureError(f"{self._where} sets entries beyond a count to 0, which no string is")
        if self.output.shape.rank < 2:
            raise SignatureError(
                f"{self._where} needs the shape [batch, max, ...], not [{self.output.shape}]"
            )

    def _check_recount(self, rule: Recount) -> None:
        """Refuse another output without rows to count, and this output if it is not one number."""
        self._check_leader(rule)
        shape, where = self.output.shape, self._where
        if any(1 not in size for size in shape.dimensions):
            raise SignatureError(f"{where} needs one number, [] or [1], not [{shape}]")
        if BATCH in shape.names:
            raise SignatureError(f"{where} needs a total over the batch; [{shape}] has a number per row")
        self._check_can_count("count")

    def _check_shared(self) -> None:
        """Refuse an output that follows the batch."""
        shape = self.output.shape
        if BATCH in shape.names:
            raise SignatureError(
                f"{self._where} cannot hold: [{shape}] follows the batch; that is the rule rows"
            )

    def _check_list(self, rule: List) -> None:
        """Refuse `of` that is no shape, and a dimension or an output of the arrays' shapes that does not exist."""
        output, where = self.output, self._where
        try:
            item = NamedShape.parse(rule.of)
        except EngineError as error:
            raise SignatureError(f"{where}: {rule.of!r} is no shape: {error}") from error
        if rule.count is not None and rule.count not in self.table.names:
            known = ", ".join(self.table.names)
            raise SignatureError(f"{where}: the inputs have no dimension {rule.count!r}; they have {known}")
        expected, shapes = list_ports(output.name, output.element_type, item, rule.count)
        if output != expected or shapes not in self.outputs:
            raise SignatureError(
                f"{where} needs the shape [?], not [{output.shape}], and an output {shapes.name!r} with the arrays' shapes"
            )

    # ---------------------------------------------------------------- what several rules need

    @property
    def _where(self) -> str:
        """The output and its rule, the beginning of an error message."""
        return f"output {self.output.name!r}: the rule {self.output.rule.NAME}"

    def _check_batch_axis(self) -> None:
        """Refuse an output without one batch axis."""
        output = self.output
        if output.shape.names.count(BATCH) != 1 or output.batch_axis is None:
            raise SignatureError(
                f"{self._where} needs one dynamic axis named batch; there is none in [{output.shape}]"
            )

    def _check_leader(self, rule: FollowingRule) -> None:
        """Refuse another output that has none of the rules that this one's can follow."""
        leader = self._named(rule.output)
        if leader is None or leader.rule.NAME not in rule.FOLLOWS:
            *first, last = rule.FOLLOWS
            raise SignatureError(
                f"{self._where} follows {rule.output!r}, which is no output with the rule {', '.join(first)} or {last}"
            )

    def _check_counter(self, name: str) -> None:
        """Refuse the output `name` unless it has one number per row of the batch."""
        where = self._where
        counter = self._named(name)
        if counter is None or not isinstance(counter.rule, Rows):
            raise SignatureError(f"{where} is counted by {name!r}, which is no output with the rule rows")
        others = [size for axis, size in enumerate(counter.shape.dimensions) if axis != counter.batch_axis]
        if any(1 not in size for size in others):
            raise SignatureError(
                f"{where} is counted by {name!r}, which has more than one number per row: [{counter.shape}]"
            )
        if counter.element_type in _UNCOUNTED:
            raise SignatureError(f"{where} is counted by {name!r}: a {counter.element_type} is no count")

    def _check_can_count(self, what: str) -> None:
        """Refuse this output if its element type holds no counts; `what` is a count of it in words."""
        if self.output.element_type in _UNCOUNTED:
            raise SignatureError(f"{self._where}: a {self.output.element_type} is no {what}")

    def _named(self, name: str) -> OutputPort | None:
        return next((other for other in self.outputs if other.name == name), None)

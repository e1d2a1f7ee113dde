"""Which splitter divides which output: one per rule, those that are followed before those that follow them."""

from __future__ import annotations

from typing import assert_never

from shapestream_engine.batching.split import OutputSplitter, RowSplitter
from shapestream_engine.batching.split_counts import (
    ConcatenatedSplitter,
    Counter,
    PaddedSplitter,
    TotalSplitter,
)
from shapestream_engine.batching.split_index import IndexSplitter, ParallelSplitter
from shapestream_engine.rules import Counts, IndexColumn, PaddedCounts, Recount, Rows, Shared, Whole, With
from shapestream_engine.signature import ModelSignature, OutputPort

__all__ = ["splitters_of"]


def splitters_of(signature: ModelSignature) -> tuple[OutputSplitter, ...]:
    """One per output, in the order in which a call's outputs are to be divided."""
    splitters = [_splitter(number, port, signature) for number, port in enumerate(signature.outputs)]
    return tuple(sorted(splitters, key=lambda splitter: splitter.STAGE))


def _splitter(number: int, port: OutputPort, signature: ModelSignature) -> OutputSplitter:
    table = signature.table
    match port.rule:
        case Rows() | Shared() | Whole():
            return RowSplitter(number, port, table)
        case IndexColumn(column=column):
            return IndexSplitter(number, port, table, column)
        case With(output=leader):
            return ParallelSplitter(number, port, table, leader)
        case Counts(output=counter):
            return ConcatenatedSplitter(number, port, table, _counter(counter, signature))
        case PaddedCounts(output=counter):
            return PaddedSplitter(number, port, table, _counter(counter, signature))
        case Recount(output=leader):
            return TotalSplitter(number, port, table, leader)
        case _:
            assert_never(port.rule)


def _counter(name: str, signature: ModelSignature) -> Counter:
    number = [port.name for port in signature.outputs].index(name)
    return Counter(number, signature.outputs[number])

"""What a worker reports of a batch is held against the model's signature, rule by rule."""

from __future__ import annotations

import pytest
from tests.pipeline.serving.batches import batch_of, report_of

from shapestream.serving.workers import ReportCheck, ReportRefused
from shapestream_engine.layout import Layout, Tensors
from shapestream_engine.output_rules import (
    Counts,
    Crop,
    IndexColumn,
    PaddedCounts,
    Recount,
    Rows,
    Shared,
    With,
)
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SIGNATURE = ModelSignature(
    "detector",
    (InputPort("x", "f32", NamedShape.parse("batch:1..8, seq:1..100"), {"seq": 0}),),
    (
        OutputPort("count", "i32", NamedShape.parse("batch"), Rows()),
        OutputPort("found", "f32", NamedShape.parse("1..50, 4"), Counts("count")),
        OutputPort("beside", "f32", NamedShape.parse("?, seq"), With("found")),
        OutputPort("table", "f32", NamedShape.parse("batch, 20, 4"), PaddedCounts("count")),
        OutputPort("labels", "f32", NamedShape.parse("seq, batch"), PaddedCounts("count")),
        OutputPort("peaks", "f32", NamedShape.parse("10, 2"), IndexColumn()),
        OutputPort("total", "i32", NamedShape.parse("1"), Recount("peaks")),
        OutputPort("anchors", "f32", NamedShape.parse("seq, 4"), Shared()),
        OutputPort("cells", "f32", NamedShape.parse("batch, ?"), Crop("batch, seq/4")),
    ),
)
GOOD = {
    "count": (2,),
    "found": (3, 4),
    "beside": (3, 7),
    "table": (2, 2, 4),
    "labels": (2, 2),
    "peaks": (5, 2),
    "total": (1,),
    "anchors": (7, 4),
    "cells": (2, 2),
}
"""The shapes of a result of 2 rows and 7 along `seq`."""


def check(shapes: dict[str, tuple[int, ...]]) -> None:
    """Checks the report of a batch of one request, whose outputs have these shapes."""
    request = Tensors(layout=((0, "f32", (2, 7)),), buffers=(bytes(56),))
    batch = batch_of(SIGNATURE, request, sizes=(2, 9))
    layout: Layout = tuple(
        (number, port.element_type, shapes[port.name]) for number, port in enumerate(SIGNATURE.outputs)
    )
    outputs = (Tensors(layout=layout, buffers=[b""] * len(layout)),)
    ReportCheck(SIGNATURE).check(batch, report_of(batch, outputs=outputs))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"found": (0, 4), "beside": (0, 7), "table": (2, 0, 4), "labels": (0, 2), "peaks": (0, 2)},
        {"found": (50, 4), "beside": (50, 7), "table": (2, 20, 4), "labels": (7, 2), "peaks": (10, 2)},
    ],
    ids=["some", "none", "most"],
)
def test_a_request_may_have_any_part_of_what_the_data_gave(change: dict[str, tuple[int, ...]]) -> None:
    """From nothing, below every lower bound and static size of the batch's output, up to all of it."""
    check(GOOD | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": (1,)}, r"'count' has 1 along 'batch'; its request has 2"),
        ({"found": (51, 4), "beside": (51, 7)}, r"'found' has 51 along axis 0, at most 50 fit"),
        ({"found": (3, 5)}, r"'found' has shape \[3, 5\], not \[1..50, 4\]"),
        ({"beside": (4, 7)}, r"'beside' has 4 rows, 'found' has 3"),
        ({"beside": (3, 9)}, r"'beside' has 9 along 'seq'; its request has 7"),
        ({"table": (1, 2, 4)}, r"'table' has 1 along 'batch'; its request has 2"),
        ({"table": (2, 21, 4)}, r"'table' has 21 along axis 1, at most 20 fit"),
        ({"table": (2, 2)}, r"'table' has shape \[2, 2\], not"),
        ({"labels": (8, 2)}, r"'labels' has 8 along axis 0, at most 7 fit"),
        ({"peaks": (11, 2)}, r"'peaks' has 11 along axis 0, at most 10 fit"),
        ({"total": (2,)}, r"'total' has shape \[2\], not \[1\]"),
        ({"anchors": (9, 4)}, r"'anchors' has 9 along 'seq'; its request has 7"),
        ({"cells": (2, 3)}, r"'cells' has 3 along 'seq/4'; its request has 2"),
    ],
)
def test_shapes_that_contradict_a_rule_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    """More than can be, or another size where the request's own is known; the output is named."""
    with pytest.raises(ReportRefused, match=message):
        check(GOOD | change)


TEXTS = ModelSignature(
    "texts",
    (InputPort("text", "str", NamedShape.parse("batch")),),
    (
        OutputPort("loud", "str", NamedShape.parse("batch, ..3"), Rows()),
        OutputPort("raw", "bytes", NamedShape.parse("batch"), Rows()),
    ),
)


def check_texts(loud: Tensor, raw: Tensor) -> None:
    """Checks the report of a request of two texts, whose outputs are these."""
    request = Tensors(layout=((0, "str", (2, 0)),), buffers=(bytes(8),))
    batch = batch_of(TEXTS, request)
    layout = ((0, "str", loud[0]), (1, "bytes", raw[0]))
    outputs = (Tensors(layout=layout, buffers=[loud[1], raw[1]]),)
    ReportCheck(TEXTS).check(batch, report_of(batch, outputs=outputs))


Tensor = tuple[tuple[int, ...], bytes]
LENGTHS = b"\1\0\0\0\2\0\0\0"
LOUD: Tensor = ((2, 1, 3), LENGTHS + b"aBC")
RAW: Tensor = ((2, 3), LENGTHS + b"\xff\xfe\0")


def test_strings_of_a_report_are_what_their_lengths_say() -> None:
    """Their shape lacks the last size of the layout; text is UTF-8, bytes may be anything."""
    check_texts(LOUD, RAW)


@pytest.mark.parametrize(
    ("loud", "raw", "words"),
    [
        (((2, 1, 3), LENGTHS + b"a\xffb"), RAW, "'loud': element 1 is no UTF-8"),
        (((2, 1, 2), LENGTHS + b"ab"), RAW, "'loud': 2 strings have lengths of 3 bytes in all"),
        (LOUD, ((2, 4), LENGTHS + b"abcd"), "'raw': 2 strings have lengths of 3 bytes in all"),
        (((2, 4, 0), bytes(32)), RAW, r"'loud' has shape"),
        (((1, 1, 0), bytes(4)), RAW, "'loud' has 1 along 'batch'"),
        (((2, 0), bytes(8)), RAW, "'loud' has shape"),
    ],
)
def test_strings_that_contradict_themselves_are_refused(loud: Tensor, raw: Tensor, words: str) -> None:
    """Before a client, or a later stage of a chain, reads them. Also when the layout came before."""
    with pytest.raises(ReportRefused, match=words):
        check_texts(loud, raw)


def test_the_strings_of_each_report_are_checked() -> None:
    """A layout is remembered, and contents are not."""
    request = Tensors(layout=((0, "str", (2, 0)),), buffers=(bytes(8),))
    batch, checks = batch_of(TEXTS, request), ReportCheck(TEXTS)
    layout = ((0, "str", LOUD[0]), (1, "bytes", RAW[0]))
    good, bad = [LOUD[1], RAW[1]], [LENGTHS + b"a\xff\xff", RAW[1]]
    checks.check(batch, report_of(batch, outputs=(Tensors(layout=layout, buffers=good),)))
    with pytest.raises(ReportRefused, match="no UTF-8"):
        checks.check(batch, report_of(batch, outputs=(Tensors(layout=layout, buffers=bad),)))

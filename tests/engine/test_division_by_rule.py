"""All rules together, on any batch, against a reference that goes row by row and knows no arrays.

A made-up detector finds things in each row of the batch, and its outputs tell of them in every way that there is.
What a request gets must be what the detector says of the request alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError
from shapestream_engine.layout import RequestShape
from shapestream_engine.output_rules import Counts, IndexColumn, PaddedCounts, Recount, Rows, Shared, With
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]
ROOM = 4


def output_port(name: str, shape: str, rule: Any, element_type: str) -> OutputPort:
    """An output, its shape given as text."""
    return OutputPort(name, element_type, NamedShape.parse(shape), rule)


DETECTOR = ModelSignature(
    "detector",
    (InputPort("image", "f32", NamedShape.parse("batch, seq"), {"seq": 0}),),
    (
        output_port("total", "", Recount("selected"), "i64"),
        output_port("beside", "?, seq", With("selected"), "i32"),
        output_port("selected", "?, 2", IndexColumn(1), "f32"),
        output_port("found", "?, 1, 2", Counts("count"), "f64"),
        output_port("beside_found", "?", With("found"), "u8"),
        output_port("table", f"{ROOM}, batch, seq", PaddedCounts("count"), "i16"),
        output_port("count", "batch, 1", Rows(), "f16"),
        output_port("other_total", "1", Recount("table"), "i32"),
        output_port("anchors", "2, seq", Shared(), "i32"),
    ),
)


class Scene(NamedTuple):
    """Requests that share a call: per request its size along `seq`, and what is found in each of its rows."""

    members: list[tuple[int, list[list[int]]]]
    order: list[int]
    """Of what is found in the batch: `selected` is sorted by anything but the batch index."""
    filling: list[list[int]]
    """What is found in the rows that only fill the call up."""

    def shapes(self) -> list[RequestShape]:
        """As the requests are known to the engine."""
        return [DETECTOR.resolve(((0, "f32", (len(rows), seq)),)) for seq, rows in self.members]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Up to five requests of up to three rows, in each of which up to four things are found."""
    things = st.lists(st.integers(0, 200), max_size=ROOM)
    members = draw(
        st.lists(st.tuples(st.integers(0, 3), st.lists(things, max_size=3)), min_size=1, max_size=5)
    )
    filling = draw(st.lists(things, max_size=2))
    found = sum(len(row) for _, rows in members for row in rows) + sum(map(len, filling))
    return Scene(members, draw(st.permutations(range(found))), filling)


def outputs_of(rows: list[list[int]], seq: int, order: list[int] | None = None) -> list[Array]:
    """What the detector gives for these rows: in the order of `order`, or, where it is free, in that of the batch."""
    flat = [(index, thing) for index, row in enumerate(rows) for thing in row]
    selected = flat if order is None else [flat[place] for place in order]
    table = np.full((ROOM, len(rows), seq), -7)
    for index, row in enumerate(rows):
        for place, thing in enumerate(row):
            table[place, index] = thing + np.arange(seq)
    given = [
        len(flat),
        np.reshape([thing + position for _, thing in selected for position in range(seq)], (-1, seq))
        if seq
        else np.zeros((len(flat), 0)),
        np.reshape([(thing, index) for index, thing in selected], (-1, 2)),
        np.reshape([(thing, -thing) for _, thing in flat], (-1, 1, 2)),
        np.reshape([thing for _, thing in flat], (-1,)),
        table,
        np.reshape([len(row) for row in rows], (-1, 1)),
        [len(flat)],
        np.arange(seq) * [[1], [2]],
    ]
    return [
        np.asarray(array).astype(dtype_of(port.element_type))
        for port, array in zip(DETECTOR.outputs, given, strict=True)
    ]


def alone(rows: list[list[int]], seq: int, order: list[int]) -> list[Array]:
    """What a request gets when it runs alone, trimmed by hand; `order`: as its things stand in the batch."""
    outputs = outputs_of(rows, seq, order)
    longest = max(map(len, rows), default=0)
    table = outputs[5][:longest]
    for index, row in enumerate(rows):
        table[len(row) :, index] = 0
    outputs[5] = table
    return outputs


def call_of(scene: Scene) -> tuple[tuple[int, int], list[Array]]:
    """The sizes and the outputs of the call."""
    rows = [row for _, own in scene.members for row in own] + scene.filling
    seq = max(seq for seq, _ in scene.members)
    return (len(rows), seq), outputs_of(rows, seq, scene.order)


@settings(deadline=None)
@given(scenes())
def test_every_request_gets_what_it_would_get_alone(scene: Scene) -> None:
    """By every rule, whatever the neighbours found, in whatever order, down to nothing at all; bit by bit."""
    sizes, outputs = call_of(scene)
    results = Assembly(DETECTOR).split(sizes, scene.shapes(), outputs)
    assert len(scene.members) == len(results)
    start = 0
    for (seq, rows), result in zip(scene.members, results, strict=True):
        size = sum(map(len, rows))
        order = [place - start for place in scene.order if start <= place < start + size]
        start += size
        for number, (port, expected) in enumerate(
            zip(DETECTOR.outputs, alone(rows, seq, order), strict=True)
        ):
            assert (number, port.element_type, expected.shape) == result.layout[number]
            assert expected.tobytes() == result.buffers[number], port.name


@settings(deadline=None)
@given(scenes(), st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_requests_that_are_divided_over_calls_get_what_one_call_gives(scene: Scene, cuts: list[int]) -> None:
    """By every rule, wherever they are cut; rows of an index column stand call by call."""
    assembly = Assembly(DETECTOR)
    for seq, rows in scene.members:
        pieces, start = [], 0
        for cut in cuts:
            if start < len(rows) or not pieces:
                pieces.append(rows[start : start + cut])
                start += cut
        parts = []
        for own in pieces:
            call = [*own, *scene.filling]
            shape = DETECTOR.resolve(((0, "f32", (len(own), seq)),))
            outputs = outputs_of(call, seq)
            parts += assembly.split((len(call), seq), [shape], outputs)
        joined = assembly.join(parts, [len(own) for own in pieces])
        in_order = list(range(sum(map(len, rows))))
        for number, (port, expected) in enumerate(
            zip(DETECTOR.outputs, alone(rows, seq, in_order), strict=True)
        ):
            assert (number, port.element_type, expected.shape) == joined.layout[number]
            assert expected.tobytes() == joined.buffers[number], port.name


@settings(deadline=None)
@given(scenes(), st.data())
def test_a_count_that_is_off_by_anything_is_never_divided(scene: Scene, data: st.DataObject) -> None:
    """One count, or one total, is changed to any other number: the batch is refused, whichever it is."""
    sizes, outputs = call_of(scene)
    names = [port.name for port in DETECTOR.outputs]
    name = data.draw(st.sampled_from(["total", "other_total", *(["count"] if sizes[0] else [])]))
    output = outputs[names.index(name)].reshape(-1)
    place = data.draw(st.integers(0, len(output) - 1))
    wrong = data.draw(st.integers(-300, 300).filter(lambda number: number != output[place]))
    output[place] = wrong
    with pytest.raises(RuleError):
        Assembly(DETECTOR).split(sizes, scene.shapes(), outputs)


@settings(deadline=None)
@given(scenes(), st.data())
def test_a_row_too_many_or_too_few_is_never_divided(scene: Scene, data: st.DataObject) -> None:
    """One row of any of the outputs that run along the data is doubled or left out: the batch is refused."""
    sizes, outputs = call_of(scene)
    names = [port.name for port in DETECTOR.outputs]
    number = names.index(data.draw(st.sampled_from(["selected", "beside", "found", "beside_found"])))
    output = outputs[number]
    if len(output) == 0:
        extra = np.zeros((1, *output.shape[1:]), output.dtype)
        outputs[number] = extra
    else:
        place = data.draw(st.integers(0, len(output) - 1))
        double = data.draw(st.booleans())
        outputs[number] = (
            np.insert(output, place, output[place], axis=0) if double else np.delete(output, place, axis=0)
        )
    with pytest.raises(RuleError):
        Assembly(DETECTOR).split(sizes, scene.shapes(), outputs)

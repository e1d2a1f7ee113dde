"""Whether a version takes all that its name announced, and where its ports are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapestream.version_fit import Fit, misfit, rearranged
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import IndexColumn, Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import parse_strategy


def port(name: str, shape: str, element_type: str = "f32", **facts: Any) -> InputPort:
    """An input."""
    return InputPort(name, element_type, NamedShape.parse(shape), **facts)


def output(name: str, shape: str, element_type: str = "f32", rule: Any = None) -> OutputPort:
    """An output."""
    return OutputPort(name, element_type, NamedShape.parse(shape), Rows() if rule is None else rule)


KNOWN = ModelSignature(
    "m",
    (port("ids", "batch:1..8, seq:1..64", "i64"), port("mask", "batch, seq", "i64", mask_of="ids")),
    (output("vector", "batch, 16"), output("score", "batch")),
)
IDS, MASK = KNOWN.inputs
VECTOR, SCORE = KNOWN.outputs
OTHERS: dict[str, tuple[Any, str | None]] = {
    "itself": ({}, None),
    "another order": ({"inputs": (MASK, IDS), "outputs": (SCORE, VECTOR)}, None),
    "wider bounds": ({"inputs": (port("ids", "batch:1..16, seq:1..128", "i64"), MASK)}, None),
    "other names of axes": (
        {
            "inputs": (
                port("ids", "batch:1..8, n:1..64", "i64"),
                port("mask", "batch, n", "i64", mask_of="ids"),
            )
        },
        None,
    ),
    "no mask": ({"inputs": (IDS,)}, "it has no input 'mask'"),
    "one more": ({"inputs": (*KNOWN.inputs, port("kind", "batch, seq", "i64"))}, "its input 'kind' is new"),
    "no score": ({"outputs": (VECTOR,)}, "it has no output 'score'"),
    "one more output": ({"outputs": (*KNOWN.outputs, output("z", "batch"))}, "its output 'z' is new"),
    "another type": (
        {"inputs": (port("ids", "batch:1..8, seq:1..64", "i32"), MASK)},
        "input 'ids': its type is i32, and clients know i64",
    ),
    "another rank": (
        {"outputs": (output("vector", "batch, 1, 16"), SCORE)},
        "output 'vector': it has 3 axes, and clients know 2",
    ),
    "narrower bounds": (
        {"inputs": (port("ids", "batch:1..8, seq:1..32", "i64"), MASK)},
        "input 'ids': axis 1 takes 1..32, and clients may send 1..64",
    ),
    "fewer rows": (
        {"inputs": (port("ids", "batch:1..4, seq:1..64", "i64"), MASK)},
        "input 'ids': axis 0 takes 1..4, and clients may send 1..8",
    ),
    "a mask that must be sent": (
        {"inputs": (IDS, port("mask", "batch, seq", "i64"))},
        "input 'mask': clients may leave it out, and this version does not make the same of that",
    ),
    "another rule": (
        {"outputs": (output("vector", "?, 16", rule=IndexColumn(0)), SCORE)},
        "output 'vector': its rule is index_column, and clients know rows",
    ),
    "longer vectors": (
        {"outputs": (output("vector", "batch, 32"), SCORE)},
        "output 'vector': axis 1 has 32, and clients expect 16",
    ),
    "sizes": ({"strategy": parse_strategy({"strategy": "bucketed", "seq": (16, 64)})}, None),
    "smaller sizes": (
        {"strategy": parse_strategy({"strategy": "bucketed", "seq": (16, 32)})},
        "it is run at 'seq' up to 32, and clients may send up to 64",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_port_is_named_that_does_not_fit(name: str) -> None:
    """Or nothing, where all that clients know is taken."""
    changes, words = OTHERS[name]
    inputs = tuple(
        replace(one, pad={"seq": 0}) if one.name == "ids" and "seq" in one.axis_names else one
        for one in changes.get("inputs", KNOWN.inputs)
    )
    version = replace(KNOWN, **{**changes, "inputs": inputs})
    assert words == misfit(KNOWN, version)


def test_sizes_that_clients_choose_apart_may_not_be_one() -> None:
    """A version that wants two axes alike does not take what the announced signature allows."""
    known = ModelSignature("m", (port("a", "n:1..9"), port("b", "k:1..9")), (output("y", "1", rule=Whole()),))
    version = replace(known, inputs=(port("a", "n:1..9"), port("b", "n:1..9")))
    assert "inputs 'a' and 'b' must have one size 'n', and clients may send two" == misfit(known, version)
    assert misfit(version, known) is None


def test_strings_may_not_be_shorter() -> None:
    """Bytes of each."""
    known = ModelSignature("m", (port("text", "batch", "str", at_most_bytes=100),), (output("y", "batch"),))
    version = replace(known, inputs=(port("text", "batch", "str", at_most_bytes=99),))
    assert "input 'text': at_most_bytes is 99, and clients may send 100" == misfit(known, version)
    assert misfit(version, known) is None


def test_tensors_are_rearranged_there_and_back() -> None:
    """By the names of the ports; what may be left out stays out."""
    version = replace(KNOWN, inputs=(MASK, IDS), outputs=(SCORE, VECTOR))
    fit = Fit.of(KNOWN, version)
    assert Fit(inputs=(1, 0), outputs=(1, 0)) == fit
    assert Fit(inputs=None, outputs=None) == Fit.of(KNOWN, KNOWN)
    sent = Tensors(layout=((0, "i64", (1, 2)), (1, "i64", (1, 2))), buffers=[b"ids", b"mask"])
    assert fit.inputs is not None
    there = rearranged(sent, fit.inputs)
    assert (((0, "i64", (1, 2)), (1, "i64", (1, 2))), [b"mask", b"ids"]) == (
        there.layout,
        list(there.buffers),
    )
    alone = rearranged(Tensors(layout=((0, "i64", (1, 2)),), buffers=[b"ids"]), fit.inputs)
    assert ((1, "i64", (1, 2)),) == alone.layout
    stray = rearranged(Tensors(layout=((7, "i64", (1, 2)),), buffers=[b"?"]), fit.inputs)
    assert ((7, "i64", (1, 2)),) == stray.layout

"""Signatures: what they derive from their ports, what they refuse, and how they travel."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine.errors import SignatureError
from shapestream_engine.output_rules import (
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
from shapestream_engine.ports import InputPort, OutputPort, has_batch_axis
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def input_port(name: str, shape: str, element_type: str = "f32", **more: Any) -> InputPort:
    """An input, its shape given as text."""
    return InputPort(name, element_type, NamedShape.parse(shape), **more)


def output_port(name: str, shape: str, rule: Rule, element_type: str = "f32") -> OutputPort:
    """An output, its shape given as text."""
    return OutputPort(name, element_type, NamedShape.parse(shape), rule)


def signature(*ports: InputPort | OutputPort) -> ModelSignature:
    """A model of these ports; where no output is among them, one that fits."""
    inputs = tuple(port for port in ports if isinstance(port, InputPort))
    outputs = tuple(port for port in ports if isinstance(port, OutputPort))
    if not outputs:
        batched = has_batch_axis(inputs)
        outputs = (output_port("y", "batch" if batched else "?", Rows() if batched else Whole()),)
    return ModelSignature("m", inputs, outputs)


EMBEDDINGS = signature(
    input_port("ids", "batch:1..64, seq:1..512", "i64", pad={"seq": 0}),
    input_port("mask", "batch, seq:..256", "i64", pad={"seq": 0}, mask_of="ids"),
    output_port("embedding", "batch, 384", Rows()),
)


def test_dimensions_are_numbered_with_batch_first() -> None:
    """The batch axis comes first wherever it stands, then the others as they occur."""
    model = signature(input_port("a", "rows, 3, batch, cols"), input_port("b", "batch, cols, depth"))
    assert (("batch", "rows", "cols", "depth"), True) == (model.dimensions, model.has_batch)


def test_anonymous_dynamic_dimensions_get_automatic_names() -> None:
    """An open axis without a name is the input's own: `<input>.<axis>`."""
    model = signature(input_port("image", "batch, 3, ?, 1..9"), input_port("other", "batch, ?"))
    assert ("batch", "image.2", "image.3", "other.1") == model.dimensions


def test_bounds_are_what_all_inputs_admit_together() -> None:
    """The interval of a dimension is the intersection over the ports that have it."""
    assert ("1..64", "1..256") == tuple(map(str, EMBEDDINGS.bounds))


def test_a_static_axis_ties_the_dynamic_ones_of_its_name() -> None:
    """`seq:8` in one input leaves no choice to `seq` in another."""
    model = signature(input_port("a", "batch, seq"), input_port("b", "batch, seq:8"))
    assert ("?", "8") == tuple(map(str, model.bounds))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (["batch, 3"], True),
        (["3, batch"], True),
        (["batch", "n, batch:..8"], True),
        (["batch, 3", "3"], True),
        (["batch, 3", "257"], False),
        (["batch, 3", "n"], False),
        (["3", ""], False),
        (["batch:4, 3"], False),
        (["batch:4, 3", "batch, 3"], False),
        (["n, 3"], False),
        ([], False),
    ],
)
def test_a_model_has_a_batch_axis_when_every_input_has_a_dynamic_one(
    shapes: list[str], expected: bool
) -> None:
    """One input without it, or with a fixed one, and requests cannot be put together, unless they have it in common."""
    model = signature(*(input_port(f"x{number}", shape) for number, shape in enumerate(shapes)))
    assert expected == model.has_batch


def test_a_dimension_is_paddable_when_every_input_that_has_it_allows_it() -> None:
    """`batch` never is; a mask always allows it; one port that is silent forbids it."""
    model = signature(
        input_port("a", "batch, seq, feat", pad={"seq": 0, "feat": 1.5}),
        input_port("b", "batch, feat"),
        input_port("mask", "batch, seq", "boolean", mask_of="a"),
    )
    assert (("batch", "seq", "feat"), (False, True, False)) == (model.dimensions, model.paddable)


@pytest.mark.parametrize(
    ("pad", "element_type", "message"),
    [
        ({"batch": 0}, "f32", r"the batch axis is never padded"),
        ({"sea": 0}, "f32", r"pad 'sea': no dynamic dimension of this name in \[batch, seq, c:3, \?\]"),
        ({"c": 0}, "f32", r"no dynamic dimension"),
        ({"x.3": 0}, "f32", r"name the axis to pad it"),
        ({"seq": 256}, "u8", r"u8 cannot hold 256"),
        ({"seq": -1}, "u8", r"cannot hold -1"),
        ({"seq": 0.5}, "i64", r"cannot hold 0\.5"),
        ({"seq": math.nan}, "i64", r"cannot hold nan"),
        ({"seq": math.inf}, "i64", r"cannot hold inf"),
        ({"seq": 2}, "boolean", r"cannot hold 2"),
        ({"seq": 1e6}, "f16", r"cannot hold 1000000"),
        ({"seq": 10**400}, "f64", r"cannot hold 1000"),
        ({"seq": "0"}, "f32", r"cannot hold '0'"),
        ({"seq": None}, "f32", r"cannot hold None"),
    ],
)
def test_padding_that_cannot_be_is_refused(pad: dict[str, Any], element_type: str, message: str) -> None:
    """Padding needs a named dynamic dimension, and a value that the element type can hold."""
    with pytest.raises(SignatureError, match=message):
        input_port("x", "batch, seq, c:3, ?", element_type, pad=pad)


@pytest.mark.parametrize(
    ("value", "element_type"),
    [
        (255, "u8"),
        (-(2**63), "i64"),
        (0.1, "f16"),
        (-math.inf, "f32"),
        (math.nan, "f32"),
        (True, "boolean"),
        (2.0, "i8"),
    ],
)
def test_padding_takes_every_value_that_the_type_holds(value: float, element_type: str) -> None:
    """Floats may be rounded, and be infinite or not a number; integers must be exact."""
    port = input_port("x", "seq", element_type, pad={"seq": value})
    assert value is port.pad_value("seq")


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ([input_port("x", "batch"), input_port("x", "batch")], r"model 'm': two inputs are called 'x'"),
        (
            [input_port("x", "batch"), output_port("y", "batch", Rows()), output_port("y", "batch", Rows())],
            r"two outputs are called 'y'",
        ),
        ([input_port("x", "batch, batch")], r"input 'x' has two batch axes"),
        (
            [input_port("x", "batch, n:1..4"), input_port("y", "batch, n:8..")],
            r"input 'y': dimension 'n' contradicts the other inputs: no size is both 1\.\.4 and 8\.\.",
        ),
        (
            [input_port("x", "c:3"), input_port("y", "c:4")],
            r"dimension 'c' is 3 in input 'x' and 4 in input 'y'",
        ),
        ([input_port("x", "n, n:4"), input_port("y", "n:5")], r"dimension 'n'"),
        ([input_port("x", "batch, seq", mask_of="z")], r"mask_of names no other input: 'z'"),
        ([input_port("x", "batch, seq", mask_of="x")], r"mask_of names no other input: 'x'"),
        (
            [input_port(name, "batch", mask_of=of) for name, of in (("x", None), ("y", "x"), ("z", "y"))],
            r"mask_of names 'y', which is a mask itself",
        ),
        (
            [input_port("x", "batch, seq"), input_port("y", "batch, len", mask_of="x")],
            r"input 'y': its dimension 'len' is none of 'x', which it masks",
        ),
    ],
)
def test_ports_that_contradict_each_other_are_refused(
    ports: list[InputPort | OutputPort], message: str
) -> None:
    """Names, bounds and masks must fit together; the message says which port does not."""
    with pytest.raises(SignatureError, match=message):
        signature(*ports)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([("y", "?, 4", Rows())], r"needs one dynamic axis named batch; there is none in \[\?, 4\]"),
        ([("y", "batch:4", Rows())], r"needs one dynamic axis named batch"),
        ([("y", "batch, batch", Rows())], r"needs one dynamic axis named batch"),
        (
            [("y", "batch", Whole())],
            r"whole cannot hold: the model has a batch axis; state the rule that divides",
        ),
        ([("y", "?, 4", IndexColumn(4))], r"there is no column 4 in \[\?, 4\]"),
        ([("y", "?, 4", IndexColumn(-1))], r"there is no column -1"),
        ([("y", "?", IndexColumn(1))], r"there is no column 1 in \[\?\]"),
        ([("y", "?, 2, 2", IndexColumn())], r"needs the shape \[rows, columns\] or \[rows\]"),
        ([("y", "", IndexColumn())], r"needs the shape"),
        ([("y", "?", With("z"))], r"follows 'z', which is no output with the rule index_column"),
        ([("y", "batch", Rows()), ("z", "?", With("y"))], r"follows 'y', which is no output with the rule"),
        ([("y", "?", IndexColumn()), ("z", "", With("y"))], r"with needs rows; the output is a scalar"),
        ([("y", "?", Counts("z"))], r"counts is counted by 'z', which is no output with the rule rows"),
        ([("y", "?", Counts("y"))], r"counts is counted by 'y', which is no output with the rule rows"),
        ([("z", "?", IndexColumn()), ("y", "?", Counts("z"))], r"by 'z', which is no output with the rule"),
        ([("z", "batch, 2", Rows()), ("y", "?", Counts("z"))], r"more than one number per row: \[batch, 2\]"),
        ([("z", "batch", Rows()), ("y", "", Counts("z"))], r"counts needs rows; the output is a scalar"),
        ([("z", "batch", Rows()), ("y", "batch, 2", Counts("z"))], r"in \[batch, 2\] it is that of 'batch'"),
        ([("z", "batch", Rows()), ("y", "?, 4", PaddedCounts("z"))], r"needs one dynamic axis named batch"),
        ([("z", "batch", Rows()), ("y", "batch", PaddedCounts("z"))], r"needs the shape \[batch, max, ...\]"),
        ([("z", "batch, 3", Rows()), ("y", "batch, ?", PaddedCounts("z"))], r"more than one number per row"),
        ([("y", "1", Recount("z"))], r"recount follows 'z', which is no output with the rule index_column,"),
        ([("z", "batch", Rows()), ("y", "1", Recount("z"))], r"index_column, with, counts or padded_counts"),
        (
            [("z", "?", IndexColumn()), ("y", "2", Recount("z"))],
            r"needs one number, \[\] or \[1\], not \[2\]",
        ),
        ([("z", "?", IndexColumn()), ("y", "batch", Recount("z"))], r"\[batch\] has a number per row"),
        ([("y", "batch, 2", Shared())], r"\[batch, 2\] follows the batch; that is the rule rows"),
    ],
)
def test_rules_that_cannot_hold_are_refused(outputs: list[tuple[str, str, Rule]], message: str) -> None:
    """A rule is checked against the shapes before anything runs, and the message names output and rule."""
    with pytest.raises(SignatureError, match=message):
        signature(input_port("x", "batch, 3"), *(output_port(*output) for output in outputs))


def test_a_boolean_is_no_index() -> None:
    """A column that knows only two rows cannot say whose row it is."""
    with pytest.raises(SignatureError, match="a boolean is no index"):
        signature(input_port("x", "batch"), output_port("y", "?", IndexColumn(), "boolean"))


def test_a_boolean_is_no_count() -> None:
    """Neither one that says how many there are, nor one that would have to be recomputed."""
    batch, flag = input_port("x", "batch"), output_port("z", "batch", Rows(), "boolean")
    with pytest.raises(SignatureError, match="is counted by 'z': a boolean is no count"):
        signature(batch, flag, output_port("y", "?", Counts("z")))
    with pytest.raises(SignatureError, match="the rule recount: a boolean is no count"):
        signature(batch, output_port("z", "?", IndexColumn()), output_port("y", "1", Recount("z"), "boolean"))


@pytest.mark.parametrize(
    "rule",
    [Rows(), IndexColumn(), With("y"), Counts("y"), PaddedCounts("y"), Recount("y"), Shared()],
)
def test_without_a_batch_axis_outputs_are_taken_whole(rule: Rule) -> None:
    """There is nothing to divide where every request runs alone."""
    with pytest.raises(SignatureError, match="the model has no batch axis, so its outputs are taken whole"):
        signature(input_port("x", "n, 3"), output_port("y", "n, 3", rule))


def test_a_model_without_outputs_is_refused() -> None:
    """It could not answer anything."""
    with pytest.raises(SignatureError, match="at least one output"):
        ModelSignature("m", (input_port("x", "n"),), ())


@pytest.mark.parametrize(("name", "element_type"), [("", "f32"), ("x", "float32")])
def test_a_port_has_a_name_and_a_known_type(name: str, element_type: str) -> None:
    """Both kinds of port refuse what they cannot be."""
    with pytest.raises(SignatureError):
        input_port(name, "n", element_type)
    with pytest.raises(SignatureError):
        output_port(name, "n", Whole(), element_type)


def test_input_shapes_fill_the_sizes_in() -> None:
    """A call's sizes become one shape per input, static axes included."""
    model = signature(input_port("a", "3, seq, batch"), input_port("b", "batch, 2"))
    assert ((3, 7, 5), (5, 2)) == model.input_shapes((5, 7))


ALL_KINDS = signature(
    input_port("a b/c:0", "batch:1..64, seq, ?, 3", "f32", pad={"seq": -0.5}),
    input_port("m", "batch, seq", "boolean", mask_of="a b/c:0"),
    output_port("rows", "batch, seq", Rows()),
    output_port("peaks", "?, 4", IndexColumn(2)),
    output_port("scores", "?", With("peaks")),
    output_port("count", "batch", Rows(), "i32"),
    output_port("found", "?, 4", Counts("count")),
    output_port("table", "batch, 100, 4", PaddedCounts("count")),
    output_port("total", "1", Recount("scores"), "i64"),
    output_port("anchors", "seq, 4", Shared()),
)


@pytest.mark.parametrize("model", [EMBEDDINGS, ALL_KINDS, signature(input_port("x", ""))])
def test_a_signature_travels_as_plain_data(model: ModelSignature) -> None:
    """Packed by msgpack and back it is equal, and derives the same."""
    packed = msgpack.packb(model.to_dict())
    received = ModelSignature.from_dict(msgpack.unpackb(packed))
    assert model == received
    assert (model.dimensions, model.bounds, model.paddable) == (
        received.dimensions,
        received.bounds,
        received.paddable,
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["name", "inputs", "outputs", "element_type", "shape", "rule", "pad", "mask_of"]
                ),
                inner | st.sampled_from(["f32", "batch", "x"]),
                max_size=8,
            )
        ),
        max_leaves=20,
    )
)
def test_whatever_arrives_as_a_signature_is_read_or_refused(plain: Any) -> None:
    """Hostile data gives a `SignatureError` and nothing else."""
    with contextlib.suppress(SignatureError):
        ModelSignature.from_dict(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, r"a name, a list of inputs and a list of outputs"),
        ({"inputs": {}}, r"a list of inputs"),
        ({"inputs": ["x"]}, r"a port is a mapping"),
        ({"inputs": [{"name": "x", "element_type": "f32"}]}, r"a port's shape is text, not None"),
        ({"inputs": [{"name": "x", "element_type": "f32", "shape": "-3"}]}, r"is not a dimension"),
        ({"inputs": [{"name": "x", "element_type": "f32", "shape": "n", "pad": [1]}]}, r"pad maps names"),
        ({"inputs": [{"name": "x", "element_type": "f32", "shape": "n", "pad": {1: 2}}]}, r"pad maps names"),
        ({"outputs": [{"name": "y", "element_type": "f32", "shape": "n"}]}, r"unknown rule None"),
    ],
)
def test_malformed_plain_data_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    """A worker of another version gets a message that one can act upon."""
    with pytest.raises(SignatureError, match=message):
        ModelSignature.from_dict({**EMBEDDINGS.to_dict(), **change})


def test_a_signature_describes_itself() -> None:
    """The lines for a human name ports, rules, bounds, and why a dimension is not padded."""
    model = signature(
        input_port("a", "batch:1..8, seq, ?", pad={"seq": 0}),
        input_port("b", "batch, seq"),
        input_port("mask", "batch", "boolean", mask_of="a"),
        output_port("y", "batch, seq", Rows()),
        output_port("z", "?, 4", IndexColumn(1)),
    )
    assert [
        "model m",
        "  input  a: f32 [batch:1..8, seq, ?], pad seq with 0",
        "  input  b: f32 [batch, seq]",
        "  input  mask: boolean [batch], mask of a",
        "  output y: f32 [batch, seq], {rule: rows}",
        "  output z: f32 [?, 4], {rule: index_column, column: 1}",
        "  batch: 1..8, requests share calls along it",
        "  seq: ?, never padded (b does not allow it): only requests of the same size share a call",
        "  a.2: ?, never padded: only requests of the same size share a call",
    ] == model.describe()
    assert "  no batch axis: every request runs alone" == signature(input_port("x", "n")).describe()[-1]


def test_the_axis_along_which_the_data_decides() -> None:
    """Rows found stand first, entries counted beside the batch axis; other outputs have the size of their rule."""
    expected = {"rows": None, "peaks": 0, "scores": 0, "count": None, "found": 0, "table": 1, "total": None}
    found = {port.name: port.data_axis for port in ALL_KINDS.outputs}
    assert {**expected, "anchors": None} == found
    assert 0 == output_port("y", "20, batch", PaddedCounts("count")).data_axis

"""Models that take and give strings: signatures, the requests of an engine alone, and batches on a slot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.slot_bench import SlotBench

from shapestream_engine import (
    ElementTypeError,
    InferenceError,
    InputPort,
    InputSpec,
    ModelSignature,
    ModelSpec,
    NamedShape,
    OutputPort,
    OutputSpec,
    ShapeError,
    SignatureError,
    Strategy,
    Tensors,
    compile_model,
    dtype_of,
    string_arrays,
)
from shapestream_engine.array_lists import unpack
from shapestream_engine.arrays import array_of
from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.output_rules import (
    Counts,
    IndexColumn,
    PaddedCounts,
    Recount,
    Rows,
    Rule,
    Whole,
    With,
)
from shapestream_engine.tensor import StringTensor

Array = np.ndarray[Any, Any]

TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
ODD = ["", "a", "\0", "a\0", "é", "日本語", "\U0001f600", "x" * 300]
"""Strings that a careless copy would change."""


def objects(*elements: Any) -> Array:
    """An array of objects [n]."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def spec_of(
    function: Callable[..., Any],
    inputs: dict[str, InputSpec] | None = None,
    outputs: dict[str, OutputSpec] | None = None,
    **more: Any,
) -> ModelSpec:
    """A function of texts [batch] whose output is texts [batch]."""
    return ModelSpec(
        name="m",
        model=function,
        inputs=inputs or {"text": InputSpec(shape="batch", element_type="str")},
        outputs=outputs or {"y": OutputSpec(shape="batch", element_type="str")},
        **more,
    )


def upper(text: Array) -> Array:
    """Upper case, element by element."""
    return np.frompyfunc(str.upper, 1, 1)(text)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- signatures


def signature(*inputs: InputPort, output: str = "batch", **more: Any) -> ModelSignature:
    """A signature with one output of numbers."""
    return ModelSignature(
        "m", inputs, (OutputPort("y", "f32", NamedShape.parse(output), more.pop("rule", Rows())),), **more
    )


def port(shape: str, element_type: str = "str", **more: Any) -> InputPort:
    """An input `text`."""
    return InputPort("text", element_type, NamedShape.parse(shape), **more)


def test_an_input_of_strings_implies_the_dimension_of_its_mean_bytes() -> None:
    """It comes after the port's own, is bounded by the elements' bound, and is paddable, since nothing is padded."""
    ids = InputPort("ids", "i64", NamedShape.parse("batch, seq"))
    model = signature(port("batch:1..8, n", at_most_bytes=64), ids)
    assert ("batch", "n", "text.bytes", "seq") == model.dimensions
    assert ["1..8", "?", "1..64", "?"] == list(map(str, model.bounds))
    assert (False, False, True, False) == model.paddable
    assert (2, None) == model.table.strings
    assert ((3, 4), (3, 5)) == model.input_shapes((3, 4, 9, 5))
    assert 1 << 20 == port("").at_most_bytes


def test_a_signature_with_strings_survives_the_wire() -> None:
    """Equal, with the bound."""
    model = signature(port("batch", at_most_bytes=64))
    assert model == ModelSignature.from_dict(model.to_dict())
    assert 64 == ModelSignature.from_dict(model.to_dict()).inputs[0].at_most_bytes


def test_the_description_names_the_bound_and_the_implied_dimension() -> None:
    """Nobody has to guess what `text.bytes` is."""
    lines = signature(port("batch", at_most_bytes=64)).describe()
    assert "  input  text: str [batch], at most 64 bytes each" in lines
    assert (
        "  text.bytes: 1..64, mean bytes of a string; requests of any share a call, and nothing is padded"
        in lines
    )


@pytest.mark.parametrize(
    ("shape", "sizes", "nbytes"),
    [
        ((2, 3, 13), (2, 3, 3), 4 * 6 + 13),
        ((2, 3, 12), (2, 3, 2), 4 * 6 + 12),
        ((2, 3, 0), (2, 3, 1), 4 * 6),
        ((0, 3, 0), (0, 3, 1), 0),
        ((1, 1, 65), (1, 1, 64), 4 + 65),
    ],
)
def test_a_layout_tells_the_mean_and_the_exact_bytes(
    shape: tuple[int, ...], sizes: tuple[int, ...], nbytes: int
) -> None:
    """Beyond the bound the mean is the bound: the string that is too long is refused by its index, elsewhere.

    Empty strings count as 1 byte, since a request of them has elements.
    """
    model = signature(port("batch, n", at_most_bytes=64))
    request = model.resolve(((0, "str", shape),))
    assert (sizes, (nbytes,)) == (request.sizes, request.nbytes)


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        ((0, "str", (2, 3)), r"has 2 dimensions, \[batch, n\], and the bytes of all its strings, not 2"),
        ((0, "str", (2, 3, -1)), "bytes of all its strings are an integer within"),
        ((0, "str", (2, 3, True)), "bytes of all its strings are an integer within"),
        ((0, "str", (2, 3, 1 << 63)), "bytes of all its strings are an integer within"),
        ((0, "str", (0, 3, 1)), "are 1, but there are none"),
        ((0, "bytes", (2, 3, 1)), "is of element type str, not 'bytes'"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: Any, complaint: str) -> None:
    """By name, and in words."""
    with pytest.raises(ShapeError, match=complaint):
        signature(port("batch, n")).resolve((layout,))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: port("batch, n", pad={"n": 0}), "strings are never padded"),
        (lambda: port("batch", mask_of="x"), "a mask is 1 or 0, and str is neither"),
        (lambda: port("batch", at_most_bytes=0), "at_most_bytes is from 1 to 4294967295, not 0"),
        (lambda: port("batch", at_most_bytes=True), "not True"),
        (lambda: port("batch", "i64", at_most_bytes=9), "bounds strings, and i64 is none"),
        (lambda: port("batch", "text"), "unknown element type 'text'; known are .*, str, bytes"),
    ],
)
def test_ports_that_cannot_be_are_refused(make: Callable[[], InputPort], complaint: str) -> None:
    """With the remedy."""
    with pytest.raises(SignatureError, match=complaint) as error:
        make()
    assert ("inputs", "text") == error.value.key


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (
            Strategy({"text.bytes": (64,)}),
            "'text.bytes' is the mean bytes of strings, which are never padded",
        ),
        (Strategy(max_prepared=8), "max_prepared is for models of fixed and padded sizes"),
        (Strategy(static_shapes=((("batch", 1),),)), "static is for models of fixed and padded sizes"),
    ],
)
def test_no_strategy_may_name_the_bytes(strategy: Strategy, complaint: str) -> None:
    """Nor need one size of them for each prepared shape."""
    with pytest.raises(SignatureError, match=complaint):
        signature(port("batch:1..8"), strategy=strategy)


@pytest.mark.parametrize(
    ("rule", "shape", "complaint"),
    [
        (IndexColumn(), "?, 3", "a str is no index"),
        (Recount("y"), "", "a str is no count"),
        (PaddedCounts("y"), "batch, ?", "sets entries beyond a count to 0"),
    ],
)
def test_rules_of_numbers_refuse_strings(rule: Rule, shape: str, complaint: str) -> None:
    """They compute with what an output holds."""
    outputs = (
        OutputPort("y", "i64", NamedShape.parse("batch"), Rows()),
        OutputPort("i", "i64", NamedShape.parse("?, 2"), IndexColumn()),
        OutputPort("s", "str", NamedShape.parse(shape), Recount("i") if isinstance(rule, Recount) else rule),
    )
    with pytest.raises(SignatureError, match=complaint):
        ModelSignature("m", (port("batch"),), outputs)


@pytest.mark.parametrize("element_type", ["str", "bytes"])
def test_strings_count_nothing(element_type: str) -> None:
    """Not even `counts` of another output."""
    outputs = (
        OutputPort("n", element_type, NamedShape.parse("batch"), Rows()),
        OutputPort("y", "f32", NamedShape.parse("?"), Counts("n")),
    )
    with pytest.raises(SignatureError, match=f"a {element_type} is no count"):
        ModelSignature("m", (port("batch"),), outputs)


@pytest.mark.parametrize("element_type", ["str", "bytes"])
def test_strings_have_no_dtype(element_type: str) -> None:
    """A place that does not know of strings fails at once, instead of sending addresses of objects."""
    with pytest.raises(ElementTypeError):
        dtype_of(element_type)


def test_requests_of_different_means_share_a_call() -> None:
    """At the largest mean; no size of the port changes."""
    model = signature(port("batch"))
    sizes = [model.resolve(((0, "str", shape),)).sizes for shape in ((1, 5), (2, 80))]
    assert (3, 40) == merge_sizes(model, sizes)


# ---------------------------------------------------------------- one request of the engine alone


@pytest.mark.parametrize(
    "texts",
    [
        ["a", "bé"],
        ("a", "bé"),
        np.array(["a", "bé"]),
        np.array(["a", "bé"], np.dtypes.StringDType()),
        objects("a", "bé"),
    ],
    ids=["list", "tuple", "U", "StringDType", "objects"],
)
def test_texts_come_as_lists_and_arrays(texts: Any) -> None:
    """Of any of NumPy's types."""
    request = compile_model(spec_of(upper)).create_infer_request()
    result = request.infer({"text": texts})["y"]
    assert ["A", "BÉ"] == result.tolist()
    assert object == result.dtype


def test_bytes_keep_their_zeros() -> None:
    """A list does not become an array of the type `S`, which drops zeros at the end."""
    spec = spec_of(
        lambda text: text,
        {"text": InputSpec(shape="n", element_type="bytes")},
        {"y": OutputSpec(shape="n", element_type="bytes")},
    )
    request = compile_model(spec).create_infer_request()
    given_ = [b"", b"\0", b"a\0", b"\xff\xfe"]
    assert given_ == request.infer({"text": given_})["y"].tolist()
    assert [b"a", b"bc"] == request.infer({"text": np.array([b"a", b"bc"])})["y"].tolist()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([1, 2], "input 'text': elements are str, not int"),
        ([b"a"], "input 'text': elements are str, not bytes"),
        (["a", None], "input 'text': elements are str, not NoneType"),
        (np.ones(2), "input 'text': elements are str, not float64"),
        ([["a"], ["b", "c"]], "input 'text': elements are str, not list"),
        (np.ma.array(objects("a", "b"), mask=[True, False]), "input 'text': masked elements are no strings"),
    ],
)
def test_what_is_no_text_is_refused(value: Any, complaint: str) -> None:
    """Nothing is converted by `str`."""
    request = compile_model(spec_of(upper)).create_infer_request()
    with pytest.raises(ElementTypeError, match=complaint):
        request.infer({"text": value})


def test_a_tensor_of_strings_is_resized_and_filled() -> None:
    """The request's own, and one of the caller's."""
    request = compile_model(spec_of(upper)).create_infer_request()
    own = request.input_tensor("text")
    own.shape = (2,)
    assert ["", ""] == own.data.tolist()
    own.data[...] = ["a", "b"]
    assert ["A", "B"] == request.infer()["y"].tolist()
    outside = StringTensor("str", (1,))
    outside.data[...] = "c"
    request.set_input_tensor("text", outside)
    assert ["C"] == request.infer()["y"].tolist()
    with pytest.raises(ElementTypeError, match="input 'text' is str, and the tensor bytes"):
        request.set_input_tensor("text", StringTensor("bytes"))
    with pytest.raises(ShapeError):
        outside.shape = (-1,)
    with pytest.raises(ElementTypeError, match="strings are str or bytes, not 'f32'"):
        StringTensor("f32")
    assert "StringTensor(str, [1])" == repr(outside)
    assert 0 == request.reallocations


@pytest.mark.parametrize("returned", [["x"], objects("x"), np.array(["x"])], ids=["list", "objects", "U"])
def test_functions_return_lists_and_arrays(returned: Any) -> None:
    """A list of texts is an output as well."""
    request = compile_model(spec_of(lambda text: returned)).create_infer_request()
    assert ["x"] == request.infer({"text": ["a"]})["y"].tolist()


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([b"x"], "output 'y': elements are str, not bytes"),
        (np.ones(1), "output 'y': elements are str, not float64"),
        ([["x"]], r"output 'y' has the shape \[1, 1\], declared is \[batch\]"),
        ([None], "output 'y': elements are str, not NoneType"),
    ],
)
def test_wrong_results_are_the_models_error(returned: Any, complaint: str) -> None:
    """And name the output."""
    request = compile_model(spec_of(lambda text: returned)).create_infer_request()
    with pytest.raises(InferenceError, match=complaint):
        request.infer({"text": ["a"]})


# ---------------------------------------------------------------- batches on a slot


def tag(text: Array, weight: Array) -> dict[str, Any]:
    """Element by element: texts, bytes, numbers, and as many words as a text has letters, at most 3."""
    words = [[f"{each}:{number}" for number in range(min(len(each), 3))] for each in text[:, 0]]
    return {
        "both": np.frompyfunc(lambda one, other: one + other, 2, 1)(text, text[:, ::-1]).astype(object),
        "raw": [each.encode("utf-16") for each in text[:, 0]],
        "weight": weight * 2,
        "count": np.array([len(own) for own in words], np.int64),
        "word": [each for own in words for each in own],
        "tail": [each[::-1] for own in words for each in own],
        "names": ["é", "b"],
    }


def tagging(strategy: Strategy = Strategy()) -> SlotBench:  # noqa: B008 - a value
    """`tag` on a slot: a model of every rule that strings may have."""
    rules: dict[str, Rule] = {"word": Counts("count"), "tail": With("word")}
    return SlotBench(
        compile_model(
            ModelSpec(
                name="m",
                model=tag,
                inputs={
                    "text": InputSpec(shape="batch:0..32, 2", element_type="str"),
                    "weight": InputSpec(shape="batch, n", element_type="f32", pad={"n": 0}),
                },
                outputs={
                    "both": OutputSpec(shape="batch, 2", element_type="str"),
                    "raw": OutputSpec(shape="batch", element_type="bytes"),
                    "weight": OutputSpec(shape="batch, n", element_type="f32"),
                    "count": OutputSpec(shape="batch", element_type="i64"),
                    **{
                        name: OutputSpec(
                            shape="?", element_type="str", rule={"rule": rule.NAME, "output": rule.output}
                        )
                        for name, rule in rules.items()
                        if isinstance(rule, Counts | With)
                    },
                    "names": OutputSpec(shape="2", element_type="str", rule={"rule": "shared"}),
                },
                strategy=strategy,
            )
        )
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Array]:
    """Texts [rows, 2] and weights [rows, n]."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    texts = st.lists(st.one_of(TEXTS, st.sampled_from(ODD)), min_size=2 * rows, max_size=2 * rows)
    return {
        "text": objects(*draw(texts)).reshape(rows, 2),
        "weight": np.full((rows, width), draw(st.integers(0, 9)), np.float32),
    }


WAYS = [Strategy(), Strategy({"batch": (1, 3)}, partitioned=True), Strategy({"batch": (8, 16), "n": (4,)})]
"""Calls as they come; requests divided over calls of 1 and 3 rows; rows filled up by copies."""
BENCHES = [tagging(strategy) for strategy in WAYS]


@given(st.sampled_from(range(len(WAYS))), st.lists(requests(), min_size=1, max_size=6))
def test_strings_in_a_batch_are_those_of_the_function_alone(way: int, batch: list[dict[str, Array]]) -> None:
    """Whatever the calls: gathered, divided, filled up with copies, and joined."""
    for request, result in zip(batch, BENCHES[way].results(*batch), strict=True):
        alone = {name: np.asarray(expected, object).tolist() for name, expected in tag(**request).items()}
        assert alone == {name: own.tolist() for name, own in result.items()}


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_texts_of_any_length_pass(size: int) -> None:
    """Up to a MiB, beside short ones."""
    bench = SlotBench(compile_model(spec_of(upper)))
    for own, result in zip(
        (["x" * size, ""], ["é" * (size // 2)]),
        bench.results(objects("x" * size, ""), objects("é" * (size // 2))),
        strict=True,
    ):
        assert [each.upper() for each in own] == result["y"].tolist()


def test_bytes_that_are_no_text_pass() -> None:
    """In the order in which they came, along an axis that is not the first."""
    spec = spec_of(
        lambda text: text,
        {"text": InputSpec(shape="2, batch", element_type="bytes")},
        {"y": OutputSpec(shape="2, batch", element_type="bytes")},
        strategy=Strategy({"batch": (2,)}, partitioned=True),
    )
    bench = SlotBench(compile_model(spec))
    first = objects(b"\xff", b"\0", b"", b"\x80\0", b"a", b"bc").reshape(2, 3)
    second = objects(b"\xfe", b"z").reshape(2, 1)
    one, other = bench.results(first, second)
    assert (first.tolist(), second.tolist()) == (one["y"].tolist(), other["y"].tolist())


def test_a_request_without_elements_needs_no_call() -> None:
    """Its strings are none, of either element type."""
    calls = []

    def never(text: Array) -> Any:
        calls.append(text)
        return {"y": text, "n": np.ones(len(text), np.int64)}

    outputs = {
        "y": OutputSpec(shape="batch", element_type="str"),
        "n": OutputSpec(shape="batch", element_type="i64"),
    }
    bench = SlotBench(compile_model(spec_of(never, outputs=outputs)))
    empty, full = bench.results(objects(), objects("a"))
    assert ([], []) == (empty["y"].tolist(), empty["n"].tolist())
    assert ["a"] == full["y"].tolist()
    assert [["a"]] == [each.tolist() for each in calls]


def test_a_list_of_arrays_of_strings() -> None:
    """As two tensors: the strings of all arrays in one row, and the arrays' shapes."""
    spec = spec_of(
        lambda text: [list(each) for each in text],
        {"text": InputSpec(shape="n", element_type="str")},
        {"words": OutputSpec(shape="length", element_type="str", rule={"rule": "list"})},
    )
    (result,) = SlotBench(compile_model(spec)).results(objects("ab", "", "é日c"))
    found = [each.tolist() for each in unpack(result["words"], result["words.shapes"])]
    assert [["a", "b"], [], ["é", "日", "c"]] == found


def test_a_model_without_a_batch_axis_is_taken_whole() -> None:
    """Also a text alone, of the shape []."""
    spec = spec_of(
        lambda text: np.array(text.item().split(), object),
        {"text": InputSpec(shape="", element_type="str")},
        {"y": OutputSpec(shape="words", element_type="str")},
    )
    model = compile_model(spec)
    assert Whole() == model.signature.outputs[0].rule
    (result,) = SlotBench(model).results(np.array("a bé c", object))
    assert ["a", "bé", "c"] == result["y"].tolist()


def test_text_that_is_no_utf8_fails_the_call_by_name() -> None:
    """A server has checked it before; the engine checks again, since it makes the texts."""
    bench = SlotBench(compile_model(spec_of(upper)))
    batch = bench.batch(objects("ab"))
    wrong = Tensors(layout=batch.members[0].layout, buffers=(b"\x02\0\0\0\xff\xfe",))
    report = bench.slots[0].run(replace(batch, members=(wrong,)))
    assert report is not None
    assert "input 'text': element 0 is no UTF-8" in report.message


def test_a_lone_surrogate_of_a_function_is_its_error() -> None:
    """UTF-8 has none."""
    report = SlotBench(compile_model(spec_of(lambda text: ["\ud800"]))).run(objects("a"))
    assert ("model_error", True) == (report.code, "output 'y': element 0 has '\\ud800'" in report.message)


def test_arrays_of_numbers_are_views_of_their_buffers() -> None:
    """`array_of` copies strings only."""
    buffer = np.arange(4, dtype=np.float32).tobytes()
    assert not array_of("f32", (2, 2), buffer).flags.owndata


def test_texts_of_another_length_are_no_new_shape() -> None:
    """The tensors of the call have the same shapes, so nothing is prepared."""
    bench = SlotBench(compile_model(spec_of(upper)))
    batches = [bench.batch(objects(text), batch=number) for number, text in enumerate(("a", "bcd"))]
    reports = [bench.slots[0].run(batch) for batch in batches]
    assert [1, 0] == [report.preparations for report in reports if report is not None]


def test_numpy_is_not_asked_for_masked_arrays_that_nobody_has_made() -> None:
    """Its module for them is imported when it is first named: 20 ms in the middle of a gateway's first call with texts."""
    program = (
        "import sys, numpy\n"
        "from shapestream_engine.arrays import plain_array\n"
        "from shapestream_engine.string_arrays import as_strings\n"
        "as_strings('str', ['a']), as_strings('str', numpy.array(['a'], object)), plain_array([1.5, 2.0])\n"
        "print('numpy.ma' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(string_arrays.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "False\n" == ran.stdout

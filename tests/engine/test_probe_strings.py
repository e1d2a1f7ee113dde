"""The proof and the calibration of models that take strings: invented texts, samples, and differences that are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, SignatureError, compile_model
from shapestream_engine.arrays import array_of
from shapestream_engine.calibration import calibrate
from shapestream_engine.calibration_shapes import call_nbytes, stages
from shapestream_engine.comparison import compare_answers
from shapestream_engine.ports import InputPort
from shapestream_engine.probing.evidence import Finding
from shapestream_engine.probing.examination import ProbeOptions, examine, treatments, values_of
from shapestream_engine.probing.inputs import (
    Samples,
    Texts,
    Uniform,
    complete_values,
    extreme_request,
    extreme_texts,
    given_texts,
    make_request,
)
from shapestream_engine.probing.tolerances import OutputTolerance, compare
from shapestream_engine.shapes import NamedShape

Array = np.ndarray[Any, Any]


def lengths(strings: Array) -> list[int]:
    """The bytes of each string."""
    return [len(each.encode() if isinstance(each, str) else each) for each in strings.ravel().tolist()]


@given(st.sampled_from(["str", "bytes"]), st.integers(0, 9), st.integers(1, 3), st.integers(0, 99), st.data())
def test_texts_have_the_bytes_that_were_asked_for(
    element_type: str, rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    """In all exactly; none is longer than the bound."""
    most = data.draw(st.integers(1, 200))
    total = data.draw(st.integers(0, rows * columns * most)) if rows else 0
    random = np.random.default_rng(seed)
    strings = Texts(element_type, most).draw((rows, columns, total), random)
    assert (rows, columns) == strings.shape
    assert total == sum(lengths(strings))
    assert max(lengths(strings), default=0) <= most
    kind = {"str": str, "bytes": bytes}[element_type]
    assert all(type(each) is kind for each in strings.ravel().tolist())


def test_texts_have_several_lengths_and_scripts() -> None:
    """Not only words of ASCII, and not all of one length."""
    strings = Texts("str", 1 << 20).draw((64, 64 * 40), np.random.default_rng(0))
    assert len(set(lengths(strings))) > 10
    assert len({text.isascii() for text in strings.tolist()}) == 2


@pytest.mark.parametrize(("kind", "first"), [("smallest", "\0"), ("largest", "\U0010ffff")])
def test_extreme_texts_repeat_the_first_or_the_last_character(kind: str, first: str) -> None:
    """In the bytes that were asked for."""
    strings = extreme_texts("str", kind, (2, 16))
    assert [8, 8] == lengths(strings)
    assert {first} == {each[0] for each in strings.tolist()}


def test_samples_keep_their_lengths_except_in_a_measurement() -> None:
    """Which repeats or cuts them, at whole characters."""
    given_ = np.array(["日本", "ab"])
    assert ["日本", "ab"] == given_texts("str", given_, None).tolist()
    assert ["日x", "abab"] == given_texts("str", given_, 8).tolist()
    assert [b"\xffa", b"\xffa"] == given_texts("bytes", np.array([b"\xffab", b"\xffa"]), 4).tolist()


def spec_of(function: Any, **more: Any) -> ModelSpec:
    """A function of texts [batch]."""
    return ModelSpec(
        name="m",
        model=function,
        inputs={"text": InputSpec(shape="batch:1..16", element_type="str")},
        outputs={"y": OutputSpec(shape="batch", element_type="str")},
        **more,
    )


def reversed_text(text: Array) -> Array:
    """Row by row."""
    return np.frompyfunc(lambda each: each[::-1], 1, 1)(text)  # type: ignore[no-any-return]


def justified(text: Array) -> Array:
    """Filled up to the longest of the call: a row depends on the others."""
    most = max(map(len, text.tolist()))
    return np.frompyfunc(lambda each: each.ljust(most), 1, 1)(text)  # type: ignore[no-any-return]


def long_first(text: Array) -> Array:
    """Wrong only beside a text that is more than four times as long."""
    most = max(map(len, text.tolist()))
    return np.frompyfunc(lambda each: "!" if 4 * len(each) < most else each, 1, 1)(text)  # type: ignore[no-any-return]


def in_order(text: Array) -> Array:
    """Exchanges rows."""
    return np.sort(text)  # type: ignore[no-any-return]


def verdicts(function: Any, options: ProbeOptions | None = None) -> list[tuple[str, str, str]]:
    """Treatment, output and verdict of each finding."""
    findings: list[Finding] = []
    examine(compile_model(spec_of(function)), options or ProbeOptions(budget_s=20), findings.extend)
    return [(each.treatment.kind, each.output, each.verdict) for each in findings]


@pytest.mark.parametrize(
    ("function", "verdict"),
    [(reversed_text, "proved"), (justified, "refuted"), (long_first, "refuted"), (in_order, "refuted")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_batching_of_strings_is_proved_or_refuted(function: Any, verdict: str) -> None:
    """By equality; texts of other lengths share calls. Padding is no treatment: nothing is padded."""
    assert [("batching", "y", verdict)] == verdicts(function)


def test_an_output_that_never_changes_proves_nothing() -> None:
    """As with numbers."""
    assert [("batching", "y", "unproved")] == verdicts(lambda text: ["x"] * len(text))


def test_mean_bytes_are_no_dimension_to_pad() -> None:
    """Beside one that is."""
    spec = ModelSpec(
        name="m",
        model=lambda text, x: x,
        inputs={
            "text": InputSpec(shape="batch", element_type="str"),
            "x": InputSpec(shape="batch, n:1..9", element_type="f32", pad={"n": 0}),
        },
        outputs={"y": OutputSpec(shape="batch, n", element_type="f32")},
    )
    found = treatments(compile_model(spec).signature, ProbeOptions())
    assert ["batching", "padding of n"] == list(map(str, found))


def test_numbers_beside_strings_are_proved() -> None:
    """Their contents vary as ever; a bisection between two requests exchanges strings one by one."""
    spec = ModelSpec(
        name="m",
        model=lambda text, x: (x.sum(1) > 0) ^ np.array([len(each) % 2 == 0 for each in text.tolist()]),
        inputs={
            "text": InputSpec(shape="batch:1..8", element_type="bytes"),
            "x": InputSpec(shape="batch, n:1..9", element_type="f32", pad={"n": 0}),
        },
        outputs={"y": OutputSpec(shape="batch", element_type="boolean")},
    )
    findings: list[Finding] = []
    examine(compile_model(spec), ProbeOptions(budget_s=30), findings.extend)
    assert [("batching", "proved"), ("padding of n", "proved")] == [
        (str(each.treatment), each.verdict) for each in findings
    ]


def test_samples_of_texts_are_used(tmp_path: Path) -> None:
    """From an .npz of NumPy's own type of strings; a model that takes no others is proved by them."""
    path = tmp_path / "texts.npz"
    np.savez(path, text=np.array(["key=1", "key=22", "a=longer", "b=", "c=3"]))

    def parsed(text: Array) -> Any:
        return [each.split("=")[1] for each in text.tolist()]

    assert [("batching", "y", "proved")] == verdicts(
        parsed, ProbeOptions(samples={"text": path}, budget_s=20)
    )
    assert [("batching", "", "unjudged")] == [
        (kind, output or "", verdict) for kind, output, verdict in verdicts(parsed)
    ]


@pytest.mark.parametrize("values", ["numbers", "samples"])
def test_numbers_are_no_values_of_strings(values: str, tmp_path: Path) -> None:
    """The message has the remedy."""
    np.savez(tmp_path / "x.npz", text=np.ones(3))
    options = (
        ProbeOptions(values={"text": Uniform(0, 1)})
        if values == "numbers"
        else ProbeOptions(samples={"text": tmp_path / "x.npz"})
    )
    with pytest.raises(
        SignatureError, match=r"input 'text' is str, and .* are not; give samples, an .npz of"
    ):
        values_of(compile_model(spec_of(reversed_text)).signature, options)


def test_an_extreme_request_of_strings() -> None:
    """Strings have a smallest and a largest, and none that is no number."""
    signature = compile_model(spec_of(reversed_text)).signature
    values = complete_values(signature, {})
    assert extreme_request(signature, values, (1, 4), "not a number") is None
    largest = extreme_request(signature, values, (1, 4), "largest")
    assert largest is not None
    (_, element_type, shape), buffer = largest.layout[0], largest.buffers[0]
    assert ["\U0010ffff"] == array_of(element_type, shape, buffer).tolist()


def test_costs_are_measured_over_rows_and_mean_bytes() -> None:
    """The requests have just these sizes, up to 16 KiB each; the bound is no usual length."""
    model = compile_model(spec_of(reversed_text))
    coarse, fine = stages(model.signature, None)
    assert {1, 1 << 14} <= {mean for _, mean in coarse}
    assert max(mean for _, mean in [*coarse, *fine]) == 1 << 14
    assert 2 * (4 + 10) == call_nbytes(model.signature, (2, 10))
    request = make_request(model.signature, complete_values(model.signature, {}), (3, 10), exact=True)
    assert (3, 10) == model.signature.resolve(request.layout).sizes
    found = calibrate(model, slots=1, max_batch=4, budget_s=0.5, values={}, key="k")
    assert ((), ("batch", "text.bytes")) == (found.findings, found.table.dimensions)
    assert len(found.table.points) > 3


def test_costs_are_measured_with_samples_of_other_lengths() -> None:
    """They are cut and repeated: a point is of its own sizes."""
    model = compile_model(spec_of(reversed_text))
    values = {"text": Samples((np.array(["x" * 500]), np.array(["日本"])), 0)}
    found = calibrate(model, slots=1, max_batch=2, budget_s=0.2, values=values, key="k")
    assert () == found.findings
    assert len(found.table.points) > 3


def test_answers_of_two_compilations_are_compared() -> None:
    """As whole numbers are."""
    models = compile_model(spec_of(reversed_text)), compile_model(spec_of(reversed_text))
    distance = compare_answers(models, [(2, 8)], values={}, budget_s=0)
    assert (2, 2) == (distance.exact, distance.same_exact)


def test_a_difference_of_strings_is_told_in_words() -> None:
    """Cut where it is long."""
    tolerance = OutputTolerance.of(None, [])
    one, other = np.array(["a", "b"], object), np.array(["a", "x" * 100], object)
    assert compare(one, one.copy(), tolerance).within
    difference = compare(one, other, tolerance)
    assert not difference.within
    assert f"'{'x' * 39}… where it was 'b' alone" == difference.words


def test_default_texts_know_their_bound() -> None:
    """No invented text is longer than the server would take."""
    port = InputPort("text", "bytes", NamedShape.parse("batch"), at_most_bytes=5)
    signature = compile_model(
        ModelSpec(
            name="m",
            model=lambda text: text,
            inputs={"text": InputSpec(shape="batch", element_type="bytes", at_most_bytes=5)},
            outputs={"y": OutputSpec(shape="batch", element_type="bytes")},
        )
    ).signature
    assert port == signature.inputs[0]
    assert {"text": Texts("bytes", 5)} == complete_values(signature, {})

"""Every family of models that padding breaks, and of those that it does not, with the verdict on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.engine.wrong_models import families
from tests.engine.wrong_models.__main__ import proved, run
from tests.engine.wrong_models.families import REDUCTIONS, Array, Reduction, Source, assembled, draw

from shapestream_engine import compile_model
from shapestream_engine.probing.evidence import Finding
from shapestream_engine.probing.examination import examine
from shapestream_engine.probing.inputs import Integers, Uniform, Values

Head = Callable[[Array], Array]


def floats(
    *, mask: bool = False, pad: float = 0.0, values: Values | None = None, kind: str = "f32"
) -> Source:
    """Numbers `[batch, seq, features]`."""
    return Source(
        name="x",
        element_type=kind,
        features=2,
        pad=pad,
        domain=values,
        vocabulary=None,
        has_mask=mask,
        most=64,
    )


def ids(vocabulary: int, *, mask: bool = False, pad: float = 0.0, values: Values | None = None) -> Source:
    """Ids `[batch, seq]` below `vocabulary`."""
    return Source(
        name="ids",
        element_type="i64",
        features=None,
        pad=pad,
        domain=values,
        vocabulary=vocabulary,
        has_mask=mask,
        most=64,
    )


def as_it_is(result: Array) -> Array:
    """Truth values."""
    return result


def above(threshold: float) -> Head:
    """A truth value."""
    return lambda result: result > threshold


def plain(result: Array) -> Array:
    """As f32."""
    return result.astype(np.float32)


def whole(result: Array) -> Array:
    """As i64."""
    return result.astype(np.int64)


def argmax(result: Array) -> Array:
    """The best feature."""
    return result.argmax(-1).astype(np.int64)


def whole_floats(result: Array) -> Array:
    """A truth value as a number."""
    return (result > 0.1).astype(np.float32)


def in_f32(given: Array) -> Array:
    """The input, more precisely."""
    return given.astype(np.float32)


def ids_as_numbers(given: Array) -> Array:
    """Each id as a value."""
    return given[..., None].astype(np.float32)


def embedded(given: Array) -> Array:
    """A row of a table per id, none of them zero."""
    return np.random.default_rng(3).normal(size=(50, 4)).astype(np.float32)[given]


def embedded_with_zero(given: Array) -> Array:
    """The same, with zero for the padding."""
    return embedded(given) * (given != 0)[..., None]


def squares(given: Array) -> Array:
    """Each id as a value, squared."""
    return np.square(ids_as_numbers(given))


def unchanged(given: Array) -> Array:
    """The input."""
    return given


def less_batch_mean(given: Array) -> Array:
    """A fiftieth of the mean over the batch is taken away."""
    return given - 0.02 * given.mean(0, keepdims=True)


# name: verdict on padding, source, values, reduction, mask, head, element type, seq in the output
R = REDUCTIONS
UNIT = Uniform(0.0, 1.0)
COUNTS = Integers(0, 29999)
ROWS: dict[str, tuple[str, Source, Callable[[Array], Array], Reduction, str, Head, str, bool]] = {
    "min": ("refuted", floats(), unchanged, R["min"], "", plain, "f32", False),
    "min under a mask": ("proved", floats(mask=True), unchanged, R["min"], "heeded", plain, "f32", False),
    "min of zeros under a mask that comes late": (
        "refuted", floats(mask=True), unchanged, R["min"], "late", plain, "f32", False,
    ),
    "min padded with what is declared largest": (
        "proved", floats(pad=1.0, values=UNIT), unchanged, R["min"], "", plain, "f32", False,
    ),
    "min of ids": ("refuted", ids(1000), ids_as_numbers, R["min"], "", whole, "i64", False),
    "max": ("refuted", floats(), unchanged, R["max"], "", plain, "f32", False),
    "max of what is declared not negative": (
        "proved", floats(values=UNIT), unchanged, R["max"], "", plain, "f32", False,
    ),
    "max of what is declared negative": (
        "refuted", floats(values=Uniform(-80.0, 0.0), pad=0.0), lambda x: x - 1, R["max"], "", plain, "f32", False,
    ),
    "max after relu": ("proved", floats(), lambda x: np.maximum(x, 0), R["max"], "", plain, "f32", False),
    "max of ids": ("proved", ids(1000), ids_as_numbers, R["max"], "", whole, "i64", False),
    "sum": ("proved", floats(), unchanged, R["sum"], "", plain, "f32", False),
    "sum padded with one": ("refuted", floats(pad=1.0), unchanged, R["sum"], "", plain, "f32", False),
    "mean": ("refuted", floats(), unchanged, R["mean"], "", plain, "f32", False),
    "mean under a mask": ("proved", floats(mask=True), unchanged, R["mean"], "heeded", plain, "f32", False),
    "mean of f16": ("refuted", floats(kind="f16"), in_f32, R["mean"], "", plain, "f32", False),
    "mean of f16 under a mask": (
        "proved", floats(kind="f16", mask=True), in_f32, R["mean"], "heeded", plain, "f32", False,
    ),
    "mean of f16 above a threshold": (
        "refuted", floats(kind="f16"), in_f32, R["mean"], "", above(0.1), "boolean", False,
    ),
    "mean above a threshold": ("refuted", floats(), unchanged, R["mean"], "", above(0.1), "boolean", False),
    "mean far above": ("refuted", floats(), unchanged, R["mean"], "", above(37.0), "boolean", False),
    "mean above zero": ("proved", floats(), unchanged, R["mean"], "", above(0.0), "boolean", False),
    "mean above a threshold, masked": (
        "proved", floats(mask=True), unchanged, R["mean"], "heeded", above(0.1), "boolean", False,
    ),
    "mean above a threshold, in floats": (
        "refuted", floats(), unchanged, R["mean"], "", whole_floats, "f32", False,
    ),
    "mean of ids above a threshold": (
        "refuted", ids(1000), ids_as_numbers, R["mean"], "", above(12.0), "boolean", False,
    ),
    "mean above what is declared": (
        "unproved", floats(values=UNIT), unchanged, R["mean"], "", above(2.0), "boolean", False,
    ),
    "class of a mean": ("refuted", floats(), lambda x: x + np.float32([1, 0]), R["mean"], "", argmax, "i64", False),
    "median": ("refuted", floats(), unchanged, R["median"], "", plain, "f32", False),
    "std above zero": (
        "refuted", floats(), unchanged, R["std"], "", above(0.0), "boolean", False,
    ),
    "std": ("refuted", floats(), unchanged, R["std"], "", plain, "f32", False),
    "third from the top": ("refuted", floats(), unchanged, families.kth(3), "", plain, "f32", False),
    "top three": ("refuted", floats(), unchanged, families.top_sum(3), "", plain, "f32", False),
    "top three of what is not negative": (
        "proved", floats(values=UNIT), unchanged, families.top_sum(3), "", plain, "f32", False,
    ),
    "argmax": ("refuted", floats(), unchanged, R["argmax"], "", whole, "i64", False),
    "argmax under a mask": ("proved", floats(mask=True), unchanged, R["argmax"], "heeded", whole, "i64", False),
    "argmin": ("refuted", floats(), unchanged, R["argmin"], "", whole, "i64", False),
    "sort": ("refuted", floats(), unchanged, R["sort"], "", plain, "f32", True),
    "sort under a mask": ("proved", floats(mask=True), unchanged, R["sort"], "heeded", plain, "f32", True),
    "cumsum": ("proved", floats(pad=7.0), unchanged, R["cumsum"], "", plain, "f32", True),
    "cumsum from the end": (
        "refuted", floats(pad=7.0), unchanged, R["cumsum from the end"], "", plain, "f32", True,
    ),
    "cummax from the end": ("refuted", floats(), unchanged, R["cummax from the end"], "", plain, "f32", True),
    "softmax": ("refuted", floats(), unchanged, R["softmax"], "", plain, "f32", True),
    "softmax under a mask": ("proved", floats(mask=True), unchanged, R["softmax"], "heeded", plain, "f32", True),
    "any above": (
        "proved", floats(), unchanged, families.any_above(0.5), "", as_it_is, "boolean", False,
    ),
    "any above what padding is": (
        "refuted", floats(), unchanged, families.any_above(-100.0), "", as_it_is, "boolean", False,
    ),
    "all above": (
        "refuted", floats(), unchanged, families.all_above(50.0), "", as_it_is, "boolean", False,
    ),
    "all above less than padding": (
        "proved", floats(), unchanged, families.all_above(-0.5), "", as_it_is, "boolean", False,
    ),
    "length": ("refuted", floats(), unchanged, R["length"], "", whole, "i64", False),
    "last": ("refuted", floats(), unchanged, R["last"], "", plain, "f32", False),
    "last under a mask": ("proved", floats(mask=True), unchanged, R["last"], "heeded", plain, "f32", False),
    "class at the last position": ("refuted", floats(), unchanged, R["last"], "", argmax, "i64", False),
    "recurrent": ("refuted", floats(), unchanged, families.recurrent(0.5), "", plain, "f32", False),
    "recurrent under a mask": (
        "proved", floats(mask=True), unchanged, families.recurrent(0.5), "heeded", plain, "f32", False,
    ),
    "attention": ("refuted", floats(), unchanged, families.attention(np.inf, "first"), "", plain, "f32", False),
    "attention under a mask": (
        "proved", floats(mask=True), unchanged, families.attention(np.inf, "mean"), "heeded", plain, "f32", False,
    ),
    "attention under a weak mask": (
        "refuted", floats(mask=True), unchanged, families.attention(8.0, "mean"), "heeded", plain, "f32", False,
    ),
    "causal convolution": (
        "proved", floats(), unchanged, families.convolution(5, 4, 0.3, causal=True), "", plain, "f32", True,
    ),
    "centred convolution": (
        "refuted", floats(), unchanged, families.convolution(5, 4, 0.3, causal=False), "", plain, "f32", True,
    ),
    "wide receptive field": ("refuted", floats(), unchanged, families.far_ahead(50), "", plain, "f32", True),
    "wide receptive field under a shifted mask": (
        "refuted", floats(mask=True), unchanged, families.far_ahead(40), "shifted", plain, "f32", True,
    ),
    "threshold of a wide receptive field under a shifted mask": (
        "refuted", floats(mask=True), unchanged, families.far_ahead(40), "shifted", above(1.0), "boolean", True,
    ),
    "elementwise": ("proved", floats(), np.tanh, R["identity"], "", plain, "f32", True),
    "embeddings' mean": ("refuted", ids(50), embedded, R["mean"], "", plain, "f32", False),
    "embeddings' mean under a mask": (
        "proved", ids(50, mask=True), embedded, R["mean"], "heeded", plain, "f32", False,
    ),
    "embeddings' sum": ("refuted", ids(50), embedded, R["sum"], "", plain, "f32", False),
    "embeddings' sum with zero for the padding": (
        "proved", ids(50), embedded_with_zero, R["sum"], "", plain, "f32", False,
    ),
    "class of embeddings' sum, declared": (
        "refuted", ids(50, values=Integers(1, 49)), embedded, R["sum"], "", argmax, "i64", False,
    ),
    "rounding of what is equal, less its mean": (
        "proved", replace(floats(mask=True, pad=1.0, values=Uniform(0.0, 160.0)), features=1),
        lambda x: np.tanh(0.1 * x + 0.5), R["centred"], "heeded", plain, "f32", True,
    ),
    "norm of squares of small numbers": (
        "refuted", ids(30000, pad=1.0, values=COUNTS), squares, R["norm"], "", plain, "f32", False,
    ),
    "norm of squares padded with zero": (
        "proved", ids(30000, values=COUNTS), squares, R["norm"], "", plain, "f32", False,
    ),
    "a little of what lies ahead of large numbers": (
        "refuted", ids(30000, mask=True, values=COUNTS), ids_as_numbers, families.far_ahead(16), "late", plain,
        "f32", True,
    ),
    "a little of what lies ahead, under a mask": (
        "proved", ids(30000, mask=True, values=COUNTS), ids_as_numbers, families.far_ahead(16), "heeded", plain,
        "f32", True,
    ),
}  # fmt: skip


OFTEN = {
    *(
        "min",
        "min under a mask",
        "max",
        "max after relu",
        "sum",
        "sum padded with one",
        "mean",
        "mean under a mask",
    ),
    *(
        "mean of f16 under a mask",
        "mean above a threshold",
        "mean above a threshold, masked",
        "median",
        "std above zero",
    ),
    *(
        "top three",
        "argmax",
        "argmax under a mask",
        "sort",
        "cumsum from the end",
        "softmax",
        "softmax under a mask",
    ),
    *("any above", "length", "last under a mask", "recurrent", "attention", "attention under a weak mask"),
    *("centred convolution", "wide receptive field under a shifted mask", "elementwise", "embeddings' mean"),
    *("embeddings' sum with zero for the padding", "rounding of what is equal, less its mean"),
    *("norm of squares of small numbers", "a little of what lies ahead of large numbers"),
}
"""A row of each kind; the others try the same reductions with other values, types and masks."""
assert OFTEN <= ROWS.keys()


@pytest.mark.parametrize(
    "row",
    [row if name in OFTEN else pytest.param(row, marks=pytest.mark.thorough) for name, row in ROWS.items()],
    ids=ROWS.keys(),
)
def test_padding_gets_the_verdict_that_it_deserves(row: tuple[Any, ...]) -> None:
    """Batching is right for all of these, and proved wherever the output changes at all."""
    expected, source, values, reduction, mask, head, element_type, keeps_seq = row
    drawn = assembled(
        "row",
        source,
        values,
        reduction,
        mask,
        head,
        element_type,
        keeps_seq=keeps_seq,
        keeps_features=head is not argmax,
    )
    found = {str(finding.treatment): finding for finding in proved(drawn)}
    assert expected == found["padding of seq"].verdict, str(found["padding of seq"])
    assert "refuted" != found["batching"].verdict, str(found["batching"])


@pytest.mark.parametrize("head", [plain, above(0.1)], ids=["numbers", "truth values"])
def test_rows_that_hear_a_little_of_each_other_are_refuted(head: Head) -> None:
    """A fiftieth of the batch's mean, also where the output only says on which side of a threshold it is."""
    element_type = "f32" if head is plain else "boolean"
    drawn = assembled("mixed", floats(), less_batch_mean, R["first"], "", head, element_type, keeps_seq=False)
    found = {str(finding.treatment): finding.verdict for finding in proved(drawn)}
    assert "refuted" == found["batching"]


@pytest.mark.parametrize("vocabulary", [50, 400])
def test_the_largest_ids_that_a_model_takes_are_tried(vocabulary: int) -> None:
    """Only the last fifth of the ids disturbs another row, and nobody has said how many ids there are."""
    table = np.arange(vocabulary, dtype=np.float32)

    def disturbed(given: Array) -> Array:
        values = table[given]
        return (values + (values[:1] >= 0.8 * vocabulary))[..., None]

    drawn = assembled("ids", ids(vocabulary), disturbed, R["first"], "", plain, "f32", keeps_seq=False)
    found = {str(finding.treatment): finding for finding in proved(drawn)}
    assert "refuted" == found["batching"].verdict, str(found["batching"])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("number", "treatment"),
    [((912, 5837), "batching"), ((8101, 89), "padding of seq")],
    ids=["a fiftieth of the batch's largest", "the first position, where no other is small"],
)
def test_what_few_requests_show_is_found(number: tuple[int, int], treatment: str, seed: int) -> None:
    """Random models that were proved once: few requests lie near their thresholds."""
    drawn = draw(np.random.default_rng(number))
    findings: list[Finding] = []
    model = compile_model(drawn.spec)
    examine(model, replace(drawn.options, seed=seed), findings.extend)
    model.close()
    assert "refuted" == {str(finding.treatment): finding.verdict for finding in findings}[treatment]


def test_the_report_counts_different_requests() -> None:
    """A request that is tried a hundred times is one."""
    row = ROWS["mean above zero"]
    drawn = assembled("row", *row[1:7], keeps_seq=False)
    for finding in proved(drawn):
        assert 100 < finding.requests < finding.cases
        assert f"checked on {finding.requests} different requests in {finding.cases} cases" in str(finding)


def test_an_output_that_never_changes_is_not_proved() -> None:
    """Its threshold may lie anywhere else."""
    row = ROWS["mean above what is declared"]
    drawn = assembled("row", *row[1:7], keeps_seq=False)
    assert {("unproved", True)} == {(each.verdict, "never changed" in each.why) for each in proved(drawn)}


@pytest.mark.thorough
def test_no_random_model_is_proved_wrongly() -> None:
    """A few draws; `python -m tests.engine.wrong_models` makes as many as one likes."""
    tally = run(10, seed=7)
    assert ([], []) == (tally.false_proofs, tally.refused)

"""Detectors on the real OpenVINO, through a slot: what a picture gets in a batch is what it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tests.engine.detectors import PORTS, ROOM, multiclass, padded, pictures, selection_by_hand, ssd
from tests.engine.slot_bench import SlotBench

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, SignatureError, compile_model

Array = np.ndarray[Any, Any]
Rules = dict[str, dict[str, Any]]

NAMES = {name: name for name in PORTS}
SSD: Rules = {
    "selected": {"rule": "index_column", "column": 0},
    "confidence": {"rule": "index_column", "column": 0},
    "total": {"rule": "recount", "output": "selected"},
    "anchors": {"rule": "shared"},
}
MULTICLASS: Rules = {"found": {"rule": "counts", "output": "count"}}
PADDED: Rules = {
    "boxes": {"rule": "padded_counts", "output": "count"},
    "scores": {"rule": "padded_counts", "output": "count"},
}


class Detector(SlotBench):
    """A model in a slot, and a way to run pictures."""

    def alone(self, images: Sequence[Array]) -> list[dict[str, Array]]:
        """Each request's outputs by name, from one call each."""
        return [result for image in images for result in self.results(image)]


@contextmanager
def running(model: ov.Model, rules: Rules) -> Iterator[Detector]:
    """The model, compiled and in a slot."""
    spec = ModelSpec(
        name="m",
        model=model,
        inputs={"image": InputSpec(shape="batch:0..32, 1, height:4..256, width:4..256")},
        outputs={name: OutputSpec(rule=rule) for name, rule in rules.items()},
    )
    compiled = compile_model(spec, threads=1)
    try:
        yield Detector(compiled)
    finally:
        compiled.close()


def check_same(expected: dict[str, Array], found: dict[str, Array]) -> None:
    """Integers exactly; floats up to the order in which convolutions of another batch size may add."""
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert array.shape == found[name].shape, name
        if array.dtype.kind == "i":
            assert array.tolist() == found[name].tolist(), name
        else:
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


BATCHES = {
    "single pictures": [1] * 8,
    "several each": [2, 1, 3],
    "one request": [4],
    "none among others": [1, 0, 2, 0],
    "none": [0],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(
    ("build", "rules"), [(ssd, SSD), (multiclass, MULTICLASS), (padded, PADDED)], ids=lambda each: ""
)
@pytest.mark.parametrize("size", [(24, 20), (8, 32)], ids=str)
def test_a_picture_gets_in_a_batch_what_it_gets_alone(
    build: Callable[[Any], ov.Model], rules: Rules, rows: list[int], size: tuple[int, int]
) -> None:
    """Pictures with many detections and with none, in requests of any number of pictures."""
    random = np.random.default_rng(len(rows))
    images = [pictures(random, count, *size) for count in rows]
    with running(build(NAMES), rules) as detector:
        for expected, found in zip(detector.alone(images), detector.results(*images), strict=True):
            check_same(expected, found)


def test_suppression_is_the_one_by_hand_though_its_rows_interleave() -> None:
    """Sorted by score across the batch, rows of all pictures alternate; each request gets its own, best first."""
    images = [pictures(np.random.default_rng(seed), rows, 24, 20) for seed, rows in enumerate([1, 2, 1, 3])]
    with running(ssd(NAMES), SSD) as detector:
        results = detector.results(*images)
        (whole,) = detector.results(np.concatenate(images))
    owners = whole["selected"][:, 0]
    assert np.count_nonzero(np.diff(owners)) > 2 * len(images), "the rows did not interleave"
    assert sum(len(result["selected"]) for result in results) == whole["total"].item()
    for result in results:
        expected = selection_by_hand(result["boxes"], result["scores"])
        assert [found[:3] for found in expected] == [tuple(row) for row in result["selected"].tolist()]
        assert [(row, kind) for row, kind, _, _ in expected] == [
            (row, kind) for row, kind, _ in result["confidence"].tolist()
        ]
        np.testing.assert_array_equal([score for *_, score in expected], result["confidence"][:, 2])
        assert [len(expected)] == result["total"].tolist()


def test_a_padded_table_is_as_long_as_it_is_filled() -> None:
    """`[batch, max, 4]` and `[batch, max]`, trimmed to the request's largest count, and 0 where a row has less."""
    images = [pictures(np.random.default_rng(7), rows, 12, 12) for rows in (1, 3, 2, 2)]
    with running(padded(NAMES), PADDED) as detector:
        results = detector.results(*images)
    lengths = {len(row) for result in results for row in result["scores"]}
    assert len(lengths) > 1, "all tables are of the same length"
    for result, image in zip(results, images, strict=True):
        counts = result["count"].tolist()
        assert (len(image), max(counts), 4) == result["boxes"].shape
        assert (len(image), max(counts)) == result["scores"].shape
        for count, boxes, scores in zip(counts, result["boxes"], result["scores"], strict=True):
            assert 0 <= count <= ROOM
            assert (scores[:count] > 0).all()
            assert not scores[count:].any()
            assert not boxes[count:].any()


def test_nothing_found_anywhere_is_an_ordinary_answer() -> None:
    """Black pictures: every output is there, and empty or 0."""
    black = [np.zeros((rows, 1, 16, 16), np.float32) for rows in (1, 2)]
    for build, rules in ((ssd, SSD), (multiclass, MULTICLASS), (padded, PADDED)):
        with running(build(NAMES), rules) as detector:
            for rows, result in zip((1, 2), detector.results(*black), strict=True):
                for name, size in {"selected": 0, "confidence": 0, "found": 0}.items():
                    assert name not in result or size == len(result[name])
                if "total" in result:
                    assert [0] == result["total"].tolist()
                if "count" in result:
                    assert [0] * rows == result["count"].tolist()
                if build is padded:
                    assert (rows, 0, 4) == result["boxes"].shape


def test_a_batch_that_breaks_a_rule_fails_alone() -> None:
    """Counts that do not sum up fail that batch, with the names of both outputs; the slot goes on with the next."""
    image = op.parameter([-1, 1, -1, -1], np.float32)
    image.output(0).get_tensor().set_names({"image"})
    found = op.transpose(op.non_zero(image, "i64"), op.constant(np.array([1, 0])))
    count = op.reduce_sum(op.convert(op.abs(image), "i64"), op.constant(np.array([1, 2, 3])))
    found.output(0).get_tensor().set_names({"found"})
    count.output(0).get_tensor().set_names({"count"})
    model = ov.Model([op.result(found), op.result(count)], [image])
    good, bad = (np.zeros((1, 1, 4, 4), np.float32) for _ in range(2))
    good[0, 0, 1, 2], bad[0, 0, 1, 2] = 1, 2
    with running(model, MULTICLASS) as detector:
        assert [1] == [len(result["found"]) for result in detector.results(good)]
        report = detector.run(good, bad)
        assert ("model_error", None) == (report.code, report.outputs)
        assert "'found' has 2 rows, and 'count', which counts them, sums up to 3" in report.message
        assert [1, 1] == [len(result["found"]) for result in detector.results(good, good)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": None}, r"'selected' is .*, in which no axis follows the batch"),
        ({"total": {"rule": "recount", "output": "scores"}}, r"recount follows 'scores', which is no output"),
        (
            {"total": {"rule": "recount", "output": "all"}},
            r"there is no output 'all'; the model has selected",
        ),
        ({"scores": {"rule": "shared"}}, r"'scores': the rule shared cannot hold: .* follows the batch"),
        (
            {"anchors": {"rule": "counts", "output": "total"}},
            r"'total', which is no output with the rule rows",
        ),
        ({"boxes": {"rule": "recount", "output": "selected"}}, r"needs one number, \[\] or \[1\], not"),
    ],
)
def test_rules_that_cannot_hold_for_a_model_are_refused(change: Rules, message: str) -> None:
    """Before anything runs, with the names of the outputs."""
    rules = {name: rule for name, rule in (SSD | change).items() if rule is not None}
    with pytest.raises(SignatureError, match=message), running(ssd(NAMES), rules):
        pass

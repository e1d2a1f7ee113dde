"""The rule `crop`: spatial outputs at a ratio to the inputs, where padding is cut off again or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shapestream_engine import Crop, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.errors import RuleError, SignatureError
from shapestream_engine.output_rules import Extent
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.probe import ProbeOptions, ProbeReport, prove
from shapestream_engine.probing.inputs import Normal
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]
HEAT = "batch, 2, height/4, width/4"
PAD = {"height": 0, "width": 0}


def signature(to: str = HEAT, shape: str = "batch, 2, ?, ?") -> ModelSignature:
    """A model with one spatial output."""
    image = InputPort("image", "f32", NamedShape.parse("batch, 1, height, width"), PAD)
    return ModelSignature("m", (image,), (OutputPort("heat", "f32", NamedShape.parse(shape), Crop(to)),))


def cropped(model: ModelSignature, members: list[tuple[int, ...]], output: Array) -> list[list[Any]]:
    """The output of a call of these requests, cropped for each."""
    shapes = [model.resolve(((0, "f32", (rows, 1, height, width)),)) for rows, height, width in members]
    rows, heights, widths = zip(*members, strict=True)
    results = Assembly(model).split((sum(rows), max(heights), max(widths)), shapes, [output])
    return [
        np.frombuffer(result.buffers[0], np.float32).reshape(result.layout[0][2]).tolist()
        for result in results
    ]


@pytest.mark.parametrize(
    ("extent", "sizes"),
    [
        (Extent(dimension="n"), (7, 8)),
        (Extent(dimension="n", times=2), (14, 16)),
        (Extent(dimension="n", divisor=4), (1, 2)),
        (Extent(dimension="n", divisor=4, rounds_up=True), (2, 2)),
    ],
)
def test_an_extent_says_how_large_an_axis_is(extent: Extent, sizes: tuple[int, int]) -> None:
    """The same, a multiple, or a fraction that is rounded down or up."""
    assert sizes == (extent.of(7), extent.of(8))


@pytest.mark.parametrize(("to", "height"), [(HEAT, 2), (HEAT.replace("height/4", "height//4"), 1)])
def test_each_request_gets_its_own_part(to: str, height: int) -> None:
    """The first cells of its own rows; a cell that is not whole counts with `/` and not with `//`."""
    output = np.arange(3 * 2 * 2 * 3, dtype=np.float32).reshape(3, 2, 2, 3)
    expected = [output[:1, :, :height, :2].tolist(), output[1:].tolist()]
    assert expected == cropped(signature(to), [(1, 7, 6), (2, 8, 12)], output)


def test_axes_that_follow_nothing_stay() -> None:
    """A number or a `?` is an axis that no padding reaches."""
    output = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
    assert [output.tolist()] == cropped(signature("batch, 2, ?, width/4"), [(1, 4, 8)], output)


def test_other_multiples_grow() -> None:
    """An output that is larger than its picture is cropped at the same ratio."""
    output = np.arange(2 * 2 * 4, dtype=np.float32).reshape(2, 1, 2, 4)
    expected = [output[:1, :, :, :2].tolist(), output[1:].tolist()]
    assert expected == cropped(
        signature("batch, 1, height*2, width*2", "batch, 1, ?, ?"), [(1, 1, 1), (1, 1, 2)], output
    )


def test_a_ratio_that_is_not_the_outputs_breaks_the_rule() -> None:
    """Checked on every call, also where nothing was padded: 9 pixels are 3 cells when the last is not whole."""
    output = np.zeros((1, 2, 2, 2), np.float32)
    with pytest.raises(
        RuleError, match=r"'heat' has 2 along axis 2 in a call of 9, whose height/4 is 3; its shape"
    ):
        cropped(signature(), [(1, 9, 8)], output)


@pytest.mark.parametrize(
    ("to", "shape", "message"),
    [
        ("batch, 2, heigth/4, width/4", "batch, 2, ?, ?", "no dimension 'heigth'; they have batch, height"),
        ("batch, 2, height/4", "batch, 2, ?, ?", "has 3 entries for the axes of"),
        ("batch, 2, height/0, width/4", "batch, 2, ?, ?", "'height/0' is no size of an axis; write NAME"),
        ("batch, 2, height/1.5, width/4", "batch, 2, ?, ?", "'height/1.5' is no size"),
        ("batch, 2, height/-4, width/4", "batch, 2, ?, ?", "'height/-4' is no size"),
        ("batch, 2, , width/4", "batch, 2, ?, ?", "'' is no size of an axis"),
        ("batch, 3, height/4, width/4", "batch, 2, ?, ?", "axis 1 is 2, not 3"),
        ("batch, batch, height/4, ?", "batch, 2, ?, ?", "axis 1 of .* has the entry 'batch'"),
        ("batch/2, 2, height/4, ?", "batch, 2, ?, ?", "axis 0 of .* has the entry 'batch/2'"),
        ("batch, height/4, ?, ?", "batch, 2, ?, ?", "axis 1 is always 2, and cannot follow height/4"),
        ("batch, 2, height/4, ?", "batch, 2, height, ?", "axis 2 is as large as 'height', not height/4"),
        ("batch, 2, height/4, ?", "?, 2, ?, ?", "needs one dynamic axis named batch"),
    ],
)
def test_what_cannot_be_cropped_is_refused(to: str, shape: str, message: str) -> None:
    """Unknown dimensions, ratios that are none, and axes that cannot follow, before anything runs."""
    with pytest.raises(SignatureError, match=message):
        signature(to, shape)


def test_a_request_without_rows_is_answered_at_its_own_size() -> None:
    """Nothing is run for it: the ports tell the shape."""
    answer = signature().resolve(((0, "f32", (0, 1, 9, 8)),)).answer
    assert answer is not None
    assert (0, 2, 3, 2) == answer.layout[0][2]


def test_the_rule_travels_with_its_signature() -> None:
    """Packed by msgpack and back it is equal."""
    model = signature()
    assert model == ModelSignature.from_dict(msgpack.unpackb(msgpack.packb(model.to_dict())))


# ------------------------------------------------------------ on the real OpenVINO


def convolved(image: Any, size: int, seed: int, channels: int) -> Any:
    """A convolution with a bias, whose border is zeros."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(2, channels, size, size)).astype(np.float32)
    border = [size // 2] * 2
    found = op.convolution(image, op.constant(weights), [1, 1], border, border, [1, 1])
    return op.add(found, op.constant(random.normal(size=(1, 2, 1, 1)).astype(np.float32)))


def write_model(path: Path, size: int, rounding: str) -> Path:
    """Two convolutions of `size` x `size`, and the best of each 4 x 4 pixels."""
    image = op.parameter([-1, 1, -1, -1], np.float32, name="image")
    image.output(0).set_names({"image"})
    features = convolved(convolved(image, size, 0, 1), size, 1, 2)
    heat = op.max_pool(features, [4, 4], [1, 1], [0, 0], [0, 0], [4, 4], rounding)
    heat.output(0).set_names({"heat"})
    ov.save_model(ov.Model([heat.output(0)], [image], "heat"), path)
    return path


def proof_of(path: Path, to: str) -> ProbeReport:
    """What the proof says of a model from a file, with padding allowed."""
    spec = ModelSpec(
        name="heat",
        path=path,
        inputs={"image": InputSpec(shape="batch:1..4, 1, height:4..48, width:4..48", pad=PAD)},
        outputs={"heat": OutputSpec(rule={"rule": "crop", "to": to})},
    )
    options = ProbeOptions(values={"image": Normal(0.0, 1.0)})
    return prove(spec, compile_model(spec), options)


def test_pixels_by_themselves_are_proved(tmp_path: Path) -> None:
    """1 x 1 convolutions see no border, and cells that are not whole are left out by the model and by the rule."""
    report = proof_of(write_model(tmp_path / "m.xml", 1, "floor"), "batch, 2, height//4, width//4")
    assert {"proved"} == {finding.verdict for finding in report.findings}
    assert {"batching", "padding"} == {finding.treatment.kind for finding in report.findings}


def test_a_border_that_reaches_inside_is_refused(tmp_path: Path) -> None:
    """Beyond the end of a picture the first 3 x 3 convolution finds something, which the second takes for the picture."""
    report = proof_of(write_model(tmp_path / "m.xml", 3, "floor"), "batch, 2, height//4, width//4")
    assert {"proved"} == {each.verdict for each in report.findings if each.treatment.kind == "batching"}
    padding = [each for each in report.findings if each.treatment.kind == "padding"]
    assert padding
    assert {"refuted"} == {each.verdict for each in padding}
    assert all(each.largest is not None and each.largest > 0.1 for each in padding)


def test_rounding_the_wrong_way_is_refused(tmp_path: Path) -> None:
    """A lone picture shows it. In company, at a size that divides, the last cell would be lost without a word."""
    report = proof_of(write_model(tmp_path / "m.xml", 1, "floor"), "batch, 2, height/4, width/4")
    padding = [each for each in report.findings if each.treatment.kind == "padding"]
    assert padding
    assert {"refuted"} == {each.verdict for each in padding}
    assert all("a request alone breaks the rule of an output" in each.why for each in padding)

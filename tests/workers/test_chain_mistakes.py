"""Mistakes in the chains of a YAML: each is a line with the place of its key, and with what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shapestream.errors import ConfigurationError
from shapestream.loading.models import plan_chains
from shapestream.settings import load_settings
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

TEXT = """\
models:
  - {name: detector, path: m.xml}
  - {name: cropper, path: m.xml}
  - {name: recogniser, path: m.xml}
chains:
  - name: reading
    inputs: {image: find.image}
    stages:
      - {name: find, model: detector, inputs: {image: image}}
      - {name: crop, model: cropper, inputs: {image: image, boxes: find.boxes}}
      - {name: read, model: recogniser, inputs: {image: crop.images}, each: item of crop.images, at_most: 200}
    outputs: {boxes: find.boxes, text: read.text}
    on_error: fail
"""
PICTURE = InputPort("image", "u8", NamedShape.parse("height:8..64, width, 3"))
SIGNATURES = {
    "detector": ModelSignature(
        "detector", (PICTURE,), (OutputPort("boxes", "i64", NamedShape.parse("?, 4"), Whole()),)
    ),
    "cropper": ModelSignature(
        "cropper",
        (PICTURE, InputPort("boxes", "i64", NamedShape.parse("boxes, 4"))),
        list_ports("images", "u8", NamedShape.parse("height, width, 3")),
    ),
    "recogniser": ModelSignature(
        "recogniser",
        (InputPort("image", "u8", NamedShape.parse("batch, height, width, 3")),),
        (OutputPort("text", "i64", NamedShape.parse("batch, 32"), Rows()),),
    ),
}
EACH = "each: item of crop.images"


def problems_of(folder: Path, text: str) -> list[tuple[str, str]]:
    """Each problem: the text of the YAML from its key on, and its words."""
    path = folder / "x.yaml"
    path.write_text(text)
    (folder / "m.xml").touch()
    try:
        plan_chains(load_settings(path), SIGNATURES)
    except ConfigurationError as error:
        return [_told(text.splitlines(), problem) for problem in error.problems]
    return []


def _told(lines: list[str], problem: str) -> tuple[str, str]:
    found = re.fullmatch(r".*x\.yaml:(\d+):(\d+): (.*)", problem)
    assert found is not None, problem
    return lines[int(found[1]) - 1][int(found[2]) - 1 :], found[3]


def test_the_text_that_the_others_differ_from_is_right(tmp_path: Path) -> None:
    """So what they say is due to the difference."""
    assert [] == problems_of(tmp_path, TEXT)


@pytest.mark.parametrize(
    ("right", "wrong", "place", "words"),
    [
        ("crop.images}, each", "crop.image}, each", "each: item", "a source of in, which has crop.image"),
        ("boxes: find.boxes}}", "boxes: fnd.boxes}}", "boxes: fnd.boxes}}", '(did you mean "find"?)'),
        ("{image: image}}", "{image: imagee}}", "image: imagee}}", 'did you mean "image"?'),
        ("boxes: find.boxes}}", "boxes: find.boxs}}", "boxes: find.boxs}}", '(did you mean "find.boxes"?)'),
        (
            "{image: find.image}",
            "{image: find.imagee}",
            "image: find.imagee}",
            '(did you mean "find.image"?)',
        ),
        ("{image: find.image}", "{image: fnd.image}", "image: fnd.image}", '(did you mean "find.image"?)'),
        ("{image: find.image}", "{image: image}", "image: image}", '(did you mean "find.image"?)'),
        (EACH, "each: item of crop.image", "each: item", "a source of in, which has crop.images"),
        (EACH, "each: items of crop.images", "each: items", "write item of, row of or batch of"),
        (EACH, "each: row of crop.images", "image: crop.images}", "write each: item of crop.images"),
        (EACH + ", ", "", "image: crop.images}", "write each: item of crop.images"),
        ("text: read.text", "text: read.texts", "text: read.texts}", '(did you mean "read.text"?)'),
        ("text: read.text", "text: raed.text", "text: raed.text}", '(did you mean "read"?)'),
        ("text: read.text", "text: image", "text: image}", "name an output of a stage"),
        ("text: read.text", "text: read.ok", "text: read.ok}", 'there is no "read.ok"'),
        ("model: cropper", "model: croper", "model: croper,", '(did you mean "cropper"?)'),
        ("boxes: find.boxes}}", "boxs: find.boxes}}", "boxs: find.boxes}}", '(did you mean "boxes"?)'),
        (", boxes: find.boxes}}", "}}", "inputs: {image: image}}", 'needs the input "boxes"'),
        ("boxes: find.boxes}}", "boxes: read.text}}", "inputs: {image: image, boxes", "waits in a circle"),
        ("boxes: find.boxes}}", "boxes: image}}", "boxes: image}}", '"boxes" takes i64, and image is u8'),
        ("name: reading", "name: cropper", "name: cropper", "names must be unique"),
        ("at_most: 200", "at_most: 0", "at_most: 0}", "must be at least 1"),
        ("at_most: 200", "at_mots: 200", "at_mots", '(did you mean "at_most"?)'),
        ("on_error: fail", "on_error: skp", "on_error: skp", 'expected "fail" or "skip"'),
    ],
)
def test_each_mistake_is_told_at_its_key(
    tmp_path: Path, right: str, wrong: str, place: str, words: str
) -> None:
    """And only once, with the name that was meant, or what to write."""
    assert 1 == TEXT.count(right)
    problems = problems_of(tmp_path, TEXT.replace(right, wrong))
    assert [True] == [told.startswith(place) and words in said for told, said in problems], problems


def test_all_mistakes_of_a_chain_are_told_at_once(tmp_path: Path) -> None:
    """A wrong source hides no other."""
    text = TEXT.replace("boxes: find.boxes}}", "boxes: find.boxs}}").replace("read.text", "read.texts")
    assert ["boxes: find.boxs}}", "text: read.texts}"] == [told for told, _ in problems_of(tmp_path, text)]

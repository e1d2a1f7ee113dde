"""A chain as text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.pipeline.chains.models import SIGNATURES

from shapestream.chains.plan import plan_chain
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream.settings import load_settings
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

PAGE = Path(__file__).parents[3] / "docs" / "chains.md"
CHAIN = ChainSpec(
    name="c",
    inputs={"x": "cut.x"},
    stages=[
        StageSpec(name="cut", model="split", inputs={"x": "x"}),
        StageSpec(name="read", model="norm", inputs={"x": "cut.parts"}, each=["item of cut.parts"]),
    ],
    outputs={"a": "read.a", "b": "read.b"},
)


def test_each_edge_has_its_type() -> None:
    """Inputs, each stage's call with its outputs, and the chain's outputs."""
    assert [
        "chain c",
        "  input  x: f32 [n, w:1..9]",
        "  cut = split(x: x)",
        "    cut.parts: list of f32 [?]",
        "  read = norm(x: each item of cut.parts), at most 256 requests and 64 MiB",
        "    read.a: list of f32 [?]",
        "    read.b: f32 [?, 3]",
        "  output a: list of f32 [?] = read.a",
        "  output b: f32 [?, 3] = read.b",
        "  a row that fails in read fails the request",
    ] == [*plan_chain(CHAIN, SIGNATURES).lines()]


@pytest.mark.parametrize(
    ("outputs", "last"),
    [
        ({"b": "read.b"}, "  a row that fails in read is marked in read.ok, which nothing takes"),
        ({"b": "read.b", "ok": "read.ok"}, "  a row that fails in read is marked in read.ok"),
    ],
    ids=["nothing takes the mark", "the mark is an output"],
)
def test_failed_rows_are_told(outputs: dict[str, str], last: str) -> None:
    """With `skip`, the drawing names the mark, and tells where it is lost."""
    assert last == [*plan_chain(replace(CHAIN, outputs=outputs, skips=True), SIGNATURES).lines()][-1]


def test_a_limit_that_is_no_whole_number_of_mebibytes_is_in_bytes() -> None:
    """As it was stated."""
    stages = [CHAIN.stages[0], replace(CHAIN.stages[1], at_most=3, at_most_bytes=1000)]
    drawn = [*plan_chain(replace(CHAIN, stages=stages), SIGNATURES).lines()]
    assert "  read = norm(x: each item of cut.parts), at most 3 requests and 1000 bytes" in drawn


def test_the_drawing_in_the_documentation_is_that_of_its_example(tmp_path: Path) -> None:
    """docs/chains.md shows what `check` says of its YAML, with models of these signatures."""
    text = PAGE.read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "x.yaml").write_text(block)
    (chain,) = load_settings(tmp_path / "x.yaml", files_must_exist=False).settings.chains
    crops = NamedShape.parse("height, width, 3")
    picture, boxes = InputPort("image", "u8", crops), NamedShape.parse("?, 4")
    crop = InputPort("image", "u8", NamedShape.parse("batch, height, width, 3"))
    read = OutputPort("text", "i64", NamedShape.parse("batch, 32"), Rows())
    signatures = {
        "detector": ModelSignature("detector", (picture,), (OutputPort("boxes", "i64", boxes, Whole()),)),
        "cropper": ModelSignature(
            "cropper",
            (picture, InputPort("boxes", "i64", NamedShape.parse("boxes, 4"))),
            list_ports("images", "u8", crops),
        ),
        "recogniser": ModelSignature("recogniser", (crop,), (read,)),
    }
    drawing = "\n".join(plan_chain(chain.spec(), signatures).lines())
    assert f"```\n{drawing}\n```" in text

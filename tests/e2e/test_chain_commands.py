"""The command line on chains: `check` draws them or names the place of a mistake; `models` and `infer` know them."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import numpy as np
import pytest
from tests.e2e.reading_chain import MODELS, expected, picture

pytestmark = pytest.mark.e2e

WORKERS = "    workers: [{count: 1, slots: 1}]\n"
DRAWING = [
    "chain reading",
    "  input  image: u8 [height:8..64, width:8..64, 3]",
    "  find = finder(image: image)",
    "    find.boxes: i64 [?, 4]",
    "  crop = cropper(image: image, boxes: find.boxes)",
    "    crop.images: list of u8 [?, ?, 3]",
    "  read = reader(image: each item of crop.images), at most 150 requests and 64 MiB",
    "    read.text: f32 [?, 2]",
    "  output boxes: i64 [?, 4] = find.boxes",
    "  output text: f32 [?, 2] = read.text",
    "  a row that fails in read fails the request",
]


@pytest.mark.thorough
def test_check_draws_a_chain(workplace: Any) -> None:
    """After its models; the script's report has the drawing and the signature; of a list, no batch axis is missed."""
    config = str(workplace.write(MODELS + WORKERS))
    ran = workplace.invoke("check", config, "--measure", "0")
    assert (0, DRAWING) == (ran.exit_code, ran.stdout.splitlines()[-len(DRAWING) - 1 : -1]), ran.output
    assert "ok: 3 models compiled and run, 1 chain fits them" == ran.stdout.splitlines()[-1]
    assert "every request runs alone" not in ran.stderr
    report = json.loads(workplace.invoke("check", config, "--measure", "0", "--json").stdout)
    (chain,) = report["chains"]
    assert (DRAWING, "reading") == (chain["drawing"], chain["signature"]["name"])


def test_models_draws_the_chains_of_a_configuration(workplace: Any) -> None:
    """The same, without a trial of each model."""
    ran = workplace.invoke("models", str(workplace.write(MODELS + WORKERS)))
    assert (0, DRAWING) == (ran.exit_code, ran.stdout.splitlines()[-len(DRAWING) :]), ran.output


@pytest.mark.parametrize("command", ["check", "models"])
def test_a_mistake_has_its_place(workplace: Any, command: str) -> None:
    """Line and column of the edge that does not fit the models; status 3."""
    text = textwrap.dedent(
        MODELS.replace("{image: crop.images}, each: item of crop.images", "{image: image}")
    )
    config = workplace.write(text + textwrap.dedent(WORKERS))
    ran = workplace.invoke(command, str(config))
    (line,) = [number for number, each in enumerate(text.splitlines(), 1) if "name: read," in each]
    column = text.splitlines()[line - 1].index("image: image") + 1
    problem = (
        f"{config}:{line}:{column}: chains[0].stages[2].inputs.image: "
        '"image" takes [batch:1..16, height:1..64, width:1..64, 3], and image is u8 [height:8..64, width:8..64, 3]'
    )
    assert (3, problem) == (ran.exit_code, ran.stderr.splitlines()[-1])


def test_serve_in_process_refuses_a_mistake_before_it_listens(workplace: Any) -> None:
    """There the signatures are known; workers bring theirs later."""
    wrong = MODELS.replace("{image: crop.images}, each: item of crop.images", "{image: image}")
    served = workplace.try_serve(wrong + "    in_process: true\n")
    assert 3 == served.wait()
    assert [] == served.events("server ready")
    assert "chains[0].stages[2].inputs.image" in served.log.read_text()


def test_every_setting_of_a_chain_has_its_line(workplace: Any) -> None:
    """`--show` names the keys as they are written."""
    config = workplace.write(MODELS + WORKERS)
    lines = config.read_text().splitlines()
    (line,) = [number for number, each in enumerate(lines, 1) if "name: crop," in each]
    shown = workplace.invoke("check", str(config), "--measure", "0", "--show").stdout.splitlines()
    assert f"chains[0].stages[1].inputs.boxes = 'find.boxes'  ({config}:{line})" in shown


def test_a_server_is_asked_for_its_chain(workplace: Any) -> None:
    """`models` tells it from models; `infer` runs it, with boxes and with none, and prints lists."""
    shown = "        outputs: {boxes: find.boxes, text: read.text, parts: crop.images}\n"
    text = MODELS.replace("        outputs: {boxes: find.boxes, text: read.text}\n", shown)
    served = workplace.serve(text + "    in_process: true\n")
    listed = workplace.invoke("models", served.address)
    assert [
        "chain reading",
        "  input  image: u8 [height:8..64, width:8..64, 3]",
        "  output boxes: i64 [?, 4]",
        "  output text: f32 [?, 2]",
        "  output parts: list of u8 [?, ?, 3]",
    ] == listed.stdout.splitlines()[-5:], listed.output
    assert "'reading'" not in listed.stderr
    plain = json.loads(workplace.invoke("models", served.address, "--json").stdout)
    assert {"finder": False, "cropper": False, "reader": False, "reading": True} == {
        model["name"]: model["is_chain"] for model in plain
    }
    for count in (0, 3):
        image = picture(count, count)
        np.save(workplace.folder / "image.npy", image)
        ran = workplace.invoke("infer", served.address, "reading", "image=image.npy", "--json")
        outputs = json.loads(ran.stdout)["outputs"]
        boxes, texts = expected(image)
        assert (boxes.tolist(), texts.tolist()) == (outputs["boxes"]["data"], outputs["text"]["data"])
        assert [high * wide * 3 for _, _, high, wide in boxes.tolist()] == [
            np.size(part["data"]) for part in outputs["parts"]
        ]

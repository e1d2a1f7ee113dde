"""`shapes` in the YAML: what it means to the engine, and how everything that is wrong with it is said."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shapestream.errors import ConfigurationError
from shapestream.loading.models import compile_models, model_spec
from shapestream.settings import LoadedSettings, load_settings
from shapestream_engine.compiled_model import PreparedLimits
from shapestream_engine.strategy import Strategy
from shapestream_workers.cli import app

TEXT = """\
models:
  - name: m
    path: m.xml
    inputs:
      ids: {{shape: "batch:1..64, seq:1..512, 3", pad: {{seq: 0}}}}
      mask: {{shape: "batch, seq", mask_of: ids}}
      rest: {{shape: "batch, width:1..9"}}
    shapes: {shapes}
"""


def load(folder: Path, shapes: str) -> LoadedSettings:
    """A model with these `shapes`."""
    path = folder / "x.yaml"
    path.write_text(TEXT.format(shapes=shapes))
    return load_settings(path, files_must_exist=False)


@pytest.mark.parametrize(
    ("shapes", "strategy"),
    [
        ("{}", Strategy()),
        ("{max_prepared: 16}", Strategy(max_prepared=16, fill_rows=True)),
        (
            "{static: [{seq: [8, 16], batch: 1, width: 3}]}",
            Strategy(static_shapes=tuple((("batch", 1), ("seq", size), ("width", 3)) for size in (8, 16))),
        ),
        ("{strategy: padded, seq: 512, batch: 8}", Strategy({"seq": (512,), "batch": (8,)})),
        ("{strategy: bucketed, seq: [32, 64, 128]}", Strategy({"seq": (32, 64, 128)})),
        (
            "{strategy: partitioned, batch: [1, 2, 4, 8], seq: [64, 128]}",
            Strategy({"batch": (1, 2, 4, 8), "seq": (64, 128)}, partitioned=True),
        ),
    ],
)
def test_every_strategy_has_its_spelling(tmp_path: Path, shapes: str, strategy: Strategy) -> None:
    """As the engine takes it; a size alone is as good as a list of one."""
    (model,) = load(tmp_path, shapes).settings.models
    assert strategy == model_spec(model).strategy


def test_limits_and_warm_up_are_passed_on(tmp_path: Path) -> None:
    """They belong to this worker, not to the signature."""
    shapes = "{strategy: padded, seq: 8, max_prepared: 3, warm_up: true}"
    (model,) = load(tmp_path, shapes).settings.models
    spec = model_spec(model)
    assert PreparedLimits(max_prepared=3, warm_up=True) == spec.prepared
    assert Strategy({"seq": (8,)}) == spec.strategy


def test_allowed_sizes_are_among_the_effective_values(tmp_path: Path) -> None:
    """`check --show` prints each with the line that it comes from."""
    values = load(tmp_path, "{strategy: bucketed, seq: [32, 64]}").effective_values()
    shown = {value.key: (value.value, value.origin) for value in values if ".shapes." in value.key}
    assert (64, f"{tmp_path}/x.yaml:8") == shown["models[0].shapes.seq[1]"]
    assert (False, "default") == shown["models[0].shapes.warm_up"]


FUNCTION = textwrap.dedent(
    """\
    models:
      - name: sorted
        function: numpy:sort
        inputs: {{a: {{shape: "batch, length:0..64", element_type: f32{pad}}}}}
        outputs: {{sorted: {{shape: "batch, length", element_type: f32}}}}
        trust: {trust}
        shapes: {shapes}
    """
)


def problems_of(folder: Path, **values: str) -> list[str]:
    """The problems that are found when the function is compiled and tried."""
    path = folder / "x.yaml"
    path.write_text(FUNCTION.format(**values))
    loaded = load_settings(path)
    with pytest.raises(ConfigurationError) as caught:
        compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    return [problem.removeprefix(f"{folder}/") for problem in caught.value.problems]


def test_what_only_the_engine_sees_points_at_the_shapes(tmp_path: Path) -> None:
    """Here the batch is unbounded, which the cap of the strategy native cannot round."""
    (problem,) = problems_of(tmp_path, pad="", trust="true", shapes="{max_prepared: 4}")
    assert problem.startswith(
        "x.yaml:7:5: models[0].shapes: model 'sorted': strategy native: 'batch' has no upper"
    )


def test_a_model_that_padding_scrambles_is_not_served_padded(tmp_path: Path) -> None:
    """Sorted with its padding, a row begins with zeros: refused, with the output and the strategy."""
    problems = problems_of(
        tmp_path, pad=", pad: {length: 0}", trust="false", shapes="{strategy: padded, length: 64}"
    )
    assert 2 == len(problems)
    for problem, place in zip(
        problems, ("4:73: models[0].inputs.a.pad.length", "7:5: models[0].shapes"), strict=True
    ):
        assert problem.startswith(f"x.yaml:{place}: output 'sorted'")
        assert "strategy padded" in problem
        assert "changes the results: largest difference" in problem


def test_models_prints_the_allowed_shapes_of_a_file(tmp_path: Path) -> None:
    """Named shapes, bounds, rules and allowed sizes; without a server, and without running the model."""
    path = tmp_path / "x.yaml"
    shapes = "{strategy: partitioned, batch: [1, 4], length: [16, 64]}"
    path.write_text(FUNCTION.format(pad=", pad: {length: 0}", trust="false", shapes=shapes))
    printed = CliRunner().invoke(app, ["models", str(path)])
    assert [
        "model sorted",
        "  input  a: f32 [batch, length:..64], pad length with 0",
        "  output sorted: f32 [batch, length], {rule: rows}",
        "  batch: ?, divided into calls of 1 or 4, as few as possible",
        "  length: ..64, padded to 16 or 64",
        "  shapes: partitioned, batch 1 or 4, length 16 or 64",
    ] == printed.output.splitlines()
    (signature,) = json.loads(CliRunner().invoke(app, ["models", str(path), "--json"]).output)
    assert {"strategy": "partitioned", "batch": [1, 4], "length": [16, 64]} == signature["shapes"]


def test_models_says_what_cannot_be_read(tmp_path: Path) -> None:
    """As `check` does, with the place."""
    path = tmp_path / "x.yaml"
    path.write_text(FUNCTION.format(pad="", trust="true", shapes="{max_prepared: 4}"))
    ran = CliRunner().invoke(app, ["models", str(path)])
    assert 3 == ran.exit_code
    assert "x.yaml:7:5: models[0].shapes: model 'sorted': strategy native: 'batch'" in ran.output

"""From settings to compiled models: what is refused although it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapestream.errors import ConfigurationError
from shapestream.loading.models import compile_models
from shapestream.settings import load_settings

SHARED = """\
models:
  - name: table
    function: numpy:sort
    inputs: {a: {shape: "batch, n", element_type: f32}}
    outputs:
      same: {shape: "n", element_type: f32, rule: shared}
"""


def test_what_is_shared_takes_the_users_word(tmp_path: Path) -> None:
    """What is not seen to be everybody's is refused at its place, unless `trust` vouches for it."""
    config = tmp_path / "x.yaml"
    config.write_text(SHARED)
    loaded = load_settings(config)
    with pytest.raises(ConfigurationError) as caught:
        compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{config}:6:7: models[0].outputs.same: output 'same': the rule shared")
    assert "that cannot be judged: the model took none of the probe's inputs" in problem
    assert problem.endswith("(vouch for it by trust: true)")
    config.write_text(SHARED + "    trust: true\n")
    loaded = load_settings(config)
    models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    assert "shared" == models["table"].signature.outputs[0].rule.NAME

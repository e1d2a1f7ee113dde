"""`device` of a group of workers: each process gets the card of its number, and the command line says the number."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, load_settings
from shapestream_workers.costs import costs_of
from shapestream_workers.roles import Roles, roles_of

MODELS = """\
models:
  - {name: a, path: a.pt2}
  - name: f
    function: "math:sqrt"
    inputs: {x: {shape: "batch", element_type: f32}}
    outputs: {y: {shape: "batch", element_type: f32}}
"""


def settings_with(tmp_path: Path, workers: str, models: str = MODELS) -> LoadedSettings:
    """Of a YAML with these groups of workers."""
    path = tmp_path / "server.yaml"
    path.write_text(f"{models}workers: {workers}\n")
    return load_settings(path, files_must_exist=False)


def test_each_process_has_a_card(tmp_path: Path) -> None:
    """Numbers begin with 0 in each group; functions keep their device, and so do groups without one."""
    loaded = settings_with(
        tmp_path, '[{count: 2, device: "cuda:{index}"}, {count: 2}, {count: 1, device: cuda}]'
    )
    devices = []
    roles = Roles()
    roles.follow([*roles_of(loaded.settings, 2, {})])
    for command in roles.commands(loaded, "ipc://s.sock").values():
        options = dict(itertools.pairwise(command))
        group = loaded.settings.worker_groups[int(options["--group"])]
        devices.append([model.device for model in loaded.settings.models_of(group, int(options["--index"]))])
    assert [["cuda:0", "CPU"], ["cuda:1", "CPU"], ["CPU", "CPU"], ["CPU", "CPU"], ["cuda", "CPU"]] == devices


def test_a_check_takes_the_first_process_that_serves_a_model(tmp_path: Path) -> None:
    """Of the first group that names it."""
    loaded = settings_with(
        tmp_path, '[{models: [f]}, {models: [a], device: "cuda:{index}"}, {models: [a], device: cuda:7}]'
    )
    assert ["cuda:0", "CPU"] == [model.device for model in loaded.settings.first_served()]


@pytest.mark.parametrize("device", ["cuda:{}", "cuda:{number}", "cuda:{index", "{index:02}"])
def test_other_braces_are_refused(tmp_path: Path, device: str) -> None:
    """They would be a device's name otherwise, which no engine knows."""
    with pytest.raises(ConfigurationError, match=r'workers\[0\].device: .*write "cuda:\{index\}"'):
        settings_with(tmp_path, f'[{{device: "{device}"}}]')


def test_a_device_that_is_not_here_is_told_with_the_place_of_its_model(tmp_path: Path) -> None:
    """Also where the process has other settings than the file: another device, and a time to measure."""
    (tmp_path / "m.onnx").write_bytes((Path(__file__).parents[1] / "zoo" / "torch" / "cnn.onnx").read_bytes())
    models = "models: [{name: m, path: m.onnx, calibration_s: 0, trust: true}]\n"
    loaded = settings_with(tmp_path, '[{device: "NOWHERE.{index}"}]', models)
    with pytest.raises(
        ConfigurationError, match=r"server.yaml:1:20: models\[0\].path: .* no device 'NOWHERE.0' here"
    ):
        costs_of(loaded)

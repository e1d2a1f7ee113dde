"""Services for texts: what a gateway is told of them, and what `check` says of models that embed none."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapestream.settings import LoadedSettings, load_settings
from shapestream_workers.chains import service_options
from shapestream_workers.check import check_configuration

HTTP = """\
server: {http: {address: "127.0.0.1:0", SERVICES}}
models:
  - name: tokens
    function: numpy:sort
    inputs: {a: {shape: "batch, n", element_type: f32}}
    outputs: {embedding: {shape: "batch, n", element_type: f32}}
    calibration_s: 0
  - name: encoder
    function: numpy:sort
    inputs: {a: {shape: "batch, n", element_type: f32}}
    outputs: {embedding: {shape: "batch, n", element_type: f32}}
    calibration_s: 0
  - name: scaler
    function: numpy:sort
    inputs: {a: {shape: "batch, n", element_type: f32}}
    outputs: {embedding: {shape: "batch, n", element_type: f32}}
    calibration_s: 0
chains:
  - name: folder
    inputs: {text: first.a}
    stages:
      - {name: first, model: tokens, inputs: {a: text}}
      - {name: second, model: encoder, inputs: {a: first.embedding}}
    outputs: {embedding: second.embedding}
  - name: alone
    inputs: {text: first.a}
    stages: [{name: first, model: encoder, inputs: {a: text}}]
    outputs: {embedding: first.embedding}
  - name: other
    inputs: {text: first.a}
    stages:
      - {name: first, model: tokens, inputs: {a: text}}
      - {name: second, model: encoder, inputs: {a: first.embedding}}
      - {name: third, model: scaler, inputs: {a: second.embedding}}
    outputs: {sentence_embedding: third.embedding, vectors: second.embedding}
in_process: true
"""


def loaded(folder: Path, services: str) -> LoadedSettings:
    """A configuration with these services."""
    path = folder / "server.yaml"
    path.write_text(HTTP.replace(", SERVICES", services))
    return load_settings(path)


FOLDER = 'folder={"encoder": "encoder", "tokenizer": "tokens"}'


@pytest.mark.parametrize(
    ("services", "told"),
    [
        ("", []),
        (", texts: folder", [FOLDER]),
        (", texts: [alone, folder, encoder]", ["alone", FOLDER, "encoder"]),
        (", texts: other", ['other={"encoder": "scaler", "tokenizer": "tokens"}']),
    ],
)
def test_a_gateway_is_told_of_the_stages(tmp_path: Path, services: str, told: list[str]) -> None:
    """The stage that makes the vectors of another's outputs, and the one that takes the texts."""
    settings = loaded(tmp_path, services).settings
    assert settings.server.http is not None
    found = service_options(settings.server.http, settings)
    assert [word for name in told for word in ("--texts", name)] == found


def test_a_gateway_is_told_of_the_largest_token(tmp_path: Path) -> None:
    """That of the encoder's probe, since the encoder was proved with no larger one."""
    loaded(tmp_path, ", texts: folder")
    text = (tmp_path / "server.yaml").read_text()
    probe = "name: encoder\n    probe: {input_ids: {integers: [1, 30521]}}\n"
    (tmp_path / "server.yaml").write_text(text.replace("name: encoder\n", probe))
    probed = load_settings(tmp_path / "server.yaml").settings
    assert probed.server.http is not None
    told = service_options(probed.server.http, probed)
    assert 'folder={"encoder": "encoder", "tokenizer": "tokens", "largest_token": 30521}' == told[1]


def test_check_refuses_models_and_chains_that_embed_no_texts(tmp_path: Path) -> None:
    """With the place of each, and what it would need."""
    found = check_configuration(loaded(tmp_path, ", texts: [encoder, folder]")).problems
    for place, name in (("server.http.texts[0]", "encoder"), ("server.http.texts[1]", "folder")):
        (problem,) = [line for line in found if place in line]
        assert problem.startswith(f"{tmp_path}/server.yaml:1:")
        assert f"{name!r} embeds no texts: it needs one input of element type str" in problem
    assert 2 == len(found)

"""What is loaded: files in their place with their bytes, and functions that somebody stands for."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from tests.onnx_files import write_scaling
from typer.testing import CliRunner

from shapestream.errors import ConfigurationError
from shapestream.loading.models import ENVIRONMENT, compile_models, read_signatures
from shapestream.settings import LoadedSettings, load_settings
from shapestream_engine.model_files import digest_of_model
from shapestream_workers.cli import app

PORTS = """\
    inputs: {a: {shape: "batch:1..8, n:1..8", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
    trust: true
"""


def loaded_from(folder: Path, text: str) -> LoadedSettings:
    """The settings of this text."""
    (folder / "x.yaml").write_text(text)
    return load_settings(folder / "x.yaml")


def problems_of(folder: Path, text: str) -> list[str]:
    """What is wrong with this text, without the folder in front."""
    with pytest.raises(ConfigurationError) as caught:
        loaded_from(folder, text)
    return [problem.removeprefix(f"{folder}/") for problem in caught.value.problems]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that registers `numpy:sort` as `acme.sort`, and nothing else."""
    info = tmp_path / "site" / "acme-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[shapestream.functions]\nacme.sort = numpy:sort\n")
    monkeypatch.setattr(sys, "path", [str(info.parent), *sys.path])


def function(name: str) -> str:
    """A model that is this function."""
    return f"models:\n  - name: m\n    function: {name}\n{PORTS}"


@pytest.mark.parametrize("name", ["numpy:flip", "os:system", "pickle:loads"])
def test_a_function_that_nobody_registered_is_not_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    """Nothing is imported for it, and the message says what would allow it."""
    monkeypatch.delenv(ENVIRONMENT)
    loaded = loaded_from(tmp_path, function(name))
    for read in (
        lambda: compile_models(loaded, loaded.settings.models, slots=1, threads=1),
        lambda: read_signatures(loaded),
    ):
        with pytest.raises(ConfigurationError) as caught:
            read()
        (problem,) = caught.value.problems
        assert problem.startswith(
            f"{tmp_path}/x.yaml:3:5: models[0].function: no installed package registers '{name}'"
        )
        assert "registered are acme.sort" in problem
        assert "--any-function" in problem


@pytest.mark.parametrize("name", ["acme.sort", "numpy:sort"])
def test_a_registered_function_is_served_by_either_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    """The package's name for it becomes the callable that it stands for."""
    monkeypatch.delenv(ENVIRONMENT)
    loaded = loaded_from(tmp_path, function(name))
    assert "numpy:sort" == loaded.settings.models[0].function
    (signature,) = read_signatures(loaded).signatures
    assert "m" == signature.name


def test_a_bare_name_that_nobody_registered_is_a_mistake_in_the_file(
    tmp_path: Path, registered: None
) -> None:
    """It is found when the file is read, with the names that there are."""
    (problem,) = problems_of(tmp_path, function("acme.rank"))
    assert 'expected package.module:name, got "acme.rank" (or a registered name: acme.sort)' in problem


@pytest.mark.parametrize("command", ["check", "serve", "worker"])
def test_whoever_starts_the_process_may_allow_any_function(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option `check` ends with status 3; each command that loads models has the option."""
    monkeypatch.delenv(ENVIRONMENT)
    config = tmp_path / "x.yaml"
    config.write_text(function("numpy:sort"))
    if command == "check":
        refused = CliRunner().invoke(app, ["check", str(config)])
        assert 3 == refused.exit_code
        assert "--any-function" in refused.output
        monkeypatch.setenv(ENVIRONMENT, "")  # put back afterwards, whatever the command sets
        assert 0 == CliRunner().invoke(app, ["check", str(config), "--any-function"]).exit_code
    assert "--any-function" in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output


# ---------------------------------------------------------------- files


def test_a_file_of_other_bytes_is_not_loaded(tmp_path: Path) -> None:
    """The digest of an IR covers its weights, so that neither file can be exchanged."""
    model, weights = tmp_path / "m.xml", tmp_path / "m.bin"
    model.write_bytes(b"<net/>")
    weights.write_bytes(b"weights")
    good = hashlib.sha256(b"<net/>weights").hexdigest()
    assert good == digest_of_model(model)
    text = f"models: [{{name: m, path: m.xml, sha256: '{good.upper()}'}}]"
    loaded = loaded_from(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_signatures(loaded)
    assert "models[0].path" in caught.value.problems[0], "the digest is right, and the file is no model"
    weights.write_bytes(b"Weights")
    with pytest.raises(ConfigurationError) as caught:
        read_signatures(loaded)
    (problem,) = caught.value.problems
    assert f"x.yaml:1:33: models[0].sha256: {model} has another sha256, " in problem


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_weights_in_other_files_cannot_be_exchanged_behind_the_pin(engine: str, tmp_path: Path) -> None:
    """The digest covers the external data of an ONNX file; the graph is the same to the bit."""
    path = tmp_path / "m.onnx"
    write_scaling(path, 2.0)
    graph, digest = path.read_bytes(), digest_of_model(path)
    text = f"models: [{{name: m, path: m.onnx, engine: {engine}, sha256: '{digest}'}}]"
    loaded = loaded_from(tmp_path, text)
    (signature,) = read_signatures(loaded).signatures
    assert "m" == signature.name
    write_scaling(path, 3.0)
    assert graph == path.read_bytes()
    with pytest.raises(ConfigurationError) as caught:
        read_signatures(loaded)
    assert "models[0].sha256" in caught.value.problems[0]
    (tmp_path / "m.weights").unlink()
    with pytest.raises(ConfigurationError) as caught:
        read_signatures(loaded)
    assert "m.weights cannot be read: No such file" in caught.value.problems[0]


@pytest.mark.parametrize("digest", ["abc", "'" + "g" * 64 + "'", 5, "[]", "'" + "a" * 63 + "'"])
def test_what_is_no_digest_is_refused(digest: str, tmp_path: Path) -> None:
    """Before any file is read."""
    (tmp_path / "m.onnx").touch()
    (problem,) = problems_of(tmp_path, f"models: [{{name: m, path: m.onnx, sha256: {digest}}}]")
    assert "models[0].sha256: expected 64 hexadecimal digits" in problem


ROOTED = "server: {{model_root: models}}\nmodels: [{{name: m, path: {path}}}]"


def test_model_files_stay_in_their_folder(tmp_path: Path) -> None:
    """By `..`, by an absolute path, by a link to a file, by a linked folder, and by a link to the weights alone."""
    inside, outside = tmp_path / "models", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "m.onnx").touch()
        (folder / "m.xml").touch()
    (inside / "link.onnx").symlink_to(outside / "m.onnx")
    (inside / "folder").symlink_to(outside)
    (inside / "m.bin").symlink_to(outside / "m.bin")
    (inside / "alias.onnx").symlink_to("m.onnx")
    for path in (
        "models/../outside/m.onnx",
        outside / "m.onnx",
        "models/link.onnx",
        "models/folder/m.onnx",
        "models/m.xml",
    ):
        (problem,) = problems_of(tmp_path, ROOTED.format(path=path))
        assert "x.yaml:2:20: models[0].path: " in problem
        assert f"is not in server.model_root, {inside.resolve()}" in problem
    for path in ("models/m.onnx", "models/alias.onnx", "outside/../models/m.onnx"):
        assert loaded_from(tmp_path, ROOTED.format(path=path))


def test_weights_in_other_files_stay_in_the_folder_too(tmp_path: Path) -> None:
    """An ONNX file in its place may name data that lies elsewhere, by a link."""
    for folder in (tmp_path / "models", tmp_path / "outside"):
        folder.mkdir()
    write_scaling(tmp_path / "models" / "m.onnx", 2.0)
    assert loaded_from(tmp_path, ROOTED.format(path="models/m.onnx"))
    (tmp_path / "models" / "m.weights").rename(tmp_path / "outside" / "m.weights")
    (tmp_path / "models" / "m.weights").symlink_to(tmp_path / "outside" / "m.weights")
    (problem,) = problems_of(tmp_path, ROOTED.format(path="models/m.onnx"))
    assert "outside/m.weights is not in server.model_root" in problem


def test_a_root_that_is_a_link_is_where_it_leads(tmp_path: Path) -> None:
    """Both sides of the comparison are resolved."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "m.onnx").touch()
    (tmp_path / "models").symlink_to("real")
    assert loaded_from(tmp_path, ROOTED.format(path="models/m.onnx"))
    (tmp_path / "real" / "m.onnx").unlink()
    (tmp_path / "real" / "m.onnx").symlink_to("m.onnx")
    assert any(
        "no such file" in problem for problem in problems_of(tmp_path, ROOTED.format(path="models/m.onnx"))
    )

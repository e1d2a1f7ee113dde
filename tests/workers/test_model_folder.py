"""`shapestream serve-folder`: the model that it finds in a folder, and its words about folders and options of no use."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings
from shapestream_workers.cli import app
from shapestream_workers.model_folder import FolderServer, model_in, written


def folder_with(tmp_path: Path, *names: str) -> Path:
    """A folder with empty files."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.onnx"], "model.onnx"),
        (["1/model.onnx", "config.pbtxt"], "1/model.onnx"),
        (["m.xml", "m.bin", "m.onnx"], "m.xml"),
        (["onnx/model.onnx", "tokenizer.json"], "."),
    ],
)
def test_the_model_of_a_folder(tmp_path: Path, names: list[str], chosen: str) -> None:
    """One file, at the top or one level below; IR before ONNX; a text model is the folder itself."""
    assert (tmp_path / chosen).absolute() == model_in(folder_with(tmp_path, *names))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "no model in it (.xml, .onnx, .pt2, or the files of a text model)"),
        (["a/b/model.onnx"], "no model in it"),
        (["a.onnx", "b.onnx"], "2 models (a.onnx, b.onnx): name one folder for each"),
        (["1/model.onnx", "2/model.onnx"], "2 models (1/model.onnx, 2/model.onnx)"),
    ],
)
def test_a_folder_without_one_model(tmp_path: Path, names: list[str], words: str) -> None:
    """It says what is there."""
    with pytest.raises(ConfigurationError) as caught:
        model_in(folder_with(tmp_path, *names))
    assert words in str(caught.value)


def test_a_yaml_is_written_and_removed(tmp_path: Path) -> None:
    """Workers and reloads read it; nobody else may."""
    folder = folder_with(tmp_path, "model.onnx")
    tokens = folder_with(tmp_path, "tokens") / "tokens"
    tokens.write_text("web " + "a" * 40)
    tokens.chmod(0o600)
    asked = FolderServer(folder=folder, name="m", http="0.0.0.0:8000", grpc="0.0.0.0:8001", token_file=tokens)
    with written(asked) as path:
        settings = load_settings(path).settings
        assert 0o700 == path.parent.stat().st_mode & 0o777
        assert [str(folder / "model.onnx")] == [str(model.path) for model in settings.models]
        assert all(address.startswith("ipc://") for address in settings.server.listen)
        assert "security" not in yaml.safe_load(path.read_text())["server"]
    assert not path.parent.exists()


def test_a_text_model_is_there_for_clients_of_texts(tmp_path: Path) -> None:
    """Over HTTP; other models are not."""
    texts, other = (
        folder_with(tmp_path / "t", "model.onnx", "tokenizer.json"),
        folder_with(tmp_path / "m", "m.onnx"),
    )
    for folder, expected in ((texts, True), (other, None)):
        asked = FolderServer(folder=folder, name="m", http="127.0.0.1:0", grpc="127.0.0.1:0")
        assert expected == asked.configuration(tmp_path / "s")["server"]["http"].get("texts")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 3, "no port for requests: give --http or --grpc"),
        (["--http", "0.0.0.0:8000"], 3, "is open to other machines (add token_file, or security: network"),
        (["--http", "here"], 3, "expected HOST:PORT"),
        (["--http", "127.0.0.1:0", "--name", "no name"], 3, "no name"),
        (["--http", "127.0.0.1:0", "--security", "off"], 2, "it is network, or left out"),
        (["--http", "127.0.0.1:0", "--token-file", "nowhere"], 3, "nowhere"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, arguments: list[str], status: int, words: str) -> None:
    """Nothing is started."""
    ran = CliRunner().invoke(app, ["serve-folder", str(folder_with(tmp_path, "m.onnx")), *arguments])
    assert (status, True) == (ran.exit_code, words in ran.output), ran.output

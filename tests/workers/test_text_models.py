"""The keys `tokenizer` and `pooling` of a model: what they mean together with others, and where mistakes are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.text_encoders import write_encoder
from tests.tokenizer_files import write_tokenizer

from shapestream.errors import ConfigurationError
from shapestream.loading.models import compile_models, model_spec
from shapestream.settings import LoadedSettings, load_settings
from shapestream_engine.model_files import digest_of_model
from shapestream_workers.check import check_configuration

TOKENS = "models:\n  - name: tokens\n    tokenizer: tokenizer.json\n"
ENCODER = """\
models:
  - name: encoder
    path: model.onnx
    engine: onnxruntime
    inputs:
      input_ids: {shape: "batch:1..8, seq:1..8", pad: {seq: 0}}
      attention_mask: {shape: "batch, seq", pad: {seq: 0}, mask_of: input_ids}
    probe: {input_ids: {integers: [0, 49]}}
    pooling: POOLING
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and an encoder."""
    write_tokenizer(tmp_path / "tokenizer.json")
    write_encoder(tmp_path / "model.onnx")
    return tmp_path


def load(folder: Path, text: str) -> LoadedSettings:
    """The settings of a YAML there."""
    config = folder / "server.yaml"
    config.write_text(text)
    return load_settings(config)


def problem(folder: Path, text: str) -> str:
    """The only problem of a YAML, without its file."""
    with pytest.raises(ConfigurationError) as caught:
        load(folder, text)
    (line,) = caught.value.problems
    return str(line).removeprefix(f"{folder}/server.yaml:")


def test_the_short_form_is_the_path(folder: Path) -> None:
    """Options have their defaults, the engine follows, and the digest is that of the file."""
    loaded = load(folder, TOKENS)
    (model,) = loaded.settings.models
    assert (str(folder / "tokenizer.json"), "tokenizer") == (model.file, model.only_engine)
    spec = model_spec(model)
    options = {
        "max_tokens": None,
        "truncate": False,
        "prompt": "",
        "lower_case": False,
        "pairs": False,
        "outputs": ("input_ids",),
    }
    assert options == spec.properties
    compiled = compile_models(loaded, [model], slots=1, threads=1)["tokens"]
    assert digest_of_model(folder / "tokenizer.json") == compiled.digest
    assert "text" == compiled.inputs[0].name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOKENS + "    path: model.onnx\n", '4:5: models[0].path: a tokenizer has no "path"'),
        (TOKENS + "    engine: openvino\n", '4:5: models[0].engine: a tokenizer has no "engine"'),
        (TOKENS + "    pooling: cls\n", '4:5: models[0].pooling: a tokenizer has no "pooling"'),
        (
            TOKENS + "    inputs: {ids: {}}\n",
            "4:14: models[0].inputs.ids: the only input of a tokenizer is text",
        ),
        (TOKENS.replace("tokenizer.json", "no.json"), "3:5: models[0].tokenizer.path: no such file"),
        (
            TOKENS.replace("tokenizer.json", "{path: tokenizer.json, truncate: true}"),
            "3:39: models[0].tokenizer.truncate: nothing says how many tokens stay (add max_tokens)",
        ),
        (
            TOKENS.replace("tokenizer.json", "{path: tokenizer.json, outputs: [ids]}"),
            '3:49: models[0].tokenizer.outputs[0]: expected "input_ids", "token_type_ids" or "attention_mask"',
        ),
        (
            ENCODER.replace("POOLING", "[mean]"),
            "9:5: models[0].pooling: expected mean, cls, last or max, and",
        ),
        (
            ENCODER.replace("POOLING", "mean, max"),
            "9:5: models[0].pooling: expected mean, cls, last or max, and",
        ),
        (
            ENCODER.replace("POOLING", "{mode: mean}"),
            "9:15: models[0].pooling.mode: this key was removed (write pooling: mean, or",
        ),
    ],
)
def test_mistakes_that_need_no_model(folder: Path, text: str, words: str) -> None:
    """Each has its place and its remedy."""
    assert problem(folder, text).startswith(words)


def test_a_pooling_of_a_model_that_pools_already(folder: Path) -> None:
    """`check` has it at the pooling, which is to go."""
    write_encoder(folder / "model.onnx", outputs=["last_hidden_state", "sentence_embedding"])
    (line,) = check_configuration(load(folder, ENCODER.replace("POOLING", "mean"))).problems
    assert "9:5: models[0].pooling: model 'encoder': " in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            TOKENS.replace("tokenizer.json", "{path: tokenizer.json, max_tokens: 2, truncate: true}"),
            "3:39: models[0].tokenizer.max_tokens: model 'tokens': the file adds 2 special tokens",
        ),
        (
            TOKENS.replace("tokenizer.json", "server.yaml"),
            "3:5: models[0].tokenizer: cannot read the tokenizer",
        ),
    ],
)
def test_mistakes_that_the_files_show(folder: Path, text: str, words: str) -> None:
    """`check` has them at the key to change."""
    (line,) = check_configuration(load(folder, text)).problems
    assert line.removeprefix(f"{folder}/server.yaml:").startswith(words)


def test_check_proves_a_pooled_model(folder: Path) -> None:
    """It is the pooled output whose batching and padding are proved."""
    report = check_configuration(load(folder, ENCODER.replace("POOLING", "mean, normalize")))
    assert [] == report.problems
    assert [("batching", "proved"), ("padding of seq", "proved")] == [
        (str(finding.treatment), finding.verdict) for finding in report.models[0].proof.findings
    ]
    assert {"sentence_embedding"} == {finding.output for finding in report.models[0].proof.findings}


def test_files_outside_of_the_models_root_are_refused(folder: Path) -> None:
    """A tokenizer is a file of a model like any other."""
    (folder / "root").mkdir()
    words = problem(folder, TOKENS + "server: {model_root: root}\n")
    assert words.startswith("3:5: models[0].tokenizer: ")
    assert "is not in server.model_root" in words

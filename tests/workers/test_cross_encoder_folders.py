"""A folder with a model that scores texts, or pairs of them, as the path of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cross_encoder.bert import IDS, MASK, MAX_TOKENS, TYPES, documents, vocabulary, write_cross_encoder
from typer.testing import CliRunner

from shapestream.errors import ConfigurationError
from shapestream.gateway.options import TextService, text_service
from shapestream.settings import load_settings
from shapestream.settings.folders import read_contents
from shapestream.settings.text_folder import MOST_LABEL_CHARACTERS, TextFolder, expand
from shapestream_engine.port_names import PortNames
from shapestream_workers.chains import service_options
from shapestream_workers.check import check_configuration
from shapestream_workers.cli import app
from shapestream_workers.gateways import GatewayPort

LARGEST = len(vocabulary()) - 1
CONFIG = documents(1)["config.json"]


def config(**values: Any) -> dict[str, Any]:
    """The file config.json with other values; None removes one."""
    return {"config.json": {key: value for key, value in {**CONFIG, **values}.items() if value is not None}}


def read(folder: Path, **given: Any) -> TextFolder:
    """What is made of a folder."""
    return expand("ranker", {"name": "ranker", "path": str(folder), **given}, read_contents(folder))


def test_a_cross_encoder_makes_pairs_and_a_chain_of_scores(tmp_path: Path) -> None:
    """Its texts are cut, since cross-encoders are trained so; its one score has a label."""
    made = read(write_cross_encoder(tmp_path / "model"))
    assert [] == made.problems == made.notes
    assert "each text, or pair of a query and a text, has one score" in {fact.words for fact in made.facts}
    assert ("LABEL_0",) == made.labels
    assert {
        "path": f"{tmp_path}/model/tokenizer.json",
        "max_tokens": MAX_TOKENS,
        "truncate": True,
        "pairs": True,
        "outputs": [IDS, TYPES],
    } == made.tokens["tokenizer"]
    assert {IDS, MASK, TYPES} == made.encoder["inputs"].keys()
    assert {IDS: {"integers": [0, LARGEST]}, TYPES: {"integers": [0, 1]}} == made.encoder["probe"]
    assert "pooling" not in made.encoder
    assert {"text": "tokenise.text", "query": "tokenise.query"} == made.chain["inputs"]
    assert {
        "score": "classify.logits",
        "tokens": "tokenise.counts",
        "uncut": "tokenise.uncut",
    } == made.chain["outputs"]


@pytest.mark.parametrize("architectures", [None, ["BertForSequenceClassification"], ["BertModel"]])
def test_the_shape_of_the_logits_decides(tmp_path: Path, architectures: list[str] | None) -> None:
    """A row of numbers for each text; the configuration need not say it."""
    made = read(
        write_cross_encoder(tmp_path / "model", 3, config(architectures=architectures, id2label=None))
    )
    assert [] == made.problems
    assert ("LABEL_0", "LABEL_1", "LABEL_2") == made.labels
    assert ["config.json has no id2label, so labels are LABEL_0 and so on"] == made.notes


@pytest.mark.parametrize(
    ("architectures", "labels"), [(["BertForSequenceClassification"], ("bad", "good")), (["BertModel"], ())]
)
def test_logits_of_unknown_shape_are_what_the_configuration_says(
    tmp_path: Path, architectures: list[str], labels: tuple[str, ...]
) -> None:
    """Where the model file says nothing."""
    folder = write_cross_encoder(
        tmp_path / "model", changed=config(architectures=architectures, id2label={"0": "bad", "1": "good"})
    )
    contents = read_contents(folder)
    ports = PortNames(inputs=contents.ports["onnx/model.onnx"].inputs, outputs={"logits": None})
    object.__setattr__(contents, "ports", {"onnx/model.onnx": ports})
    made = expand("ranker", {"name": "ranker", "path": str(folder)}, contents)
    assert labels == made.labels
    assert (not labels) == bool(made.problems)


@pytest.mark.parametrize(
    ("changed", "labels", "given", "key", "words"),
    [
        (
            config(id2label={"0": "a", "2": "b"}),
            2,
            {},
            "path",
            "id2label does not have a label for each number",
        ),
        (config(id2label=["a"]), 1, {}, "path", "id2label does not have a label for each number"),
        (
            config(id2label={"0": "a", "1": "b"}),
            1,
            {},
            "path",
            "gives 1 scores, and config.json has 2 labels",
        ),
        (
            config(id2label={"0": "a" * (MOST_LABEL_CHARACTERS + 1)}),
            1,
            {},
            "path",
            f"id2label has more than {MOST_LABEL_CHARACTERS} characters",
        ),
        (config(vocab_size=9), 1, {}, "path", "tokenizer.json is of another model"),
        ({}, 1, {"tokenizer": {"max_tokens": 65}}, "tokenizer", "the model has 64 positions"),
        ({}, 1, {"pooling": "mean"}, "path", "of different models: the size of a vector is 32"),
    ],
)
def test_what_contradicts_itself(
    tmp_path: Path, changed: dict[str, Any], labels: int, given: dict[str, Any], key: str, words: str
) -> None:
    """One problem with its remedy. A stated pooling says that the numbers are vectors."""
    made = read(write_cross_encoder(tmp_path / "model", labels, changed), **given)
    ((where, problem),) = made.problems
    assert key == where[0]
    assert words in problem
    assert problem.endswith(")")


def test_the_export_is_for_the_task(tmp_path: Path) -> None:
    """A folder without a model file says how one is made."""
    folder = write_cross_encoder(tmp_path / "model")
    (folder / "onnx" / "model.onnx").unlink()
    ((_, problem),) = read(folder).problems
    assert "optimum-cli export onnx --task text-classification" in problem


YAML = """\
server: {http: {address: "127.0.0.1:0", texts: [ranker, ranker.encoder]}}
models:
  - name: ranker
    path: model
    tokenizer: TOKENIZER
in_process: true
"""


def test_all_folders_of_texts_are_served_without_their_names(tmp_path: Path) -> None:
    """`true` is the names of the folders, in their order; an error points to it."""
    write_cross_encoder(tmp_path / "model", 2, config(id2label={"0": "bad", "1": "good"}))
    text = YAML.replace("TOKENIZER", "{}").replace("[ranker, ranker.encoder]", "true")
    (tmp_path / "server.yaml").write_text(text)
    loaded = load_settings(tmp_path / "server.yaml")
    assert loaded.settings.server.http is not None
    assert ("ranker",) == loaded.settings.server.http.texts
    assert "server.yaml:1:" in loaded.problem(("server", "http", "texts", 0), "x")


def test_a_gateway_is_told_of_the_parts_and_labels(tmp_path: Path) -> None:
    """By the options of its command line, which reads them."""
    write_cross_encoder(tmp_path / "model", 2, config(id2label={"0": "bäd=", "1": "go od"}))
    (tmp_path / "server.yaml").write_text(YAML.replace("TOKENIZER", "{truncate: false}"))
    loaded = load_settings(tmp_path / "server.yaml")
    assert loaded.settings.server.http is not None
    assert [False, True] == [
        getattr(loaded.settings.models[0].tokenizer, option) for option in ("truncate", "pairs")
    ]
    port = GatewayPort.open(loaded.settings.server.http, loaded)
    port.socket.close()
    options = port.options[port.options.index("--texts") :]
    _, ranker, *others = options
    assert TextService(
        name="ranker",
        encoder="ranker.encoder",
        tokenizer="ranker.tokens",
        largest_token=LARGEST,
        labels=("bäd=", "go od"),
    ) == text_service(ranker)
    assert ["--texts", "ranker.encoder"] == others
    assert options == [
        *service_options(loaded.settings.server.http, loaded.settings, {"ranker": ["bäd=", "go od"]})
    ]
    ran = CliRunner().invoke(app, ["gateway", "ipc://x", "--texts", "ranker=[1]"])
    assert (2, True) == (ran.exit_code, "expected NAME, or NAME=" in ran.output)


def test_a_prompt_before_pairs_is_refused(tmp_path: Path) -> None:
    """With its place in the YAML."""
    write_cross_encoder(tmp_path / "model")
    (tmp_path / "server.yaml").write_text(YAML.replace("TOKENIZER", "{prompt: 'query: '}"))
    with pytest.raises(ConfigurationError) as refused:
        load_settings(tmp_path / "server.yaml")
    (line,) = refused.value.problems
    assert "server.yaml:5:17: models[0].tokenizer.prompt: a model that scores texts has no prompt" in line


def test_check_refuses_the_encoder_as_a_service(tmp_path: Path) -> None:
    """It takes no texts; the folder itself is taken."""
    write_cross_encoder(tmp_path / "model")
    text = YAML.replace("TOKENIZER", "{}").replace(
        "path: model", "path: model\n    trust: true\n    calibration_s: 0"
    )
    (tmp_path / "server.yaml").write_text(text)
    (problem,) = check_configuration(load_settings(tmp_path / "server.yaml")).problems
    assert "server.http.texts[1]: 'ranker.encoder' embeds no texts" in problem

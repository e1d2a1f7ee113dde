"""A folder with a text model as the path of a model: what is read of it, and what is refused with which words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
from tests.text_encoders import IDS, MASK, POSITIONS, TYPES, write_encoder
from tests.text_folders import HIDDEN, KIND, VOCABULARY, documents, write_folder
from tests.tokenizer_files import tokenizer

from shapestream.errors import ConfigurationError
from shapestream.loading.sources import digests_of
from shapestream.settings import LoadedSettings, load_models, load_settings
from shapestream.settings.folders import read_contents
from shapestream.settings.text_folder import TextFolder, expand
from shapestream_engine import ModelLoadError
from shapestream_engine.port_names import PortNames, port_names
from shapestream_workers.check import check_configuration


def changed(name: str, **values: Any) -> dict[str, Any]:
    """A document with other values; None removes one."""
    document = {**documents()[name], **values}
    return {name: {key: value for key, value in document.items() if value is not None}}


def read(folder: Path, **given: Any) -> TextFolder:
    """What is made of a folder."""
    return expand("texts", {"name": "texts", "path": str(folder), **given}, read_contents(folder))


def load(tmp_path: Path, more: str = "", rest: str = "") -> LoadedSettings:
    """A YAML with the folder `model` beside it."""
    config = tmp_path / "server.yaml"
    config.write_text(f"models:\n  - name: texts\n    path: model\n{more}{rest}")
    return load_settings(config)


def facts(made: TextFolder) -> dict[str, str]:
    """The facts by file."""
    assert [] == made.problems
    found: dict[str, str] = {}
    for fact in made.facts:
        found[fact.file] = f"{found[fact.file]}; {fact.words}" if fact.file in found else fact.words
    return found


def test_everything_is_read_from_its_file(tmp_path: Path) -> None:
    """A usual folder: each fact has the file, and the key in it, that says so."""
    made = read(write_folder(tmp_path, inputs=[IDS, MASK, TYPES]))
    assert {
        "onnx/model.onnx": f"inputs {IDS}, {MASK}, {TYPES}; outputs last_hidden_state; a vector has 6 numbers",
        "sentence_bert_config.json: max_seq_length": "longest text: 16 tokens",
        "tokenizer.json": "10 tokens, ids up to 9",
        "config.json: pad_token_id": "padding: the id 0",
        "1_Pooling/config.json": "pooling: mean of last_hidden_state",
        "modules.json": "vectors have the length 1",
        "config.json: vocab_size": f"the proof tries {IDS} from 0 to 9",
        "config.json: type_vocab_size": f"the proof tries {TYPES} from 0 to 1",
    } == facts(made)
    assert [] == made.notes
    assert [f"folder texts: {tmp_path}", "  padding: the id 0 (config.json: pad_token_id)"] == [
        line for line in made.lines() if "folder" in line or "padding" in line
    ]
    assert {
        "name": "texts.tokens",
        "tokenizer": {"path": f"{tmp_path}/tokenizer.json", "max_tokens": 16, "outputs": [IDS, TYPES]},
    } == made.tokens
    assert {
        "name": "texts.encoder",
        "path": f"{tmp_path}/onnx/model.onnx",
        "inputs": {
            IDS: {"shape": "batch:1..64, seq:1..16", "pad": {"seq": 0}},
            MASK: {"shape": "batch, seq", "pad": {"seq": 0}, "mask_of": IDS},
            TYPES: {"shape": "batch, seq", "pad": {"seq": 0}},
        },
        "probe": {IDS: {"integers": [0, 9]}, TYPES: {"integers": [0, 1]}},
        "pooling": "mean, normalize",
    } == made.encoder


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"], "embedding_dimension": HIDDEN}, "cls"),
        ({"pooling_mode": "mean", "pooling_mode_mean_tokens": None}, "mean"),
    ],
)
def test_each_pooling_of_sentence_transformers(tmp_path: Path, pooling: dict[str, Any], mode: str) -> None:
    """The old keys, one of which is true, and the newer word."""
    made = read(write_folder(tmp_path, changed("1_Pooling/config.json", **pooling)))
    assert [] == made.problems
    assert f"{mode}, normalize" == made.encoder["pooling"]


MODULES = documents()["modules.json"]
POOLING = "1_Pooling/config.json"


@pytest.mark.parametrize(
    ("files", "encoder", "given", "key", "words"),
    [
        ({}, {"model": ""}, {}, "path", "no ONNX or IR model is in "),
        ({}, {"model": "openvino_model.onnx"}, {}, "path", "optimum-cli export onnx"),
        ({"tokenizer.json": None}, {}, {}, "path", "there is no tokenizer.json in "),
        ({"tokenizer.json": "{"}, {}, {}, "path", "tokenizer.json cannot be read: it is no JSON: "),
        (
            {"tokenizer.json": '{"a":' * 50_000},
            {},
            {},
            "path",
            "tokenizer.json cannot be read: it is nested too deeply",
        ),
        (
            {"tokenizer.json": "{}"},
            {},
            {},
            "path",
            "tokenizer.json is no tokenizer: it has no model with a vocabulary",
        ),
        ({"tokenizer.json": "[]"}, {}, {}, "path", "tokenizer.json is no tokenizer"),
        (
            {"tokenizer.json": tokenizer(words=("a", "b", "c", "d", "e", "\ud800"))},
            {},
            {},
            "path",
            "tokenizer.json is of another model: its token '\\ud800' has the id 10, and config.json has vocab_size 10",
        ),
        ({"config.json": "[1]"}, {}, {}, "path", "config.json is no JSON object"),
        (
            changed("config.json", vocab_size="many"),
            {},
            {},
            "path",
            "config.json: vocab_size is 'many', which is no count",
        ),
        (
            changed("config.json", hidden_size=8),
            {},
            {},
            "path",
            "the size of a vector is 8 (config.json: hidden_size), 6 (",
        ),
        (
            changed(POOLING, word_embedding_dimension=7),
            {},
            {},
            "path",
            "7 (1_Pooling/config.json: word_embedding_dimension)",
        ),
        (changed(POOLING, pooling_mode_mean_tokens=False), {}, {}, "pooling", "the pooling is none"),
        (
            changed(POOLING, pooling_mode_max_tokens=True),
            {},
            {},
            "pooling",
            "pooling_mode_mean_tokens and pooling_mode_max_tokens",
        ),
        (
            changed(POOLING, pooling_mode=["mean", "cls"]),
            {},
            {},
            "pooling",
            "the pooling is mean and cls, and there are",
        ),
        (
            changed(POOLING, embedding_dimension=7),
            {},
            {},
            "path",
            "7 (1_Pooling/config.json: embedding_dimension)",
        ),
        (
            changed(POOLING, pooling_mode="weightedmean"),
            {},
            {},
            "pooling",
            "the pooling is weightedmean, and there are mean",
        ),
        (
            {POOLING: None},
            {},
            {},
            "path",
            "modules.json names a pooling, and 1_Pooling/config.json is not there",
        ),
        ({"modules.json": None}, {}, {}, "pooling", "no file says how tokens become one vector"),
        ({"modules.json": MODULES[:1]}, {}, {}, "pooling", "no file says how tokens become one vector"),
        ({"modules.json": "{}"}, {}, {}, "path", "modules.json is no list of modules"),
        (
            {"modules.json": [*MODULES[:2], {"type": f"{KIND}.Dense", "path": "2_Dense"}]},
            {},
            {},
            "path",
            "modules.json has a step Dense",
        ),
        ({}, {"inputs": [IDS, MASK, POSITIONS]}, {}, "path", "onnx/model.onnx has an input 'position_ids'"),
        (
            {},
            {"outputs": ["logits"]},
            {},
            "pooling",
            "has the outputs logits, and none is last_hidden_state or token_embeddings",
        ),
        (
            {},
            {},
            {"tokenizer": {"max_tokens": 33}},
            "tokenizer",
            "the model has 32 positions, config.json: max_position_embeddings",
        ),
        ({}, {}, {"tokenizer": "other.json"}, "tokenizer", "the folder has its tokenizer"),
        ({}, {}, {"tokenizer": {"path": "other.json"}}, "tokenizer", "the folder has its tokenizer"),
        (
            {
                "sentence_bert_config.json": None,
                **changed("config.json", max_position_embeddings=None),
                **changed("tokenizer_config.json", model_max_length=1e30),
            },
            {},
            {},
            "tokenizer",
            "no file says how many tokens a text may have (add tokenizer: {max_tokens: 512}",
        ),
    ],
)
def test_what_is_missing_or_contradicts_itself(
    tmp_path: Path,
    files: dict[str, Any],
    encoder: dict[str, Any],
    given: dict[str, Any],
    key: str,
    words: str,
) -> None:
    """One problem, at the key that could change it, with a remedy, and printable whatever a file holds."""
    made = read(write_folder(tmp_path, files, **encoder), **given)
    ((where, problem),) = made.problems
    assert key == where[0]
    assert words in problem
    assert problem.encode()
    assert problem.endswith(")") or "cannot be read" in problem


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Nobody wants to correct them one by one."""
    made = read(
        write_folder(tmp_path, {"tokenizer.json": None, "modules.json": None}, inputs=[IDS, MASK, POSITIONS])
    )
    assert ["path", "path", "pooling"] == sorted(str(key[0]) for key, _ in made.problems)


@pytest.mark.parametrize(
    ("files", "longest", "source"),
    [
        ({}, 16, "sentence_bert_config.json: max_seq_length"),
        ({"sentence_bert_config.json": None}, 32, "tokenizer_config.json: model_max_length"),
        (
            {"sentence_bert_config.json": None, "tokenizer_config.json": None},
            32,
            "config.json: max_position_embeddings",
        ),
        (
            {
                "sentence_bert_config.json": None,
                "tokenizer_config.json": None,
                **changed("config.json", model_type="roberta", pad_token_id=1),
            },
            30,
            "config.json: max_position_embeddings, less those before the first token",
        ),
    ],
)
def test_the_longest_text(tmp_path: Path, files: dict[str, Any], longest: int, source: str) -> None:
    """The first file that says it, in the order of sentence-transformers; RoBERTa counts positions from its padding on."""
    made = read(write_folder(tmp_path, files))
    assert f"longest text: {longest} tokens" in facts(made)[source]
    assert longest == made.tokens["tokenizer"]["max_tokens"]
    assert f"batch:1..64, seq:1..{longest}" == made.encoder["inputs"][IDS]["shape"]


def test_a_promise_beyond_the_positions_is_noted(tmp_path: Path) -> None:
    """The model cannot keep it, so its positions are the limit."""
    made = read(write_folder(tmp_path, changed("sentence_bert_config.json", max_seq_length=64)))
    assert 32 == made.tokens["tokenizer"]["max_tokens"]
    (note,) = made.notes
    assert note.startswith(
        "sentence_bert_config.json: max_seq_length is 64, and the model has 32 positions, config.json"
    )


def test_notes(tmp_path: Path) -> None:
    """What is not done as the files say is told."""
    files = {
        "tokenizer.json": tokenizer(padding={"strategy": "BatchLongest"}, truncation={"max_length": 8}),
        "special_tokens_map.json": {"pad_token": {"content": "[MASK]"}},
        **changed("tokenizer_config.json", pad_token=None),
    }
    notes = "\n".join(read(write_folder(tmp_path, files)).notes)
    for words in (
        "the padding token '[MASK]' has the id 4 in tokenizer.json, and config.json has pad_token_id 0",
        "tokenizer.json has padding switched on; it is switched off here",
        "tokenizer.json has truncation switched on; it is switched off here",
    ):
        assert words in notes
    assert 3 == len(notes.splitlines())


def _prompts(**others: Any) -> dict[str, Any]:
    """A folder's default prompt."""
    document = {"default_prompt_name": "query", "prompts": {"query": "Query: "}} | others
    return {"config_sentence_transformers.json": document}


def test_texts_are_lowered_and_have_the_folders_prompt(tmp_path: Path) -> None:
    """As sentence-transformers does, and `check` tells both; the YAML may say otherwise."""
    files = {**_prompts(), **changed("sentence_bert_config.json", do_lower_case=True)}
    folder = write_folder(tmp_path, files)
    made = read(folder)
    assert {"prompt": "Query: ", "lower_case": True, "max_tokens": 16} == {
        key: made.tokens["tokenizer"].get(key) for key in ("prompt", "lower_case", "max_tokens")
    }
    facts = "\n".join(map(str, made.facts))
    assert (
        "before every text stands 'Query: ' (config_sentence_transformers.json: default_prompt_name)" in facts
    )
    assert "texts are lowered (sentence_bert_config.json: do_lower_case)" in facts


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (_prompts(prompts={}), "has the default prompt 'query', and no text for it"),
        (
            {**_prompts(), **changed("1_Pooling/config.json", include_prompt=False)},
            "1_Pooling/config.json leaves the tokens of the prompt out of the vector",
        ),
    ],
)
def test_a_prompt_that_cannot_be_added_is_a_problem(
    tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    """It names the way out."""
    ((_, problem),) = read(write_folder(tmp_path, files)).problems
    assert words in problem
    assert "tokenizer: {prompt: ''}" in problem


def test_the_older_layout_with_a_folder_of_the_transformer(tmp_path: Path) -> None:
    """modules.json names the folder that has the encoder's documents."""
    moved = ("config.json", "sentence_bert_config.json", "tokenizer_config.json")
    files: dict[str, Any] = dict.fromkeys(moved)
    files |= {f"0_Transformer/{name}": documents()[name] for name in moved}
    files["modules.json"] = [{**MODULES[0], "path": "0_Transformer"}, *MODULES[1:]]
    found = facts(read(write_folder(tmp_path, files)))
    assert "longest text: 16 tokens" == found["0_Transformer/sentence_bert_config.json: max_seq_length"]
    assert "padding: the id 0" == found["0_Transformer/config.json: pad_token_id"]


def test_modules_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    """A hostile folder reads no file of others."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    for path in ("../secret", str(tmp_path / "secret")):
        modules = [MODULES[0], {**MODULES[1], "path": path}]
        folder = write_folder(tmp_path / "model", {"modules.json": modules})
        contents = read_contents(folder)
        assert not any("secret" in name for name in contents.documents)


def test_a_model_that_pools_by_itself(tmp_path: Path) -> None:
    """As sentence-transformers exports it, with all steps: nothing is pooled again, and steps of ours may be missing."""
    dense = {"modules.json": [*MODULES[:2], {"type": f"{KIND}.Dense", "path": "2_Dense"}]}
    folder = write_folder(tmp_path, dense, outputs=["token_embeddings", "sentence_embedding"])
    made = read(folder)
    assert "the model pools by itself: sentence_embedding" in facts(made)["onnx/model.onnx"]
    assert "pooling" not in made.encoder
    assert [
        "onnx/model.onnx also has token_embeddings, which each call copies and no one reads"
    ] == made.notes


def test_a_model_without_a_mask_is_not_padded(tmp_path: Path) -> None:
    """What cannot tell padding from tokens never sees any."""
    contents = read_contents(write_folder(tmp_path))
    ports = PortNames(inputs={IDS: (None, None)}, outputs={"last_hidden_state": (None, None, HIDDEN)})
    bare = type(contents)(folder=contents.folder, documents=contents.documents, ports={"model.onnx": ports})
    made = expand("texts", {"name": "texts"}, bare)
    assert {IDS: {"shape": "batch:1..64, seq:1..16"}} == made.encoder["inputs"]
    assert "so nothing is padded" in made.notes[0]


@pytest.mark.parametrize(
    ("engine", "file"),
    [
        (None, "openvino/openvino_model.xml"),
        ("openvino", "openvino/openvino_model.xml"),
        ("onnxruntime", "onnx/model.onnx"),
    ],
)
def test_which_of_two_model_files(tmp_path: Path, engine: str | None, file: str) -> None:
    """The IR, unless the engine is another; the file that is left is noted."""
    folder = write_folder(tmp_path)
    ov.save_model(
        ov.Core().read_model(folder / "onnx" / "model.onnx"), folder / "openvino" / "openvino_model.xml"
    )
    made = read(folder, **({} if engine is None else {"engine": engine}))
    assert f"{folder}/{file}" == made.encoder["path"]
    assert (engine != "onnxruntime") == any("onnx/model.onnx is not used" in note for note in made.notes)


def test_a_file_whose_engine_is_not_installed_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the extra `onnxruntime` alone the ONNX file is taken, and the note says why; an IR alone stays."""
    folder = write_folder(tmp_path)
    ir = folder / "openvino" / "openvino_model.xml"
    ov.save_model(ov.Core().read_model(folder / "onnx" / "model.onnx"), ir)
    monkeypatch.setitem(sys.modules, "openvino", None)
    made = read(folder)
    assert f"{folder}/onnx/model.onnx" == made.encoder["path"]
    (note,) = (note for note in made.notes if "is not used" in note)
    assert "openvino/openvino_model.xml needs the engine openvino, which is not installed" in note
    (folder / "onnx" / "model.onnx").unlink()
    assert str(ir) == read(folder).encoder["path"]


def test_the_yaml_is_put_over_the_files(tmp_path: Path) -> None:
    """Key by key, also inside of inputs; pooling and the longest text, too."""
    write_folder(tmp_path / "model", {"modules.json": None})
    more = """\
    engine: onnxruntime
    tokenizer: {max_tokens: 12, truncate: true}
    pooling: cls, normalize
    batching: {max_batch: 128}
    inputs: {input_ids: {pad: {seq: 3}}}
"""
    settings = load(tmp_path, more).settings
    tokens, encoder = settings.models
    assert tokens.tokenizer is not None
    assert (12, True) == (tokens.tokenizer.max_tokens, tokens.tokenizer.truncate)
    assert "cls, normalize" == encoder.pooling
    assert ("onnxruntime", 128) == (encoder.engine, encoder.batching.max_batch)
    assert ("batch:1..128, seq:1..12", {"seq": 3}) == (encoder.inputs[IDS].shape, encoder.inputs[IDS].pad)


def test_two_models_and_a_chain(tmp_path: Path) -> None:
    """They take the model's place; groups of workers that name it serve both."""
    write_folder(tmp_path / "model")
    port = "{shape: n, element_type: f32}"
    rest = f"  - {{name: sort, function: 'numpy:sort', inputs: {{a: {port}}}, outputs: {{b: {port}}}}}\n"
    rest += "workers: [{models: [texts]}, {models: [sort]}]\n"
    settings = load(tmp_path, rest=rest).settings
    assert ["texts.tokens", "sort", "texts.encoder"] == [model.name for model in settings.models]
    assert ["texts"] == [chain.name for chain in settings.chains]
    assert [("texts.tokens", "texts.encoder"), ("sort",)] == [
        group.models for group in settings.worker_groups
    ]
    assert {"texts.tokens", "texts.encoder"} == digests_of(settings.models).keys()
    assert ["texts"] == [chain.name for chain in load_models(tmp_path / "server.yaml").settings.chains]


@pytest.mark.parametrize(
    ("more", "files", "problem"),
    [
        (
            "    batching: {max_batch: 0}\n",
            {},
            "server.yaml:4:16: models[0].batching.max_batch: must be at least 1, got 0",
        ),
        (
            "    tokenizer: {max_token: 9}\n",
            {},
            'server.yaml:4:17: models[0].tokenizer.max_token: unknown key (did you mean "max_tokens"?)',
        ),
        ("    pooling: sum\n", {}, "server.yaml:4:5: models[0].pooling: expected mean, "),
        (
            "    pooling: {mode: cls}\n",
            {},
            "server.yaml:4:15: models[0].pooling.mode: this key was removed (write pooling: mean, or ",
        ),
        (
            "    function: numpy:sort\n",
            {},
            'server.yaml:4:5: models[0].function: both "path" and "function" are given',
        ),
        ("", {"tokenizer.json": "{}"}, "server.yaml:3:5: models[0].path: tokenizer.json is no tokenizer"),
        (
            "",
            {"modules.json": None},
            "server.yaml:2:5: models[0].pooling: no file says how tokens become one vector",
        ),
    ],
)
def test_mistakes_have_their_place_in_the_yaml(
    tmp_path: Path, more: str, files: dict[str, Any], problem: str
) -> None:
    """Also those of the model that has another index than the folder's."""
    write_folder(tmp_path / "model", files)
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, more)
    (found,) = caught.value.problems
    assert found.startswith(f"{tmp_path}/{problem}")


def test_a_folder_without_a_text_model_is_refused_as_before(tmp_path: Path) -> None:
    """It is taken for a mistaken path to the file in it."""
    (tmp_path / "model").mkdir()
    write_encoder(tmp_path / "model" / "net.onnx")
    with pytest.raises(ConfigurationError, match=r"is a folder \(name the file in it: .*/model/net.onnx\)"):
        load(tmp_path)


def test_settings_tell_where_they_come_from(tmp_path: Path) -> None:
    """A value that is made of the folder has the line of its model; defaults stay defaults."""
    write_folder(tmp_path / "model")
    loaded = load(tmp_path, "    batching: {max_batch: 9}\n")
    origins = {each.key: each.origin for each in loaded.effective_values()}
    line = f"{tmp_path}/server.yaml"
    assert f"{line}:2" == origins["models[1].pooling"] == origins["chains[0].outputs.tokens"]
    assert f"{line}:4" == origins["models[1].batching.max_batch"]
    assert "default" == origins["models[1].trust"]


def test_check_tells_the_facts_and_proves_the_folder(tmp_path: Path) -> None:
    """The facts stand above the models, and a chain of them is drawn; a script gets them, too."""
    write_folder(tmp_path / "model", inputs=[IDS, MASK, TYPES])
    report = check_configuration(load(tmp_path, "    engine: onnxruntime\n"))
    assert [] == report.problems
    lines = list(report.lines(None))
    assert f"folder texts: {tmp_path}/model" == lines[0]
    assert "  pooling: mean of last_hidden_state (1_Pooling/config.json)" in lines
    assert any(line.startswith("  padding of seq, output 'sentence_embedding': proved") for line in lines)
    assert "  output embedding: f32 [?, 6] = embed.sentence_embedding" in lines
    assert {"fact": "padding: the id 0", "file": "config.json: pad_token_id"} in report.to_dict(None)[
        "folders"
    ][0]["facts"]


def test_a_model_with_fewer_embeddings_than_its_config_says(tmp_path: Path) -> None:
    """The proof tries every id that config.json promises, so the file of another model is found."""
    folder = write_folder(tmp_path / "model", model="")
    (folder / "onnx").mkdir()
    write_encoder(folder / "onnx" / "model.onnx", vocabulary=VOCABULARY - 3, hidden=HIDDEN)
    report = check_configuration(load(tmp_path, "    engine: onnxruntime\n"))
    assert report.problems or report.warnings
    assert any(
        "out of data bounds" in line or "indices" in line for line in (*report.problems, *report.warnings)
    )


PARAMETER = """
<net><layers><layer id="0" type="Parameter" name="x">
<output><port id="0"><dim>%s</dim></port></output></layer></layers></net>
"""


def test_ports_of_damaged_files(tmp_path: Path) -> None:
    """Each is an error with the path, whatever the bytes are."""
    for name, data in (
        ("a.onnx", b""),
        ("b.onnx", b"\xff" * 100),
        ("c.xml", b"<net><layers><layer/></layers></net>"),
        ("d.xml", b"<net"),
        ("e.xml", b'<!DOCTYPE a [<!ENTITY b "c">]><net>&b;</net>'),
        ("f.xml", (PARAMETER % "x").encode()),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ModelLoadError, match="cannot read the model ") as caught:
            port_names(path)
        assert name in str(caught.value)
    os.mkfifo(tmp_path / "g.onnx")
    with pytest.raises(ModelLoadError, match="is not a regular file"):
        port_names(tmp_path / "g.onnx")

"""A tokenizer as a model: ids as the library gives them, limits, and files that are none."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from examples.embeddings.weights import model_folder
from tests.engine.slot_bench import SlotBench
from tests.tokenizer_files import WORDS, write_tokenizer

from shapestream_engine import (
    CompiledModel,
    InferenceError,
    InputSpec,
    InvalidInput,
    ModelLoadError,
    ModelSpec,
    OutputSpec,
    SignatureError,
    compile_model,
    read_model,
)
from shapestream_engine.array_lists import unpack
from shapestream_engine.backends import tokenizer as backend
from shapestream_engine.model_files import MOST_TOKENIZER_BYTES, files_of_model

TEXTS = [
    "compress a file",
    "",
    " ",
    "Ünïcödé 🙂 👩‍👩‍👧",
    "שלום עולם",
    "long " * 300,
    "\x00\x07 control\x7f",
    "a\x00b",
    "\N{RIGHT-TO-LEFT OVERRIDE}x",
]


def spec_of(path: Path, **properties: Any) -> ModelSpec:
    """A tokenizer with these options."""
    return ModelSpec(name="tokens", path=path, engine="tokenizer", properties=properties)


def encode(model: CompiledModel, texts: list[str]) -> dict[str, Any]:
    """The outputs for texts: lists as lists of plain lists, and the counts."""
    results = model.create_infer_request().infer({"text": texts})
    lists = {name for name in results if f"{name}.shapes" in results}
    found: dict[str, Any] = {
        name: [array.tolist() for array in unpack(results[name], results[f"{name}.shapes"])] for name in lists
    }
    return found | {name: results[name].tolist() for name in ("counts", "uncut")}


@pytest.fixture(scope="module")
def minilm() -> Path:
    """MiniLM's own, which asks for padding and truncation to 128."""
    return model_folder() / "tokenizer.json"


def test_ids_are_those_of_the_library(minilm: Path) -> None:
    """Text by text, without the padding and the truncation that the file asks for."""
    library = tokenizers.Tokenizer.from_file(str(minilm))
    library.no_padding()
    library.no_truncation()
    model = compile_model(spec_of(minilm, outputs=list(backend.LISTS)))
    found = encode(model, TEXTS)
    expected = [library.encode(text) for text in TEXTS]
    assert [each.ids for each in expected] == found["input_ids"]
    assert [each.type_ids for each in expected] == found["token_type_ids"]
    assert [each.attention_mask for each in expected] == found["attention_mask"]
    assert [len(each.ids) for each in expected] == found["counts"]
    assert 302 == found["counts"][5]
    assert "padding to 128, truncation to 128" == model.properties["switched_off"]


def test_no_text_is_an_ordinary_request(minilm: Path) -> None:
    """On a slot it is answered without a call, or by one: no ids, no counts."""
    bench = SlotBench(compile_model(spec_of(minilm)))
    report = bench.run({"text": np.array([], object)})
    (result,) = bench.arrays(report)
    assert [(0,), (0, 1), (0,)] == [
        result[name].shape for name in ("input_ids", "input_ids.shapes", "counts")
    ]


def test_a_long_text_is_an_error_or_cut(tmp_path: Path) -> None:
    """The error has its number, its length, the limit and the remedy; special tokens count."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    refusing = compile_model(spec_of(path, max_tokens=4))
    assert [4] == encode(refusing, ["hello world"])["counts"]
    with pytest.raises(InvalidInput, match="text 1 has 5 tokens, and the model takes at most 4") as caught:
        encode(refusing, ["hello", "hello world hello", "hello"])
    assert "`truncate: true`" in str(caught.value)
    cutting = compile_model(spec_of(path, max_tokens=4, truncate=True))
    found = encode(cutting, ["hello", "hello world", "hello world hello"])
    assert [[2, 5, 3], [2, 5, 6, 3], [2, 5, 6, 3]] == found["input_ids"]
    assert [3, 4, 5] == found["uncut"]


def test_a_cut_text_is_told_with_the_tokens_that_it_had(minilm: Path) -> None:
    """As many as the library counts without a cut."""
    found = encode(compile_model(spec_of(minilm, max_tokens=7, truncate=True)), TEXTS)
    whole = encode(compile_model(spec_of(minilm)), TEXTS)
    assert [min(7, count) for count in whole["counts"]] == found["counts"]
    assert whole["counts"] == found["uncut"] == whole["uncut"]


def test_what_is_far_too_long_is_not_encoded_to_its_end(tmp_path: Path) -> None:
    """By its characters; where texts are cut, only one whose beginning has enough tokens, or the rest might count."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    most = 4 * backend.TOKEN_CHARACTERS
    words, spaces = "hello " * most, " " * (most + 1)
    refusing = compile_model(spec_of(path, max_tokens=4))
    with pytest.raises(
        InvalidInput, match=f"text 1 has {len(words)} characters, and the model takes at most 4"
    ):
        encode(refusing, ["hello", words])
    assert [3] == encode(refusing, ["hello" + " " * (most - 5)])["counts"]
    cutting = compile_model(spec_of(path, max_tokens=4, truncate=True))
    found = encode(cutting, [words])
    assert [[2, 5, 5, 3]] == found["input_ids"]
    assert found["uncut"] > found["counts"]
    with pytest.raises(InvalidInput, match=f"text 0 has {most + 6} characters"):
        encode(cutting, [spaces + "hello"])


def test_a_request_goes_on_after_an_error(tmp_path: Path) -> None:
    """One text that is too long fails its call only."""
    request = compile_model(
        spec_of(write_tokenizer(tmp_path / "t.json"), max_tokens=3)
    ).create_infer_request()
    with pytest.raises(InferenceError):
        request.infer({"text": ["hello world"]})
    assert [3] == request.infer({"text": ["hello"]})["counts"].tolist()


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        (
            {"max_tokens": 2, "truncate": True},
            "the file adds 2 special tokens to each text, so max_tokens: 2 leaves none",
        ),
        ({"max_tokens": 0}, "max_tokens is a count from 1, not 0"),
        ({"truncate": True}, "truncate needs max_tokens"),
        (
            {"outputs": ["ids"]},
            "a tokenizer has no output 'ids'; it has input_ids, token_type_ids, attention_mask",
        ),
        ({"outputs": ["input_ids", "input_ids"]}, "named once each"),
        (
            {"max_length": 5},
            "a tokenizer has the properties max_tokens, truncate, prompt, lower_case, "
            "pairs, outputs, not max_length",
        ),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, properties: dict[str, Any], words: str) -> None:
    """Each is a mistake of the configuration, and says which values there are."""
    with pytest.raises(SignatureError, match="model 'tokens': ") as caught:
        compile_model(spec_of(write_tokenizer(tmp_path / "t.json"), **properties))
    assert words in str(caught.value)


def test_its_ports_are_known(tmp_path: Path) -> None:
    """A spec may bound the bytes of a text, and state no other port."""
    path = write_tokenizer(tmp_path / "t.json")
    model = read_model(ModelSpec(path=path, engine="tokenizer", inputs={"text": InputSpec(at_most_bytes=99)}))
    assert 99 == model.input("text").at_most_bytes
    assert ["input_ids", "input_ids.shapes", "counts", "uncut"] == [port.name for port in model.outputs]
    for ports in ({"inputs": {"words": InputSpec()}}, {"outputs": {"ids": OutputSpec()}}):
        with pytest.raises(SignatureError, match="the ports of a tokenizer are known"):
            read_model(ModelSpec(path=path, engine="tokenizer", **ports))  # type: ignore[arg-type]
    with pytest.raises(SignatureError, match="takes a path or the path of a tokenizer"):
        compile_model(ModelSpec(name="t", model=len, engine="tokenizer"))


DEEP = b'{"a":' * 100_000
UNKNOWN = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}}
HOSTILE = {
    "empty": b"",
    "no tokenizer": b"{}",
    "a list": b"[]",
    "text": b"hello",
    "bytes": b"\xff\xfe\x00",
    "deep": DEEP,
    "deep lists": b"[" * 1_000_000,
    "wrong type": b'{"version":"1.0","model":{"type":"Sorcery"}}',
    "wrong version": b'{"version":"9.9","model":{"type":"WordLevel","vocab":{},"unk_token":"x"}}',
    "fails on any text": json.dumps(UNKNOWN).encode(),
    "merges of unknown tokens": (
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":4294967295},"merges":[["a","b"]]}}'
    ),
    "ids beyond u32": b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"x":99999999999},"unk_token":"x"}}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_are_no_tokenizer(tmp_path: Path, name: str) -> None:
    """Any bytes: a clear error with the path and the remedy, never a panic or a crash."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(HOSTILE[name])
    for act in (read_model, compile_model):
        with pytest.raises(ModelLoadError, match="cannot read the tokenizer ") as caught:
            act(spec_of(path))
        assert str(path) in str(caught.value)
        assert "transformers writes one" in str(caught.value)
        assert ("path",) == caught.value.key


def test_files_that_are_not_read(tmp_path: Path) -> None:
    """Missing, a folder, and more bytes than any tokenizer has, of which few are on the disk."""
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelLoadError, match="No such file"):
        compile_model(spec_of(path))
    with pytest.raises(ModelLoadError, match=r"is not a regular file|Is a directory"):
        compile_model(spec_of(tmp_path))
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelLoadError, match=f"is longer than {MOST_TOKENIZER_BYTES} bytes"):
        compile_model(spec_of(path))
    assert [path] == files_of_model(path)


@pytest.mark.parametrize("where", ["load", "call"])
def test_a_panic_of_the_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A panic is no `Exception`: it ends neither the program nor the slot."""

    class Panic(BaseException):
        """As pyo3 raises it."""

    path = write_tokenizer(tmp_path / "t.json")

    class Panicking:
        """A tokenizer with a defect."""

        read = staticmethod(tokenizers.Tokenizer.from_buffer)
        broken = where == "load"

        def __init__(self, sound: tokenizers.Tokenizer) -> None:
            self.sound = sound

        @classmethod
        def from_buffer(cls, data: bytes) -> Panicking:
            return cls(cls.read(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sound, name)

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            if self.broken:
                raise Panic("index out of bounds")
            self.sound.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizers, "Tokenizer", Panicking)
    if where == "load":
        with pytest.raises(ModelLoadError, match="index out of bounds"):
            compile_model(spec_of(path))
    else:
        request = compile_model(spec_of(path)).create_infer_request()
        Panicking.broken = True
        with pytest.raises(InferenceError, match="the tokenizer failed: index out of bounds"):
            request.infer({"text": ["hello"]})


def test_other_threads_go_on_while_it_encodes(minilm: Path) -> None:
    """The library releases the GIL: another thread runs during one call, though none is ever made to give it up."""
    library = tokenizers.Tokenizer.from_file(str(minilm))
    library.no_truncation()
    turns, done = [0], threading.Event()

    def turn() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the GIL up, so that the call can end

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    beside = threading.Thread(target=turn)
    beside.start()
    try:
        then = turns[0]
        library.encode_batch_fast(["hello world " * 20_000])
        during = turns[0] - then
    finally:
        done.set()
        sys.setswitchinterval(before)
        beside.join()
    assert during > 0


def test_the_words_of_the_small_tokenizer(tmp_path: Path) -> None:
    """What other tests count on: unknown words have an id, and `WORDS` begin after the special tokens."""
    model = compile_model(spec_of(write_tokenizer(tmp_path / "t.json")))
    assert [[2, 1, *range(5, 5 + len(WORDS)), 3]] == encode(model, ["what " + " ".join(WORDS)])["input_ids"]


def test_a_prompt_stands_before_each_text_and_both_are_lowered(tmp_path: Path) -> None:
    """The ids are those of the text that results."""
    path = write_tokenizer(tmp_path / "t.json")
    plain = compile_model(spec_of(path))
    changed = compile_model(spec_of(path, prompt="HELLO ", lower_case=True))
    expected = encode(plain, ["hello world", "hello "])
    assert expected == encode(changed, ["World", ""])

"""A tokenizer of pairs: rows as the library puts them together, cut as it cuts them, each text encoded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from examples.embeddings.weights import model_folder
from tests.tokenizer_files import SPECIAL, WORDS, tokenizer, write_tokenizer

from shapestream_engine import CompiledModel, InvalidInput, ModelSpec, SignatureError, compile_model
from shapestream_engine.array_lists import unpack
from shapestream_engine.backends import tokenizer as backend

TEXTS = ["hello", "", "compress a file", "a " * 9, "world " * 4, "hello world " * 20, "unknown zebra"]
POST_PROCESSORS = {
    "template": tokenizer()["post_processor"],
    "typed": {
        **tokenizer()["post_processor"],
        "pair": [
            {kind: {"id": name, "type_id": number}}
            for kind, name, number in [
                ("SpecialToken", "[CLS]", 0),
                ("Sequence", "A", 0),
                ("SpecialToken", "[SEP]", 0),
                ("Sequence", "B", 1),
                ("SpecialToken", "[SEP]", 1),
            ]
        ],
    },
    "bert": {"type": "BertProcessing", "cls": ["[CLS]", 2], "sep": ["[SEP]", 3]},
    "roberta": {
        "type": "RobertaProcessing",
        "cls": ["[CLS]", 2],
        "sep": ["[SEP]", 3],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
    "none": None,
}


def compiled(path: Path, **properties: Any) -> CompiledModel:
    """A tokenizer of pairs, with all lists."""
    options = {"pairs": True, "outputs": list(backend.LISTS), **properties}
    return compile_model(ModelSpec(name="tokens", path=path, engine="tokenizer", properties=options))


def encode(model: CompiledModel, query: list[str], text: list[str]) -> dict[str, Any]:
    """The outputs for pairs: lists as lists of plain lists, and both counts."""
    results = model.create_infer_request().infer({"text": text, "query": query})
    found: dict[str, Any] = {
        name: [array.tolist() for array in unpack(results[name], results[f"{name}.shapes"])]
        for name in backend.LISTS
    }
    return found | {name: results[name].tolist() for name in ("counts", "uncut")}


def by_library(path: Path, pairs: list[tuple[str, str]], most: int | None) -> dict[str, Any]:
    """What the library makes of these pairs itself."""
    library = tokenizers.Tokenizer.from_file(str(path))
    library.no_padding()
    library.no_truncation()
    uncut = [len(library.encode(*pair).ids) for pair in pairs]
    if most is not None:
        library.enable_truncation(max_length=most, strategy="longest_first")
    rows = [library.encode(*pair) for pair in pairs]
    lists = {name: [getattr(row, attribute) for row in rows] for name, attribute in backend.LISTS.items()}
    return {**lists, "counts": [len(row.ids) for row in rows], "uncut": uncut}


@pytest.mark.parametrize("kind", POST_PROCESSORS)
@pytest.mark.parametrize("most", [6, 7, 13, 64])
def test_rows_are_those_of_the_library(tmp_path: Path, kind: str, most: int) -> None:
    """With its special tokens and types, and cut as `longest_first` cuts them, whichever text is longer."""
    path = write_tokenizer(tmp_path / "tokenizer.json", post_processor=POST_PROCESSORS[kind])
    model = compiled(path, max_tokens=most, truncate=True)
    pairs = [(query, text) for query in TEXTS for text in TEXTS]
    expected = by_library(path, pairs, most)
    assert expected == encode(model, [query for query, _ in pairs], [text for _, text in pairs])
    assert any(count < uncut for count, uncut in zip(expected["counts"], expected["uncut"], strict=True))


def test_a_real_tokenizer_makes_pairs() -> None:
    """MiniLM's, over random words of its vocabulary."""
    path = model_folder() / "tokenizer.json"
    words = sorted(word for word in json.loads(path.read_text())["model"]["vocab"] if word.isalpha())
    random = np.random.default_rng(3)
    texts = [" ".join(random.choice(words, size)) for size in random.integers(0, 200, 40)]
    pairs = [*zip(texts[:20], texts[20:], strict=True)]
    found = encode(compiled(path, max_tokens=128, truncate=True), texts[:20], texts[20:])
    assert by_library(path, pairs, 128) == found
    assert {0, 1} == {kind for row in found["token_type_ids"] for kind in row}


def test_one_query_is_for_all_texts(tmp_path: Path) -> None:
    """As if each had it; without one, texts are rows by themselves."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    model = compiled(path, max_tokens=8, truncate=True)
    assert encode(model, ["hello a"] * len(TEXTS), TEXTS) == encode(model, ["hello a"], TEXTS)
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_truncation(max_length=8)
    assert [library.encode(text).ids for text in TEXTS] == encode(model, [], TEXTS)["input_ids"]
    assert {name: [] for name in (*backend.LISTS, "counts", "uncut")} == encode(model, ["a"], [])


def test_other_numbers_of_queries_are_refused(tmp_path: Path) -> None:
    """In words that say how many there may be."""
    model = compiled(write_tokenizer(tmp_path / "tokenizer.json"), max_tokens=8)
    with pytest.raises(InvalidInput, match="2 queries for 3 texts: give one for all, one for each, or none"):
        encode(model, ["a", "a"], ["a"] * 3)


def test_a_long_pair_is_an_error_where_none_is_cut(tmp_path: Path) -> None:
    """With its number, and its tokens with those of its query."""
    model = compiled(write_tokenizer(tmp_path / "tokenizer.json"), max_tokens=6)
    assert [6] == encode(model, ["hello"], ["hello world"])["counts"]
    with pytest.raises(InvalidInput, match="text 1 has 7 tokens with its query, and the model takes at most"):
        encode(model, ["hello"], ["hello", "hello world a"])
    with pytest.raises(InvalidInput, match="text 0 has 7 tokens, and the model takes at most"):
        encode(model, [], ["hello " * 5])


@pytest.mark.parametrize("kind", ["query", "text"])
def test_what_is_far_too_long_is_not_encoded_to_its_end(tmp_path: Path, kind: str) -> None:
    """A query or a text, by its characters; cut, it counts as longer than the model takes."""
    path = write_tokenizer(tmp_path / "tokenizer.json", post_processor=None)
    words = "hello " * (8 * backend.TOKEN_CHARACTERS)
    given = {"query": [""], "text": [""], kind: [words]}
    with pytest.raises(InvalidInput, match=f"{kind} 0 has {len(words)} characters"):
        encode(compiled(path, max_tokens=8), **given)
    cutting = compiled(path, max_tokens=8, truncate=True)
    found = encode(cutting, **given)
    assert ([[5] * 8], [8]) == (found["input_ids"], found["counts"])
    assert found["uncut"][0] > 8
    with pytest.raises(InvalidInput, match=f"{kind} 0 has {len(words)} characters"):
        encode(cutting, **{**given, kind: ["hello" + " " * (len(words) - 5)]})


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"max_tokens": None}, "pairs need max_tokens"),
        ({"prompt": "query: "}, "pairs have no prompt"),
        ({"max_tokens": 3, "truncate": True}, "adds 3 special tokens to each pair"),
    ],
)
def test_options_that_do_not_go_with_pairs(tmp_path: Path, properties: dict[str, Any], words: str) -> None:
    """Are refused at load."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(SignatureError, match=words):
        compiled(path, **{"max_tokens": 8, **properties})


@pytest.mark.parametrize("order", ["BA", "ABA", "A"])
def test_another_way_to_put_texts_together_is_refused(tmp_path: Path, order: str) -> None:
    """A second text that comes first, a text that comes twice, or one that is lost."""
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in order]
    post_processor = {**tokenizer()["post_processor"], "pair": pair}
    path = write_tokenizer(tmp_path / "tokenizer.json", post_processor=post_processor)
    with pytest.raises(SignatureError, match="puts two texts together in a way that is not known here"):
        compiled(path, max_tokens=8)


def test_lowered_texts_are_lowered_in_both_places(tmp_path: Path) -> None:
    """Query and text alike, where the tokenizer itself does not."""
    words = (*WORDS, "Hello")
    path = write_tokenizer(tmp_path / "tokenizer.json", words=words, normalizer=None)
    loud = len(SPECIAL) + len(WORDS)
    assert [[2, loud, 3, loud, 3]] == encode(compiled(path, max_tokens=9), ["Hello"], ["Hello"])["input_ids"]
    lowering = compiled(path, max_tokens=9, lower_case=True)
    assert [[2, 5, 3, 5, 3]] == encode(lowering, ["Hello"], ["Hello"])["input_ids"]

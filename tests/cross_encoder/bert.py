"""A small BERT of random weights that scores pairs of texts, as an ONNX file and as formulas of NumPy, in a folder.

No weights of a cross-encoder come with a package, so these are drawn here. `python -m tests.cross_encoder.bert` writes
`scores.json` beside this file: 200 pairs, and their scores by the library `tokenizers` and the formulas below in f64. It
needs no engine, so engines and the server are held against something that is none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from onnx import TensorProto, helper
from tests.onnx_files import write_onnx

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
HIDDEN, HEADS, LAYERS, INNER, POSITIONS = 32, 2, 2, 64, 64
MAX_TOKENS = 48
"""Tokens of a pair, less than positions: long pairs are cut."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
EPSILON = 1e-12
SCORES = Path(__file__).with_name("scores.json")
QUERIES, TEXTS_OF_QUERY = 20, 10

Weights = Mapping[str, npt.NDArray[Any]]


def _words(count: int) -> list[str]:
    """Words of two or three syllables."""
    random = np.random.default_rng(11)
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = random.integers(2, 4)
        word = "".join(
            random.choice(list("bdfgklmnprstvz")) + random.choice(list("aeiou")) for _ in range(syllables)
        )
        found[word] = None
    return [*found]


def vocabulary() -> list[str]:
    """Special tokens, letters, letters within a word, and words."""
    return [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *_words(160)]


def tokenizer_document() -> dict[str, Any]:
    """A tokenizer.json as those of BERT are."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {token: number for number, token in enumerate(vocabulary())}, unk_token="[UNK]"
        )
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(SPECIAL))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    document: dict[str, Any] = json.loads(made.to_str())
    return document


def weights(labels: int) -> Weights:
    """All weights, f32. They are larger than those of a model before its training, or all scores were alike."""
    random = np.random.default_rng(5)

    def drawn(*shape: int, scale: float | None = None) -> npt.NDArray[np.float32]:
        found = random.standard_normal(shape) * (1.2 / math.sqrt(shape[0]) if scale is None else scale)
        return found.astype(np.float32)

    def norm(name: str) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.gain": 1 + drawn(HIDDEN, scale=0.1), f"{name}.shift": drawn(HIDDEN, scale=0.1)}

    found: dict[str, npt.NDArray[Any]] = {
        "words": drawn(len(vocabulary()), HIDDEN, scale=1),
        "positions": drawn(POSITIONS, HIDDEN, scale=0.3),
        "types": drawn(2, HIDDEN, scale=0.5),
        **norm("embedded"),
    }
    for layer in range(LAYERS):
        for name in ("query", "key", "value", "mixed"):
            found |= {
                f"{layer}.{name}": drawn(HIDDEN, HIDDEN),
                f"{layer}.{name}.bias": drawn(HIDDEN, scale=0.1),
            }
        found |= {f"{layer}.inner": drawn(HIDDEN, INNER), f"{layer}.inner.bias": drawn(INNER, scale=0.1)}
        found |= {f"{layer}.outer": drawn(INNER, HIDDEN), f"{layer}.outer.bias": drawn(HIDDEN, scale=0.1)}
        found |= {**norm(f"{layer}.attended"), **norm(f"{layer}.done")}
    found |= {"pooler": drawn(HIDDEN, HIDDEN), "pooler.bias": drawn(HIDDEN, scale=0.1)}
    found |= {"head": drawn(HIDDEN, labels), "head.bias": drawn(labels, scale=0.1)}
    return found


# ---------------------------------------------------------------- formulas


def logits(made: Weights, ids: Sequence[int], types: Sequence[int]) -> npt.NDArray[np.float64]:
    """The scores of one row, in f64, without padding."""
    known = {name: value.astype(np.float64) for name, value in made.items()}

    def normal(x: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        return np.asarray(centred / deviation * known[f"{name}.gain"] + known[f"{name}.shift"])

    def linear(x: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        return np.asarray(x @ known[name] + known[f"{name}.bias"])

    x = normal(
        known["words"][list(ids)] + known["positions"][: len(ids)] + known["types"][list(types)], "embedded"
    )
    erf = np.vectorize(math.erf)
    for layer in range(LAYERS):
        query, key, value = (
            linear(x, f"{layer}.{name}").reshape(len(ids), HEADS, -1).transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        attention = np.exp(query @ key.transpose(0, 2, 1) / math.sqrt(HIDDEN / HEADS))
        attention /= attention.sum(-1, keepdims=True)
        mixed = (attention @ value).transpose(1, 0, 2).reshape(len(ids), HIDDEN)
        x = normal(x + linear(mixed, f"{layer}.mixed"), f"{layer}.attended")
        inner = linear(x, f"{layer}.inner")
        inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
        x = normal(x + linear(inner, f"{layer}.outer"), f"{layer}.done")
    return linear(np.tanh(linear(x[0], "pooler")), "head")


# ---------------------------------------------------------------- ONNX


class _Graph:
    """Nodes, and the constants that they take."""

    def __init__(self, made: Weights) -> None:
        self.nodes: list[Any] = []
        self.known = dict(made)

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        output = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.known)}"
        self.known[name] = np.array(value, dtype)
        return name

    def linear(self, x: str, name: str, output: str = "") -> str:
        return self.add("Add", self.add("MatMul", x, name), f"{name}.bias", name=output)

    def normal(self, x: str, name: str) -> str:
        return self.add("LayerNormalization", x, f"{name}.gain", f"{name}.shift", axis=-1, epsilon=EPSILON)

    def heads(self, x: str, order: Sequence[int]) -> str:
        shape = self.constant([0, 0, HEADS, HIDDEN // HEADS], np.int64)
        return self.add("Transpose", self.add("Reshape", x, shape), perm=list(order))


def write_bert(path: Path, labels: int) -> Path:
    """Write the model: ids, mask and types in, `logits` [batch, labels] out."""
    graph = _Graph(weights(labels))
    add, constant = graph.add, graph.constant
    sizes = add("Slice", add("Shape", IDS), constant([1], np.int64), constant([2], np.int64))
    places = add("Slice", "positions", constant([0], np.int64), sizes, constant([0], np.int64))
    words = add("Add", add("Gather", "words", IDS), add("Gather", "types", TYPES))
    x = graph.normal(add("Add", words, places), "embedded")
    absent = add("Sub", constant(1), add("Cast", MASK, to=TensorProto.FLOAT))
    hidden = add("Unsqueeze", add("Mul", absent, constant(-1e4)), constant([1, 2], np.int64))
    for layer in range(LAYERS):
        query, key, value = (
            graph.heads(graph.linear(x, f"{layer}.{name}"), order)
            for name, order in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3)))
        )
        products = add("Div", add("MatMul", query, key), constant(math.sqrt(HIDDEN / HEADS)))
        attention = add("Softmax", add("Add", products, hidden), axis=-1)
        mixed = add("Transpose", add("MatMul", attention, value), perm=[0, 2, 1, 3])
        mixed = add("Reshape", mixed, constant([0, 0, HIDDEN], np.int64))
        x = graph.normal(add("Add", x, graph.linear(mixed, f"{layer}.mixed")), f"{layer}.attended")
        inner = graph.linear(x, f"{layer}.inner")
        erf = add("Erf", add("Div", inner, constant(math.sqrt(2))))
        inner = add("Mul", add("Mul", inner, add("Add", erf, constant(1))), constant(0.5))
        x = graph.normal(add("Add", x, graph.linear(inner, f"{layer}.outer")), f"{layer}.done")
    first = add("Gather", x, constant(0, np.int64), axis=1)
    graph.linear(add("Tanh", graph.linear(first, "pooler")), "head", "logits")
    return write_onnx(
        path,
        graph.nodes,
        {name: ["batch", "seq"] for name in (IDS, MASK, TYPES)},
        {"logits": ["batch", labels]},
        graph.known,
        types=dict.fromkeys((IDS, MASK, TYPES), TensorProto.INT64),
    )


# ---------------------------------------------------------------- the folder, and the pairs


def documents(labels: int) -> dict[str, Any]:
    """The JSON files of the folder."""
    return {
        "tokenizer.json": tokenizer_document(),
        "config.json": {
            "architectures": ["BertForSequenceClassification"],
            "model_type": "bert",
            "hidden_size": HIDDEN,
            "id2label": {str(number): f"LABEL_{number}" for number in range(labels)},
            "max_position_embeddings": POSITIONS,
            "pad_token_id": 0,
            "type_vocab_size": 2,
            "vocab_size": len(vocabulary()),
        },
        "tokenizer_config.json": {"model_max_length": MAX_TOKENS, "pad_token": "[PAD]"},
    }


def write_cross_encoder(folder: Path, labels: int = 1, changed: Mapping[str, Any] | None = None) -> Path:
    """Write a folder, as optimum lays it out. `changed` replaces documents, or, given None, leaves them out."""
    (folder / "onnx").mkdir(parents=True)
    for name, document in (documents(labels) | dict(changed or {})).items():
        if document is not None:
            (folder / name).write_text(json.dumps(document))
    write_bert(folder / "onnx" / "model.onnx", labels)
    return folder


def drawn_pairs() -> list[tuple[str, list[str]]]:
    """Queries, each with texts of many lengths: known words, words of letters, and characters that no token has."""
    random = np.random.default_rng(17)
    words = [
        *_words(160),
        *("".join(random.choice(list(LETTERS), size)) for size in range(1, 9)),
        "ünï",
        "42",
        "!",
    ]

    def text(most: int) -> str:
        return " ".join(random.choice(words, random.integers(0, most)))

    return [(text(12), [text(60) for _ in range(TEXTS_OF_QUERY)]) for _ in range(QUERIES)]


def scored(query: str, text: str) -> float:
    """The score of a pair, by the library `tokenizers` and the formulas."""
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_document()))
    library.enable_truncation(max_length=MAX_TOKENS, strategy="longest_first")
    row = library.encode(query, text)
    return float(logits(weights(1), row.ids, row.type_ids)[0])


def kept() -> list[dict[str, Any]]:
    """What `scores.json` has: {"query", "texts", "scores"} of each query."""
    found: list[dict[str, Any]] = json.loads(SCORES.read_text())
    return found


if __name__ == "__main__":
    SCORES.write_text(
        "[\n"
        + ",\n".join(
            json.dumps({"query": query, "texts": texts, "scores": [scored(query, text) for text in texts]})
            for query, texts in drawn_pairs()
        )
        + "\n]\n"
    )

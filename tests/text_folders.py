"""Folders with a text model for tests, as sentence-transformers lays one out: an ONNX file, a tokenizer, and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.text_encoders import write_encoder
from tests.tokenizer_files import SPECIAL, WORDS, tokenizer

HIDDEN = 6
VOCABULARY = len(SPECIAL) + len(WORDS)
KIND = "sentence_transformers.models"


def documents() -> dict[str, Any]:
    """The JSON files of a folder, by their paths in it."""
    return {
        "tokenizer.json": tokenizer(),
        "config.json": {
            "model_type": "bert",
            "hidden_size": HIDDEN,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "type_vocab_size": 2,
        },
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"{KIND}.{kind}"}
            for number, (kind, path) in enumerate(
                [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
            )
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": HIDDEN,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
        "tokenizer_config.json": {"model_max_length": 32, "pad_token": "[PAD]"},
    }


def write_folder(
    folder: Path, changed: Mapping[str, Any] | None = None, *, model: str = "onnx/model.onnx", **encoder: Any
) -> Path:
    """Write a folder. `changed` replaces documents, or, given None, leaves them out; `encoder` is for `write_encoder`."""
    for name, document in (documents() | dict(changed or {})).items():
        if document is not None:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(document if isinstance(document, str) else json.dumps(document))
    if model:
        (folder / model).parent.mkdir(parents=True, exist_ok=True)
        write_encoder(folder / model, vocabulary=VOCABULARY, hidden=HIDDEN, **encoder)
    return folder

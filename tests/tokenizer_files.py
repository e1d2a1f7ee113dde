"""A small tokenizer.json for tests: words by their ids, [CLS] and [SEP] around a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens; the index is the id."""
WORDS = ("hello", "world", "compress", "a", "file")
"""Words, whose ids follow."""


def tokenizer(*, words: tuple[str, ...] = WORDS, **more: Any) -> dict[str, Any]:
    """The document; `more` replaces parts of it."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *words))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    cls, sep = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("[CLS]", "[SEP]"))
    text, pair = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True, **flags} for number, token in enumerate(SPECIAL)
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [cls, text, sep],
            "pair": [cls, text, sep, pair, sep],
            "special_tokens": {
                token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}
                for token in ("[CLS]", "[SEP]")
            },
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        **more,
    }


def write_tokenizer(path: Path, **more: Any) -> Path:
    """Write the file and return its path."""
    path.write_text(json.dumps(tokenizer(**more)))
    return path

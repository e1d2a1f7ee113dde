"""A chain of texts, tokenise -> embed (importable/words.py): its YAML, and what it answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "importable"))
import words

SERVED = """\
    server:
      listen: [ipc://s.sock]
      http: {address: "127.0.0.1:0", texts: sentences}
    models:
      - name: tokens
        function: words:tokenise
        inputs: {text: {shape: "texts", element_type: str}}
        outputs:
          input_ids: {rule: list, shape: "tokens", element_type: i64}
          tokens: {shape: "texts", element_type: i64}
        batching: {max_batch: 1}
        calibration_s: 0
      - name: encoder
        function: words:encode
        inputs: {input_ids: {shape: "batch:1..64, seq:1..4096", element_type: i64}}
        outputs: {embedding: {shape: "batch, 8", element_type: f32}}
        calibration_s: 0
    chains:
      - name: sentences
        inputs: {text: tokenise.text}
        stages:
          - {name: tokenise, model: tokens, inputs: {text: text}}
          - name: embed
            model: encoder
            inputs: {input_ids: tokenise.input_ids}
            each: item of tokenise.input_ids
            at_most: 2048
        outputs: {embedding: embed.embedding, tokens: tokenise.tokens}
    workers: [{count: 2, slots: 1}]
"""
TEXTS = ["a sentence", "", "two\nlines", "😀 ünïcödé", "שלום עולם", "\0\x01 control", "x" * 500]


def expected(texts: list[str]) -> np.ndarray[Any, Any]:
    """The vectors of these texts."""
    return np.stack([words.embed(text) for text in texts])


def tokens(texts: list[str]) -> int:
    """The tokens of all of them."""
    return sum(1 + len(text) for text in texts)

"""Sentences to token ids, as MiniLM was trained: lower case, word pieces, at most 256 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

# Both counts include the two special tokens at the ends.
MIN_TOKENS = 4
MAX_TOKENS = 256


class SentenceTokenizer:
    """Turns sentences into arrays of token ids, each of its own length."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file asks for padding to 128, which is what shapestream is there to avoid.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length=MAX_TOKENS)

    def encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Token ids [seq] of each sentence; longer ones are cut off at MAX_TOKENS."""
        return [
            np.array(encoding.ids, dtype=np.int64)
            for encoding in self._tokenizer.encode_batch(list(sentences))
        ]

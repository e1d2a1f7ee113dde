"""The tokeniser of the chain: text in UTF-8 to token ids."""

from __future__ import annotations

import numpy as np
import pytest
from examples.embeddings.tokens import MAX_TOKENS, SentenceTokenizer, tokenise
from examples.embeddings.weights import model_folder


@pytest.mark.parametrize("text", ["compress a file", "", "Ünïcödé 🙂 שלום", "long " * 1000, "\x00\x07"])
def test_a_text_has_the_tokens_of_the_tokeniser(text: str) -> None:
    """One row, as the sentence alone gives, cut off where MiniLM ends."""
    ids = tokenise(np.frombuffer(text.encode(), np.uint8))
    (expected,) = SentenceTokenizer(model_folder()).encode([text])
    np.testing.assert_array_equal(expected[None], ids)
    assert ids.shape[1] <= MAX_TOKENS


def test_bytes_that_are_no_text_are_replaced() -> None:
    """Broken UTF-8 fails nobody."""
    (expected,) = SentenceTokenizer(model_folder()).encode(["a\N{REPLACEMENT CHARACTER}b"])
    np.testing.assert_array_equal(expected[None], tokenise(np.frombuffer(b"a\xffb", np.uint8)))

"""The sections of a model for text: its tokenizer, and the pooling of its output."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shapestream.settings.values import Section


class PoolingSettings(Section):
    """Pooling of the vectors of a text's tokens into one vector, the output `sentence_embedding`."""

    mode: Literal["mean", "cls", "last", "max"]
    """The mean of all tokens, the first token, the last one, or the largest value of each component."""
    of: str = Field(default="last_hidden_state", min_length=1)
    """The output with a vector per token, [batch, seq, hidden], which `sentence_embedding` replaces."""
    mask: str = Field(default="attention_mask", min_length=1)
    """The input that tells tokens from padding, [batch, seq]; `cls` needs none."""
    normalize: bool = False
    """Give each vector the length 1."""

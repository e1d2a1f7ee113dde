"""The sections of a model for text: its tokenizer, and the pooling of its output."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shapestream.settings.values import Finding, Section, read_path


class TokenizerSettings(Section):
    """A tokenizer as a model: texts in, the token ids of each text out. FILE is short for {path: FILE}."""

    path: Annotated[str, BeforeValidator(partial(read_path, expected="a tokenizer.json"))]
    """A tokenizer.json, relative to this file."""
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    """Tokens of a text, at most, special ones included. Default: any number; of a folder, what its files say."""
    truncate: bool = False
    """Cut a text with more tokens. Default: it is an error."""
    add_special_tokens: bool = True
    """Add the file's tokens around a text, such as [CLS] and [SEP]."""
    prompt: str = ""
    """Text before every text. Default: nothing; of a folder, its default prompt."""
    lower_case: bool = False
    """Lower each text first, its prompt included. Default: no; of a folder, what its files say."""
    outputs: tuple[Literal["input_ids", "token_type_ids", "attention_mask"], ...] = Field(
        default=("input_ids",), strict=False, min_length=1
    )
    """The lists with an array per text, beside `counts`."""

    def problems(self) -> Iterator[Finding]:
        """Yield the contradictions between these settings."""
        if self.truncate and self.max_tokens is None:
            yield ("truncate",), "nothing says how many tokens stay (add max_tokens)"
        if len(set(self.outputs)) < len(self.outputs):
            yield ("outputs",), "an output is named twice (remove one)"


def read_tokenizer(value: Any) -> Any:
    """Read a mapping, or the path of a file as short for {path: FILE}."""
    return {"path": value} if isinstance(value, str) else value


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

"""The engine for tokenizer.json, by the library `tokenizers`: texts in, the token ids of each text out.

    text    str [texts]      in
    input_ids, and where asked for token_type_ids and attention_mask: a list of i64 [tokens], an array per text
    counts  i64 [texts]      the number of tokens of each text

`properties` has the options: `max_tokens`, `truncate`, `add_special_tokens`, `prompt`, `lower_case`, and `outputs`, the
names of the lists. The padding and the truncation that a file asks for are switched off: texts of several lengths need no
padding here, and only the configuration has texts cut.

The library encodes without the GIL, so other threads go on (`tests/engine/test_tokenizer.py` sees it). It would encode one
request on all CPUs, beside the slots' threads; a slot has its own thread, so this is off unless `TOKENIZERS_PARALLELISM`
says otherwise. The library is Rust: a defect of it is a panic, which is no `Exception`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from shapestream_engine.backends.host_request import HostModel, HostRequest
from shapestream_engine.errors import (
    EngineMissing,
    InferenceError,
    InvalidInput,
    ModelLoadError,
    SignatureError,
    message_of,
)
from shapestream_engine.files import read_regular
from shapestream_engine.model import ModelSpec
from shapestream_engine.model_files import MOST_TOKENIZER_BYTES
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library reads it at each call
try:
    import tokenizers
except ModuleNotFoundError as error:
    raise EngineMissing("tokenizer", extra="text") from error

TEXT = "text"
"""The input."""
COUNTS = "counts"
"""The output with the number of tokens of each text."""
LISTS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
"""Name of an output -> the attribute of the library's encoding that it is."""


TOKEN_CHARACTERS = 256
"""Characters of a text that count as a token at least, or those of the vocabulary's longest entry, if that has more. A text
with more than `max_tokens` times as many is not encoded to its end, which may take seconds, to find that it is too long. The
longest entries of usual vocabularies have 20 to 130."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOptions:
    """The options of a tokenizer; raises `SignatureError` for values that they cannot have."""

    max_tokens: int | None = None
    """Tokens of a text, at most, special ones included; None: any number."""
    truncate: bool = False
    """True: a longer text is cut; False: it is an error."""
    add_special_tokens: bool = True
    """True: with the tokens that the file adds around a text, such as [CLS] and [SEP]."""
    prompt: str = ""
    """Text before every text."""
    lower_case: bool = False
    """True: each text is lowered first, its prompt included, as sentence-transformers does."""
    outputs: tuple[str, ...] = ("input_ids",)
    """The lists, of `LISTS`; the first is `input_ids`."""

    def __post_init__(self) -> None:
        if strange := [name for name in self.outputs if name not in LISTS]:
            raise SignatureError(f"a tokenizer has no output {strange[0]!r}; it has {', '.join(LISTS)}")
        if len(set(self.outputs)) < len(self.outputs) or not self.outputs:
            raise SignatureError("the outputs of a tokenizer are named once each, and there is one at least")
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise SignatureError(f"max_tokens is a count from 1, not {self.max_tokens!r}")
        if self.truncate and self.max_tokens is None:
            raise SignatureError("truncate needs max_tokens, the number of tokens that stay")

    @classmethod
    def of(cls, spec: ModelSpec) -> TokenizerOptions:
        """Return the options in the properties of a spec."""
        try:
            return cls(**{name: _plain(value) for name, value in spec.properties.items()})
        except TypeError:
            known = ", ".join(cls.__slots__)
            given = ", ".join(map(str, spec.properties))
            raise SignatureError(
                f"model {spec.name!r}: a tokenizer has the properties {known}, not {given}"
            ) from None
        except SignatureError as error:
            raise SignatureError(f"model {spec.name!r}: {error}", key=("properties",)) from error


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> HostModel:
    """Load the file. `slots` and `threads` have no effect: a call runs in its caller's thread."""
    options = TokenizerOptions.of(spec)
    signature = _signature(spec, options)
    tokenizer, asked = _load(spec)
    special = tokenizer.num_special_tokens_to_add(False) if options.add_special_tokens else 0
    if options.truncate and options.max_tokens is not None:
        if options.max_tokens <= special:
            raise SignatureError(
                f"model {spec.name!r}: the file adds {special} special tokens to each text, so max_tokens: "
                f"{options.max_tokens} leaves none for a text to be cut (raise it)",
                key=("properties", "max_tokens"),
            )
        tokenizer.enable_truncation(max_length=options.max_tokens)
    properties = {
        "library": f"tokenizers {tokenizers.__version__}",
        "vocabulary": tokenizer.get_vocab_size(),
        "special_tokens": special,
        "switched_off": ", ".join(asked) or "nothing",
        "max_tokens": options.max_tokens,
        "truncate": options.truncate,
        "parallelism": os.environ["TOKENIZERS_PARALLELISM"],
    }
    most = None
    if options.max_tokens is not None:
        most = options.max_tokens * max(TOKEN_CHARACTERS, *map(len, tokenizer.get_vocab()))
    return HostModel(signature, properties, lambda: TokenizerRequest(signature, tokenizer, options, most))


def read_spec(spec: ModelSpec) -> ModelSignature:
    """Return the signature, which does not depend on the file; raises `ModelLoadError` as `compile_spec` does."""
    _load(spec)
    return _signature(spec, TokenizerOptions.of(spec))


def _load(spec: ModelSpec) -> tuple[Any, list[str]]:
    """Return the tokenizer, without padding and truncation, and the words for those that the file asks for."""
    if spec.path is None:
        raise spec.refused_by("tokenizer", "the path of a tokenizer.json")
    try:
        data = read_regular(spec.path, MOST_TOKENIZER_BYTES)
    except OSError as error:
        raise ModelLoadError(f"cannot read the tokenizer {spec.path}: {error.strerror}") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        asked = [
            f"{what} to {size}" if size else what
            for what, setting, key in (
                ("padding", tokenizer.padding, "length"),
                ("truncation", tokenizer.truncation, "max_length"),
            )
            if setting is not None
            for size in (setting.get(key),)
        ]
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Some files load, and fail on any text: an unknown token that the vocabulary lacks, for one.
        tokenizer.encode_batch_fast(["", "a", "\N{SNOWMAN} zebra"], add_special_tokens=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        words = message_of(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise ModelLoadError(
            f"cannot read the tokenizer {spec.path}: {words} (it is no tokenizer.json of the library tokenizers; "
            "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        ) from error
    return tokenizer, asked


def _signature(spec: ModelSpec, options: TokenizerOptions) -> ModelSignature:
    if strange := [*(spec.inputs.keys() - {TEXT}), *spec.outputs]:
        raise SignatureError(
            f"model {spec.name!r}: the ports of a tokenizer are known: the input {TEXT}, and as outputs "
            f"{', '.join(options.outputs)} and {COUNTS}; remove {strange[0]!r}"
        )
    given = spec.inputs.get(TEXT)
    text = InputPort(
        TEXT, "str", NamedShape.parse("texts"), at_most_bytes=None if given is None else given.at_most_bytes
    )
    lists = [list_ports(name, "i64", NamedShape.parse("tokens"), "texts") for name in options.outputs]
    counts = OutputPort(COUNTS, "i64", NamedShape.parse("texts"), Whole())
    return ModelSignature(spec.name, (text,), (*chain.from_iterable(lists), counts), spec.strategy)


class TokenizerRequest(HostRequest):
    """A request of a tokenizer, which all requests share: encoding changes nothing in it."""

    def __init__(
        self,
        signature: ModelSignature,
        tokenizer: Any,
        options: TokenizerOptions,
        most_characters: int | None,
    ) -> None:
        """`most_characters`: of a text that is encoded; None: any number."""
        super().__init__(signature)
        self._tokenizer = tokenizer
        self._options = options
        self._most_characters = most_characters

    def run(self) -> list[Array]:
        """Encode the texts; raises `InvalidInput` for one with too many tokens, `InferenceError` if the library fails."""
        (tensor,) = self._tensors
        texts = tensor.data.tolist()
        long = self._cut(texts)
        if prompt := self._options.prompt:
            texts = [prompt + text for text in texts]
        if self._options.lower_case:
            texts = [text.lower() for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=self._options.add_special_tokens
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise InferenceError(f"the tokenizer failed: {message_of(error)}") from error
        counts = np.fromiter(map(len, encodings), np.int64, len(encodings))
        self._check(counts)
        for number, characters in long.items():
            if counts[number] != self._options.max_tokens:  # what was cut off might have given others
                raise self._too_long(number, f"{characters} characters")
        outputs: list[Array] = []
        for name in self._options.outputs:
            outputs += _packed([getattr(encoding, LISTS[name]) for encoding in encodings], counts)
        return [*outputs, counts]

    def _cut(self, texts: list[str]) -> dict[int, int]:
        """Cut the texts that are far too long, where long ones are cut; return their lengths in characters, by number.

        Raises `InvalidInput` where they are not.
        """
        most = self._most_characters
        if most is None:
            return {}
        long = {number: len(text) for number, text in enumerate(texts) if len(text) > most}
        for number, characters in long.items():
            if not self._options.truncate:
                raise self._too_long(number, f"{characters} characters")
            texts[number] = texts[number][:most]
        return long

    def _too_long(self, number: int, what: str) -> InvalidInput:
        remedy = (
            ""
            if self._options.truncate
            else "; `truncate: true` in the server's configuration cuts such texts"
        )
        return InvalidInput(
            f"text {number} has {what}, and the model takes at most {self._options.max_tokens} tokens "
            f"(shorten or divide the text{remedy})"
        )

    def _check(self, counts: Array) -> None:
        most = self._options.max_tokens
        if most is not None and (counts > most).any():
            number = int(np.argmax(counts > most))
            raise self._too_long(number, f"{counts[number]} tokens")


def _packed(arrays: Sequence[Sequence[int]], counts: Array) -> tuple[Array, Array]:
    """Return the list as its two outputs: all elements, and the shape of each array."""
    elements = np.fromiter(chain.from_iterable(arrays), np.int64, int(counts.sum()))
    return elements, counts[:, None].copy()

"""The engine for tokenizer.json, by the library `tokenizers`: texts in, the token ids of each text out.

    text    str [texts]      in
    input_ids, and where asked for token_type_ids and attention_mask: a list of i64 [tokens], an array per text
    counts  i64 [texts]      the number of tokens of each text
    uncut   i64 [texts]      the number of tokens that it would have if none were cut; larger than `counts` where it was

With `pairs`, for models that score pairs of texts, a row is a text with its query, and there is one more:

    query   str [queries]    in: the first text of each pair; one for all texts, one for each, or none

`properties` has the options: `max_tokens`, `truncate`, `prompt`, `lower_case`, `pairs`, and the names
of the lists, `outputs`. The padding and the truncation that a file asks for are switched off: texts of several lengths need
no padding here, and only the configuration has texts cut.

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
from shapestream_engine.backends.pair_template import NoTemplate, Row, Template
from shapestream_engine.errors import (
    EngineMissing,
    InferenceError,
    InvalidInput,
    ModelLoadError,
    SignatureError,
    message_of,
)
from shapestream_engine.files import read_regular
from shapestream_engine.model import InputSpec, ModelSpec
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
QUERY = "query"
"""The input with the first text of each pair."""
COUNTS = "counts"
"""The output with the number of tokens of each text."""
UNCUT = "uncut"
"""The output with the number of tokens that each text, or pair, would have if none were cut."""
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
    prompt: str = ""
    """Text before every text."""
    lower_case: bool = False
    """True: each text is lowered first, its prompt included, as sentence-transformers does."""
    pairs: bool = False
    """True: texts are the second ones of pairs, whose first ones are in `query`."""
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
        if self.pairs and self.max_tokens is None:
            raise SignatureError("pairs need max_tokens: the tokens of a query count for each text")
        if self.pairs and self.prompt:
            raise SignatureError("pairs have no prompt")

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
    templates = _templates(spec, tokenizer) if options.pairs else ()
    kind = "pair" if templates else "text"
    special = tokenizer.num_special_tokens_to_add(bool(templates))
    if options.truncate and options.max_tokens is not None:
        if options.max_tokens <= special:
            raise SignatureError(
                f"model {spec.name!r}: the file adds {special} special tokens to each {kind}, so max_tokens: "
                f"{options.max_tokens} leaves none for a text to be cut (raise it)",
                key=("properties", "max_tokens"),
            )
        if not options.pairs:
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
    if templates:
        return HostModel(
            signature, properties, lambda: PairRequest(signature, tokenizer, options, most, templates)
        )
    return HostModel(
        signature, properties, lambda: TokenizerRequest(signature, tokenizer, options, most, special)
    )


def _templates(spec: ModelSpec, tokenizer: Any) -> tuple[Template, Template]:
    """Return what the file puts around a text, and around two. Raises `SignatureError` if it does something else."""
    first, second = "a", "b \N{SNOWMAN} a zebra"
    own = [encoding.ids for encoding in tokenizer.encode_batch([first, second], add_special_tokens=False)]
    try:
        alone = Template.of(tokenizer.encode(second), own[1:])
        pair = Template.of(tokenizer.encode(first, second), own)
    except NoTemplate:
        raise SignatureError(
            f"model {spec.name!r}: the file puts two texts together in a way that is not known here (it needs a "
            "post_processor that has special tokens, the first text once, and then the second one once)",
            key=("properties", "pairs"),
        ) from None
    return alone, pair


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
    names = {TEXT: "texts", QUERY: "queries"} if options.pairs else {TEXT: "texts"}
    if strange := [*(spec.inputs.keys() - names.keys()), *spec.outputs]:
        raise SignatureError(
            f"model {spec.name!r}: the ports of a tokenizer are known: the input {' and '.join(names)}, and as outputs "
            f"{', '.join(options.outputs)}, {COUNTS} and {UNCUT}; remove {strange[0]!r}"
        )
    inputs = [
        InputPort(
            name,
            "str",
            NamedShape.parse(shape),
            at_most_bytes=spec.inputs.get(name, InputSpec()).at_most_bytes,
        )
        for name, shape in names.items()
    ]
    lists = [list_ports(name, "i64", NamedShape.parse("tokens"), "texts") for name in options.outputs]
    counts = [OutputPort(name, "i64", NamedShape.parse("texts"), Whole()) for name in (COUNTS, UNCUT)]
    return ModelSignature(spec.name, (*inputs,), (*chain.from_iterable(lists), *counts), spec.strategy)


class TokenizerRequest(HostRequest):
    """A request of a tokenizer, which all requests share: encoding changes nothing in it."""

    def __init__(
        self,
        signature: ModelSignature,
        tokenizer: Any,
        options: TokenizerOptions,
        most_characters: int | None,
        special: int,
    ) -> None:
        """`most_characters`: of a text that is encoded; None: any number. `special`: tokens that the file adds to one."""
        super().__init__(signature)
        self._tokenizer = tokenizer
        self._options = options
        self._most_characters = most_characters
        self._special = special

    def run(self) -> list[Array]:
        """Encode the texts; raises `InvalidInput` for one with too many tokens, `InferenceError` if the library fails."""
        (tensor,) = self._tensors
        texts = tensor.data.tolist()
        long = self._cut(texts)
        if prompt := self._options.prompt:
            texts = [prompt + text for text in texts]
        encodings = self._encoded(texts, add_special_tokens=True)
        counts = np.fromiter(map(len, encodings), np.int64, len(encodings))
        self._check(counts)
        uncut = counts.copy()
        if self._options.truncate:
            for number in np.flatnonzero(counts == self._options.max_tokens).tolist():
                uncut[number] += sum(len(rest) - self._special for rest in encodings[number].overflowing)
        for number, characters in long.items():
            if counts[number] != self._options.max_tokens:  # what was cut off might have given others
                raise self._too_long(number, f"{characters} characters")
            uncut[number] += 1  # for what was cut off
        outputs: list[Array] = []
        for name in self._options.outputs:
            outputs += _packed([getattr(encoding, LISTS[name]) for encoding in encodings], counts)
        return [*outputs, counts, uncut]

    def _encoded(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        """Return the library's encodings. Raises `InferenceError` if it fails."""
        if self._options.lower_case:
            texts = [text.lower() for text in texts]
        try:
            encodings: list[Any] = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise InferenceError(f"the tokenizer failed: {message_of(error)}") from error
        return encodings

    def _cut(self, texts: list[str], kind: str = TEXT) -> dict[int, int]:
        """Cut the texts that are far too long, where long ones are cut; return their lengths in characters, by number.

        Raises `InvalidInput` where they are not. `kind` is what a text is called then.
        """
        most = self._most_characters
        if most is None:
            return {}
        long = {number: len(text) for number, text in enumerate(texts) if len(text) > most}
        for number, characters in long.items():
            if not self._options.truncate:
                raise self._too_long(number, f"{characters} characters", kind)
            texts[number] = texts[number][:most]
        return long

    def _too_long(self, number: int, what: str, kind: str = TEXT) -> InvalidInput:
        remedy = (
            ""
            if self._options.truncate
            else "; `truncate: true` in the server's configuration cuts such texts"
        )
        return InvalidInput(
            f"{kind} {number} has {what}, and the model takes at most {self._options.max_tokens} tokens "
            f"(shorten or divide the text{remedy})"
        )

    def _check(self, counts: Array) -> None:
        most = self._options.max_tokens
        if most is not None and (counts > most).any():
            number = int(np.argmax(counts > most))
            raise self._too_long(number, f"{counts[number]} tokens")


class PairRequest(TokenizerRequest):
    """A request of a tokenizer of pairs. Each text, and each query, is encoded once."""

    def __init__(
        self,
        signature: ModelSignature,
        tokenizer: Any,
        options: TokenizerOptions,
        most_characters: int | None,
        templates: tuple[Template, Template],
    ) -> None:
        """`templates`: of a text alone, and of a pair."""
        super().__init__(signature, tokenizer, options, most_characters, special=0)
        self._alone, self._pair = templates

    def run(self) -> list[Array]:
        """Encode the pairs; raises `InvalidInput` for one with too many tokens, `InferenceError` if the library fails."""
        text, query = (tensor.data.tolist() for tensor in self._tensors)
        if len(query) not in (0, 1, len(text)):
            raise InvalidInput(
                f"there are {len(query)} queries for {len(text)} texts: give one for all, one for each, or none"
            )
        texts, queries = self._ids(text, TEXT), self._ids(query, QUERY)
        if len(queries) == 1:
            queries *= len(texts)
        most = self._options.max_tokens
        assert most is not None  # `TokenizerOptions` has seen to it
        if queries:
            rows = [self._pair.row(pair, most) for pair in zip(queries, texts, strict=True)]
        else:
            rows = [self._alone.row((ids,), most) for ids in texts]
        uncut = np.fromiter((row.uncut for row in rows), np.int64, len(rows))
        if not self._options.truncate and (uncut > most).any():
            number = int(np.argmax(uncut > most))
            with_query = " with its query" if queries else ""
            raise self._too_long(number, f"{uncut[number]} tokens{with_query}")
        counts = np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))
        outputs: list[Array] = []
        for name in self._options.outputs:
            outputs += _packed([_list_of(row, name) for row in rows], counts)
        return [*outputs, counts, uncut]

    def _ids(self, texts: list[str], kind: str) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        long = self._cut(texts, kind)
        ids = [encoding.ids for encoding in self._encoded(texts, add_special_tokens=False)]
        for number, characters in long.items():
            if len(ids[number]) < (self._options.max_tokens or 0):  # what was cut off might have given others
                raise self._too_long(number, f"{characters} characters", kind)
            ids[number] += ids[number][-1:]  # for what was cut off: it is cut as well, and counts as uncut
        return ids


def _list_of(row: Row, name: str) -> Sequence[int]:
    match name:
        case "input_ids":
            return row.ids
        case "token_type_ids":
            return row.types
        case _:
            return [1] * len(row.ids)


def _packed(arrays: Sequence[Sequence[int]], counts: Array) -> tuple[Array, Array]:
    """Return the list as its two outputs: all elements, and the shape of each array."""
    elements = np.fromiter(chain.from_iterable(arrays), np.int64, int(counts.sum()))
    return elements, counts[:, None].copy()

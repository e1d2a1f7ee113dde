"""The section `models` of the YAML: facts that model files do not hold, and the settings of batching."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    WrapValidator,
)

from shapestream.errors import closest, did_you_mean
from shapestream.settings.model_sources import (
    SUFFIXES,
    check_digest,
    check_engine,
    read_engine,
    read_function,
    read_model_path,
    suffix_problems,
)
from shapestream.settings.values import (
    COUNT,
    TEXT,
    Bytes,
    Finding,
    Section,
    below,
    check_name,
    constant,
    describe,
    read_path,
    wrong,
)
from shapestream.settings.version_settings import Share, Version
from shapestream.settings.yaml_source import Location
from shapestream.versions import MOST_NAME, NAME
from shapestream_engine.backends.registry import engines_of_path
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.errors import ShapeError, SignatureError
from shapestream_engine.output_rules import RULES, FollowingRule, List
from shapestream_engine.pooling import POOLINGS, Pooling
from shapestream_engine.ports import MAX_AT_MOST_BYTES, shapes_of
from shapestream_engine.postprocess import FORMS, Steps
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.strategy import Strategy, parse_strategy
from shapestream_engine.string_arrays import STRING_TYPES

MAX_ALLOWED_SIZE = (1 << 31) - 1
"""Largest size in `shapes`: `shapestream_engine.strategy` takes no larger one."""


def check_shape(value: Any) -> str:
    """Check a shape in OpenVINO's spelling, with names, or a list of its entries."""
    if isinstance(value, list) and all(type(entry) in (int, str) for entry in value):
        value = ", ".join(str(entry) for entry in value)
    elif type(value) is int:
        value = str(value)
    if not isinstance(value, str):
        raise wrong(f'expected a shape, got {describe(value)} (write "batch:1..64, seq:1..512, 384")')
    try:
        NamedShape.parse(value)
    except ShapeError as error:
        raise wrong(f"{describe(value)} is not a shape: {error}") from error
    return value


def read_sizes(value: Any) -> tuple[int, ...]:
    """Read the allowed sizes of a dimension: one, or an ascending list."""
    sizes = value if isinstance(value, list) else [value]
    if not isinstance(value, list) and type(value) is not int:
        raise wrong(
            f"expected a size or a list of sizes, got {describe(value)} (write [32, 64]; other keys are dimensions)"
        )
    if not sizes:
        raise wrong("the list of sizes is empty (write [32, 64])")
    for size in sizes:
        if type(size) is not int or not 1 <= size <= MAX_ALLOWED_SIZE:
            raise wrong(f"expected sizes, integers from 1 to {MAX_ALLOWED_SIZE}, got {describe(size)}")
    for before, after in pairwise(sizes):
        if before == after:
            raise wrong(f"{before} is listed twice (list each once)")
        if before > after:
            raise wrong(f"sizes must ascend, but {after} comes after {before} (sort them)")
    return tuple(sizes)


def check_pad_value(value: Any) -> Any:
    """Check a padding value: a number or a truth value."""
    if isinstance(value, (bool, int, float)):
        return value
    hint = " (remove the quotes)" if isinstance(value, str) else " (write the value to pad with, such as 0)"
    raise wrong(f"expected a number, got {describe(value)}{hint}")


def read_value(value: Any) -> Any:
    """Check the value that an input has in every request: a number or a truth value."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise wrong(
        f"expected a number, got {describe(value)} (write the one that every request has, such as 16000)"
    )


Shape: TypeAlias = Annotated[
    str,
    BeforeValidator(check_shape),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": {"type": ["string", "integer"]}}]}),
]
ElementType: TypeAlias = Annotated[
    str,
    BeforeValidator(partial(check_name, what="element type", known=[*ELEMENT_TYPES, *STRING_TYPES])),
    WithJsonSchema(TEXT),
]
PadValue: TypeAlias = Annotated[
    Any, BeforeValidator(check_pad_value), WithJsonSchema({"type": ["number", "boolean"]})
]
AllowedSizes: TypeAlias = Annotated[
    tuple[int, ...],
    BeforeValidator(read_sizes),
    WithJsonSchema({"anyOf": [COUNT, {"type": "array", "items": COUNT, "minItems": 1}]}),
]


class PortSettings(Section):
    """Facts about an input or an output. Functions need both; those of a model file must agree with it."""

    shape: Shape | None = None
    """Named dimensions and their bounds: "batch:1..64, seq:1..512, 384"; of a list, those of one array."""
    element_type: ElementType | None = None
    """Element type by OpenVINO's name (f32, i64, boolean, ...)."""


class InputSettings(PortSettings):
    """Facts about one input that the model file leaves open."""

    pad: dict[str, PadValue] = Field(default_factory=dict)
    """Dimensions that may be padded, each with the value to pad with."""
    mask_of: str | None = None
    """Make this input (1 = data, 0 = padding) from the named one where the client sends none."""
    at_most_bytes: Bytes | None = Field(default=None, ge=1, le=MAX_AT_MOST_BYTES)
    """Bytes of each string, at most, of an input of the element type str or bytes. Default: 1 MiB."""
    value: Annotated[Any, BeforeValidator(read_value), WithJsonSchema({"type": ["number", "boolean"]})] = None
    """The value of this input, a number for each element, in every request; clients need not send it."""

    @property
    def has_batch(self) -> bool:
        """Tell whether the stated shape has a dynamic axis `batch`."""
        shape = NamedShape.parse(self.shape or "")
        return any(
            name == BATCH and size.is_dynamic
            for name, size in zip(shape.names, shape.dimensions, strict=True)
        )


class ShapesSettings(Section):
    """Call shapes of a model. Any other key is a dimension, with its allowed size or sizes: seq: [64, 128]."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AllowedSizes] = Field(init=False)

    strategy: Literal["native", "padded", "bucketed", "partitioned"] = "native"
    """`native`: any shape. `padded`: one. `bucketed`: the next of several. `partitioned`: batch divided into sizes."""
    max_prepared: int | None = Field(default=None, ge=1, le=100_000)
    """Prepared shapes that are kept, at most. Default: 64; for `native`, which then rounds later shapes up: no limit."""
    warm_up: bool = False
    """Prepare shapes at the start instead of on first use."""
    static: tuple[dict[str, AllowedSizes], ...] = Field(default=(), strict=False)
    """Call shapes with a static model each, for `native`: [{batch: 1, seq: [8, 16]}]; every dimension is named."""

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The allowed sizes by dimension."""
        return dict(self.model_extra or {})

    @property
    def stated(self) -> list[str]:
        """The keys that say anything other than their default."""
        return [key for key, value in self if value not in ("native", None, (), False)]

    def to_strategy(self) -> Strategy:
        """Return the strategy as the engine takes it. Raises `SignatureError` for sizes that it cannot have."""
        if self.strategy == "native":
            return parse_strategy({"max_prepared": self.max_prepared, "static": self.static})
        return parse_strategy({"strategy": self.strategy, **self.sizes})

    def problems(self, inputs: Mapping[str, InputSettings]) -> Iterator[Finding]:
        """Yield the problems of strategy, dimensions, sizes and padding with these inputs of the model.

        The engine checks the strategy against the model file.
        """
        dimensions = _Dimensions(inputs)
        if self.strategy == "native":
            yield from self._native_problems()
            for index, shape in enumerate(self.static):
                for name, sizes in shape.items():
                    # If the YAML describes no inputs, the names of the dimensions come from the model file.
                    if name in dimensions.bounds or len(dimensions.bounds) > 1:
                        for words in dimensions.complaints(name, sizes, list(dimensions.bounds)):
                            yield ("static", index, name), words
        else:
            if self.static:
                words = f"static shapes need the strategy native, but this is {self.strategy} (remove one of them)"
                yield ("static",), words
            for name, sizes in self.sizes.items():
                known = [*dimensions.bounds, *type(self).file_keys()]
                for words in dimensions.complaints(name, sizes, known):
                    yield (name,), words
                for port in dimensions.unpaddable.get(name, ()):
                    remedy = f"allow it in inputs.{port}: pad: {{{name}: VALUE}}"
                    yield (name,), f'sizes of "{name}" need padding ({remedy})'
        try:
            self.to_strategy()
        except SignatureError as error:
            yield error.key[1:], str(error)

    def _native_problems(self) -> Iterator[Finding]:
        known = type(self).file_keys()
        for name in self.sizes:
            close = closest(name, known)
            remedy = f'did you mean "{close}"?' if close else "remove it, or choose another strategy"
            yield (name,), f"the strategy native takes any size as it comes ({remedy})"
        if self.warm_up:
            yield ("warm_up",), "the strategy native prepares nothing (remove it)"


class _Dimensions:
    """The dimensions in the described inputs of a model."""

    def __init__(self, inputs: Mapping[str, InputSettings]) -> None:
        self.bounds: dict[str, Dimension] = {BATCH: Dimension()}
        """Bounds that all inputs allow. `batch` is always known: the model file may name that axis."""
        self.unpaddable: dict[str, list[str]] = {}
        """The inputs that do not allow a dimension to be padded."""
        self.strings = {
            f"{port}.bytes" for port, settings in inputs.items() if settings.element_type in STRING_TYPES
        }
        """The dimensions of the mean bytes of strings, which have no allowed sizes."""
        for port, settings in inputs.items():
            if settings.shape is None:
                continue
            shape = NamedShape.parse(settings.shape)
            for name, dimension in zip(shape.names, shape.dimensions, strict=True):
                if name is None:
                    continue
                with suppress(ShapeError):  # the engine reports inputs that contradict each other
                    self.bounds[name] = self.bounds.get(name, Dimension()).intersection(dimension)
                    if name != BATCH and name not in settings.pad and settings.mask_of is None:
                        self.unpaddable.setdefault(name, []).append(port)

    def complaints(self, name: str, sizes: Sequence[int], known: Sequence[str]) -> Iterator[str]:
        """Yield the problems of these sizes of a dimension. `known`: the keys to suggest instead."""
        if name in self.strings:
            yield f'"{name}" is the mean bytes of strings, which are never padded (remove it)'
        elif (bounds := self.bounds.get(name)) is None:
            yield f'no input has a dimension "{name}" {did_you_mean(name, known)}'
        elif outside := [size for size in sizes if size not in bounds]:
            yield f'{outside[0]} is outside the bounds {bounds} of "{name}" (change it, or the shape of the input)'


DEFAULT_INVARIANT_ROWS = 4
"""Rows of a call for `batch_invariant: true`: most of the gain for short rows, at a small cost for a lone request."""

_ALONE = {"max_batch": (1,), "max_delay_ms": (0,), "max_padding_ratio": (), "max_batch_bytes": ()}
"""Values, beside null, that change nothing where each request runs alone."""


def read_hang_limit(value: Any) -> Any:
    """Read seconds, `auto` or `off`."""
    if value in ("auto", "off"):
        return value
    if type(value) in (int, float) and 0 < value <= 86400:
        return value
    raise wrong(
        f"expected seconds, auto or off, got {describe(value)} (write auto, off, or a number up to 86400)"
    )


def read_invariant(value: Any) -> bool | int:
    """Read `batch_invariant`: a truth value, or a number of rows."""
    if isinstance(value, bool):
        return value
    if type(value) is not int or value < 1:
        raise wrong(
            f"expected true, false or a number of rows from 1, got {describe(value)} (write true, or 8)"
        )
    return value


def read_property(value: Any) -> str:
    """Read a property of the engine as text: true is YES, false is NO."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise wrong(f"expected a text or a number, got {describe(value)}")


def read_steps(value: Any) -> str:
    """Check the steps of an output."""
    try:
        return str(Steps.parse(value if isinstance(value, str) else ""))
    except ValueError:
        raise wrong(f"expected {FORMS}, got {describe(value)}") from None


def read_pooling(value: Any) -> str:
    """Check the pooling of a text's vectors."""
    with suppress(ValueError):
        if isinstance(value, str) and Pooling.parse(value):
            return value
    raise wrong(f"expected {POOLINGS}, got {describe(value)}")


SamplesPath: TypeAlias = Annotated[
    str, BeforeValidator(partial(read_path, expected="an .npz of samples", suffix=".npz"))
]
Engine: TypeAlias = Annotated[
    str,
    BeforeValidator(check_engine),
    WithJsonSchema({**TEXT, "examples": ["auto", "openvino", "onnxruntime", "torch", "function"]}),
]
PropertyValue: TypeAlias = Annotated[
    str, BeforeValidator(read_property), WithJsonSchema({"type": ["string", "number", "boolean"]})
]
RuleName: TypeAlias = Annotated[
    str,
    BeforeValidator(partial(check_name, what="rule", known=RULES)),
    WithJsonSchema({"enum": list(RULES), "type": "string"}),
]


class OutputSettings(PortSettings):
    """An output, and the rule that divides its rows between requests."""

    rule: RuleName | None = None
    """The rule. Default: `rows` where the output has the batch axis, `whole` for a model without one."""
    column: int | None = Field(default=None, ge=0)
    """For `index_column`: the column that holds the index of the row in the batch, from 0."""
    output: str | None = None
    """The output that the rule follows. `with`: the one with parallel rows; `counts`, `padded_counts`: the one that counts
    these rows; `recount`: the one whose rows are counted."""
    to: str | None = None
    """For `crop`: an entry per axis, such as `batch, 8, height/4, width/4`. `/` rounds up, `//` down; `?` stays."""
    count: str | None = None
    """For `list`: the input dimension whose size is the number of arrays. Default: the data decides the number."""

    def rule_arguments(self) -> dict[str, Any] | None:
        """Return the rule as the engine reads it, or None for the default."""
        if self.rule is None:
            return None
        given = {"rule": self.rule, "column": self.column, "output": self.output, "to": self.to}
        if self.rule == List.NAME:
            given |= {"of": self.shape, "count": self.count}
        return {key: value for key, value in given.items() if value is not None}

    def problems(
        self, name: str, outputs: Mapping[str, OutputSettings], *, complete: bool
    ) -> Iterator[Finding]:
        """Yield the problems of the rule. `complete`: `outputs` has all outputs of the model."""
        if self.column is not None and self.rule != "index_column":
            yield ("column",), 'only the rule "index_column" has a "column" (remove it)'
        if self.rule == "crop" and self.to is None:
            yield (), 'the rule "crop" needs the size of each axis (add to: "batch, 8, height/4, width/4")'
        if self.to is not None and self.rule != "crop":
            yield ("to",), 'only the rule "crop" has a "to" (remove it)'
        if self.count is not None and self.rule != List.NAME:
            yield ("count",), 'only the rule "list" has a "count" (remove it)'
        rule = RULES.get(self.rule or "rows")
        if rule is None or not issubclass(rule, FollowingRule):
            if self.output is not None:
                having = ", ".join(
                    f'"{key}"' for key, each in RULES.items() if issubclass(each, FollowingRule)
                )
                yield ("output",), f'only the rules {having} have an "output" (remove it)'
        elif self.output is None:
            yield (), f'the rule "{self.rule}" needs the output {rule.MEANING} (add output: NAME)'
        elif self.output == name:
            yield ("output",), "an output cannot follow itself (name another output)"
        elif (followed := outputs.get(self.output)) is not None:
            led_by = followed.rule or "rows"
            if led_by not in rule.FOLLOWS:
                wanted = " or ".join(f'"{each}"' for each in rule.FOLLOWS)
                follows = f'"{self.rule}" follows one with the rule {wanted}'
                yield ("output",), f'"{self.output}" has the rule "{led_by}" ({follows})'
        elif complete:
            yield (
                ("output",),
                f'there is no output "{self.output}" {did_you_mean(self.output, list(outputs))}',
            )


class ProbeSettings(Section):
    """Realistic values for one input, or for all (`"*"`), for the proof of batching and padding."""

    integers: tuple[int, int] | None = Field(default=None, strict=False)
    """Whole numbers between these two, both included."""
    uniform: tuple[float, float] | None = Field(default=None, strict=False)
    """Numbers between these two."""
    samples: SamplesPath | None = None
    """An .npz of real inputs, relative to this file: arrays called like the inputs, several as `ids.0`, `ids.1`."""

    def problems(self) -> Iterator[Finding]:
        """Yield the problems of settings that no values can be drawn from."""
        if sum(getattr(self, kind) is not None for kind in type(self).file_keys()) != 1:
            advice = "integers: [low, high], uniform: [low, high] or samples: FILE.npz"
            yield (), f"write one of {advice}"
        for kind, ends in (("integers", self.integers), ("uniform", self.uniform)):
            if ends is not None and ends[0] > ends[1]:
                yield (kind,), f"the low end {ends[0]:g} is above the high end {ends[1]:g} (swap them)"
        if self.integers is not None and not -(1 << 63) <= min(self.integers) <= max(self.integers) < 1 << 63:
            yield ("integers",), "no element type has integers of more than 64 bits (narrow the range)"
        if self.uniform is not None and not self.uniform[1] - self.uniform[0] <= sys.float_info.max:
            yield ("uniform",), "the difference of the two ends is not finite (narrow the range)"


def _read_probe(value: Any) -> Any:
    """Read a path for all inputs; raises the error of a description that lacks the name of its input."""
    if isinstance(value, str):
        return {"*": {"samples": value}}
    for kind in ProbeSettings.file_keys() if isinstance(value, dict) else ():
        if kind in value and not isinstance(value[kind], dict | None):
            own = f"{{{kind}: {_plain(value[kind])}}}"
            whole = f"{value[kind]}, or " if kind == "samples" else ""
            raise wrong(
                f"{kind} describes an input, whose name is missing (write {whole}{{NAME: {own}}}, or {{'*': {own}}} for all)"
            )
    return value


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, list | tuple) else str(value)


class BatchingSettings(Section):
    """Limits and options of a model's batches."""

    max_batch: int | None = Field(default=None, ge=1, le=1 << 20)
    """Rows in one call, at most. Default: the upper bound of `batch` in the shapes, or 64."""
    max_delay_ms: float = Field(default=0.0, ge=0, le=60_000, allow_inf_nan=False)
    """Milliseconds that a free slot may wait for more requests. 0: only for clients that send on each answer, if it pays."""
    max_padding_ratio: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Padding elements / computed elements of a call, at most. Default: as much padding as pays by measured costs."""
    max_batch_bytes: Bytes | None = None
    """Bytes of the inputs of one call, with padding and filled rows, at most. Default: 256 MiB."""
    batch_invariant: Annotated[
        Any, BeforeValidator(read_invariant), WithJsonSchema({"anyOf": [COUNT, {"type": "boolean"}]})
    ] = False
    """The same bits whatever shares the call: no padding, and this number of rows in every call. true: 4."""

    hang_after_s: Annotated[
        Any,
        BeforeValidator(read_hang_limit),
        WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"enum": ["auto", "off"]}]}),
    ] = "auto"
    """Seconds after which a running batch counts as hanging. `auto`: many times the usual time of its model's batches."""

    @property
    def hang_limit_s(self) -> float | None:
        """`hang_after_s` in seconds; None: by the usual time of batches, `inf`: never."""
        if self.hang_after_s == "auto":
            return None
        return inf if self.hang_after_s == "off" else float(self.hang_after_s)

    @property
    def invariant_rows(self) -> int | None:
        """Rows of every call for `batch_invariant`; None: any number."""
        if self.batch_invariant is False:
            return None
        if self.batch_invariant is True:
            return min(DEFAULT_INVARIANT_ROWS, self.max_batch or DEFAULT_INVARIANT_ROWS)
        return int(self.batch_invariant)


class TokenizerSettings(Section):
    """A tokenizer as a model: texts in, the token ids of each text out. FILE is short for {path: FILE}."""

    SHORT = "path"
    path: Annotated[str, BeforeValidator(partial(read_path, expected="a tokenizer.json"))]
    """A tokenizer.json, relative to this file."""
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    """Tokens of a text, at most, special ones included. Default: any number; of a folder, what its files say."""
    truncate: bool = False
    """Cut a text with more tokens. Default: it is an error."""
    prompt: str = ""
    """Text before every text. Default: nothing; of a folder, its default prompt."""
    lower_case: bool = constant(False, is_shown=True)
    """Lower each text first, its prompt included, as the files of a folder may say."""
    pairs: bool = constant(False, is_shown=True)
    """Make pairs of a query and a text, for the model of a folder that scores them."""
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
        if self.pairs and self.prompt:
            yield ("prompt",), "a model that scores texts has no prompt before them (write prompt: '')"


class ModelSettings(Section):
    """A model: its file, and the facts that the file does not hold."""

    name: str = Field(min_length=1, max_length=MOST_NAME, pattern=f"^{NAME}$")
    """The name that clients use."""
    version: Version | None = None
    """The version; models of one name have different ones. Default: 1."""
    traffic: Share | None = None
    """Share of the requests that name no version: 5%. Default: what the other versions leave."""
    traffic_by: Literal["request", "caller"] | None = None
    """`caller`: all requests of a caller get the same version. Default: `request`, each is drawn by itself."""
    shadow: Share | None = None
    """Share of the answered requests that this version runs again, to be compared; with traffic: 0%."""
    path: Annotated[str, BeforeValidator(read_model_path)] | None = None
    """IR (.xml), ONNX (.onnx) or an exported program of PyTorch (.pt2), relative to this file."""
    function: Annotated[str, WrapValidator(read_function)] | None = None
    """A NumPy callable instead of `path`: `package.module:name` that an installed package registers, or its name there."""
    tokenizer: TokenizerSettings | None = None
    """A tokenizer.json instead of `path`: texts in, token ids out. With a folder as `path`: options of its tokenizer."""
    sha256: Annotated[str, BeforeValidator(check_digest)] | None = None
    """The sha256 that the model's files must have, one after the other: the file itself, then its weights."""
    engine: Annotated[Engine | None, BeforeValidator(read_engine)] = None
    """The engine. Default: auto, which is the first of openvino and onnxruntime that takes an ONNX file."""
    device: str = Field(default="CPU", min_length=1)
    """The engine's name of the device."""
    inputs: dict[str, InputSettings] = Field(default_factory=dict)
    """Inputs by their names in the model file; unnamed ones are input0, input1, ..."""
    outputs: dict[str, OutputSettings] = Field(default_factory=dict)
    """Outputs by their names in the model file; unnamed ones are output0, output1, ..."""
    properties: dict[str, PropertyValue] = Field(default_factory=dict)
    """Properties of the engine, by its own names, such as INFERENCE_PRECISION_HINT: bf16."""
    pooling: Annotated[str, BeforeValidator(read_pooling)] | None = None
    """Pooling of the vectors of a text's tokens into one, after each call: mean, cls, last or max; "mean, normalize": of
    length 1. Default: the outputs as they are."""
    postprocess: dict[str, Annotated[str, BeforeValidator(read_steps)]] = Field(default_factory=dict)
    """Steps of outputs along their last axis, after each call: softmax, argmax, topk K, or "softmax, topk K"."""
    probe: Annotated[
        dict[str, ProbeSettings],
        BeforeValidator(_read_probe, json_schema_input_type=str | dict[str, ProbeSettings]),
    ] = Field(default_factory=dict)
    """Realistic values by input, for the proof of batching and padding; or the path of an .npz of samples."""
    trust: bool = False
    """Serve the model without proof: you vouch that rows depend neither on their batch-mates nor on padding."""
    idempotent: bool = True
    """A request may run twice. `false`: each runs alone, and a lost one is answered `worker_lost`, not retried."""
    calibration_s: float = Field(default=5.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds at start-up, at most, to measure the costs of calls; kept. 0: costs are learned from traffic alone."""
    audit: float = Field(default=0.001, ge=0, le=1, allow_inf_nan=False)
    """Share of the answers from shared or padded calls that are compared with the request run alone. 0: none."""
    shapes: ShapesSettings = ShapesSettings()
    batching: BatchingSettings = BatchingSettings()

    @property
    def file(self) -> str | None:
        """The file of the model, or of its tokenizer; None for a function."""
        return self.path if self.tokenizer is None else self.tokenizer.path

    @property
    def only_engine(self) -> str | None:
        """The engine that is configured, or the only one for its kind; None where the file decides (`engine_of`)."""
        if self.tokenizer is not None:
            return "tokenizer"
        if self.engine is not None or self.path is None:
            return self.engine or "function"
        engines = engines_of_path(PurePath(self.path))
        return engines[0] if len(engines) == 1 else None

    @property
    def effective_audit(self) -> float:
        """The share of answers that are audited: 0 if requests may not run twice, or if no proof gives tolerances."""
        return self.audit if self.idempotent and not self.trust else 0.0

    def problems(self) -> Iterator[Finding]:
        """Yield the contradictions between the settings of this model."""
        yield from (
            self._source_problems() if self.tokenizer is None else self._tokenizer_problems(self.tokenizer)
        )
        if "audit" in self.model_fields_set and self.audit > self.effective_audit:
            words = "runs requests twice, which idempotent: false forbids"
            if self.trust:
                words = "needs the proof of the model, which trust: true skips"
            yield ("audit",), f"an audit {words} (remove one of them)"
        for name, port in self.inputs.items():
            if port.mask_of == name:
                yield (
                    ("inputs", name, "mask_of"),
                    "an input cannot be the mask of itself (name another input)",
                )
            elif port.mask_of is not None and self.function is not None and port.mask_of not in self.inputs:
                words = f'there is no input "{port.mask_of}" {did_you_mean(port.mask_of, list(self.inputs))}'
                yield ("inputs", name, "mask_of"), words
        for name, output in self.outputs.items():
            complete = self.function is not None
            yield from below(("outputs", name), output.problems(name, self.outputs, complete=complete))
            if output.rule == List.NAME:
                yield from below(("outputs", name), self._list_problems(name))
        for name, probe in self.probe.items():
            yield from below(("probe", name), probe.problems())
        yield from below(("shapes",), self.shapes.problems(self.inputs))
        if self.batching.invariant_rows is not None:
            for key in self.shapes.stated:
                yield ("shapes", key), "batch_invariant runs exact shapes only (remove one of them)"
        if not self.idempotent:
            yield from self._problems_of_running_once()

    def _list_problems(self, name: str) -> Iterator[Finding]:
        """Yield the problems of an output that is a list of arrays."""
        remedy = "(remove the rule)"
        if self.path is not None:
            yield ("rule",), f'only a function returns lists: the rule "list" does not fit a "path" {remedy}'
        elif self.inputs and all(port.has_batch for port in self.inputs.values()):
            yield (
                ("rule",),
                f'the rule "list" does not fit a model whose inputs all have a batch axis {remedy}',
            )
        if shapes_of(name) in self.outputs:
            yield (), f'the list\'s shapes are an output "{shapes_of(name)}" already (rename one of them)'

    def _source_problems(self) -> Iterator[Finding]:
        """Yield the problems of `path`, `function` and `engine`."""
        if self.path is None and self.function is None:
            yield (), 'neither "path" nor "function" nor "tokenizer" (one of them says what to run)'
        elif self.path is not None and self.function is not None:
            yield ("function",), 'both "path" and "function" are given (remove one)'
        elif self.engine == "function" if self.function is None else self.engine in SUFFIXES:
            kind = "path" if self.function is None else "function"
            remedy = "remove the engine; it is chosen by the kind"
            yield ("engine",), f'engine "{self.engine}" does not take a "{kind}" ({remedy})'
        elif self.function is not None and self.sha256 is not None:
            yield ("sha256",), "only model files have a sha256, and this is a function (remove it)"
        elif self.path is not None:
            yield from suffix_problems(PurePath(self.path), self.engine)
        if self.path is not None or self.function is None:
            return
        ports: tuple[tuple[str, Mapping[str, PortSettings]], ...]
        ports = ("inputs", self.inputs), ("outputs", self.outputs)
        for key, described in ports:
            if not described:
                yield (), f'a function needs "{key}" (describe each with shape and element_type)'
            for name, port in described.items():
                missing = [field for field in ("shape", "element_type") if getattr(port, field) is None]
                if missing:
                    yield (key, name), f"a function needs {' and '.join(missing)} here (add them)"

    def _tokenizer_problems(self, tokenizer: TokenizerSettings) -> Iterator[Finding]:
        """Yield what a tokenizer does not take: another source, and ports and options of an engine."""
        yield from below(("tokenizer",), tokenizer.problems())
        for key in ("path", "function", "engine", "properties", "pooling", "postprocess", "outputs", "probe"):
            if getattr(self, key):
                yield (key,), f'a tokenizer has no "{key}" (remove one of them)'
        for name, port in self.inputs.items():
            if name != "text" or port.model_fields_set - {"at_most_bytes"}:
                words = "the only input of a tokenizer is text, and only its at_most_bytes is open (remove the rest)"
                yield ("inputs", name), words

    def _problems_of_running_once(self) -> Iterator[Finding]:
        """Yield the settings that `idempotent: false` forbids: limits of shared calls, and copies of rows."""
        for key, harmless in _ALONE.items():
            if (value := getattr(self.batching, key)) is not None and value not in harmless:
                words = 'requests of a model with "idempotent: false" run alone (remove this key)'
                yield ("batching", key), words
        rows = self.shapes.sizes.get(BATCH, (1,))
        filling: list[Location] = []
        # A partition whose sizes include 1 leaves no rows over to fill up.
        if rows != (1,) and not (self.shapes.strategy == "partitioned" and 1 in rows):
            filling.append(("shapes", BATCH))
        if self.batching.invariant_rows not in (None, 1):
            filling.append(("batching", "batch_invariant"))
        for where in filling:
            yield (
                where,
                'this fills up calls with copies of rows, which "idempotent: false" forbids (remove it)',
            )

"""The section `models` of the YAML: what model files do not say, and how each model is batched."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from shapestream.settings_file_values import (
    check_digest,
    check_function,
    read_model_path,
    read_samples_path,
)
from shapestream.settings_section import COUNT, TEXT, Bytes, Section
from shapestream.settings_values import (
    check_element_type,
    check_engine,
    check_pad_value,
    check_shape,
    engine_of_path,
    read_hang_limit,
    read_invariant,
    read_property,
    read_rule_argument,
    read_sizes,
)

__all__ = [
    "BatchingSettings",
    "InputSettings",
    "ModelSettings",
    "OutputSettings",
    "ProbeSettings",
    "ShapesSettings",
]

DEFAULT_INVARIANT_ROWS = 4
"""Most of what batching gains short rows is had with so many, and a request alone pays for filling up the others."""

Shape: TypeAlias = Annotated[
    str,
    BeforeValidator(check_shape),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": {"type": ["string", "integer"]}}]}),
]
ElementType: TypeAlias = Annotated[str, BeforeValidator(check_element_type), WithJsonSchema(TEXT)]
Engine: TypeAlias = Annotated[
    str,
    BeforeValidator(check_engine),
    WithJsonSchema({**TEXT, "examples": ["openvino", "onnxruntime", "torch", "function"]}),
]
PadValue: TypeAlias = Annotated[
    Any, BeforeValidator(check_pad_value), WithJsonSchema({"type": ["number", "boolean"]})
]
AllowedSizes: TypeAlias = Annotated[
    tuple[int, ...],
    BeforeValidator(read_sizes),
    WithJsonSchema({"anyOf": [COUNT, {"type": "array", "items": COUNT, "minItems": 1}]}),
]
PropertyValue: TypeAlias = Annotated[
    str, BeforeValidator(read_property), WithJsonSchema({"type": ["string", "number", "boolean"]})
]


class InputSettings(Section):
    """What the model file does not say, or leaves open, about one input."""

    shape: Shape | None = None
    """Named dimensions and their bounds: "batch:1..64, seq:1..512, 384"."""
    element_type: ElementType | None = None
    """OpenVINO's name (f32, i64, boolean, ...). Functions need it; a file's must agree."""
    pad: dict[str, PadValue] = Field(default_factory=dict)
    """Dimensions that may be padded, each with the value to pad with."""
    mask_of: str | None = None
    """Make this input (1 = data, 0 = padding) from the named one where the client sends none."""


class OutputSettings(Section):
    """How one output goes back to the requests that it belongs to."""

    rule: (
        Literal["rows", "index_column", "with", "counts", "padded_counts", "recount", "shared", "whole"]
        | None
    ) = None
    """Default: `rows` where the output has the batch axis, `whole` for a model without one."""
    column: Annotated[Any, BeforeValidator(read_rule_argument)] = Field(
        None, json_schema_extra={"type": ["integer", "null"], "minimum": 0}
    )
    """For `index_column`: the column that holds the index of the row in the batch."""
    output: str | None = None
    """For `with`: the output whose rows this one runs parallel to; for `counts` and `padded_counts`: the one that counts
    its rows; for `recount`: the one whose rows it counts."""
    shape: Shape | None = None
    """Needed for functions only."""
    element_type: ElementType | None = None
    """Needed for functions only."""

    def rule_arguments(self) -> dict[str, Any] | None:
        """The rule as the engine's `rules` module reads it, or None where the default holds."""
        if self.rule is None:
            return None
        given = {"rule": self.rule, "column": self.column, "output": self.output}
        return {key: value for key, value in given.items() if value is not None}


class ProbeSettings(Section):
    """Realistic values for one input, or `"*"` for all: what the model's batching and padding are tried on."""

    integers: tuple[int, int] | None = Field(default=None, strict=False)
    """Whole numbers between these two, both included."""
    uniform: tuple[float, float] | None = Field(default=None, strict=False)
    """Numbers between these two."""
    normal: tuple[float, float] | None = Field(default=None, strict=False)
    """Numbers around a mean: [mean, standard deviation]."""
    samples: Annotated[str, BeforeValidator(read_samples_path)] | None = None
    """An .npz of real inputs, relative to this file: arrays called like the inputs, several as `ids.0`, `ids.1`."""


def _read_probe(value: Any) -> Any:
    return {"*": {"samples": value}} if isinstance(value, str) else value


class ShapesSettings(Section):
    """Which shapes the device is given. Any other key is a dimension, with its allowed size or sizes: seq: [64, 128]."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AllowedSizes] = Field(init=False)

    strategy: Literal["native", "padded", "bucketed", "partitioned"] = "native"
    """`native`: any shape. `padded`: one. `bucketed`: the next of several. `partitioned`: batch divided into sizes."""
    max_prepared: int | None = Field(default=None, ge=1, le=100_000)
    """Prepared shapes that are kept. Default: 64; for `native`, which then rounds late shapes up: no limit."""
    max_prepared_bytes: Bytes | None = None
    """The same in bytes of weights and inputs."""
    warm_up: bool = False
    """Prepare shapes at the start, not when they are first needed."""
    static: tuple[dict[str, AllowedSizes], ...] = Field(default=(), strict=False)
    """For `native`: call shapes with a static model of their own, [{batch: 1, seq: [8, 16]}]; every dimension is named."""

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The allowed sizes by dimension."""
        return dict(self.model_extra or {})


class BatchingSettings(Section):
    """How requests are put together."""

    max_batch: int | None = Field(default=None, ge=1, le=1 << 20)
    """Rows in one call, at most. Default: the upper bound of `batch` in the shapes, or 64."""
    max_delay_ms: float = Field(default=0.0, ge=0, le=60_000, allow_inf_nan=False)
    """How long a free slot may wait for company. 0: never."""
    max_padding_ratio: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Elements computed only as padding / elements computed, at most. Default: as much as measured costs make worth it."""
    max_batch_bytes: Bytes | None = None
    """Bytes of the inputs of one call, padding and filled rows included, at most. Default: 256 MiB; see docs/memory.md."""
    batch_invariant: Annotated[
        Any, BeforeValidator(read_invariant), WithJsonSchema({"anyOf": [COUNT, {"type": "boolean"}]})
    ] = False
    """Results that are the same to the bit whoever shares the call: no padding, and so many rows in every call. true: 4."""

    hang_after_s: Annotated[
        Any,
        BeforeValidator(read_hang_limit),
        WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"enum": ["auto", "off"]}]}),
    ] = "auto"
    """Seconds after which a running batch is taken to hang. `auto`: many times what its model's batches usually take."""

    @property
    def hang_limit_s(self) -> float | None:
        """The same in seconds; None: by what batches usually take, `inf`: never."""
        if self.hang_after_s == "auto":
            return None
        return inf if self.hang_after_s == "off" else float(self.hang_after_s)

    @property
    def invariant_rows(self) -> int | None:
        """The rows of every call; None: as many as there are."""
        if self.batch_invariant is False:
            return None
        if self.batch_invariant is True:
            return min(DEFAULT_INVARIANT_ROWS, self.max_batch or DEFAULT_INVARIANT_ROWS)
        return int(self.batch_invariant)


class ModelSettings(Section):
    """One model: where it is, and what its file cannot know."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$")
    """What clients call it."""
    path: Annotated[str, BeforeValidator(read_model_path)] | None = None
    """IR (.xml), ONNX (.onnx) or an exported program of PyTorch (.pt2), relative to this file."""
    function: Annotated[str, BeforeValidator(check_function)] | None = None
    """Instead of `path`: a NumPy callable, `package.module:name`, that an installed package registers, or its name there."""
    sha256: Annotated[str, BeforeValidator(check_digest)] | None = None
    """Load the model only if this is the sha256 of its files, one after the other: the file itself, then its weights."""
    engine: Engine | None = None
    """Default: openvino for an IR or ONNX file, torch for a .pt2, function for a function."""
    device: str = Field(default="CPU", min_length=1)
    """The engine's name of the device."""
    inputs: dict[str, InputSettings] = Field(default_factory=dict)
    """By the name in the model file; unnamed ones are input0, input1, ..."""
    outputs: dict[str, OutputSettings] = Field(default_factory=dict)
    """By the name in the model file; unnamed ones are output0, output1, ..."""
    properties: dict[str, PropertyValue] = Field(default_factory=dict)
    """Properties of the engine, by its own names, such as INFERENCE_PRECISION_HINT: bf16."""
    probe: Annotated[dict[str, ProbeSettings], BeforeValidator(_read_probe)] = Field(default_factory=dict)
    """Realistic inputs, by input, to try batching and padding on; or the path of an .npz of samples."""
    trust: bool = False
    """You vouch that rows depend neither on their batch-mates nor on padding: the model is served without proof."""
    idempotent: bool = True
    """`false`: a request must not run twice. Each runs alone, and a lost one is answered `worker_lost`, not retried."""
    calibration_s: float = Field(default=5.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds at start-up, at most, in which a worker measures what calls cost; kept. 0: learned from traffic alone."""
    shapes: ShapesSettings = ShapesSettings()
    batching: BatchingSettings = BatchingSettings()

    @property
    def effective_engine(self) -> str:
        """The engine that runs it, chosen by the kind of model where the file names none."""
        return self.engine or ("function" if self.path is None else engine_of_path(self.path))

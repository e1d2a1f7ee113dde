"""What the YAML may say, as frozen models: names, types, ranges and defaults of every setting.

`settings_loader.py` reads a file into `Settings`, or says what is wrong with it; docs/configuration.md is
the page for users. A setting that one value cannot be judged by alone (two models of one name, a worker for a
model that is not there) is checked in `settings_checks.py`.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from shapestream.settings_addresses import (
    check_address,
    read_key_list,
    read_secret_path,
    read_security_mode,
)
from shapestream.settings_file_values import (
    check_digest,
    check_function,
    read_model_path,
    read_model_root,
    read_output_path,
    read_samples_path,
)
from shapestream.settings_values import (
    check_element_type,
    check_engine,
    check_pad_value,
    check_shape,
    engine_of_path,
    read_auto,
    read_bytes,
    read_hang_limit,
    read_invariant,
    read_memory_limit,
    read_property,
    read_rule_argument,
    read_sizes,
)

__all__ = [
    "BatchingSettings",
    "InProcessSettings",
    "InputSettings",
    "LoggingSettings",
    "ModelSettings",
    "OutputSettings",
    "ProbeSettings",
    "SecuritySettings",
    "ServerSettings",
    "Settings",
    "ShapesSettings",
    "WorkerGroupSettings",
]

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}
DEFAULT_INVARIANT_ROWS = 4
"""Most of what batching gains short rows is had with so many, and a request alone pays for filling up the others."""

Address: TypeAlias = Annotated[str, BeforeValidator(check_address), WithJsonSchema(_TEXT)]
Bytes: TypeAlias = Annotated[
    int, BeforeValidator(read_bytes), WithJsonSchema({"anyOf": [_COUNT, {**_TEXT, "examples": ["256 MiB"]}]})
]
MemoryLimit: TypeAlias = Annotated[
    int,
    BeforeValidator(read_memory_limit),
    WithJsonSchema({"anyOf": [{**_COUNT, "minimum": 64 << 20}, {**_TEXT, "examples": ["2 GiB"]}]}),
]
AutoCount: TypeAlias = Annotated[
    Any, BeforeValidator(read_auto), WithJsonSchema({"anyOf": [_COUNT, {"const": "auto"}]})
]
Shape: TypeAlias = Annotated[
    str,
    BeforeValidator(check_shape),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": {"type": ["string", "integer"]}}]}),
]
ElementType: TypeAlias = Annotated[str, BeforeValidator(check_element_type), WithJsonSchema(_TEXT)]
Engine: TypeAlias = Annotated[
    str,
    BeforeValidator(check_engine),
    WithJsonSchema({**_TEXT, "examples": ["openvino", "onnxruntime", "torch", "function"]}),
]
PadValue: TypeAlias = Annotated[
    Any, BeforeValidator(check_pad_value), WithJsonSchema({"type": ["number", "boolean"]})
]
AllowedSizes: TypeAlias = Annotated[
    tuple[int, ...],
    BeforeValidator(read_sizes),
    WithJsonSchema({"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 1}]}),
]
PropertyValue: TypeAlias = Annotated[
    str, BeforeValidator(read_property), WithJsonSchema({"type": ["string", "number", "boolean"]})
]


KeyList: TypeAlias = Annotated[
    Any,
    BeforeValidator(read_key_list),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]


class _Model(BaseModel):
    """Strict: nothing is converted, nothing unknown is let through."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class SecuritySettings(_Model):
    """Who may connect over tcp; docs/security.md. `security: network` is short for {mode: network}."""

    mode: Literal["keys", "network"] = "keys"
    """`keys`: callers prove a listed key. `network`: anybody who gets there is let in; the network keeps others away."""
    key: Annotated[str, BeforeValidator(read_secret_path)] | None = None
    """The server's secret key: a file with mode 0600, from `shapestream keys new`."""
    clients: KeyList = ()
    """Who may send requests: a folder of .pub files, or a list of public keys."""
    admins: KeyList = ()
    """Who may also see the server's counters."""
    workers: KeyList = ()
    """Who may serve models at `worker_listen`."""


def _read_security(value: Any) -> Any:
    return read_security_mode(value) if isinstance(value, str) else value


class ServerSettings(_Model):
    """The process that producers talk to."""

    listen: tuple[Address, ...] = Field(
        default=("ipc://run/shapestream.sock",), strict=False, min_length=1, validate_default=True
    )
    """Where clients connect: ipc://PATH (relative to this file) or tcp://HOST:PORT; beyond loopback with `security`."""
    worker_listen: Address | None = None
    """Where workers that were started elsewhere dial in. The server's own workers need no setting."""
    security: Annotated[SecuritySettings | None, BeforeValidator(_read_security)] = None
    """Needed for addresses that other machines reach: the keys that are let in, or `network`."""
    max_queued_requests: int = Field(default=8192, ge=1)
    """Requests that may wait, of all clients together; more are answered `overloaded`."""
    max_queued_bytes: Bytes = 2 << 30
    """Bytes of tensors that may wait; more are answered `overloaded`."""
    max_queued_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Seconds that the slots are predicted to need for what waits; more is answered `overloaded`. Null: not limited."""
    window_requests: int = Field(default=1024, ge=1, le=65536)
    """A client's credit: requests without an answer at any time."""
    window_bytes: Bytes = 512 << 20
    """A client's credit in bytes of tensors; a single request above it is answered `too_large`."""
    windows_per_key: int = Field(default=2, ge=1, le=65536)
    """Where clients prove keys: how many clients' credits all clients with one key have together."""
    prefetch: bool = True
    """While all slots are busy, the next batch is sent to one a moment before it becomes free."""
    kept_bytes: Bytes = 64 << 20
    """Replies that were given are kept up to so many bytes, for clients that ask again after a broken connection."""
    kept_s: float = Field(default=60.0, ge=0, le=86400, allow_inf_nan=False)
    """How long such a reply is kept, at most."""
    max_clients: int = Field(default=1024, ge=1, le=65536)
    """Clients at a time."""
    heartbeat_s: float = Field(default=1.0, gt=0, le=3600, allow_inf_nan=False)
    """How often the server, its clients and its workers show that they live."""
    client_silence_s: float = Field(default=10.0, gt=0, le=86400, allow_inf_nan=False)
    """A client that was silent for so long is gone; its queued requests are dropped."""
    worker_silence_s: float = Field(default=3.0, gt=0, le=86400, allow_inf_nan=False)
    """A worker that was silent for so long is lost; what it ran is run elsewhere."""
    model_root: Annotated[str, BeforeValidator(read_model_root)] | None = None
    """Model files must lie in this folder, symbolic links followed. Default: anywhere."""
    hang_min_s: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)
    """No batch is taken to hang before it has run so long. Default: 10, and `worker_silence_s` twice if that is more."""
    hang_grace_s: float = Field(default=5.0, gt=0, le=3600, allow_inf_nan=False)
    """A batch that hangs is cancelled; if it has not ended after so long, its worker is killed."""
    quarantine_requests: int = Field(default=1024, ge=0, le=65536)
    """Requests that killed workers, whose digests are kept; what equals one is answered `poisoned`. 0: none."""
    quarantine_s: float = Field(default=600.0, gt=0, le=86400, allow_inf_nan=False)
    """How long such a digest is kept."""
    record_trace: Annotated[str, BeforeValidator(read_output_path)] | None = None
    """Record when requests come and how large they are, never what is in them, for `simulate` and `tune`."""
    grace_s: float = Field(default=25.0, ge=0, le=86400, allow_inf_nan=False)
    """How long SIGTERM waits for accepted requests before it gives up on them."""


class InputSettings(_Model):
    """What the model file does not say, or leaves open, about one input."""

    shape: Shape | None = None
    """Named dimensions and their bounds: "batch:1..64, seq:1..512, 384"."""
    element_type: ElementType | None = None
    """OpenVINO's name (f32, i64, boolean, ...). Functions need it; a file's must agree."""
    pad: dict[str, PadValue] = Field(default_factory=dict)
    """Dimensions that may be padded, each with the value to pad with."""
    mask_of: str | None = None
    """Make this input (1 = data, 0 = padding) from the named one where the client sends none."""


class OutputSettings(_Model):
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


class ProbeSettings(_Model):
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


class ShapesSettings(_Model):
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


class BatchingSettings(_Model):
    """How requests are put together."""

    max_batch: int | None = Field(default=None, ge=1, le=1 << 20)
    """Rows in one call, at most. Default: the upper bound of `batch` in the shapes, or 64."""
    max_delay_ms: float = Field(default=0.0, ge=0, le=60_000, allow_inf_nan=False)
    """How long a free slot may wait for company. 0: never."""
    max_padding_ratio: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Elements computed only as padding / elements computed, at most. Default: as much as measured costs make worth it."""
    max_batch_bytes: Bytes | None = None
    """Bytes of the requests in one call, padding not counted. Default: any; a larger request runs alone."""
    batch_invariant: Annotated[
        Any, BeforeValidator(read_invariant), WithJsonSchema({"anyOf": [_COUNT, {"type": "boolean"}]})
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


class ModelSettings(_Model):
    """One model: where it is, and what its file cannot know."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$")
    """What clients call it."""
    path: Annotated[str, BeforeValidator(read_model_path)] | None = None
    """IR (.xml), ONNX (.onnx) or an exported program of PyTorch (.pt2), relative to this file."""
    function: Annotated[str, BeforeValidator(check_function)] | None = None
    """Instead of `path`: a NumPy callable, `package.module:name`, that an installed package registers, or its name there."""
    sha256: Annotated[str, BeforeValidator(check_digest)] | None = None
    """Load the file only if this is its sha256; of an IR: that of the .xml and the .bin together, in this order."""
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


class WorkerGroupSettings(_Model):
    """Worker processes that are alike."""

    count: int = Field(default=1, ge=1, le=256)
    """Processes."""
    models: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    """The models that each of them serves. Default: all."""
    slots: AutoCount = "auto"
    """Inference calls at a time in one process."""
    threads: AutoCount = "auto"
    """Threads that the engine may use in one process."""
    memory_limit: MemoryLimit | None = None
    """Resident memory at which a process is replaced by a fresh one, with nothing lost. Default: none."""


class InProcessSettings(_Model):
    """Slots in the server process itself: for development and trusted models (a crash ends the server)."""

    slots: AutoCount = "auto"
    """Inference calls at a time."""
    threads: AutoCount = "auto"
    """Threads that the engine may use."""
    memory_limit: MemoryLimit | None = None
    """Resident memory of the server at which it warns. Default: none."""
    refuse_new_shapes: bool = False
    """While the server holds more than `memory_limit`: answer requests of shapes that it has not met `unavailable`."""


def _read_in_process(value: Any) -> Any:
    if isinstance(value, bool):
        return InProcessSettings() if value else None
    return value


class LoggingSettings(_Model):
    """Lines on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """At `debug` every request and batch can be followed by its id."""
    format: Literal["auto", "json", "pretty"] = "auto"
    """`auto`: pretty on a terminal, JSON elsewhere."""


class Settings(_Model):
    """The whole file."""

    # Validated like a section that is there: its default address, too, starts at the folder of the file.
    server: ServerSettings = Field(default_factory=cast(Any, dict), validate_default=True)
    models: tuple[ModelSettings, ...] = Field(default=(), strict=False)
    """May be empty only for a server whose workers all dial in."""
    workers: tuple[WorkerGroupSettings, ...] | None = Field(default=None, strict=False)
    """Default: one worker with all models. `[]`: none, they dial in."""
    in_process: Annotated[InProcessSettings | None, BeforeValidator(_read_in_process)] = None
    """`true`, or {slots, threads}: run the models in the server instead of in workers."""
    logging: LoggingSettings = LoggingSettings()

    @property
    def worker_groups(self) -> tuple[WorkerGroupSettings, ...]:
        """The groups of processes to start, defaults applied."""
        if self.in_process is not None or (self.workers is None and not self.models):
            return ()
        return (WorkerGroupSettings(),) if self.workers is None else self.workers

    def effective(self) -> Settings:
        """The same with what is chosen by the rest of the file written out: engines, and the default worker."""
        models = tuple(model.model_copy(update={"engine": model.effective_engine}) for model in self.models)
        return self.model_copy(update={"models": models, "workers": self.worker_groups})

    def models_of(self, group: WorkerGroupSettings) -> tuple[ModelSettings, ...]:
        """The models that a group serves."""
        if group.models is None:
            return self.models
        return tuple(model for model in self.models if model.name in group.models)

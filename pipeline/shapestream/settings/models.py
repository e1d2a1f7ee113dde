"""The section `models` of the YAML: facts that model files do not hold, and how each model is batched."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from shapestream.settings.places import check_digest, check_function, read_model_path, read_samples_path
from shapestream.settings.shapes import ElementType, InputSettings, Shape, ShapesSettings
from shapestream.settings.values import (
    COUNT,
    TEXT,
    Bytes,
    Finding,
    Section,
    check_engine,
    did_you_mean,
    engine_of_path,
    read_hang_limit,
    read_invariant,
    read_property,
    read_rule_argument,
)
from shapestream.settings.yaml_source import Location
from shapestream_engine.ports import BATCH

__all__ = ["BatchingSettings", "ModelSettings", "OutputSettings", "ProbeSettings"]

DEFAULT_INVARIANT_ROWS = 4
"""Rows of a call for `batch_invariant: true`: most of the gain for short rows, at a small cost for a lone request."""

_SUFFIXES = {"openvino": (".xml", ".onnx"), "onnxruntime": (".onnx",), "torch": (".pt2",)}
_KINDS = {".xml": "IR", ".onnx": "ONNX", ".pt2": "torch.export"}

_ALONE = {"max_batch": (1,), "max_delay_ms": (0,), "max_padding_ratio": (), "max_batch_bytes": ()}
"""Values, beside null, that change nothing where each request runs alone."""

Engine: TypeAlias = Annotated[
    str,
    BeforeValidator(check_engine),
    WithJsonSchema({**TEXT, "examples": ["openvino", "onnxruntime", "torch", "function"]}),
]
PropertyValue: TypeAlias = Annotated[
    str, BeforeValidator(read_property), WithJsonSchema({"type": ["string", "number", "boolean"]})
]


class _Follower(NamedTuple):
    """A rule that names another output."""

    meaning: str
    follows: tuple[str, ...]
    """The rules that the other output may have."""


_FOLLOWERS = {
    "with": _Follower("that it runs parallel to", ("index_column", "counts")),
    "counts": _Follower("that counts its rows", ("rows",)),
    "padded_counts": _Follower("that counts its rows", ("rows",)),
    "recount": _Follower("whose rows it counts", ("index_column", "with", "counts", "padded_counts")),
}


class OutputSettings(Section):
    """An output, and the rule that divides its rows between requests."""

    rule: (
        Literal["rows", "index_column", "with", "counts", "padded_counts", "recount", "shared", "whole"]
        | None
    ) = None
    """The rule. Default: `rows` where the output has the batch axis, `whole` for a model without one."""
    column: Annotated[Any, BeforeValidator(read_rule_argument)] = Field(
        None, json_schema_extra={"type": ["integer", "null"], "minimum": 0}
    )
    """Column that holds the index of the row in the batch, for `index_column`."""
    output: str | None = None
    """The output that the rule follows. `with`: the one with parallel rows; `counts`, `padded_counts`: the one that counts
    these rows; `recount`: the one whose rows are counted."""
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

    def problems(
        self, name: str, outputs: Mapping[str, OutputSettings], *, complete: bool
    ) -> Iterator[Finding]:
        """Yield the problems of the rule; `complete`: the model has no other outputs, and no other names for them."""
        if self.column is not None and self.rule != "index_column":
            yield ("column",), 'only the rule "index_column" has a "column" (remove it)'
        follower = _FOLLOWERS.get(self.rule or "")
        if follower is None:
            if self.output is not None:
                having = ", ".join(f'"{each}"' for each in _FOLLOWERS)
                yield ("output",), f'only the rules {having} have an "output" (remove it)'
        elif self.output is None:
            yield (), f'the rule "{self.rule}" needs the output {follower.meaning} (add output: NAME)'
        elif self.output == name:
            yield ("output",), "an output cannot follow itself"
        elif (followed := outputs.get(self.output)) is not None:
            led_by = followed.rule or "rows"
            if led_by not in follower.follows:
                wanted = " or ".join(f'"{each}"' for each in follower.follows)
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
    normal: tuple[float, float] | None = Field(default=None, strict=False)
    """Numbers around a mean: [mean, standard deviation]."""
    samples: Annotated[str, BeforeValidator(read_samples_path)] | None = None
    """An .npz of real inputs, relative to this file: arrays called like the inputs, several as `ids.0`, `ids.1`."""

    def problems(self) -> Iterator[Finding]:
        """Yield the problems of settings that no values can be drawn from."""
        if sum(getattr(self, kind) is not None for kind in type(self).model_fields) != 1:
            advice = "integers: [low, high], uniform: [low, high], normal: [mean, std] or samples: FILE.npz"
            yield (), f"write one of {advice}"
        for kind, ends in (("integers", self.integers), ("uniform", self.uniform)):
            if ends is not None and ends[0] > ends[1]:
                yield (kind,), f"the low end {ends[0]:g} lies above the high end {ends[1]:g}"
        if self.integers is not None and not -(1 << 63) <= min(self.integers) <= max(self.integers) < 1 << 63:
            yield ("integers",), "no element type has integers of more than 64 bits (narrow the range)"
        if self.uniform is not None and not self.uniform[1] - self.uniform[0] <= sys.float_info.max:
            yield ("uniform",), "the two ends lie further apart than any number (narrow the range)"
        if self.normal is not None and self.normal[1] < 0:
            yield ("normal",), f"the standard deviation {self.normal[1]:g} is negative"


def _read_probe(value: Any) -> Any:
    return {"*": {"samples": value}} if isinstance(value, str) else value


class BatchingSettings(Section):
    """Limits and options of a model's batches."""

    max_batch: int | None = Field(default=None, ge=1, le=1 << 20)
    """Rows in one call, at most. Default: the upper bound of `batch` in the shapes, or 64."""
    max_delay_ms: float = Field(default=0.0, ge=0, le=60_000, allow_inf_nan=False)
    """Milliseconds that a free slot may wait for more requests. 0: it never waits."""
    max_padding_ratio: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Padding elements / computed elements of a call, at most. Default: as much padding as pays by measured costs."""
    max_batch_bytes: Bytes | None = None
    """Bytes of the inputs of one call, with padding and filled rows, at most. Default: 256 MiB; see docs/memory.md."""
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


class ModelSettings(Section):
    """A model: its file, and the facts that the file does not hold."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$")
    """The name that clients use."""
    path: Annotated[str, BeforeValidator(read_model_path)] | None = None
    """IR (.xml), ONNX (.onnx) or an exported program of PyTorch (.pt2), relative to this file."""
    function: Annotated[str, BeforeValidator(check_function)] | None = None
    """A NumPy callable instead of `path`: `package.module:name` that an installed package registers, or its name there."""
    sha256: Annotated[str, BeforeValidator(check_digest)] | None = None
    """The sha256 that the model's files must have, one after the other: the file itself, then its weights."""
    engine: Engine | None = None
    """The engine. Default: openvino for an IR or ONNX file, torch for a .pt2, function for a function."""
    device: str = Field(default="CPU", min_length=1)
    """The engine's name of the device."""
    inputs: dict[str, InputSettings] = Field(default_factory=dict)
    """Inputs by their names in the model file; unnamed ones are input0, input1, ..."""
    outputs: dict[str, OutputSettings] = Field(default_factory=dict)
    """Outputs by their names in the model file; unnamed ones are output0, output1, ..."""
    properties: dict[str, PropertyValue] = Field(default_factory=dict)
    """Properties of the engine, by its own names, such as INFERENCE_PRECISION_HINT: bf16."""
    probe: Annotated[dict[str, ProbeSettings], BeforeValidator(_read_probe)] = Field(default_factory=dict)
    """Realistic values by input, for the proof of batching and padding; or the path of an .npz of samples."""
    trust: bool = False
    """Serve the model without proof: you vouch that rows depend neither on their batch-mates nor on padding."""
    idempotent: bool = True
    """A request may run twice. `false`: each runs alone, and a lost one is answered `worker_lost`, not retried."""
    calibration_s: float = Field(default=5.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds at start-up, at most, to measure the costs of calls; kept. 0: costs are learned from traffic alone."""
    shapes: ShapesSettings = ShapesSettings()
    batching: BatchingSettings = BatchingSettings()

    @property
    def effective_engine(self) -> str:
        """The engine of the model, chosen by its kind where the file names none."""
        return self.engine or ("function" if self.path is None else engine_of_path(self.path))

    def problems(self) -> Iterator[Finding]:
        """Yield the contradictions between the settings of this model."""
        yield from self._source_problems()
        for name, port in self.inputs.items():
            if port.mask_of == name:
                yield ("inputs", name, "mask_of"), "an input cannot be the mask of itself"
            elif port.mask_of is not None and self.path is None and port.mask_of not in self.inputs:
                words = f'there is no input "{port.mask_of}" {did_you_mean(port.mask_of, list(self.inputs))}'
                yield ("inputs", name, "mask_of"), words
        for name, output in self.outputs.items():
            for where, words in output.problems(name, self.outputs, complete=self.path is None):
                yield ("outputs", name, *where), words
        for name, probe in self.probe.items():
            for where, words in probe.problems():
                yield ("probe", name, *where), words
        for where, words in self.shapes.problems(self.inputs):
            yield ("shapes", *where), words
        if self.batching.invariant_rows is not None:
            for key, value in self.shapes:
                if value not in ("native", None, (), False):
                    words = "batch_invariant runs exact shapes, in calls of a fixed number of rows (remove one of them)"
                    yield ("shapes", key), words
        if not self.idempotent:
            yield from self._problems_of_running_once()

    def _source_problems(self) -> Iterator[Finding]:
        """Yield the problems of `path`, `function` and `engine`."""
        if self.path is None and self.function is None:
            yield (), 'neither "path" nor "function" (one of them says what to run)'
        elif self.path is not None and self.function is not None:
            yield ("function",), 'both "path" and "function" are given (remove one)'
        elif self.engine == "function" if self.function is None else self.engine in _SUFFIXES:
            kind = "path" if self.function is None else "function"
            remedy = "remove the engine; it is chosen by the kind"
            yield ("engine",), f'engine "{self.engine}" does not take a "{kind}" ({remedy})'
        elif self.function is not None and self.sha256 is not None:
            yield ("sha256",), "a function is no file (remove it)"
        elif self.path is not None:
            yield from self._suffix_problems(PurePath(self.path))
        if self.path is not None or self.function is None:
            return
        ports: dict[str, Mapping[str, InputSettings | OutputSettings]] = {
            "inputs": self.inputs,
            "outputs": self.outputs,
        }
        for key, described in ports.items():
            if not described:
                yield (), f'a function needs "{key}" (nothing else says what they are)'
            for name, port in described.items():
                missing = [field for field in ("shape", "element_type") if getattr(port, field) is None]
                if missing:
                    yield (key, name), f"a function's port needs {' and '.join(missing)}"

    def _suffix_problems(self, path: PurePath) -> Iterator[Finding]:
        """Yield the problem of a file that the engine does not read. The files of packages' engines are not known here."""
        if self.engine is None and not any(path.suffix in suffixes for suffixes in _SUFFIXES.values()):
            known = ", ".join(f"{what} ({suffix})" for suffix, what in _KINDS.items())
            yield (
                ("path",),
                f'"{path.name}" is of no kind that is known: {known} (write the engine that reads it)',
            )
        elif self.engine is not None and path.suffix not in _SUFFIXES.get(self.engine, (path.suffix,)):
            read = " and ".join(_SUFFIXES[self.engine])
            yield ("path",), f'engine "{self.engine}" reads {read}, not "{path.name}"'

    def _problems_of_running_once(self) -> Iterator[Finding]:
        """Yield the settings that `idempotent: false` rules out: those about sharing calls, and those that copy rows."""
        for key, harmless in _ALONE.items():
            if (value := getattr(self.batching, key)) is not None and value not in harmless:
                words = 'requests of a model with "idempotent: false" run alone (remove this key)'
                yield ("batching", key), words
        rows = self.shapes.sizes.get(BATCH, (1,))
        filling: list[Location] = []
        # Of a partition into calls some of which have one row nothing is left over.
        if rows != (1,) and not (self.shapes.strategy == "partitioned" and 1 in rows):
            filling.append(("shapes", BATCH))
        if self.batching.invariant_rows not in (None, 1):
            filling.append(("batching", "batch_invariant"))
        for where in filling:
            words = 'this fills calls up with copies of rows, of which "idempotent: false" allows none (remove this key)'
            yield where, words

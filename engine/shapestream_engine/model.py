"""Models by their description: a `ModelSpec`, the engine that reads and compiles it, and `compile_model`.

A `ModelSpec` describes a model and adds facts that its file lacks. The engine that the spec names compiles the model.
Each `InferRequest` owns its input tensors; they are resized in place and reused from call to call:

    model = compile_model(ModelSpec(name="sum", path=Path("sum.xml")))
    request = model.create_infer_request()
    request.input_tensor("x").shape = (2, 7)
    request.input_tensor("x").data[...] = 1
    request.infer()
    request.output_tensor(0).data
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from shapestream_engine.backends.registry import (
    EngineChoice,
    check_engine,
    choose_engine,
    engines_of_path,
    load_backend,
)
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.compiled_model import CompiledModel, PreparedLimits, PreparedModels
from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.infer_request import port_number
from shapestream_engine.model_files import is_whole
from shapestream_engine.output_step import OutputStep, SteppedModel
from shapestream_engine.pooling import Pooling
from shapestream_engine.ports import InputPort, OutputPort, PadValue
from shapestream_engine.postprocess import Postprocess
from shapestream_engine.shapes import NamedShape, ShapeLike
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The statements of a spec about an input; None: as in the file.

    InputSpec(shape="batch:1..64, seq:1..512", pad={"seq": 0})
    """

    shape: str | None = None
    """Names and bounds of the axes, `batch:1..64, seq:1..512, 384`. A name alone has the bounds that another input
    states."""
    element_type: str | None = None
    pad: Mapping[str, PadValue] = field(default_factory=dict)
    mask_of: str | None = None
    at_most_bytes: int | None = None
    """Bound of each element of an input of strings, in bytes; None: 1 MiB."""
    value: PadValue | None = None
    """The value of each element in all requests, which may then lack the input; None: as the request has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """The statements of a spec about an output; None: as in the file, or as shape inference shows.

    OutputSpec(rule={"rule": "with", "output": "peaks"})
    """

    rule: Mapping[str, Any] | None = None
    """The rule as in a configuration; see `parse_rule`."""
    shape: str | None = None
    element_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to compile: exactly one of `path`, `function` (`package.module:name`) and `model`.

        ModelSpec(path=Path("minilm.onnx"), inputs={"ids": InputSpec(shape="batch, seq:1..512", pad={"seq": 0})})

    `model` is a model in memory: an `openvino.Model`, or a callable for the engine `function`. `properties` have the
    engine's own names and override the defaults.
    """

    name: str = ""
    """Name of the model; by default the name of the file or function."""
    path: Path | None = None
    """Path of the model file; a str is converted."""
    function: str | None = None
    model: Any = None
    engine: str | None = None
    """`openvino`, `onnxruntime`, `torch`, `function` or an installed engine; None: the first that takes the model
    (`engine_of`)."""
    device: str = "CPU"
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)
    outputs: Mapping[str, OutputSpec] = field(default_factory=dict)
    properties: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy = Strategy()  # noqa: RUF009 - frozen
    """The call shapes of the model."""
    prepared: PreparedLimits = PreparedLimits()  # noqa: RUF009 - frozen
    """Limits of the prepared models, if strategy and engine use them."""
    pooling: Pooling | None = None
    """Pooling of an output of the model, after each call; None: the outputs as they are."""
    postprocess: Postprocess | None = None
    """Steps of its outputs, or of the pooled one, after each call."""

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))  # frozen; callers may pass a str
        given = [what for what in (self.path, self.function, self.model) if what is not None]
        if len(given) != 1:
            raise SignatureError(
                f"model {self.name!r}: give one of path, function and model, not {len(given)}"
            )
        if not self.name:
            object.__setattr__(self, "name", self._own_name())
        if self.engine is not None:
            try:
                check_engine(self.engine)
            except SignatureError as error:
                raise SignatureError(f"model {self.name!r}: {error}", key=error.key) from error

    def _own_name(self) -> str:
        if self.path is not None:
            return self.path.stem
        if self.function is not None:
            return self.function.rpartition(":")[2]
        return str(getattr(self.model, "__name__", "model"))

    @property
    def steps(self) -> tuple[OutputStep, ...]:
        """The steps after each call, in their order."""
        return tuple(step for step in (self.pooling, self.postprocess) if step is not None)

    @property
    def judged(self) -> ModelSpec:
        """The model whose outputs a proof compares: without choices, which flip where two values are equal."""
        if self.postprocess is None:
            return self
        return replace(self, postprocess=self.postprocess.judged)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that may run the model, in the order in which they are tried; only `engine` where it is given."""
        if self.engine is not None:
            return (self.engine,)
        if self.function is not None or callable(self.model):
            return ("function",)
        return engines_of_path(self.path) if self.path is not None else ("openvino",)

    def refused_by(self, engine: str, takes: str) -> SignatureError:
        """Make the error for an engine that takes another kind of model."""
        what = "a function" if self.function is not None else type(self.model).__name__
        return SignatureError(f"model {self.name!r}: the engine {engine} takes a path or {takes}, not {what}")

    def reshape(self, shapes: Mapping[str, ShapeLike] | ShapeLike) -> ModelSpec:
        """Return the spec with other input shapes, as OpenVINO's `reshape`; it takes effect at compilation.

            spec.reshape({"ids": "batch, 1..512", "mask": "batch, 1..512"})

        Shapes are given by input name. A single shape is for a spec that names exactly one input; `read_model` knows the
        inputs of a file.
        """
        if not isinstance(shapes, Mapping):
            if len(self.inputs) != 1:
                raise SignatureError(
                    f"model {self.name!r}: say which input is to be [{NamedShape.of(shapes)}]: reshape({{name: shape}})"
                )
            shapes = {next(iter(self.inputs)): shapes}
        inputs = {**self.inputs}
        for name, shape in cast("Mapping[str, ShapeLike]", shapes).items():
            inputs[name] = replace(inputs.get(name, InputSpec()), shape=str(NamedShape.of(shape)))
        return replace(self, inputs=inputs)


class Backend(Protocol):
    """The interface of an engine's module or object."""

    def compile_spec(self, spec: ModelSpec, *, slots: int, threads: int | None) -> CompiledModel:
        """Compile the model for `slots` threads that run calls at the same time.

        `threads` is the number of CPU threads that all slots share; None: the engine's choice. Raises `ModelLoadError` for
        a file that cannot be read or run, `SignatureError` for a spec that contradicts the file, and `EngineMissing` if a
        package is missing.

        A backend may also have `read_spec(spec) -> ModelSignature`, for `read_model`, and `check_spec(spec) -> None`, which
        raises `EngineError` for a file that another engine should run (`engine_of`). Neither compiles anything.
        """


def engine_of(spec: ModelSpec) -> EngineChoice:
    """Return the engine that runs the model: the only one, or the first that is installed and takes the file.

    The file is read where several engines may run it. Raises `EngineMissing`, and `ModelLoadError` if none takes it.
    `probe.choose` compiles it as well, in a child process.
    """
    if len(spec.engines) == 1:
        return EngineChoice(engine=spec.engines[0])
    return choose_engine(spec.engines, lambda engine: check_reads(spec, engine))


def check_reads(spec: ModelSpec, engine: str) -> None:
    """Raise `EngineError` if the engine is not installed, cannot read the model, or would compute it wrongly."""
    check_spec = getattr(load_backend(engine), "check_spec", None)
    # A file that is missing or damaged is no engine's fault: the first one says it when it compiles.
    if check_spec is not None and (spec.path is None or is_whole(spec.path)):
        check_spec(spec)


def with_engine(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the name of the engine that runs it; raises the errors of `engine_of`."""
    return spec if spec.engine is not None else replace(spec, engine=engine_of(spec).engine)


def spec_of(model: ModelSpec | Path | str) -> ModelSpec:
    """Return the spec of a model that is given by its spec or its file."""
    return model if isinstance(model, ModelSpec) else ModelSpec(path=Path(model))


def compile_model(
    model: ModelSpec | Path | str, *, slots: int = 1, threads: int | None = None
) -> CompiledModel:
    """Read, check and compile a model, given by its file or a spec.

        model = compile_model("sum.onnx", slots=2, threads=4)

    `slots` requests run at the same time on `threads` shared CPU threads (None: the engine's choice). Shapes that the
    strategy prepares are compiled now in part, the others on demand. Raises `EngineMissing`, `ModelLoadError` or
    `SignatureError`, whose message has the remedy.
    """
    if slots < 1 or (threads is not None and threads < 1):
        raise ValueError(f"slots and threads are counts from 1, not {slots} and {threads}")
    spec = spec_of(model)
    choice = engine_of(spec)
    backend: Backend = load_backend(choice.engine)
    compiled = backend.compile_spec(spec, slots=slots, threads=threads)
    if compiled.signature.strategy != spec.strategy:
        raise SignatureError(
            f"model {spec.name!r}: the engine {choice.engine} does not do the strategy {spec.strategy.name}"
        )
    for step in spec.steps:
        compiled = _stepped(compiled, step)
    compiled.engine = choice.engine
    if spec.path is not None:  # a model in memory is not held for it
        compiled.compile_again = lambda slots, threads: compile_model(spec, slots=slots, threads=threads)
    if compiled.prepares:
        _warm_up(compiled, spec)
    return compiled


def _stepped(model: CompiledModel, step: OutputStep) -> CompiledModel:
    try:
        return SteppedModel(model, step)
    except SignatureError:
        model.close()
        raise


def _warm_up(model: CompiledModel, spec: ModelSpec) -> None:
    signature = model.signature
    if signature.strategy.sizes:
        model.prepared = PreparedModels(model.prepare, spec.prepared)
        planner = CallPlanner(signature)
        # Even without a warm-up, the smallest and the largest shape are compiled, so that a model that cannot run is
        # refused now.
        warm_up = spec.prepared.warm_up
        model.prepared.warm_up(planner.prepared_shapes() if warm_up else planner.extreme_shapes())
    elif shapes := signature.static_sizes:
        # Static shapes are configured one by one, so all are compiled now and none is dropped.
        model.prepared = PreparedModels(model.prepare, PreparedLimits(max_prepared=len(shapes)))
        for shape in shapes:
            _prepare_static(model, model.prepared, shape)


def _prepare_static(model: CompiledModel, prepared: PreparedModels, shape: tuple[int, ...]) -> None:
    try:
        prepared.warm_up([shape])
    except EngineError as error:
        dimensions = model.signature.dimensions
        words = ", ".join(f"{name}: {size}" for name, size in zip(dimensions, shape, strict=True))
        raise SignatureError(
            f"model {model.signature.name!r}: strategy native: static: {{{words}}}: {error}",
            key=("strategy", "static"),
        ) from error


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The inputs and outputs of a model before compilation, from its file and its spec.

        model = read_model(Path("model.xml"))
        print(model.input().partial_shape)                        # [?,?]
        model = model.reshape([(1, 10), "8..512"])
        print(model.output().partial_shape)                       # [1..10,8..512]
        request = model.compile().create_infer_request()

    The value is frozen: `reshape` returns another one.
    """

    spec: ModelSpec
    signature: ModelSignature

    @property
    def inputs(self) -> tuple[InputPort, ...]:
        """The inputs, in the order of the model's ports."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        """The outputs, in the order of the model's ports."""
        return self.signature.outputs

    def input(self, port: int | str = 0) -> InputPort:
        """Return an input, by number or name."""
        return self.signature.inputs[port_number("input", port, self.signature)]

    def output(self, port: int | str = 0) -> OutputPort:
        """Return an output, by number or name; its `partial_shape` comes from shape inference."""
        return self.signature.outputs[port_number("output", port, self.signature)]

    def reshape(self, shapes: ShapeLike | Mapping[int | str, ShapeLike]) -> ReadModel:
        """Return the model with other input shapes.

            model.reshape([(1, 10), "8..512"])          # the only input
            model.reshape({"ids": "1, ?", 1: [1, -1]})  # by name or number

        An axis keeps its name unless the shape renames it. Raises `ShapeError` for an invalid shape, and `SignatureError`
        for a shape that the model does not take.
        """
        if not isinstance(shapes, Mapping):
            if len(self.signature.inputs) != 1:
                names = ", ".join(port.name for port in self.signature.inputs)
                raise SignatureError(
                    f"model {self.spec.name!r} has several inputs, {names}: say whose shape it is"
                )
            shapes = {0: shapes}
        wanted = {}
        for key, value in cast("Mapping[int | str, ShapeLike]", shapes).items():
            port, shape = self.input(key), NamedShape.of(value)
            if len(shape) == len(port.shape):
                kept = (new or own for new, own in zip(shape.names, port.shape.names, strict=True))
                shape = NamedShape(tuple(kept), shape.dimensions)
            wanted[port.name] = shape
        return read_model(self.spec.reshape(wanted))

    def compile(
        self,
        *,
        device: str | None = None,
        properties: Mapping[str, Any] | None = None,
        slots: int = 1,
        threads: int | None = None,
    ) -> CompiledModel:
        """Compile the model; see `compile_model`. `device` and `properties` override the spec; None: as in the spec."""
        spec = self.spec
        if device is not None:
            spec = replace(spec, device=device)
        if properties is not None:
            spec = replace(spec, properties=properties)
        return compile_model(spec, slots=slots, threads=threads)


def read_model(model: ModelSpec | Path | str) -> ReadModel:
    """Read a model, given by its file or a spec, without compiling it where the engine can do that.

        read_model("model.onnx").inputs

    Raises the errors of `compile_model`, except those of the device.
    """
    spec = spec_of(model)
    backend: Backend = load_backend(engine_of(spec).engine)
    read_spec = getattr(backend, "read_spec", None)
    if read_spec is not None:
        signature: ModelSignature = read_spec(spec)
    else:
        compiled = backend.compile_spec(spec, slots=1, threads=1)
        compiled.close()
        signature = compiled.signature
    for step in spec.steps:
        signature = step.signature(signature)
    return ReadModel(spec, signature)

"""Models by their description: a `ModelSpec`, the engine that reads and compiles it, and `compile_model`.

A model is described by a `ModelSpec`, which says what its file cannot know, and compiled by the engine that the
spec names. Each `InferRequest` owns its input tensors; they are resized in place and reused from call to call:

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

from shapestream_engine.backends.registry import check_engine, load_backend
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.compiled_model import CompiledModel, PreparedLimits, PreparedModels
from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.infer_request import port_number
from shapestream_engine.ports import InputPort, OutputPort, PadValue
from shapestream_engine.shapes import NamedShape, ShapeLike
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Facts about an input beyond the model file. None: as the file says."""

    shape: str | None = None
    """Names and bounds, `batch:1..64, seq:1..512, 384`. A name alone takes the bounds that another input states for it."""
    element_type: str | None = None
    pad: Mapping[str, PadValue] = field(default_factory=dict)
    mask_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Facts about an output beyond the model file. None: as the file says, or as shape inference shows."""

    rule: Mapping[str, Any] | None = None
    """As in a configuration, `{"rule": "with", "output": "peaks"}`; see `parse_rule`."""
    shape: str | None = None
    element_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to compile: exactly one of `path`, `function` (`package.module:name`) and `model`.

    `model` is one that is in memory already: an `openvino.Model`, or a callable for the engine `function`.
    `properties` are the engine's own, under its own names, and win over the defaults.
    """

    name: str = ""
    """Name of the model; by default that of the file or the function."""
    path: Path | None = None
    """A str is made a `Path`."""
    function: str | None = None
    model: Any = None
    engine: str | None = None
    """`openvino`, `onnxruntime`, `torch`, `function` or an installed one; chosen by what is given when None."""
    device: str = "CPU"
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)
    outputs: Mapping[str, OutputSpec] = field(default_factory=dict)
    properties: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy = Strategy()  # noqa: RUF009 - frozen
    """Call shapes that the model is given."""
    prepared: PreparedLimits = PreparedLimits()  # noqa: RUF009 - frozen
    """Bounds on the models for single shapes, where the strategy and the engine make such."""

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))  # frozen; callers give a str as well
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
    def effective_engine(self) -> str:
        """The engine that compiles it: the one named, else by what is given."""
        if self.engine is not None:
            return self.engine
        if self.function is not None or callable(self.model):
            return "function"
        return "torch" if self.path is not None and self.path.suffix.lower() == ".pt2" else "openvino"

    def reshape(self, shapes: Mapping[str, ShapeLike] | ShapeLike) -> ModelSpec:
        """The same model with other shapes of inputs, as OpenVINO's `reshape`: takes effect when it is compiled.

        By name; a shape alone is for a model of which this spec names exactly one input, else see `read_model`.
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
    """The interface of an engine's module."""

    def compile_spec(self, spec: ModelSpec, *, slots: int, threads: int | None) -> CompiledModel:
        """The model, ready to run from `slots` threads at a time, on `threads` CPU threads together (None: as it likes).

        Raises `ModelLoadError` for a file that cannot be read or run, `SignatureError` for a spec that contradicts it,
        `EngineMissing` where something must be installed first.
        """


def spec_of(model: ModelSpec | Path | str) -> ModelSpec:
    """A model that is given by its spec, or by its file alone."""
    return model if isinstance(model, ModelSpec) else ModelSpec(path=Path(model))


def compile_model(
    model: ModelSpec | Path | str, *, slots: int = 1, threads: int | None = None
) -> CompiledModel:
    """Read, check and compile a model, given by its file or by a spec, with the engine that it is for.

    `slots` requests are to run at the same time, on `threads` CPU threads together (None: the engine's choice).
    What its strategy wants prepared is, at least in part; the rest follows when it is first asked for.
    Raises `EngineMissing`, `ModelLoadError` or `SignatureError`, which say what to do.
    """
    if slots < 1 or (threads is not None and threads < 1):
        raise ValueError(f"slots and threads are counts from 1, not {slots} and {threads}")
    spec = spec_of(model)
    backend: Backend = load_backend(spec.effective_engine)
    compiled = backend.compile_spec(spec, slots=slots, threads=threads)
    if compiled.signature.strategy != spec.strategy:
        raise SignatureError(
            f"model {spec.name!r}: the engine {spec.effective_engine} does not do the strategy {spec.strategy.name}"
        )
    if compiled.prepares:
        _warm_up(compiled, spec)
    return compiled


def _warm_up(model: CompiledModel, spec: ModelSpec) -> None:
    signature = model.signature
    if signature.strategy.sizes:
        model.prepared = PreparedModels(model.prepare, spec.prepared)
        planner = CallPlanner(signature)
        # Without a warm-up too the smallest and the largest: a model that cannot be run so is refused now.
        warm_up = spec.prepared.warm_up
        model.prepared.warm_up(planner.prepared_shapes() if warm_up else planner.extreme_shapes())
    elif shapes := signature.static_sizes:
        # They were asked for one by one, so all are made now, and none makes room for another.
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
    """The inputs and outputs of a model, by its file and its spec together, before it is compiled.

    It is frozen: `reshape` gives another one.

        model = read_model(Path("model.xml"))
        print(model.input().partial_shape)                        # [?,?]
        model = model.reshape([(1, 10), "8..512"])
        print(model.output().partial_shape)                       # [1..10,8..512]
        request = model.compile().create_infer_request()
    """

    spec: ModelSpec
    signature: ModelSignature

    @property
    def inputs(self) -> tuple[InputPort, ...]:
        """All inputs, in the order of the model's ports."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        """All outputs, in the order of the model's ports."""
        return self.signature.outputs

    def input(self, port: int | str = 0) -> InputPort:
        """An input, by number or name; its `partial_shape` is what it may be."""
        return self.signature.inputs[port_number("input", port, self.signature)]

    def output(self, port: int | str = 0) -> OutputPort:
        """An output, by number or name; its `partial_shape` is what shape inference shows of it."""
        return self.signature.outputs[port_number("output", port, self.signature)]

    def reshape(self, shapes: ShapeLike | Mapping[int | str, ShapeLike]) -> ReadModel:
        """Return this model for other shapes: of its only input, or of inputs by name or number.

        In any spelling: `"1, ?"`, `[1, -1]`, `[(1, 10), "8..512"]`. An axis keeps its name unless it is given another.
        Raises `ShapeError` for what is no shape, and `SignatureError` for one that the model does not take.
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
        """The model, ready to run; see `compile_model`.

        `device` and `properties` are the engine's own, as in `ModelSpec`; None: as the spec says.
        """
        spec = self.spec
        if device is not None:
            spec = replace(spec, device=device)
        if properties is not None:
            spec = replace(spec, properties=properties)
        return compile_model(spec, slots=slots, threads=threads)


def read_model(model: ModelSpec | Path | str) -> ReadModel:
    """Read a model, given by its file or by a spec, without compiling it for its device where the engine can do that.

    Raises what `compile_model` raises, except for what only the device could object to.
    """
    spec = spec_of(model)
    backend: Backend = load_backend(spec.effective_engine)
    read_spec = getattr(backend, "read_spec", None)
    if read_spec is not None:
        return ReadModel(spec, read_spec(spec))
    compiled = backend.compile_spec(spec, slots=1, threads=1)
    compiled.close()
    return ReadModel(spec, compiled.signature)

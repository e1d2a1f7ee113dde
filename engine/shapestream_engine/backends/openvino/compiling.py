"""A model compiled by OpenVINO from a `ModelSpec`, read from its file, and the properties that it runs with in the end."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import openvino as ov

from shapestream_engine.backends.file_ports import no_tensors
from shapestream_engine.backends.openvino.model_ports import reshape_inputs, signature_of_model
from shapestream_engine.backends.openvino.request import CompiledGraph, OpenVinoRequest
from shapestream_engine.backends.openvino.runtime import core, engine_words
from shapestream_engine.compiled_model import CompiledModel, PreparedSizes
from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.model import ModelSpec
from shapestream_engine.model_files import (
    check_file,
    files_of_model,
    opset_of,
    outputs_that_are_no_tensors,
)
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import fixed_ports, port_bounds

_FORMATS = {".xml": "ir", ".onnx": "onnx"}
NEWEST_OPSET = 28
"""The newest version of ONNX's operators when this OpenVINO was tried (a test compares it with the package `onnx`).

OpenVINO runs operators of later versions by the meaning of the last one that it knows, and says nothing.
"""
_MADE_OF_OTHERS = frozenset(("AUTO", "HETERO", "MULTI"))
"""Devices that hand properties on to others, and list only their own."""


def read_model(core: ov.Core, path: Path) -> ov.Model:
    """The model in the file, as it is; raises `ModelLoadError`."""
    check_file(path)
    if strange := outputs_that_are_no_tensors(path):
        raise ModelLoadError(f"cannot read the model {path}: {no_tensors(strange)}")
    if (opset := opset_of(path)) is not None and opset > NEWEST_OPSET:
        raise ModelLoadError(
            f"cannot read the model {path}: it asks for opset {opset} of ONNX, and OpenVINO is known to read up to "
            f"{NEWEST_OPSET} (export it with an older opset, or try engine: onnxruntime)"
        )
    known = _FORMATS.get(path.suffix.lower())
    if known is not None and (reason_not := _unreadable(known, path)) is not None:
        raise ModelLoadError(f"cannot read the model {path} as {known.upper()}: {reason_not}")
    try:
        return core.read_model(str(path))
    except (RuntimeError, OSError) as error:
        advice = _advice(path)
        raise ModelLoadError(f"cannot read the model {path}: {engine_words(error)}{advice}") from error


def _advice(path: Path) -> str:
    """Another engine for an ONNX file that is whole, and that OpenVINO cannot convert all the same."""
    if path.suffix.lower() != ".onnx":
        return ""
    try:
        files_of_model(path)
    except (ModelLoadError, OSError):
        return ""
    return " (ONNX Runtime may have what OpenVINO lacks: engine: onnxruntime)"


def _unreadable(format_name: str, path: Path) -> str | None:
    """The reason why the reader of this format does not take the file; None if it does.

    `Core.read_model` asks the readers of all formats in turn; of a damaged file they write each their own complaint to
    stderr, and the error then holds none of the reasons.
    """
    frontends: Any = importlib.import_module("openvino.frontend")
    try:
        reader = frontends.FrontEndManager().load_by_framework(format_name)
        if reader is None or reader.supported(str(path)):
            return None
        reader.load(str(path))
    except Exception as error:  # noqa: BLE001 - the readers' errors have no common class but this
        return engine_words(error)
    return "the file is damaged, or of another format"


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> CompiledModel:
    """Read the model, give its inputs the shapes of the spec, work out its signature, and compile it.

    Where only some shapes are allowed it is compiled for these alone, each when it is prepared; where single shapes
    have models of their own, for all shapes as well.
    """
    shared = _properties(core(), spec, slots, threads)
    # A dynamic model is compiled for each request by itself; together they have the threads.
    alone = _properties(core(), spec, 1, _share(slots, threads))
    model = _model(spec)
    signature = signature_of_model(model, spec)

    def compiled(shaped: ov.Model) -> ov.CompiledModel:
        try:
            return core().compile_model(shaped, spec.device, alone if shaped.is_dynamic() else shared)
        except RuntimeError as error:
            raise ModelLoadError(
                f"model {spec.name!r}: {spec.device} cannot compile it: {engine_words(error)}"
            ) from error

    if signature.strategy.sizes or signature.static_sizes:
        return PreparingModel(signature, model, compiled, shared)
    return OpenVinoModel(signature, model, compiled)


def read_spec(spec: ModelSpec) -> ModelSignature:
    """The signature of the model, without compiling it: for `read_model`."""
    return signature_of_model(_model(spec), spec)


def _model(spec: ModelSpec) -> ov.Model:
    if spec.path is not None:
        return read_model(core(), spec.path)
    if isinstance(spec.model, ov.Model):
        return spec.model.clone()  # it is reshaped afterwards, and the caller's stays as it is
    what = "a function" if spec.function is not None else type(spec.model).__name__
    raise SignatureError(f"model {spec.name!r}: the engine openvino takes a path or an ov.Model, not {what}")


class OpenVinoModel(CompiledModel):
    """A model compiled by OpenVINO. A stateful one is reset before each call: requests never share a state.

    A static model is compiled once, and its requests share it. A dynamic one is compiled for each request, because a call
    that fails spoils it for later calls (docs/backends.md): then it is compiled anew, before any request meets it.
    """

    def __init__(
        self,
        signature: ModelSignature,
        model: ov.Model,
        compile_shaped: Callable[[ov.Model], ov.CompiledModel],
        *,
        ports: Sequence[InputPort] | None = None,
        nbytes: int = 0,
    ) -> None:
        """`ports`: the inputs as this model has them, if it is prepared for fewer shapes than the signature says."""
        self._compile = lambda: compile_shaped(model)
        first = CompiledGraph(self._compile)
        super().__init__(signature, _effective_properties(first.compiled))
        self._graphs: list[CompiledGraph] | None = [first]
        """Of a static model the only one; of a dynamic one those of its requests, also of requests that are gone."""
        self._dynamic = model.is_dynamic()
        self._lock = threading.Lock()
        self.states = _states(model)
        sources = [output.node.input_value(0).get_node().get_type_name() for output in model.outputs]
        self._forwarded = frozenset(number for number, source in enumerate(sources) if source == "Parameter")
        self._ports = ports
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Weights and inputs, where it is prepared for a shape; 0 otherwise."""
        return self._nbytes

    def create_infer_request(self) -> OpenVinoRequest:
        """A request with tensors of its own; small upper bounds are reserved at once."""
        with self._lock:
            if self._graphs is None:
                raise self.is_closed()
            graph = self._free_graph(self._graphs)
            request = OpenVinoRequest(
                self.signature,
                graph,
                stateful=bool(self.states),
                spoils=self._dynamic,
                forwarded=self._forwarded,
                ports=self._ports,
            )
            graph.user = weakref.ref(request)
        return request

    def _free_graph(self, graphs: list[CompiledGraph]) -> CompiledGraph:
        if not self._dynamic:
            return graphs[0]
        if all(graph.user() is not None for graph in graphs):
            gc.collect()  # a request and its tensors refer to each other, so that one that is gone may still be there
        for graph in graphs:
            if graph.user() is None:
                return graph
        graphs.append(CompiledGraph(self._compile))
        return graphs[-1]

    def close(self) -> None:
        """Let go of the compiled models; their memory is free once the requests are gone too."""
        self._graphs = None


class PreparingModel(CompiledModel):
    """A model that is reshaped and compiled for each allowed shape, or each hot one, by itself.

    A request of its own takes any shape all the same: the dynamic model is compiled for the first of them.
    """

    prepares = True

    def __init__(
        self,
        signature: ModelSignature,
        model: ov.Model,
        compile_shaped: Callable[[ov.Model], ov.CompiledModel],
        properties: Mapping[str, Any],
    ) -> None:
        super().__init__(signature, properties)
        self.states = _states(model)
        self._model = model
        self._compile = compile_shaped
        self._weights = sum(
            node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant"
        )
        self._dynamic: OpenVinoModel | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # several threads may be the first to ask for the dynamic model

    def prepare(self, sizes: PreparedSizes) -> OpenVinoModel:
        """A static model for these sizes, or one that is dynamic in what has none. Raises `SignatureError`."""
        if self._is_closed:
            raise self.is_closed()
        ports = fixed_ports(self.signature, sizes)
        shaped = self._model.clone()  # which shares the weights
        try:
            reshape_inputs(shaped, ports)
        except SignatureError as error:
            raise SignatureError(f"model {self.signature.name!r}: {error}", key=error.key) from error
        inputs = sum(bound for bound in port_bounds(ports) if bound is not None)
        prepared = OpenVinoModel(
            self.signature, shaped, self._compile, ports=ports, nbytes=self._weights + inputs
        )
        self.properties = prepared.properties
        return prepared

    def create_infer_request(self) -> OpenVinoRequest:
        """A request of the dynamic model, with tensors of its own."""
        with self._lock:
            if self._is_closed:
                raise self.is_closed()
            if self._dynamic is None:
                self._dynamic = OpenVinoModel(self.signature, self._model, self._compile)
        return self._dynamic.create_infer_request()

    def close(self) -> None:
        """Let go of all compiled models."""
        self._is_closed = True
        if self.prepared is not None:
            self.prepared.close()
        if self._dynamic is not None:
            self._dynamic.close()


def _states(model: ov.Model) -> tuple[str, ...]:
    """The names of the model's variables, which ReadValue reads and Assign writes."""
    return tuple(sorted(variable.info.variable_id for variable in model.get_variables()))


def _share(slots: int, threads: int | None) -> int | None:
    """The threads of one slot of several, at least one; None for the only slot: as OpenVINO likes."""
    if threads is None:
        return None if slots == 1 else max(1, len(os.sched_getaffinity(0)) // slots)
    return max(1, threads // slots)


def _properties(runtime: ov.Core, spec: ModelSpec, slots: int, threads: int | None) -> dict[str, Any]:
    """Our defaults where the device has such a property, then the user's own, which must exist."""
    device = spec.device.partition(":")[0].partition(".")[0]
    try:
        supported = set(runtime.get_property(device, "SUPPORTED_PROPERTIES"))
    except RuntimeError as error:
        raise ModelLoadError(
            f"model {spec.name!r}: no device {spec.device!r} here; there are {', '.join(runtime.available_devices)} "
            f"({engine_words(error)})"
        ) from error
    # Requests run side by side on streams of their own, and the operating system places the threads: several worker
    # processes that pin theirs would pin them to the same CPUs.
    defaults: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": str(slots),
        "ENABLE_CPU_PINNING": False,
    }
    if threads is not None:
        defaults["INFERENCE_NUM_THREADS"] = threads
    if device in _MADE_OF_OTHERS:
        supported.add("INFERENCE_PRECISION_HINT")
    properties = {name: value for name, value in defaults.items() if name in supported}
    return properties | dict(spec.properties)


def _effective_properties(compiled: ov.CompiledModel) -> dict[str, Any]:
    found = {}
    for name in compiled.get_property("SUPPORTED_PROPERTIES"):
        if name == "SUPPORTED_PROPERTIES":
            continue
        try:
            found[name] = _plain(compiled.get_property(name))
        except RuntimeError:
            continue  # some devices list properties that they then do not tell
    return found


def _plain(value: Any) -> Any:
    match value:
        case bool() | int() | float() | str():
            return value
        case ov.Type():
            return value.get_type_name()
        case Enum():
            return value.name
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case _:
            # The enumerations of pybind11 are none of Python's.
            return str(getattr(value, "name", value))

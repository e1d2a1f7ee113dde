"""From a `ModelSpec` to a model compiled by OpenVINO, and the properties in effect."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import openvino as ov

from shapestream_engine.backends.file_ports import no_tensors
from shapestream_engine.backends.openvino.model_ports import reshape_inputs, signature_of_model
from shapestream_engine.backends.openvino.narrowing import bounded_inputs
from shapestream_engine.backends.openvino.request import CompiledGraph, OpenVinoRequest
from shapestream_engine.backends.openvino.runtime import core, engine_words
from shapestream_engine.compiled_model import CompiledModel, PreparedSizes
from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.machine import available_cpus
from shapestream_engine.model import ModelSpec
from shapestream_engine.model_files import (
    check_file,
    files_of_model,
    is_whole,
    opset_of,
    outputs_that_are_no_tensors,
)
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import fixed_ports, port_bounds

_FORMATS = {".xml": "ir", ".onnx": "onnx"}
NEWEST_OPSET = 28
"""The newest ONNX opset that this OpenVINO was tried with; a test compares it with the package `onnx`. OpenVINO
silently runs operators of later opsets with the semantics of an older version."""
_MADE_OF_OTHERS = frozenset(("AUTO", "HETERO", "MULTI"))
"""Devices that pass properties to other devices, and list their own only."""


def read_model(core: ov.Core, path: Path) -> ov.Model:
    """Read the model in a file, unchanged; raises `ModelLoadError`."""
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
    """Return advice where OpenVINO cannot read an undamaged ONNX file; otherwise ""."""
    if path.suffix.lower() != ".onnx":
        return ""
    if not is_whole(path):
        return ""
    _, *weights = files_of_model(path)
    folder = path.parent.resolve()
    if any(not file.resolve().is_relative_to(folder) for file in weights):
        return (
            f" (a link leads out of the folder, as in the cache of Hugging Face, and OpenVINO follows none: copy what the "
            f"links lead to, cp -rL {path.parent} COPY)"
        )
    return " (ONNX Runtime may have what OpenVINO lacks: engine: onnxruntime)"


def _unreadable(format_name: str, path: Path) -> str | None:
    """Return the reason why OpenVINO's reader of this format refuses the file; None if it accepts it.

    `Core.read_model` asks all readers in turn. For a damaged file each writes its own complaint to stderr, and the final
    error holds none of the reasons.
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
    """Read the model, reshape its inputs to the spec, derive its signature, and compile it.

    Where only some shapes are allowed, the model is compiled for each of them when it is prepared. With static shapes, it
    is compiled for all other shapes as well.
    """
    shared = _properties(core(), spec, slots, threads)
    # Each request has its own compilation of a dynamic model; together they share the threads.
    alone = _properties(core(), spec, 1, _share(slots, threads))
    model = _model(spec)
    bounded = bounded_inputs(model, spec.name)
    signature = signature_of_model(model, spec)

    def compiled(shaped: ov.Model) -> ov.CompiledModel:
        try:
            return core().compile_model(shaped, spec.device, alone if shaped.is_dynamic() else shared)
        except RuntimeError as error:
            raise ModelLoadError(
                f"model {spec.name!r}: {spec.device} cannot compile it: {engine_words(error)}"
            ) from error

    prepares = bool(signature.strategy.sizes or signature.static_sizes)
    return OpenVinoModel(signature, model, compiled, shared, bounded=bounded, prepares=prepares)


def check_spec(spec: ModelSpec) -> None:
    """Raise `ModelLoadError` for a model that OpenVINO cannot read, or would compute wrongly."""
    bounded_inputs(_model(spec), spec.name)


def read_spec(spec: ModelSpec) -> ModelSignature:
    """Return the signature of the model without compilation, for `read_model`."""
    model = _model(spec)
    bounded_inputs(model, spec.name)  # refuses what would be computed wrongly
    return signature_of_model(model, spec)


def _model(spec: ModelSpec) -> ov.Model:
    if spec.path is not None:
        return read_model(core(), spec.path)
    if isinstance(spec.model, ov.Model):
        return spec.model.clone()  # the copy is reshaped, the caller's model stays unchanged
    raise spec.refused_by("openvino", "an ov.Model")


class OpenVinoModel(CompiledModel):
    """A model compiled by OpenVINO. A stateful model is reset before each call, so requests never share a state.

    Requests of a static model share one compilation. A dynamic model is compiled for each request, because a failed call
    corrupts it for later calls (docs/backends.md). It is then compiled again before its next call.

    A model that `prepares` is reshaped and compiled for each allowed or static shape. `create_infer_request` makes requests
    for any other shape; the first one compiles the dynamic model.
    """

    def __init__(
        self,
        signature: ModelSignature,
        model: ov.Model,
        compile_shaped: Callable[[ov.Model], ov.CompiledModel],
        properties: Mapping[str, Any],
        *,
        bounded: Sequence[int],
        prepares: bool = False,
        ports: Sequence[InputPort] | None = None,
        nbytes: int = 0,
    ) -> None:
        """`bounded`: numbers of the inputs whose values must fit i32.

        `ports`: the inputs of a model that is prepared for fewer shapes than the signature allows.
        """
        super().__init__(signature, properties)
        self.prepares = prepares
        self._model = model
        self._compile = compile_shaped
        self._graphs: list[CompiledGraph] | None = []
        """One graph of a static model; of a dynamic model one per request, including requests that are gone."""
        self._dynamic = model.is_dynamic()
        self._lock = threading.Lock()
        self.states = tuple(sorted(variable.info.variable_id for variable in model.get_variables()))
        sources = [output.node.input_value(0).get_node().get_type_name() for output in model.outputs]
        self._forwarded = frozenset(number for number, source in enumerate(sources) if source == "Parameter")
        self._bounded = bounded
        self._ports = ports
        self._nbytes = nbytes
        if not prepares:
            self._graphs = [first := self._compiled()]
            self.properties = first.properties

    @property
    def nbytes(self) -> int:
        """Bytes of weights and inputs of a prepared model; 0 for others."""
        return self._nbytes

    def prepare(self, sizes: PreparedSizes) -> OpenVinoModel:
        """Compile the model for these sizes; a size of None stays dynamic. Raises `SignatureError`."""
        if self._graphs is None:
            raise self.is_closed()
        ports = fixed_ports(self.signature, sizes)
        shaped = self._model.clone()  # a clone shares the weights
        try:
            reshape_inputs(shaped, ports)
        except SignatureError as error:
            raise SignatureError(f"model {self.signature.name!r}: {error}", key=error.key) from error
        weights = sum(
            node.get_byte_size() for node in self._model.get_ops() if node.get_type_name() == "Constant"
        )
        inputs = sum(bound for bound in port_bounds(ports) if bound is not None)
        prepared = OpenVinoModel(
            self.signature,
            shaped,
            self._compile,
            self.properties,
            bounded=self._bounded,
            ports=ports,
            nbytes=weights + inputs,
        )
        self.properties = prepared.properties
        return prepared

    def create_infer_request(self) -> OpenVinoRequest:
        """Create a request with its own tensors; small upper bounds are reserved at once."""
        with self._lock:
            if self._graphs is None:
                raise self.is_closed()
            graph = self._free_graph(self._graphs)
            request = OpenVinoRequest(
                self.signature,
                graph,
                stateful=bool(self.states),
                in_caller=_computes_in_caller(graph.properties),
                spoils=self._dynamic,
                forwarded=self._forwarded,
                bounded=self._bounded,
                ports=self._ports,
            )
            graph.user = weakref.ref(request)
        return request

    def _compiled(self) -> CompiledGraph:
        return CompiledGraph(lambda: self._compile(self._model), _effective_properties)

    def _free_graph(self, graphs: list[CompiledGraph]) -> CompiledGraph:
        if graphs and not self._dynamic:
            return graphs[0]
        if all(graph.user() is not None for graph in graphs):
            gc.collect()  # a request and its tensors form a reference cycle, so a deleted request may still exist
        for graph in graphs:
            if graph.user() is None:
                return graph
        graphs.append(self._compiled())
        return graphs[-1]

    def close(self) -> None:
        """Release all compiled models; their memory is freed with the last request."""
        self._graphs = None
        if self.prepared is not None:
            self.prepared.close()


def _share(slots: int, threads: int | None) -> int | None:
    """Return the threads of one slot, at least 1; None for a single slot: OpenVINO's choice."""
    if threads is None:
        return None if slots == 1 else max(1, available_cpus() // slots)
    return max(1, threads // slots)


def _properties(runtime: ov.Core, spec: ModelSpec, slots: int, threads: int | None) -> dict[str, Any]:
    """Return defaults where the device has the property, then the user's properties, which must exist."""
    device = spec.device.partition(":")[0].partition(".")[0]
    try:
        supported = set(runtime.get_property(device, "SUPPORTED_PROPERTIES"))
    except RuntimeError as error:
        raise ModelLoadError(
            f"model {spec.name!r}: no device {spec.device!r} here; there are {', '.join(runtime.available_devices)} "
            f"({engine_words(error)})"
        ) from error
    # Requests run in parallel on separate streams, and the operating system places the threads. Worker processes that
    # pin threads would pin them to the same CPUs.
    defaults: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": str(slots),
        "ENABLE_CPU_PINNING": False,
    }
    if threads is not None:
        defaults["INFERENCE_NUM_THREADS"] = threads
    if device == "CPU" and slots == threads == 1 and "INFERENCE_NUM_THREADS" not in spec.properties:
        defaults["NUM_STREAMS"] = "0"  # each call computes in its calling thread alone
    if device in _MADE_OF_OTHERS:
        supported.add("INFERENCE_PRECISION_HINT")
    properties = {name: value for name, value in defaults.items() if name in supported}
    return properties | dict(spec.properties)


def _computes_in_caller(properties: Mapping[str, Any]) -> bool:
    """Tell whether OpenVINO's own `infer` computes in the calling thread, and raises the error of a failed call.

    It does on the CPU, without streams, and with one stream of several threads, which then help. On one stream with one
    thread it hides the error and returns the outputs of an earlier call (2026.4.1). Several streams compute in their own
    threads. `AUTO`, `HETERO` and `MULTI` list neither streams nor threads, and other devices no threads.
    """
    streams, threads = properties.get("NUM_STREAMS"), properties.get("INFERENCE_NUM_THREADS")
    return threads is not None and (streams == 0 or (streams == 1 and threads > 1))


def _effective_properties(compiled: ov.CompiledModel) -> dict[str, Any]:
    found = {}
    for name in compiled.get_property("SUPPORTED_PROPERTIES"):
        if name == "SUPPORTED_PROPERTIES":
            continue
        try:
            found[name] = _plain(compiled.get_property(name))
        except RuntimeError:
            continue  # some devices list properties that they refuse to return
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
            # pybind11's enumerations are no `Enum`.
            return str(getattr(value, "name", value))


_HINT = "INFERENCE_PRECISION_HINT"


def faster_precision(spec: ModelSpec) -> Mapping[str, str]:
    """Return the properties with which this device computes the model in bf16; empty if it has none, or the spec says
    a precision.
    """
    device = spec.device.partition(":")[0].partition(".")[0]
    try:
        capabilities = core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    except RuntimeError:
        return {}  # MULTI and HETERO tell nothing of their devices
    return bf16_if_offered(capabilities, spec.properties)


def bf16_if_offered(capabilities: Collection[str], properties: Mapping[str, object]) -> Mapping[str, str]:
    """Return the property for bf16 if the device is capable of it and `properties` leave the precision open."""
    return {_HINT: "bf16"} if "BF16" in capabilities and _HINT not in properties else {}

"""ONNX Runtime sessions of `ModelSpec`s: their options, execution providers and signatures, and the requests that call them.

**Trees run on one thread.** The kernels of `TreeEnsembleClassifier`, `TreeEnsembleRegressor` and `TreeEnsemble` add the
trees of a row in their order, or in one part per thread whose sums are then added: on several threads, with more than 80
trees for one row, and with more than 50 rows (its `tree_ensemble_common.h`, tried with 1.31). A forest counts votes, and
votes are often equal, so the last bit of a sum decides the label: of 1,000 requests on two threads 27 had another label
in company than alone. On one thread the order is the same for any number of rows. docs/backends.md has the figures.

A request runs its calls on its own input tensors, without a copy on the way in or out.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from shapestream_engine.backends.file_ports import FilePort, no_tensors, signature_of
from shapestream_engine.backends.host_request import HostModel, HostRequest
from shapestream_engine.backends.onnxruntime.providers import ProviderDevice, Providers, short_name
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError, ModelLoadError, SignatureError
from shapestream_engine.files import open_regular
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.model_files import check_file
from shapestream_engine.shapes import Dimension
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

_ELEMENT_TYPES = {
    "bool": "boolean",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float16": "f16",
    "float": "f32",
    "double": "f64",
    "bfloat16": "bf16",
    "string": "str",
}

_PROVIDER = "provider."
"""Prefix of properties that are options of the execution provider."""
_TREES = b"TreeEnsemble"
"""Beginning of the types of all operators with trees. A model that holds it elsewhere has one thread for no reason; its
answers are right."""


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> HostModel:
    """Read the model, apply the names and bounds of the spec, and make a session."""
    providers = _providers(spec)
    source = _source(spec)
    options, properties = session_options(spec, slots, 1 if _has_trees(source) else threads)
    (provider, provider_options), *_ = providers
    properties |= {"provider": provider} | {
        f"{_PROVIDER}{name}": value for name, value in provider_options.items()
    }
    session = _session(spec, source, options, providers)
    signature = _signature(spec, session)
    ports = (*signature.inputs, *signature.outputs)
    has_strings = any(port.is_string for port in ports)
    for port in ports if has_strings else ():
        if (
            port.element_type == "bf16"
        ):  # of its arrays NumPy knows nothing, and others cannot be bound beside strings
            raise SignatureError(
                f"model {spec.name!r}: {port.KIND} {port.name!r} is bf16, which ONNX Runtime does not take beside "
                f"strings; cast it in the model",
                key=(f"{port.KIND}s", port.name),
            )
    kind = OnnxRuntimeStringRequest if has_strings else OnnxRuntimeRequest
    return HostModel(signature, properties, lambda: kind(signature, session))


def check_spec(spec: ModelSpec) -> None:
    """Raise `ModelLoadError`, or `SignatureError` for a port that cannot be sent, if this engine cannot run the file."""
    session = _plain_session(spec)
    _ports("input", session.get_inputs(), spec)
    _ports("output", session.get_outputs(), spec)


def read_spec(spec: ModelSpec) -> ModelSignature:
    """Return the signature of the model, for `read_model`."""
    return _signature(spec, _plain_session(spec))


def _plain_session(spec: ModelSpec) -> ort.InferenceSession:
    """Make a session that only tells what the file holds, without the time of an optimization."""
    providers = device_of(spec).reading(ort.get_available_providers())
    options, _ = session_options(spec, 1, 1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _session(spec, _source(spec), options, providers)


def _session(
    spec: ModelSpec, source: str | bytes, options: ort.SessionOptions, providers: Providers
) -> ort.InferenceSession:
    try:
        session = ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # ONNX Runtime's errors have no other common class
        where = f"the model {spec.path}" if spec.path is not None else f"model {spec.name!r}"
        raise ModelLoadError(f"cannot read {where}: {engine_words(error)}") from error
    if any(provider not in session.get_providers() for provider, _ in providers):
        raise ModelLoadError(
            f"model {spec.name!r}: {spec.device} cannot run it, only {session.get_providers()}"
        )
    return session


def _signature(spec: ModelSpec, session: ort.InferenceSession) -> ModelSignature:
    return signature_of(
        spec, _ports("input", session.get_inputs(), spec), _ports("output", session.get_outputs(), spec)
    )


def _source(spec: ModelSpec) -> str | bytes:
    """Return the source of a session: a path, or an ONNX model as bytes. An `onnx.ModelProto` is serialized."""
    if spec.path is not None:
        check_file(spec.path)
        return str(spec.path)
    if isinstance(spec.model, bytes):
        return spec.model
    serialize = getattr(spec.model, "SerializeToString", None)
    if serialize is None:
        raise spec.refused_by("onnxruntime", "an ONNX model")
    return bytes(serialize())


def _has_trees(source: str | bytes) -> bool:
    """Return whether the model holds an operator that adds trees. Its bytes are searched, not parsed: the attributes of
    large forests have millions of fields."""
    if isinstance(source, bytes):
        return _TREES in source
    try:
        with (
            open_regular(Path(source)) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
        ):
            return whole.find(_TREES) >= 0
    except (OSError, ValueError):  # an empty file cannot be mapped; the session says what is wrong with it
        return False


def _cannot_travel(kind: str, argument: Any) -> str:
    if kind == "output" and argument.type.startswith(("seq(", "map(")):
        return no_tensors([argument.name])
    return f"{kind} {argument.name!r} is of type {argument.type}, which cannot be sent"


def _ports(kind: str, arguments: Sequence[Any], spec: ModelSpec) -> list[FilePort]:
    stated: Mapping[str, InputSpec | OutputSpec] = spec.inputs if kind == "input" else spec.outputs
    ports = []
    for argument in arguments:
        onnx_type = str(argument.type).removeprefix("tensor(").removesuffix(")")
        if onnx_type not in _ELEMENT_TYPES:
            raise SignatureError(
                f"model {spec.name!r}: {_cannot_travel(kind, argument)}", key=(f"{kind}s", argument.name)
            )
        own = stated.get(argument.name)
        # ONNX Runtime shows a file without a shape as it shows a scalar. Who states axes knows that it is none.
        is_open = not argument.shape and own is not None and bool(own.shape)
        dimensions = [
            Dimension(size, size) if isinstance(size, int) else Dimension() for size in argument.shape
        ]
        ports.append(
            FilePort(
                name=argument.name,
                element_type=_ELEMENT_TYPES[onnx_type],
                symbols=tuple(size if isinstance(size, str) else None for size in argument.shape),
                dimensions=None if is_open else tuple(dimensions),
            )
        )
    return ports


def session_options(
    spec: ModelSpec, slots: int, threads: int | None
) -> tuple[ort.SessionOptions, dict[str, Any]]:
    """Return the session options: defaults, then the spec's properties; and the same as plain data.

    Names with a dot are session configuration entries (`session.intra_op.allow_spinning`), which ONNX Runtime does not
    check. Other names must be attributes of `SessionOptions`. Raises `SignatureError`.
    """
    plain: dict[str, Any] = {
        # Memory patterns keep a plan for every shape that occurs, without a limit.
        "enable_mem_pattern": False,
        # Spinning threads take CPU time from other slots and processes.
        "session.intra_op.allow_spinning": "0",
        # Failures are raised as errors; the log would repeat them on stderr.
        "log_severity_level": 4,
    }
    if threads is not None:
        # Each slot's thread takes part in its call; all slots share the threads of the pool.
        plain["intra_op_num_threads"] = max(1, threads - slots + 1)
    for name, value in spec.properties.items():
        if not name.startswith(_PROVIDER):
            plain[name] = value
    options = ort.SessionOptions()
    for name, value in plain.items():
        try:
            _set(options, name, value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise SignatureError(
                f"model {spec.name!r}: property {name!r}: {error}", key=("properties", name)
            ) from error
    return options, plain


def _set(options: ort.SessionOptions, name: str, value: Any) -> None:
    if "." in name:
        options.add_session_config_entry(name, str(value))
    elif name in _CHOICES:
        choices = _CHOICES[name]
        if str(value) not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, not {value!r}")
        setattr(options, name, choices[str(value)])
    elif name in _READERS:
        setattr(options, name, _READERS[name](value))
    else:
        known = ", ".join(sorted([*_READERS, *_CHOICES]))
        raise ValueError(f"unknown; known are {known}, and names with a dot")


def device_of(spec: ModelSpec) -> ProviderDevice:
    """Return the spec's device (`CPU`, `CUDA`, `CUDA:1`); raises `ModelLoadError`."""
    available = ort.get_available_providers()
    device = ProviderDevice.parse(spec.device, available)
    if device is None:
        known = ", ".join(map(short_name, available))
        raise ModelLoadError(
            f"model {spec.name!r}: no device {spec.device!r} here; this ONNX Runtime has {known}"
        )
    return device


def _providers(spec: ModelSpec) -> Providers:
    """Return the execution providers of a session that runs calls, and their options: defaults, then the spec's
    properties. A file is read for its ports first where the options follow from its bounds."""
    device = device_of(spec)
    inputs = read_spec(spec).inputs if device.needs_bounds else ()
    own = {
        name.removeprefix(_PROVIDER): str(value)
        for name, value in spec.properties.items()
        if name.startswith(_PROVIDER)
    }
    try:
        return device.running(inputs, own, ort.get_available_providers())
    except SignatureError as error:
        raise SignatureError(f"model {spec.name!r}: {error}", key=error.key) from error


def _truth(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "yes", "1", "false", "no", "0"):
        raise ValueError(f"expected true or false, not {value!r}")
    return text in ("true", "yes", "1")  # settings write true as YES, as OpenVINO does


_READERS: dict[str, Callable[[Any], Any]] = {
    "enable_cpu_mem_arena": _truth,
    "enable_mem_pattern": _truth,
    "enable_mem_reuse": _truth,
    "inter_op_num_threads": int,
    "intra_op_num_threads": int,
    "log_severity_level": int,
    "use_deterministic_compute": _truth,
}
_CHOICES: dict[str, dict[str, Any]] = {
    "execution_mode": {
        "sequential": ort.ExecutionMode.ORT_SEQUENTIAL,
        "parallel": ort.ExecutionMode.ORT_PARALLEL,
    },
    "graph_optimization_level": {
        "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    },
}


# ---------------------------------------------------------------- calls

_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_WHERE = re.compile(r"/\S+:\d+ [^()]*\([^()]*\)(?: const)? ")


def engine_words(error: BaseException) -> str:
    """Return the message of an ONNX Runtime error in one line, without codes and source locations."""
    text = _WHERE.sub("", _CODE.sub("", str(error)))
    return " ".join(text.split()) or type(error).__name__


_BF16 = 16
"""ONNX's number for bfloat16; NumPy lacks the type."""


class OnnxRuntimeRequest(HostRequest):
    """An inference request with one `IOBinding` of a session.

    An input is bound again only when its shape or address has changed. An output whose shape the inputs determine keeps
    its memory as long as the input shapes stay equal. Each call allocates all other outputs from ONNX Runtime's arena.
    """

    def __init__(self, signature: ModelSignature, session: ort.InferenceSession) -> None:
        super().__init__(signature)
        self._session = session
        self._binding = session.io_binding()
        self._inputs = tuple(
            (argument.name, tensor, _bound_type(port.element_type))
            for argument, tensor, port in zip(
                session.get_inputs(), self._tensors, signature.inputs, strict=True
            )
        )
        self._bound: list[Array | None] = [None] * len(self._inputs)
        self._output_names = tuple(argument.name for argument in session.get_outputs())
        self._by_data = _depending_on_data(signature)
        self._keep_outputs = False
        self._dtypes = tuple(dtype_of(port.element_type) for port in signature.outputs)
        self._values: Any = None

    def run(self) -> list[Array]:
        """Run one call; its outputs lie in ONNX Runtime's memory until the next call."""
        kept = not self._bind_inputs() and self._keep_outputs
        self._bind_outputs(self._by_data if kept else range(len(self._output_names)))
        self._keep_outputs = False
        try:
            self._call()
        except InferenceError:
            if not kept:
                raise
            # The file may state a wrong dimension for an output; then every call allocates every output.
            self._bind_outputs(range(len(self._output_names)))
            self._call()
            self._by_data = tuple(range(len(self._output_names)))
        self._keep_outputs = True
        self._values = values = self._binding._iobinding.get_outputs()
        return [_array(value, dtype) for value, dtype in zip(values, self._dtypes, strict=True)]

    def _call(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its errors have no common class but this
            raise _error_of(error) from error

    def _bind_inputs(self) -> bool:
        """Bind the inputs whose shape or address changed since the last call; tell whether any did."""
        changed = False
        for number, (name, tensor, element_type) in enumerate(self._inputs):
            data = tensor.data
            if data is not self._bound[number]:  # a tensor makes a new view for each shape
                self._binding.bind_input(name, "cpu", 0, element_type, data.shape, data.ctypes.data)
                self._bound[number] = data
                changed = True
        return changed

    def _bind_outputs(self, numbers: Any) -> None:
        for number in numbers:
            self._binding.bind_output(self._output_names[number])


class OnnxRuntimeStringRequest(HostRequest):
    """An inference request of a model with strings, which ONNX Runtime binds to no memory: each call copies all tensors."""

    def __init__(self, signature: ModelSignature, session: ort.InferenceSession) -> None:
        super().__init__(signature)
        self._session = session
        self._input_names = tuple(argument.name for argument in session.get_inputs())
        self._output_names = tuple(argument.name for argument in session.get_outputs())

    def run(self) -> list[Array]:
        """Run one call; its outputs are arrays of their own."""
        arrays = {name: tensor.data for name, tensor in zip(self._input_names, self._tensors, strict=True)}
        try:
            outputs: list[Array] = self._session.run(self._output_names, arrays)
        except Exception as error:  # its errors have no common class but this
            raise _error_of(error) from error
        return outputs


def _error_of(error: Exception) -> MemoryError | InferenceError:
    words = engine_words(error)
    return MemoryError(words) if "Failed to allocate memory" in words else InferenceError(words)


def _bound_type(element_type: str) -> Any:
    return _BF16 if element_type == "bf16" else dtype_of(element_type).type


def _depending_on_data(signature: ModelSignature) -> tuple[int, ...]:
    """Return the outputs whose shapes may differ between calls of equal input shapes."""
    known = {name for port in signature.inputs for name in port.shape.names if name is not None}
    return tuple(
        number
        for number, port in enumerate(signature.outputs)
        if any(
            dimension.is_dynamic and name not in known
            for name, dimension in zip(port.shape.names, port.shape.dimensions, strict=True)
        )
    )


def _array(value: Any, dtype: np.dtype[Any]) -> Array:
    if dtype.kind != "V":
        array: Array = value.numpy()
        return array
    # NumPy has no bf16, so the array is made from the address; `_values` keeps the memory alive.
    shape = value.shape()
    memory = (ctypes.c_uint16 * int(np.prod(shape))).from_address(value.data_ptr())
    bits: Array = np.ctypeslib.as_array(memory)
    return bits.view(dtype).reshape(shape)

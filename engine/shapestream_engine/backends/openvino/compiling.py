"""From a `ModelSpec` to a model compiled by OpenVINO, and the properties that it runs with in the end."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import openvino as ov

from shapestream_engine.backends.openvino.engine_words import engine_words
from shapestream_engine.backends.openvino.ports import signature_of
from shapestream_engine.backends.openvino.reading import read_model
from shapestream_engine.backends.openvino.request import OpenVinoRequest
from shapestream_engine.backends.openvino.runtime import core
from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.model import CompiledModel, ModelSpec
from shapestream_engine.signature import ModelSignature

__all__ = ["OpenVinoModel", "compile_spec", "read_spec"]


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> OpenVinoModel:
    """Read the model, give its inputs the shapes of the spec, work out its signature, and compile it."""
    properties = _properties(core(), spec, slots, threads)
    model = _model(spec)
    signature = signature_of(model, spec)
    try:
        compiled = core().compile_model(model, spec.device, properties)
    except RuntimeError as error:
        raise ModelLoadError(
            f"model {spec.name!r}: {spec.device} cannot compile it: {engine_words(error)}"
        ) from error
    return OpenVinoModel(signature, compiled, stateful=bool(model.get_variables()))


def read_spec(spec: ModelSpec) -> ModelSignature:
    """What the model would be if it were compiled: for `read_model`."""
    return signature_of(_model(spec), spec)


def _model(spec: ModelSpec) -> ov.Model:
    if spec.path is not None:
        return read_model(core(), spec.path)
    if isinstance(spec.model, ov.Model):
        return spec.model.clone()  # it is reshaped afterwards, and the caller's stays as it is
    what = "a function" if spec.function is not None else type(spec.model).__name__
    raise SignatureError(f"model {spec.name!r}: the engine openvino takes a path or an ov.Model, not {what}")


class OpenVinoModel(CompiledModel):
    """A model compiled by OpenVINO. A stateful one is reset before each call: requests never share a state."""

    def __init__(self, signature: ModelSignature, compiled: ov.CompiledModel, *, stateful: bool) -> None:
        super().__init__(signature, _effective_properties(compiled))
        self._compiled: ov.CompiledModel | None = compiled
        self._stateful = stateful

    def create_infer_request(self) -> OpenVinoRequest:
        """A request with tensors of its own; small upper bounds are reserved at once."""
        if self._compiled is None:
            raise RuntimeError(f"{self!r} is closed")
        return OpenVinoRequest(self.signature, self._compiled.create_infer_request(), stateful=self._stateful)

    def close(self) -> None:
        """Let go of the compiled model; its memory is free once its requests are gone too."""
        self._compiled = None


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
    return {name: value for name, value in defaults.items() if name in supported} | dict(spec.properties)


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

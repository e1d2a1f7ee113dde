"""From a `ModelSpec` to a session of ONNX Runtime and the signature of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort

from shapestream_engine.backends.file_ports import FilePort, no_tensors, signature_of
from shapestream_engine.backends.onnxruntime.engine_words import engine_words
from shapestream_engine.backends.onnxruntime.options import provider_of, session_options
from shapestream_engine.backends.onnxruntime.request import OnnxRuntimeRequest
from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.model import CompiledModel, ModelSpec
from shapestream_engine.shapes import Dimension
from shapestream_engine.signature import ModelSignature

__all__ = ["OnnxRuntimeModel", "compile_spec", "read_spec"]

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
}


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> OnnxRuntimeModel:
    """Read the model, give its inputs the names and bounds of the spec, and make a session for it."""
    provider, provider_options = provider_of(spec)
    options, properties = session_options(spec, slots, threads)
    properties |= {"provider": provider} | {
        f"provider.{name}": value for name, value in provider_options.items()
    }
    session = _session(spec, options, provider, provider_options)
    return OnnxRuntimeModel(_signature(spec, session), session, properties)


def read_spec(spec: ModelSpec) -> ModelSignature:
    """What the model would be if it were compiled, without the time that its optimization takes: for `read_model`."""
    provider, provider_options = provider_of(spec)
    options, _ = session_options(spec, 1, 1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _signature(spec, _session(spec, options, provider, provider_options))


def _session(
    spec: ModelSpec, options: ort.SessionOptions, provider: str, provider_options: Mapping[str, Any]
) -> ort.InferenceSession:
    source = _source(spec)
    try:
        session = ort.InferenceSession(source, options, providers=[(provider, provider_options)])
    except Exception as error:  # its errors have no common class but this
        where = f"the model {spec.path}" if spec.path is not None else f"model {spec.name!r}"
        raise ModelLoadError(f"cannot read {where}: {engine_words(error)}") from error
    if provider not in session.get_providers():
        raise ModelLoadError(
            f"model {spec.name!r}: {spec.device} cannot run it, only {session.get_providers()}"
        )
    return session


def _signature(spec: ModelSpec, session: ort.InferenceSession) -> ModelSignature:
    return signature_of(
        spec, _ports("input", session.get_inputs(), spec), _ports("output", session.get_outputs(), spec)
    )


class OnnxRuntimeModel(CompiledModel):
    """A session of ONNX Runtime; requests may call it at the same time."""

    def __init__(
        self, signature: ModelSignature, session: ort.InferenceSession, properties: Mapping[str, Any]
    ) -> None:
        super().__init__(signature, properties)
        self._session: ort.InferenceSession | None = session

    def create_infer_request(self) -> OnnxRuntimeRequest:
        """A request with tensors of its own; small upper bounds are reserved at once."""
        if self._session is None:
            raise self.is_closed()
        return OnnxRuntimeRequest(self.signature, self._session)

    def close(self) -> None:
        """Let go of the session; its memory is free once its requests are gone too."""
        self._session = None


def _source(spec: ModelSpec) -> str | bytes:
    """What a session is made of: a path, or an ONNX model in memory, as bytes or as an `onnx.ModelProto`."""
    if spec.path is not None:
        if not spec.path.is_file():
            reason = "is a directory" if spec.path.is_dir() else "no such file"
            raise ModelLoadError(f"cannot read the model {spec.path}: {reason}")
        return str(spec.path)
    if isinstance(spec.model, bytes):
        return spec.model
    serialize = getattr(spec.model, "SerializeToString", None)
    if serialize is None:
        what = "a function" if spec.function is not None else type(spec.model).__name__
        raise SignatureError(
            f"model {spec.name!r}: the engine onnxruntime takes a path or an ONNX model, not {what}"
        )
    return bytes(serialize())


def _cannot_travel(kind: str, argument: Any) -> str:
    if kind == "output" and argument.type.startswith(("seq(", "map(")):
        return no_tensors([argument.name])
    remedy = " (train or export the model with numbers instead of texts)" if "string" in argument.type else ""
    return f"{kind} {argument.name!r} is of type {argument.type}, which cannot travel{remedy}"


def _ports(kind: str, arguments: Sequence[Any], spec: ModelSpec) -> list[FilePort]:
    ports = []
    for argument in arguments:
        onnx_type = str(argument.type).removeprefix("tensor(").removesuffix(")")
        if onnx_type not in _ELEMENT_TYPES:
            raise SignatureError(
                f"model {spec.name!r}: {_cannot_travel(kind, argument)}", key=(f"{kind}s", argument.name)
            )
        ports.append(
            FilePort(
                name=argument.name,
                element_type=_ELEMENT_TYPES[onnx_type],
                symbols=tuple(size if isinstance(size, str) else None for size in argument.shape),
                dimensions=tuple(
                    Dimension(size, size) if isinstance(size, int) else Dimension() for size in argument.shape
                ),
            )
        )
    return ports

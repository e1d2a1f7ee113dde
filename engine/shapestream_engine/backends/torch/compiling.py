"""An exported program on its device, read and placed as a `ModelSpec` says."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shapestream_engine.backends.file_ports import signature_of
from shapestream_engine.backends.torch.devices import Device, Program, find_device
from shapestream_engine.backends.torch.ports import ports_of
from shapestream_engine.backends.torch.request import TorchRequest
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.errors import EngineError, InferenceError, ModelLoadError, SignatureError
from shapestream_engine.model import CompiledModel, ModelSpec, Preparations
from shapestream_engine.prepared import PreparedSizes
from shapestream_engine.signature import ModelSignature

__all__ = ["TorchModel", "compile_spec", "read_program"]

_PRECISIONS = ("highest", "high", "medium")


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> TorchModel:
    """Read the program, give its inputs the names and bounds of the spec, and put it on its device.

    PyTorch has one number of threads, and one precision of matrix products, for a whole process: the last model that
    is compiled sets them.
    """
    device = find_device(spec.name, spec.device)
    properties = _properties(spec)
    program = read_program(spec)
    try:
        inputs, outputs = ports_of(program)
    except EngineError as error:
        raise SignatureError(f"model {spec.name!r}: {error}", key=error.key) from error
    signature = signature_of(spec, inputs, outputs)
    try:
        module = device.place(program)
    except Exception as error:  # its errors have no common class but this
        raise ModelLoadError(
            f"model {spec.name!r}: {device.name} cannot take it: {type(error).__name__}: {error}"
        ) from error
    if threads is not None:
        torch.set_num_threads(max(1, threads // slots))  # of one call; each slot's thread has as many
    _set_precision(properties["float32_matmul_precision"])
    properties |= {"device": device.name, "num_threads": torch.get_num_threads(), "torch": torch.__version__}
    model = TorchModel(signature, _program(module, program), device, properties)
    if device.compiles and spec.prepared.warm_up and signature.strategy.sizes:
        model.warm_up(islice(CallPlanner(signature).prepared_shapes(), spec.prepared.max_prepared))
    return model


class TorchModel(CompiledModel):
    """An exported program on a device."""

    def __init__(
        self, signature: ModelSignature, program: Program, device: Device, properties: Mapping[str, Any]
    ) -> None:
        super().__init__(signature, properties)
        self._program: Program | None = program
        self._device = device
        self._before = device.preparations()

    @property
    def preparations(self) -> Preparations | None:
        """Compilations on XLA since the model was made, those of other models of the process included."""
        now, before = self._device.preparations(), self._before
        if now is None or before is None:
            return None
        return Preparations(count=now.count - before.count, hits=now.hits - before.hits)

    def warm_up(self, shapes: Iterable[PreparedSizes]) -> None:
        """Have the device compile these shapes now, on zeros. One that is open in some dimension is left out."""
        request = self.create_infer_request()
        for sizes in shapes:
            known = tuple(size for size in sizes if size is not None)
            if len(known) < len(sizes):
                continue
            for tensor, shape in zip(request.input_tensors, self.signature.input_shapes(known), strict=True):
                tensor.shape = shape
                tensor.data[...] = 0
            try:
                request.infer()
            except InferenceError as error:
                raise ModelLoadError(f"model {self.signature.name!r} of sizes {known}: {error}") from error

    def create_infer_request(self) -> TorchRequest:
        """A request with tensors of its own; small upper bounds are reserved at once."""
        if self._program is None:
            raise self.is_closed()
        return TorchRequest(self.signature, self._program, self._device)

    def close(self) -> None:
        """Let go of the program; its memory is free once its requests are gone too."""
        self._program = None


def _properties(spec: ModelSpec) -> dict[str, Any]:
    properties: dict[str, Any] = {"float32_matmul_precision": "highest"}  # f32 unless the spec says otherwise
    for name, value in spec.properties.items():
        if name not in properties:
            raise SignatureError(
                f"model {spec.name!r}: property {name!r}: unknown; known are {', '.join(properties)}",
                key=("properties", name),
            )
        if value not in _PRECISIONS:
            raise SignatureError(
                f"model {spec.name!r}: property {name!r}: expected one of {', '.join(_PRECISIONS)}, not {value!r}",
                key=("properties", name),
            )
        properties[name] = value
    return properties


def _set_precision(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # PyTorch 2.9 has a second way to say the same, and forbids to mix the two
        torch.set_float32_matmul_precision(precision)
        # CUDA's convolutions are rounded to 10 bits unless they are told not to be.
        torch.backends.cudnn.allow_tf32 = precision != "highest"


def _program(module: torch.nn.Module, program: torch.export.ExportedProgram) -> Program:
    """Flat inputs to flat outputs: programs may take and return dictionaries and lists of tensors."""
    in_spec = program.call_spec.in_spec

    def call(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arguments, named = pytree.tree_unflatten(list(inputs), in_spec)
        return list(pytree.tree_leaves(module(*arguments, **named)))

    return call


def read_program(spec: ModelSpec) -> torch.export.ExportedProgram:
    """The program in the file, or the one in memory. Raises `ModelLoadError`, or `SignatureError` if it keeps a state."""
    program = spec.model if spec.path is None else _load(spec)
    if not isinstance(program, torch.export.ExportedProgram):
        what = "a function" if spec.function is not None else type(program).__name__
        raise SignatureError(
            f"model {spec.name!r}: the engine torch takes a path or an exported program, not {what}"
        )
    if changed := _changed(program):
        # Requests would find what other requests left there.
        raise SignatureError(
            f"model {spec.name!r}: the program changes {', '.join(changed)} in each call; export it without"
        )
    return program


def _changed(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers and inputs that a call of the program leaves with other contents."""
    operations = (node.target for node in program.graph.nodes if node.op == "call_function")
    if any(operation._schema.is_mutable for operation in operations if hasattr(operation, "_schema")):
        # Only in its functional form does a program say which of its operations in place can be seen from outside.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's of its own affairs
            program = program.run_decompositions({})
    signature = program.graph_signature
    return sorted({*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()})


def _load(spec: ModelSpec) -> torch.export.ExportedProgram:
    path = spec.path
    assert path is not None
    if not path.is_file():
        reason = "is a directory" if path.is_dir() else "no such file"
        raise ModelLoadError(f"cannot read the model {path}: {reason}")
    try:
        with warnings.catch_warnings():
            # PyTorch 2.9 warns of its own reading buffers that are not writable.
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:  # its errors have no common class but this
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(
            f"cannot read the model {path} as a program of torch.export: {reason}"
        ) from error

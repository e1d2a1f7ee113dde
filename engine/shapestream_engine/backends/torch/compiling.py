"""From a `ModelSpec` to an exported program on its device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from shapestream_engine.backends.file_ports import FilePort, signature_of
from shapestream_engine.backends.host_request import HostModel
from shapestream_engine.backends.torch.devices import (
    ELEMENT_TYPES,
    Device,
    Program,
    TorchRequest,
    find_device,
)
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.compiled_model import Preparations, PreparedSizes
from shapestream_engine.errors import EngineError, InferenceError, ModelLoadError, SignatureError
from shapestream_engine.model import ModelSpec
from shapestream_engine.model_files import check_file
from shapestream_engine.shapes import MAX_SIZE, Dimension
from shapestream_engine.signature import ModelSignature

_PRECISIONS = ("highest", "high", "medium")


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> TorchModel:
    """Read the program, apply the names and bounds of the spec, and place it on its device.

    PyTorch has one thread count and one matrix precision per process. The model compiled last sets both.
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
        torch.set_num_threads(max(1, threads // slots))  # per call; each slot has this number of threads
    _set_precision(properties["float32_matmul_precision"])
    properties |= {"device": device.name, "num_threads": torch.get_num_threads(), "torch": torch.__version__}
    model = TorchModel(signature, _program(module, program), device, properties)
    if device.compiles and spec.prepared.warm_up and signature.strategy.sizes:
        model.warm_up(islice(CallPlanner(signature).prepared_shapes(), spec.prepared.max_prepared))
    return model


class TorchModel(HostModel):
    """An exported program on a device."""

    def __init__(
        self, signature: ModelSignature, program: Program, device: Device, properties: Mapping[str, Any]
    ) -> None:
        super().__init__(signature, properties, lambda: TorchRequest(signature, program, device))
        self._device = device
        self._before = device.preparations()

    @property
    def preparations(self) -> Preparations | None:
        """XLA compilations in this process since the model was made, other models included."""
        now, before = self._device.preparations(), self._before
        if now is None or before is None:
            return None
        return Preparations(count=now.count - before.count, hits=now.hits - before.hits)

    def warm_up(self, shapes: Iterable[PreparedSizes]) -> None:
        """Run calls on zeros, so that the device compiles these shapes now; shapes with an open dimension are
        skipped."""
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


def _properties(spec: ModelSpec) -> dict[str, Any]:
    properties: dict[str, Any] = {"float32_matmul_precision": "highest"}  # f32 by default
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
        warnings.simplefilter("ignore")  # PyTorch 2.9 warns of mixing its two interfaces for this setting
        torch.set_float32_matmul_precision(precision)
        # By default, CUDA rounds the inputs of convolutions to 10 bits.
        torch.backends.cudnn.allow_tf32 = precision != "highest"


def _program(module: torch.nn.Module, program: torch.export.ExportedProgram) -> Program:
    """Make a function from flat inputs to flat outputs; programs may take and return nested dictionaries and lists."""
    in_spec = program.call_spec.in_spec

    def call(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arguments, named = pytree.tree_unflatten(list(inputs), in_spec)
        return list(pytree.tree_leaves(module(*arguments, **named)))

    return call


def read_program(spec: ModelSpec) -> torch.export.ExportedProgram:
    """Return the program from the file or from memory; raises `ModelLoadError`, or `SignatureError` if it keeps a state."""
    program = spec.model if spec.path is None else _load(spec)
    if not isinstance(program, torch.export.ExportedProgram):
        raise spec.refused_by("torch", "an exported program")
    if changed := _changed(program):
        # A request would see the state of other requests.
        raise SignatureError(
            f"model {spec.name!r}: the program changes {', '.join(changed)} in each call; export it without these changes"
        )
    return program


def _changed(program: torch.export.ExportedProgram) -> list[str]:
    """Return the buffers and inputs that a call of the program changes."""
    operations = (node.target for node in program.graph.nodes if node.op == "call_function")
    if any(operation._schema.is_mutable for operation in operations if hasattr(operation, "_schema")):
        # Only the functional form shows which in-place operations are visible from outside.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's internal warnings
            program = program.run_decompositions({})
    signature = program.graph_signature
    return sorted({*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()})


def _load(spec: ModelSpec) -> torch.export.ExportedProgram:
    path = spec.path
    assert path is not None
    check_file(path)
    complaints = _FirstError()
    log = logging.getLogger(torch.export.__name__)
    log.addFilter(complaints)
    try:
        with warnings.catch_warnings():
            # PyTorch 2.9 warns of read-only buffers that it reads itself.
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:  # its errors have no common class but this
        reason = " ".join(str(complaints.first or error).split()) or type(error).__name__
        raise ModelLoadError(
            f"cannot read the model {path} as a program of torch.export: {reason}"
        ) from error
    finally:
        log.removeFilter(complaints)


class _FirstError(logging.Filter):
    """Keeps the first error that PyTorch logs while it reads a file, and hides all of them. PyTorch 2.9 logs the
    reason with a traceback, and raises an error that only refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the first error, and drop the record."""
        if record.exc_info and self.first is None:
            self.first = record.exc_info[1]
        return False


_TRACED_MINIMUM = 2
"""Smallest size that `torch.export` treats like any other; 0 and 1 are special cases."""


def ports_of(program: torch.export.ExportedProgram) -> tuple[list[FilePort], list[FilePort]]:
    """Return the program's inputs and outputs, in the order of its flattened arguments and results.

    Outputs of a dictionary are named by its keys, others `output0`, `output1`, …
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [
        _port(program, "input", getattr(each.arg, "name", ""), each.arg, values)
        for each in signature.input_specs
        if each.kind == InputKind.USER_INPUT
    ]
    returned = [each.arg for each in signature.output_specs if each.kind == OutputKind.USER_OUTPUT]
    names = _output_names(program, len(returned))
    outputs = [
        _port(program, "output", name, argument, values)
        for name, argument in zip(names, returned, strict=True)
    ]
    return inputs, outputs


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    returned = pytree.tree_unflatten(list(range(count)), program.call_spec.out_spec)
    if isinstance(returned, Mapping) and sorted(returned.values(), key=str) == sorted(range(count), key=str):
        by_number = {number: str(key) for key, number in returned.items()}
        return [by_number[number] for number in range(count)]
    return [f"output{number}" for number in range(count)]


def _port(
    program: torch.export.ExportedProgram, kind: str, name: str, argument: Any, values: Mapping[str, Any]
) -> FilePort:
    value = values.get(argument.name) if isinstance(argument, TensorArgument) else None
    if not isinstance(value, torch.Tensor):
        raise SignatureError(
            f"{kind} {name or argument!r} of the program is no tensor; export the program without it",
            key=(f"{kind}s", name),
        )
    if value.dtype not in ELEMENT_TYPES:
        raise SignatureError(
            f"{kind} {name!r} is of type {value.dtype}, which cannot be sent", key=(f"{kind}s", name)
        )
    axes = [_axis(program, size) for size in value.shape]
    return FilePort(
        name=name,
        element_type=ELEMENT_TYPES[value.dtype],
        symbols=tuple(symbol for symbol, _ in axes),
        dimensions=tuple(dimension for _, dimension in axes),
    )


def _axis(program: torch.export.ExportedProgram, size: Any) -> tuple[str | None, Dimension]:
    """Return the symbol of an axis, if its size is a symbol, and the admitted sizes."""
    if isinstance(size, int):
        return None, Dimension(size, size)
    expression = size.node.expr
    if not expression.is_Symbol:
        return None, Dimension()
    bounds = program.range_constraints.get(expression)
    dimension = Dimension() if bounds is None else _dimension(bounds.lower, bounds.upper)
    # Data-dependent sizes such as u0 name no dimension: two outputs may share a symbol by accident of tracing.
    return (None if str(expression).startswith("u") else str(expression)), dimension


def _dimension(lower: Any, upper: Any) -> Dimension:
    """Return the dimension between two SymPy bounds of PyTorch.

    PyTorch's integer infinity, `int_oo`, claims to be finite. Without a `min` above 2, tracing assumes two elements of
    each dynamic dimension. A program does not check that, and runs with fewer.
    """
    minimum = max(0, int(lower)) if lower.is_Integer else 0
    maximum = int(upper) if upper.is_Integer and int(upper) < MAX_SIZE else None
    assumed = maximum is None and minimum <= _TRACED_MINIMUM
    return Dimension(0 if assumed else minimum, maximum)

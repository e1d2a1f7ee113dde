"""The devices of programs, and the requests that call them: the host's CPUs, CUDA devices and XLA devices.

torch_xla's variable `PJRT_DEVICE` (`CPU`, `TPU`, …) chooses the XLA device.

Input tensors lie in host memory, and are copied to other devices. Arrays become tensors, and tensors arrays, over the same
memory.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export.passes import move_to_device_pass

from shapestream_engine.backends.host_request import HostRequest, InputTensor
from shapestream_engine.compiled_model import Preparations
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import EngineMissing, InferenceError, ModelLoadError
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

Program: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function from inputs on the device, in the signature's order, to outputs."""


class Device:
    """The host's CPUs; inputs are used without a copy."""

    kind: type[InputTensor] = InputTensor
    """The class of the requests' input tensors."""
    compiles = False
    """True if the first call of each shape compiles."""
    short_indices = False
    """True if i64 outputs of indices may arrive as i32."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        """PyTorch's name for the device."""

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one call, from host memory to host memory."""
        with torch.inference_mode():
            return program(inputs)

    def place(self, program: torch.export.ExportedProgram) -> torch.nn.Module:
        """Return the program's module, with its weights and constants on this device."""
        if self.name != "cpu":
            program = move_to_device_pass(program, self.name)
        module: torch.nn.Module = program.module()
        return module

    def preparations(self) -> Preparations | None:
        """Return the shapes that the device has compiled so far, for all models; None if it never compiles any."""
        return None


class PinnedTensor(InputTensor):
    """An input tensor in page-locked memory, which a CUDA device reads asynchronously."""

    __slots__ = ()

    def _new_storage(self, nbytes: int) -> np.ndarray[Any, Any]:
        storage: np.ndarray[Any, Any] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return storage


class CudaDevice(Device):
    """A CUDA device. Each slot's thread has its own stream, so that calls overlap."""

    kind = PinnedTensor

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._streams = threading.local()

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one call on the thread's stream: copy in, run, copy out."""
        stream = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = torch.cuda.Stream(self.name)
        with torch.inference_mode(), torch.cuda.stream(stream):
            outputs = program([tensor.to(self.name, non_blocking=True) for tensor in inputs])
            return [output.cpu() for output in outputs]


def find_device(model: str, name: str) -> Device:
    """Return the device of this name (`CPU`, `cuda`, `cuda:1`, `xla`); raises `ModelLoadError`, or `EngineMissing` for
    XLA."""
    name = name.lower()
    kind = name.partition(":")[0]
    if name == "cpu":
        return Device()
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = name.partition(":")[2] or "0"
        if number.isdecimal() and int(number) < count:
            return CudaDevice(f"cuda:{int(number)}")
        raise ModelLoadError(f"model {model!r}: no device {name!r} here; CUDA devices: {count}")
    if kind == "xla":
        return XlaDevice.of(model, name)
    raise ModelLoadError(f"model {model!r}: no device {name!r}; the engine torch has cpu, cuda and xla")


_BOUNDED = "nonzero:masked_select:masked_scatter"
"""Operations that stay on the device, with an upper bound for their result size, `<=25`, instead of running on the
host."""

_ONE_AT_A_TIME = threading.Lock()
"""The process has one graph of pending operations; calls in parallel would compile each other's operations."""


class XlaDevice(Device):
    """An XLA device. Calls of the process run one at a time; the first call of each shape compiles."""

    compiles = True
    short_indices = True  # indices of `nonzero`, seen on 2.9

    def __init__(self, name: str, xla: Any, metrics: Any) -> None:
        super().__init__(name)
        self._xla = xla
        self._metrics = metrics

    @classmethod
    def of(cls, model: str, name: str) -> XlaDevice:
        """Return the device `xla` or `xla:1`. Sets `XLA_EXPERIMENTAL`, which torch_xla reads once, unless it is set."""
        os.environ.setdefault("XLA_EXPERIMENTAL", _BOUNDED)
        try:
            xla: Any = importlib.import_module("torch_xla")
            metrics: Any = importlib.import_module("torch_xla.debug.metrics")
        except ModuleNotFoundError as error:
            if error.name != "torch_xla":
                raise
            raise EngineMissing("torch on xla", extra="torch-xla") from error
        except ImportError as error:
            raise ModelLoadError(f"torch_xla is installed but cannot be loaded: {error}") from error
        number = name.partition(":")[2] or "0"
        try:
            return cls(str(xla.device(int(number))), xla, metrics)
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"model {model!r}: no device {name!r} here: {' '.join(str(error).split())}"
            ) from error

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one call: record it, compile it if its shapes are new, run it, and copy its results in their true
        sizes."""
        # No `inference_mode`: torch_xla 2.9 cannot create tensors in it.
        with _ONE_AT_A_TIME, torch.no_grad():
            outputs = program([tensor.to(self.name) for tensor in inputs])
            self._xla.sync()  # one graph for all outputs; otherwise each copy would compile its own
            return [output.cpu() for output in outputs]

    def place(self, program: torch.export.ExportedProgram) -> torch.nn.Module:
        """Return the program's module without its checks of data-dependent sizes, which the host does not know."""
        module: Any = super().place(program)
        unwanted = (
            torch.ops.aten._assert_scalar.default,
            torch.ops.aten.sym_constrain_range_for_size.default,
            torch.ops.aten.sym_constrain_range.default,
        )
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in unwanted:
                module.graph.erase_node(node)
        module.graph.eliminate_dead_code()
        module.recompile()
        placed: torch.nn.Module = module
        return placed

    def preparations(self) -> Preparations:
        """Return compilations of this process, and calls whose graph was compiled already."""
        compiled = self._metrics.metric_data("CompileTime")
        return Preparations(
            count=0 if compiled is None else int(compiled[0]),
            hits=int(self._metrics.counter_value("CachedCompile") or 0),
        )


# ---------------------------------------------------------------- calls

ELEMENT_TYPES: dict[torch.dtype, str] = {
    torch.bool: "boolean",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
}
"""PyTorch's dtype -> OpenVINO's name of the element type."""


def tensor_of(array: Array, element_type: str) -> torch.Tensor:
    """Return a tensor over the array's memory."""
    if element_type == "bf16":  # PyTorch does not know ml_dtypes' bf16
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> Array:
    """Return an array over a host tensor's memory; elements that are not contiguous are copied."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.uint16).numpy()
        return bits.view(dtype_of("bf16"))
    array: Array = tensor.numpy()
    return array


class TorchRequest(HostRequest):
    """A request with host tensors, each with a view as a PyTorch tensor."""

    def __init__(self, signature: ModelSignature, program: Program, device: Device) -> None:
        super().__init__(signature, device.kind)
        self._program = program
        self._device = device
        self._arrays: list[Array | None] = [None] * len(self._tensors)
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._tensors)

    def run(self) -> list[Array]:
        """Run one call. Outputs lie in PyTorch's memory; on the CPU they may be views of the inputs."""
        try:
            outputs = self._device.run(self._program, self._inputs())
        except torch.OutOfMemoryError as error:
            raise MemoryError(_words(error)) from error
        except Exception as error:  # errors of the program's operations have no other common class
            if "can't allocate memory" in str(error):
                raise MemoryError(_words(error)) from error
            raise InferenceError(_words(error)) from error
        return [self._checked(number, output) for number, output in enumerate(outputs)]

    def _inputs(self) -> list[torch.Tensor]:
        for number, (port, tensor) in enumerate(zip(self.signature.inputs, self._tensors, strict=True)):
            data = tensor.data
            if data is not self._arrays[number]:  # a tensor makes a new view for each new shape
                self._arrays[number] = data
                self._views[number] = tensor_of(data, port.element_type)
        return self._views

    def _checked(self, number: int, output: torch.Tensor) -> Array:
        port = self.signature.outputs[number]
        shape = tuple(output.shape)
        if self._device.short_indices and port.element_type == "i64" and output.dtype == torch.int32:
            output = output.to(torch.int64)
        if ELEMENT_TYPES.get(output.dtype) != port.element_type or not port.partial_shape.admits(shape):
            raise InferenceError(
                f"output {port.name!r} is {port.element_type} {port.partial_shape} in the model file, and the call gave "
                f"{output.dtype} {list(shape)}"
            )
        return array_of(output)


def _words(error: BaseException) -> str:
    """Return the first paragraph of an error; the rest is source locations and advice for PyTorch developers."""
    text = str(error).split("\n\n")[0].split("\nException raised from")[0]
    return " ".join(text.split()) or type(error).__name__

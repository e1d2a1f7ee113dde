"""Calls of an exported program on input tensors in host memory, which are copied to other devices.

Arrays become tensors, and tensors arrays, over the same memory.
"""

from __future__ import annotations

import numpy as np
import torch

from shapestream_engine.backends.host_request import HostRequest
from shapestream_engine.backends.torch.devices import Device, Program
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

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

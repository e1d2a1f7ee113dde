"""Where OpenVINO leaves outputs: its own memory, reserved at once where bounds are small, or a tensor that was set."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov

from shapestream_engine.array_tensor import ArrayTensor
from shapestream_engine.backends.openvino.tensor import tensor_over
from shapestream_engine.element_types import dtype_of
from shapestream_engine.reservation import bound_shape, output_bounds, reserved
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import RESERVE_BYTES, Tensor

__all__ = ["CopiedOutput", "SetOutput", "reserve_outputs"]


def reserve_outputs(signature: ModelSignature, request: ov.InferRequest) -> None:
    """Outputs with small upper bounds are given them at once: no call then makes them grow.

    Afterwards they have no elements, as before. What is reserved costs address space, and memory once it is written.
    """
    for number, at_once in enumerate(reserved(output_bounds(signature))):
        if at_once and signature.outputs[number].is_dynamic:
            tensor = request.get_output_tensor(number)
            # A copy: what OpenVINO hands out shows the tensor's shape as it is by then.
            before = list(map(int, tensor.shape))
            tensor.shape = bound_shape(signature, number)
            tensor.shape = before


class SetOutput:
    """An output that OpenVINO leaves in a tensor of the caller's."""

    def __init__(
        self, signature: ModelSignature, request: ov.InferRequest, number: int, tensor: Tensor
    ) -> None:
        port = signature.outputs[number]
        self._tensor = tensor
        self._dtype = dtype_of(port.element_type)
        self._lent = isinstance(tensor, ArrayTensor)
        bound = bound_shape(signature, number)
        element_type = request.get_output_tensor(number).element_type
        if self._lent:
            assert bound is not None  # else it was refused
            before = tensor.shape
            tensor.shape = bound
            self._engine_tensor = tensor_over(tensor.data, element_type)
            tensor.shape = before
        else:
            nbytes = tensor.capacity_bytes
            if bound is not None:
                most = int(np.prod(bound)) * self._dtype.itemsize
                nbytes = max(nbytes, most if most <= RESERVE_BYTES else 0)
            smallest = [axis.minimum for axis in port.shape.dimensions]
            elements = max(1, -(-nbytes // self._dtype.itemsize))
            self._engine_tensor = ov.Tensor(element_type, [elements] + [1] * (max(1, len(smallest)) - 1))
            self._memory = _bytes(self._engine_tensor)
            self._engine_tensor.shape = smallest
            tensor.rest_on(self._memory, tuple(smallest))
        request.set_output_tensor(number, self._engine_tensor)

    def take_up(self) -> None:
        """After a call: the tensor shows what it gave."""
        shape = tuple(map(int, self._engine_tensor.shape))
        if self._lent:
            self._tensor.shape = shape
            return
        now = _bytes(self._engine_tensor)
        if now.nbytes > self._memory.nbytes or (now.nbytes and now.ctypes.data != self._memory.ctypes.data):
            self._memory = now  # it had to grow, which may have left it at its address
        self._tensor.rest_on(self._memory, shape)


class CopiedOutput:
    """An output that OpenVINO leaves where an input is, and that is copied from there into a tensor of the caller's."""

    def __init__(
        self, signature: ModelSignature, request: ov.InferRequest, number: int, tensor: Tensor
    ) -> None:
        self._request, self._number, self._tensor = request, number, tensor
        self._dtype = dtype_of(signature.outputs[number].element_type)

    def take_up(self) -> None:
        """After a call: the tensor holds what it gave."""
        data = self._request.get_output_tensor(self._number).data
        self._tensor.shape = data.shape
        self._tensor.data[...] = data.view(self._dtype)


def _bytes(tensor: ov.Tensor) -> np.ndarray[Any, Any]:
    data: np.ndarray[Any, Any] = tensor.data
    return data.reshape(-1).view(np.uint8)

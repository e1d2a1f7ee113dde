"""OpenVINO's inference requests, whose own input tensors are resized in place and reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from openvino._pyopenvino import InferRequest as PlainInferRequest

from shapestream_engine.backends.openvino.engine_words import engine_words
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError, ShapeError
from shapestream_engine.model import InferRequest
from shapestream_engine.ports import InputPort
from shapestream_engine.reservation import reserved, upper_bounds
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import TensorLike

__all__ = ["OpenVinoRequest", "OpenVinoTensor"]

_Array: TypeAlias = "np.ndarray[Any, Any]"

# The class that `ov.InferRequest` derives from: its `infer` wants no inputs and makes none, and costs half.
_infer = PlainInferRequest.infer


class OpenVinoTensor:
    """One of a request's own input tensors. Setting `shape` resizes it in place, as OpenVINO's `set_shape` does.

    It reallocates only if the shape needs more than the capacity, which then at least doubles, up to the upper bound.
    A reallocation is counted when the data moved to another address, which is asked of OpenVINO, not inferred.
    """

    __slots__ = ("_address", "_bound", "_capacity", "_data", "_dtype", "_port", "_request", "_shape", "_tensor",
                 "reallocations")  # fmt: skip

    def __init__(
        self, request: OpenVinoRequest, tensor: Any, port: InputPort, bound: int | None, *, reserve: bool
    ) -> None:
        self._request = request
        self._tensor = tensor
        self._port = port
        self._dtype = dtype_of(port.element_type)
        self._bound = bound
        self.reallocations = 0
        """How often the data moved to another address since the tensor was made."""
        dimensions = port.shape.dimensions
        self._capacity = int(tensor.byte_size)
        if reserve and bound is not None and bound > self._capacity:
            self._reserve(bound)
        self._tensor.shape = [0 if axis.is_dynamic else axis.minimum for axis in dimensions]
        self._shape = tuple(self._tensor.shape)
        self._data = self._view()
        self._address = self._data.ctypes.data

    @property
    def element_type(self) -> str:
        """OpenVINO's name of the element type, such as `f32`."""
        return self._port.element_type

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis. Setting it raises `ShapeError` for a shape that the port does not take."""
        return self._shape

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        shape = tuple(shape)
        if shape == self._shape:
            return
        port = self._port
        # OpenVINO takes any shape at any time: a wrong one fails later, and one set during a call corrupts memory.
        if not port.shape.partial_shape.admits(shape):
            raise ShapeError(f"input {port.name!r} takes [{port.shape}], not {list(shape)}")
        if self._request.running:
            raise InferenceError(f"input {port.name!r} cannot be resized while its request runs")
        needed = self._dtype.itemsize
        for size in shape:
            needed *= size
        if needed > self._capacity:
            self._grow(needed)
        self._tensor.shape = shape
        self._shape = shape
        self._data = data = self._view()
        if needed:
            address = data.ctypes.data
            self.reallocations += address != self._address
            self._address = address

    @property
    def data(self) -> _Array:
        """A view of exactly `shape`, in OpenVINO's memory; valid until the shape is set again."""
        return self._data

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a shape may take without a reallocation."""
        return self._capacity

    def _grow(self, needed: int) -> None:
        """Doubling makes the cost of growth a constant per byte; the bound keeps it from taking what cannot come."""
        doubled = 2 * self._capacity
        self._reserve(max(needed, doubled if self._bound is None else min(doubled, self._bound)))

    def _reserve(self, nbytes: int) -> None:
        # `set_shape` takes any shape of the rank; this one has as many elements as are wanted.
        elements = -(-nbytes // self._dtype.itemsize)
        self._tensor.shape = [elements] + [1] * (len(self._port.shape) - 1)
        self._capacity = elements * self._dtype.itemsize

    def _view(self) -> _Array:
        data: _Array = self._tensor.data
        # bf16, which NumPy has no type of its own for, comes as a type of the same size.
        return data if data.dtype == self._dtype else data.view(self._dtype)

    def __repr__(self) -> str:
        return f"OpenVinoTensor({self.element_type}, {list(self._shape)}, {self._data.nbytes} of {self._capacity} bytes)"


class OpenVinoRequest(InferRequest):
    """An `ov.InferRequest` and its own tensors, wrapped once."""

    def __init__(self, signature: ModelSignature, request: ov.InferRequest, *, stateful: bool) -> None:
        super().__init__(signature)
        self._request = request
        self._stateful = stateful
        self.running = False
        """A call that `start_async` began is not over, or `infer` runs."""
        bounds = upper_bounds(signature)
        self._tensors = tuple(
            OpenVinoTensor(self, request.get_input_tensor(number), port, bound, reserve=at_once)
            for number, (port, bound, at_once) in enumerate(
                zip(signature.inputs, bounds, reserved(bounds), strict=True)
            )
        )
        self._dtypes = tuple(dtype_of(port.element_type) for port in signature.outputs)

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The request's own input tensors, in the order of the signature."""
        return self._tensors

    def infer(self) -> None:
        """Run in this thread; raises `InferenceError` with OpenVINO's words. Other threads run meanwhile."""
        self.running = True
        try:
            if self._stateful:
                self._request.reset_state()
            _infer(self._request, {}, share_outputs=True, decode_strings=False)
        except RuntimeError as error:
            raise InferenceError(engine_words(error)) from error
        finally:
            self.running = False

    def start_async(self) -> None:
        """Begin to run on a thread of OpenVINO's."""
        self.running = True
        try:
            if self._stateful:
                self._request.reset_state()
            self._request.start_async()
        except RuntimeError as error:
            self.running = False
            raise InferenceError(engine_words(error)) from error

    def wait(self) -> None:
        """Until the call is over; raises `InferenceError` with OpenVINO's words. Other threads run meanwhile."""
        try:
            self._request.wait()
        except RuntimeError as error:
            raise InferenceError(engine_words(error)) from error
        finally:
            self.running = False

    def cancel(self) -> None:
        """Ask the running call to stop: it raises, and the request can be used again. Without a call: nothing."""
        self._request.cancel()

    def outputs(self) -> list[_Array]:
        """The outputs of the last call, as views of OpenVINO's memory: copy before the next call."""
        tensor = self._request.get_output_tensor
        return [
            data if (data := tensor(number).data).dtype == dtype else data.view(dtype)
            for number, dtype in enumerate(self._dtypes)
        ]

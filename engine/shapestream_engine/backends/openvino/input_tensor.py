"""An input tensor of an inference request, in OpenVINO's memory, resized in place."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import openvino as ov

from shapestream_engine.backends.host_request import StringInputTensor
from shapestream_engine.backends.openvino.runtime import engine_words
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError, InvalidInput, ShapeError
from shapestream_engine.infer_request import RequestTensor, Runs
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import MAX_SIZE
from shapestream_engine.tensor import Array, TensorLike


def tensor_over(data: Array, element_type: ov.Type) -> ov.Tensor:
    """Return an OpenVINO tensor over an array's memory; it keeps the memory alive."""
    # NumPy lacks bf16; the view has the same item size.
    known = data.view(np.uint16) if data.dtype.kind == "V" else data
    return ov.Tensor(known, ov.Shape(data.shape), element_type)


class TensorOwner(Runs, Protocol):
    """The attributes of a request that its tensors need."""

    engine_request: ov.InferRequest


class OpenVinoTensor(RequestTensor):
    """An input tensor of a request. Setting `shape` resizes it in place, as OpenVINO's `set_shape` does.

        tensor = request.input_tensor("ids")
        tensor.shape = (2, 7)
        tensor.data[...] = 1

    Memory is reallocated only if the shape exceeds the capacity. The capacity then at least doubles, up to the upper
    bound. A reallocation is counted if the address changed, which is read from OpenVINO. `use` replaces the tensor by a
    tensor of the caller's, which OpenVINO then reads directly.
    """

    __slots__ = ("_address", "_bound", "_capacity", "_data", "_dtype", "_number", "_port", "_request", "_shape", "_shown",
                 "_tensor", "outside", "reallocations")  # fmt: skip

    _request: TensorOwner

    def __init__(
        self, request: TensorOwner, number: int, port: InputPort, bound: int | None, *, reserve: bool
    ) -> None:
        self._request = request
        self._number = number
        # Not OpenVINO's own: memory is corrupted where that is moved away from a request with a failed call, and both are
        # freed (2026.4.1).
        element_type = request.engine_request.get_input_tensor(number).element_type
        self._tensor = ov.Tensor(element_type, [axis.minimum for axis in port.shape.dimensions])
        request.engine_request.set_input_tensor(number, self._tensor)
        self._port = port
        self._dtype = dtype_of(port.element_type)
        self._bound = bound
        self._capacity = 0 if port.is_dynamic else int(self._tensor.byte_size)
        self._shape = ()
        self.outside = None
        self._shown: Array | None = None
        self.reallocations = 0
        """Moves of the data to another address since the tensor was made."""
        if reserve and bound is not None and bound > self._capacity:
            self._reserve(bound)
        self._address = self._view().ctypes.data if self._capacity else 0
        self._empty()

    @property
    def element_type(self) -> str:
        """OpenVINO's name of the element type, such as `f32`."""
        return self._port.element_type

    def _resize(self, shape: tuple[int, ...]) -> None:
        """Resize OpenVINO's tensor.

        OpenVINO accepts any shape at any time: a wrong shape fails later, and a change during a call corrupts memory.
        """
        port = self._port
        needed = self._dtype.itemsize
        for size in shape:
            needed *= size
        if needed > MAX_SIZE:
            raise ShapeError(
                f"input {port.name!r}: {list(shape)} has more bytes than any machine can address"
            )
        try:
            if needed > self._capacity:
                self._grow(needed)
            self._tensor.shape = shape
        except RuntimeError as error:
            self._replace()
            raise MemoryError(f"input {port.name!r} of shape {list(shape)}: {engine_words(error)}") from error
        self._shape = shape
        self._data = data = self._view()
        if needed:
            address = data.ctypes.data
            self.reallocations += address != self._address
            self._address = address

    @property
    def capacity_bytes(self) -> int:
        """Largest size in bytes of a shape without a reallocation."""
        return self._capacity

    @property
    def is_outside(self) -> bool:
        """Tell whether a tensor of the caller's replaces this one."""
        return self.outside is not None

    def use(self, outside: TensorLike | None) -> None:
        """Let OpenVINO read the tensor `outside`; None: this tensor again."""
        was_outside = self.is_outside
        super().use(outside)
        if outside is None and was_outside:
            self._set()
        self._shown = None

    def move(self) -> None:
        """Attach the tensor, with its contents, to the request's new OpenVINO request."""
        self._shown = None
        if self.outside is None:
            self._set()

    def _set(self) -> None:
        # OpenVINO refuses a tensor that the model would refuse, such as an empty one.
        self._tensor.shape = [axis.minimum for axis in self._port.shape.dimensions]
        self._request.engine_request.set_input_tensor(self._number, self._tensor)
        self._tensor.shape = self._shape

    def show(self) -> None:
        """Attach the tensor from outside as it is before a call; raises `ShapeError` if its shape does not fit."""
        if self.outside is None or (data := self.outside.data) is self._shown:
            return
        self._port.admitted(data.shape)
        self._request.engine_request.set_input_tensor(
            self._number, tensor_over(data, self._tensor.element_type)
        )
        self._shown = data

    def _grow(self, needed: int) -> None:
        """Double the capacity, so that growth costs a constant per byte, but not beyond the upper bound."""
        doubled = 2 * self._capacity
        self._reserve(max(needed, doubled if self._bound is None else min(doubled, self._bound)))

    def _reserve(self, nbytes: int) -> None:
        # `set_shape` accepts any shape of the rank; this shape has the wanted number of elements.
        elements = -(-nbytes // self._dtype.itemsize)
        self._tensor.shape = [elements] + [1] * (len(self._port.shape) - 1)
        self._capacity = elements * self._dtype.itemsize

    def _empty(self) -> None:
        self._tensor.shape = [0 if axis.is_dynamic else axis.minimum for axis in self._port.shape.dimensions]
        self._shape = tuple(map(int, self._tensor.shape))
        self._data = self._view()

    def _replace(self) -> None:
        """Replace OpenVINO's tensor after a failed allocation: it reports its old capacity, but has no memory
        (2026.4)."""
        request = self._request.engine_request
        smallest = ov.Shape([axis.minimum for axis in self._port.shape.dimensions])
        request.set_input_tensor(self._number, ov.Tensor(self._tensor.element_type, smallest))
        self._tensor = request.get_input_tensor(self._number)
        self._capacity = int(self._tensor.byte_size)
        self._address = 0
        self._empty()

    def _view(self) -> Array:
        data: Array = self._tensor.data
        # NumPy lacks bf16; OpenVINO returns a type of the same size.
        return data if data.dtype == self._dtype else data.view(self._dtype)

    def __repr__(self) -> str:
        if self.outside is not None:
            return f"OpenVinoTensor({self.element_type}, from outside: {self.outside!r})"
        return f"OpenVinoTensor({self.element_type}, {list(self._shape)}, {self._data.nbytes} of {self._capacity} bytes)"


class OpenVinoStringTensor(StringInputTensor):
    """An input tensor of strings of a request; each call gives OpenVINO a copy of its contents.

    OpenVINO's Python interface copies strings as arrays of NumPy's type `S`, which drop zero bytes at the end of an element.
    So an input whose element ends with one is refused, and an output lacks them.
    """

    __slots__ = ("_number",)
    _request: TensorOwner
    is_outside = True
    """OpenVINO never reads this tensor itself, so each call shows it."""

    def __init__(self, request: TensorOwner, number: int, port: InputPort) -> None:
        self._number = number
        super().__init__(request, port)

    def move(self) -> None:
        """Do nothing: the next call shows the tensor to the request's new OpenVINO request."""

    def show(self) -> None:
        """Give OpenVINO a copy of the contents before a call.

        Raises `InvalidInput` for a string that ends with a zero byte, and `ShapeError` for a shape that does not fit.
        """
        data = self.data
        self._port.admitted(data.shape)
        encoded = [element.encode() for element in data.ravel().tolist()]
        for index, element in enumerate(encoded):
            if element.endswith(b"\0"):
                raise InvalidInput(
                    f"input {self._port.name!r}: element {index} ends with a zero byte, which OpenVINO would drop"
                )
        tensor = ov.Tensor(ov.Type.string, ov.Shape(data.shape))
        if encoded:
            tensor.bytes_data = np.array(encoded, np.bytes_).reshape(data.shape)
        self._request.engine_request.set_input_tensor(self._number, tensor)


def strings_of(tensor: ov.Tensor) -> Array:
    """Return the strings of an output as objects; raises `InferenceError` where they are no UTF-8."""
    array = np.empty(tuple(map(int, tensor.shape)), object)
    if array.size:
        try:
            array.reshape(-1)[:] = [element.decode() for element in tensor.bytes_data.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InferenceError(f"an output's string is no UTF-8: {error.reason}") from None
    return array

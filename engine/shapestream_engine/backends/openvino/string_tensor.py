"""Strings of an OpenVINO request. OpenVINO's Python interface copies them, as arrays of NumPy's type `S`.

These arrays drop zero bytes at the end of an element. So an input whose element ends with one is refused, and an output
lacks them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov

from shapestream_engine.backends.openvino.input_tensor import TensorOwner
from shapestream_engine.errors import InferenceError, InvalidInput
from shapestream_engine.ports import InputPort
from shapestream_engine.string_tensor import StringTensor
from shapestream_engine.tensor import Array, TensorLike


class OpenVinoStringTensor(StringTensor):
    """An input tensor of strings of a request; each call gives OpenVINO a copy of its contents."""

    __slots__ = ("_number", "_outside", "_port", "_request")

    def __init__(self, request: TensorOwner, number: int, port: InputPort) -> None:
        self._outside: TensorLike | None = None
        self._request, self._number, self._port = request, number, port
        dimensions = port.shape.dimensions
        super().__init__(port.element_type, [0 if axis.is_dynamic else axis.minimum for axis in dimensions])

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis; setting it is `set_shape`."""
        return self._shape if self._outside is None else self._outside.shape

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self.set_shape(shape)

    @property
    def data(self) -> Array:
        """The array of objects of `shape`, valid until the shape is set again."""
        return self._data if self._outside is None else self._outside.data

    def set_shape(self, shape: Sequence[int]) -> None:
        """Resize the tensor; raises `ShapeError` for a shape that the port does not take."""
        if self._request.running:
            raise InferenceError(f"input {self._port.name!r} cannot be resized while its request runs")
        if self._outside is not None:
            self._outside.shape = self._port.admitted(shape)
        elif shape != self._shape:
            self._resize(self._port.admitted(shape))

    @property
    def is_outside(self) -> bool:
        """True: OpenVINO never reads this tensor itself, so each call shows it."""
        return True

    def use(self, outside: TensorLike | None) -> None:
        """Let OpenVINO read the tensor `outside`; None: this tensor again."""
        if self._request.running:
            raise InferenceError(f"input {self._port.name!r} cannot be exchanged while its request runs")
        self._outside = outside

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

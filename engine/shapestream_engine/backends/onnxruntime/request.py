"""Calls of ONNX Runtime on the request's input tensors, without a copy on the way in or out."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import onnxruntime as ort

from shapestream_engine.backends.host_request import HostRequest
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_WHERE = re.compile(r"/\S+:\d+ [^()]*\([^()]*\)(?: const)? ")


def engine_words(error: BaseException) -> str:
    """Return the message of an ONNX Runtime error in one line, without codes and source locations."""
    text = _WHERE.sub("", _CODE.sub("", str(error)))
    return " ".join(text.split()) or type(error).__name__


_BF16 = 16
"""ONNX's number for bfloat16; NumPy lacks the type."""


class OnnxRuntimeRequest(HostRequest):
    """An inference request with one `IOBinding` of a session.

    An input is bound again only when its shape or address has changed. An output whose shape the inputs determine keeps
    its memory as long as the input shapes stay equal. Each call allocates all other outputs from ONNX Runtime's arena.
    """

    def __init__(self, signature: ModelSignature, session: ort.InferenceSession) -> None:
        super().__init__(signature)
        self._session = session
        self._binding = session.io_binding()
        self._inputs = tuple(
            (argument.name, tensor, _bound_type(port.element_type))
            for argument, tensor, port in zip(
                session.get_inputs(), self._tensors, signature.inputs, strict=True
            )
        )
        self._bound: list[Array | None] = [None] * len(self._inputs)
        self._output_names = tuple(argument.name for argument in session.get_outputs())
        self._by_data = _depending_on_data(signature)
        self._keep_outputs = False
        self._dtypes = tuple(dtype_of(port.element_type) for port in signature.outputs)
        self._values: Any = None

    def run(self) -> list[Array]:
        """Run one call; its outputs lie in ONNX Runtime's memory until the next call."""
        kept = not self._bind_inputs() and self._keep_outputs
        self._bind_outputs(self._by_data if kept else range(len(self._output_names)))
        self._keep_outputs = False
        try:
            self._call()
        except InferenceError:
            if not kept:
                raise
            # The file may state a wrong dimension for an output; then every call allocates every output.
            self._bind_outputs(range(len(self._output_names)))
            self._call()
            self._by_data = tuple(range(len(self._output_names)))
        self._keep_outputs = True
        self._values = values = self._binding._iobinding.get_outputs()
        return [_array(value, dtype) for value, dtype in zip(values, self._dtypes, strict=True)]

    def _call(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its errors have no common class but this
            raise _error_of(error) from error

    def _bind_inputs(self) -> bool:
        """Bind the inputs whose shape or address changed since the last call; tell whether any did."""
        changed = False
        for number, (name, tensor, element_type) in enumerate(self._inputs):
            data = tensor.data
            if data is not self._bound[number]:  # a tensor makes a new view for each shape
                self._binding.bind_input(name, "cpu", 0, element_type, data.shape, data.ctypes.data)
                self._bound[number] = data
                changed = True
        return changed

    def _bind_outputs(self, numbers: Any) -> None:
        for number in numbers:
            self._binding.bind_output(self._output_names[number])


class OnnxRuntimeStringRequest(HostRequest):
    """An inference request of a model with strings, which ONNX Runtime binds to no memory: each call copies all tensors."""

    def __init__(self, signature: ModelSignature, session: ort.InferenceSession) -> None:
        super().__init__(signature)
        self._session = session
        self._input_names = tuple(argument.name for argument in session.get_inputs())
        self._output_names = tuple(argument.name for argument in session.get_outputs())

    def run(self) -> list[Array]:
        """Run one call; its outputs are arrays of their own."""
        arrays = {name: tensor.data for name, tensor in zip(self._input_names, self._tensors, strict=True)}
        try:
            outputs: list[Array] = self._session.run(self._output_names, arrays)
        except Exception as error:  # its errors have no common class but this
            raise _error_of(error) from error
        return outputs


def _error_of(error: Exception) -> MemoryError | InferenceError:
    words = engine_words(error)
    return MemoryError(words) if "Failed to allocate memory" in words else InferenceError(words)


def _bound_type(element_type: str) -> Any:
    return _BF16 if element_type == "bf16" else dtype_of(element_type).type


def _depending_on_data(signature: ModelSignature) -> tuple[int, ...]:
    """Return the outputs whose shapes may differ between calls of equal input shapes."""
    known = {name for port in signature.inputs for name in port.shape.names if name is not None}
    return tuple(
        number
        for number, port in enumerate(signature.outputs)
        if any(
            dimension.is_dynamic and name not in known
            for name, dimension in zip(port.shape.names, port.shape.dimensions, strict=True)
        )
    )


def _array(value: Any, dtype: np.dtype[Any]) -> Array:
    if dtype.kind != "V":
        array: Array = value.numpy()
        return array
    # NumPy has no bf16, so the array is made from the address; `_values` keeps the memory alive.
    shape = value.shape()
    memory = (ctypes.c_uint16 * int(np.prod(shape))).from_address(value.data_ptr())
    bits: Array = np.ctypeslib.as_array(memory)
    return bits.view(dtype).reshape(shape)

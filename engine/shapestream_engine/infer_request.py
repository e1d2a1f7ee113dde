"""Inference requests: the interface to one call at a time that every backend keeps, and what all of them share.

A request has input tensors of its own, which are resized in place, filled and reused. Instead of these it may use a
tensor of the caller's, for inputs and for outputs; that is for programs that use the engine alone. Slots never do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapestream_engine.errors import ElementTypeError, InferenceError, ShapeError
from shapestream_engine.input_arrays import InputArrays, as_port_array, in_port_order
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import ArrayTensor, Tensor, TensorLike, output_bounds


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output of the last call, in the engine's own memory: valid until the request's next call."""

    element_type: str
    data: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(self.data.shape)


class InferResults(Mapping[str, np.ndarray[Any, Any]]):
    """The outputs of a request's last call, by name; a number works too. Views, until the next call: copy what must last."""

    __slots__ = ("_request",)

    def __init__(self, request: InferRequest) -> None:
        self._request = request

    def __getitem__(self, port: int | str) -> np.ndarray[Any, Any]:
        return self._request.outputs()[port_number("output", port, self._request.signature)]

    def __iter__(self) -> Iterator[str]:
        return (port.name for port in self._request.signature.outputs)

    def __len__(self) -> int:
        return len(self._request.signature.outputs)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {array.dtype} {list(array.shape)}" for name, array in self.items())
        return f"<InferResults {shapes}>"


class InferRequest(ABC):
    """One call at a time of a compiled model, with input tensors of its own.

    Used by one thread. A call that has begun runs to its end: no engine is asked to stop one (docs/backends.md says why).
    Before the first call outputs have 0 in each dynamic dimension.
    """

    def __init__(self, signature: ModelSignature) -> None:
        self.signature = signature

    @property
    @abstractmethod
    def input_tensors(self) -> Sequence[TensorLike]:
        """The request's own input tensors, in the order of the signature; resize them in place."""

    @abstractmethod
    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run on what the input tensors hold, to the end; raises `InferenceError`. The request stays usable.

        With `inputs`, `fill` comes first. Returns the outputs by name, `InferResults(self)`: views, until the next call.
        """

    @abstractmethod
    def start_async(self) -> None:
        """Begin to run; the tensors must not be touched before `wait` has returned."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the end of the call that `start_async` began; raises `InferenceError` if it failed."""

    @abstractmethod
    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """The outputs of the last call, as views of the engine's memory: copy before the next call."""

    def input_tensor(self, port: int | str = 0) -> TensorLike:
        """The input tensor of a port, by number or name."""
        return self.input_tensors[port_number("input", port, self.signature)]

    def output_tensor(self, port: int | str = 0) -> OutputTensor:
        """The output of a port, by number or name, of the last call."""
        number = port_number("output", port, self.signature)
        return OutputTensor(self.signature.outputs[number].element_type, self.outputs()[number])

    def fill(self, inputs: InputArrays) -> None:
        """Give every input its value: arrays are copied into the request's own tensors, tensors go to `set_input_tensor`.

        Raises `ShapeError` for what a port does not take; tensors before that one are filled then.
        """
        values = in_port_order(self.signature.inputs, inputs)
        for number, (port, value) in enumerate(zip(self.signature.inputs, values, strict=True)):
            # An array is asked first: of one whose type no buffer has, such as bf16, nothing may ask for `data`.
            if not isinstance(value, np.ndarray) and isinstance(value, TensorLike):
                self.set_input_tensor(number, value)
                continue
            array = as_port_array(port, value)
            self.set_input_tensor(number, None)
            tensor = self.input_tensors[number]
            tensor.shape = array.shape
            tensor.data[...] = array

    def set_input_tensor(self, port: int | str, tensor: TensorLike | None) -> None:
        """Let later calls read this input from `tensor`, as it is when they start; None: from the request's own again.

        The request's own tensor of the port then stands for this one: resizing either resizes it. OpenVINO, ONNX Runtime,
        PyTorch on a CPU and functions read its memory without a copy. A shape that the port does not take is refused when
        the call starts.
        """
        number = port_number("input", port, self.signature)
        if tensor is not None:
            _check_element_type("input", self.signature.inputs[number], tensor)
        self._use_input(number, tensor)

    def set_output_tensor(self, port: int | str, tensor: Tensor) -> None:
        """Let later calls leave this output in `tensor`, and give it the output's shape, in place while it fits.

        A tensor over a caller's array (`ArrayTensor`) cannot grow: it is refused, with `ShapeError`, unless the output's
        upper bound fits. Any other grows where it must. OpenVINO writes into it without a copy: into the array, or else
        into memory of its own, of at least the same capacity, which the tensor takes up. Other engines copy.
        """
        number = port_number("output", port, self.signature)
        _check_element_type("output", self.signature.outputs[number], tensor)
        bound = output_bounds(self.signature)[number]
        if isinstance(tensor, ArrayTensor) and (bound is None or bound > tensor.capacity_bytes):
            needs = "may need any number of bytes" if bound is None else f"may need {bound} bytes"
            raise ShapeError(
                f"output {self.signature.outputs[number].name!r} {needs}, and an array of {tensor.capacity_bytes} bytes "
                f"cannot grow; bound the shapes of the inputs, or set a Tensor"
            )
        self._use_output(number, tensor)

    def _use_input(self, number: int, tensor: TensorLike | None) -> None:
        if tensor is not None:
            raise InferenceError(f"a {type(self).__name__} reads from its own input tensors only")

    def _use_output(self, number: int, tensor: Tensor) -> None:
        raise InferenceError(f"a {type(self).__name__} leaves outputs in the engine's memory only")

    @property
    def reallocations(self) -> int:
        """Moves of the input tensors' data to another address, since the request was made."""
        return sum(tensor.reallocations for tensor in self.input_tensors)


def port_number(kind: str, port: int | str, signature: ModelSignature) -> int:
    """The number of a port that is given by number or name; raises `KeyError` that lists the names."""
    names = [each.name for each in (signature.inputs if kind == "input" else signature.outputs)]
    if isinstance(port, str) and port in names:
        return names.index(port)
    if isinstance(port, int) and 0 <= port < len(names):
        return port
    raise KeyError(f"no {kind} {port!r}; model {signature.name!r} has {', '.join(names)}")


def _check_element_type(kind: str, port: InputPort | OutputPort, tensor: TensorLike) -> None:
    if tensor.element_type != port.element_type:
        raise ElementTypeError(
            f"{kind} {port.name!r} is {port.element_type}, and the tensor {tensor.element_type}"
        )

"""The base of engines whose input tensors lie in host memory that this package allocates: models and requests.

Tensors are resized in place. A call blocks its thread; `start_async` runs the call on a thread of the request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shapestream_engine.arrays import InputArrays, array_dtype
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.infer_request import BackgroundCall, InferRequest, InferResults, RequestTensor, Runs
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import (
    RESERVE_BYTES,
    Array,
    StringTensor,
    Tensor,
    TensorLike,
    reserved,
    upper_bounds,
)


class InputTensor(RequestTensor, Tensor):
    """An input tensor of numbers of a request."""

    __slots__ = ("_port", "_request", "outside")

    def __init__(
        self, request: HostRequest, port: InputPort, *, upper_bound_bytes: int | None, reserve_bytes: int
    ) -> None:
        self._request = request
        self.outside = None
        super().__init__(
            port.element_type,
            _empty_shape(port),
            upper_bound_bytes=upper_bound_bytes,
            reserve_bytes=reserve_bytes,
        )
        self._port = port


class StringInputTensor(RequestTensor, StringTensor):
    """An input tensor of strings of a request."""

    __slots__ = ("_port", "_request", "outside")

    def __init__(self, request: Runs, port: InputPort) -> None:
        self._request = request
        self.outside = None
        super().__init__(port.element_type, _empty_shape(port))
        self._port = port


def _empty_shape(port: InputPort | OutputPort) -> list[int]:
    return [0 if axis.is_dynamic else axis.minimum for axis in port.shape.dimensions]


class HostRequest(InferRequest):
    """A request over tensors in host memory. An engine implements `run`, which is one call.

    Tensors from outside may replace the request's own tensors.
    """

    def __init__(self, signature: ModelSignature, kind: type[InputTensor] = InputTensor) -> None:
        super().__init__(signature)
        self.running = False
        """True during a call; the tensors must not change then."""
        bounds = upper_bounds(signature)
        self._tensors = tuple(
            StringInputTensor(self, port)
            if port.is_string
            else kind(self, port, upper_bound_bytes=bound, reserve_bytes=RESERVE_BYTES if at_once else 0)
            for port, bound, at_once in zip(signature.inputs, bounds, reserved(bounds), strict=True)
        )
        self._outputs: list[Array] = [
            np.empty(_empty_shape(port), array_dtype(port.element_type)) for port in signature.outputs
        ]
        self._outside = False
        """True if an input uses a tensor of the caller's."""
        self._set_outputs: dict[int, Tensor] = {}
        self._background = BackgroundCall()

    @abstractmethod
    def run(self) -> list[Array]:
        """Run one call and return its outputs. Raises `InferenceError`, or `MemoryError` if the device lacks memory."""

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The request's own input tensors, in the order of the signature."""
        return self._tensors

    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run a call in this thread, on `inputs` if given; other threads continue meanwhile."""
        if inputs is not None:
            self.fill(inputs)
        if self._outside:
            self._check_outside()
        self.running = True
        self._finish()
        return self._results

    def start_async(self) -> None:
        """Start a call on the request's thread; raises `RuntimeError` if nothing waited for the last call."""
        self._background.check_free()
        if self._outside:
            self._check_outside()
        self.running = True
        self._background.start(self._finish)

    def wait(self) -> None:
        """Wait for the call that `start_async` started, and raise its error. Without a call, return at once."""
        self._background.wait()

    def outputs(self) -> list[Array]:
        """Return the outputs of the last successful call; copy them before the next call."""
        return self._outputs

    def _check_outside(self) -> None:
        """Raise `ShapeError` if the caller gave a tensor of its own a shape that the port does not take."""
        for port, tensor in zip(self.signature.inputs, self._tensors, strict=True):
            port.admitted(tensor.shape)

    def _finish(self) -> None:
        try:
            outputs = self.run()
            for number, tensor in self._set_outputs.items():
                tensor.shape = outputs[number].shape
                tensor.data[...] = outputs[number]
                outputs[number] = tensor.data
            self._outputs = outputs
        finally:
            self.running = False

    def _use_input(self, number: int, tensor: TensorLike | None) -> None:
        self._tensors[number].use(tensor)
        self._outside = any(each.outside is not None for each in self._tensors)

    def _use_output(self, number: int, tensor: Tensor) -> None:
        self._set_outputs[number] = tensor


class HostModel(CompiledModel):
    """A model whose requests are `HostRequest`s; `make` makes one. Requests may run at the same time.

    HostModel(signature, {"library": "acme 1.0"}, lambda: AcmeRequest(signature, matrix))
    """

    def __init__(
        self, signature: ModelSignature, properties: Mapping[str, Any], make: Callable[[], HostRequest]
    ) -> None:
        super().__init__(signature, properties)
        self._make: Callable[[], HostRequest] | None = make

    def create_infer_request(self) -> HostRequest:
        """Create a request with its own tensors; small upper bounds are reserved at once."""
        if self._make is None:
            raise self.is_closed()
        return self._make()

    def close(self) -> None:
        """Release the model; its memory is freed with the last of its requests."""
        self._make = None

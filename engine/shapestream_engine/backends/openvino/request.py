"""OpenVINO's inference requests, whose own input tensors are resized in place and reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov

from shapestream_engine.backends.openvino.input_tensor import OpenVinoTensor, tensor_over
from shapestream_engine.backends.openvino.runtime import engine_words
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError
from shapestream_engine.infer_request import InferRequest, InferResults
from shapestream_engine.input_arrays import InputArrays
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import (
    RESERVE_BYTES,
    Array,
    ArrayTensor,
    Tensor,
    TensorLike,
    bound_shape,
    output_bounds,
    port_bounds,
    reserved,
    upper_bounds,
)


class CompiledGraph:
    """A model as OpenVINO compiled it, and as it compiles it anew."""

    def __init__(self, compile_model: Callable[[], ov.CompiledModel]) -> None:
        self._compile = compile_model
        self.compiled = compile_model()
        self.user: Callable[[], object | None] = lambda: None
        """Returns the request that was made last, while it is there."""

    def renew(self) -> None:
        """Compile the model again."""
        self.compiled = self._compile()


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
        self._number = number
        self.move(request)

    def move(self, request: ov.InferRequest) -> None:
        """Let this request leave the output there, from now on."""
        request.set_output_tensor(self._number, self._engine_tensor)

    def take_up(self) -> None:
        """Make the caller's tensor show the output of the call that is over."""
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

    def move(self, request: ov.InferRequest) -> None:
        """Copy the output of this request, from now on."""
        self._request = request

    def take_up(self) -> None:
        """Copy the output of the call that is over to the caller's tensor."""
        data = self._request.get_output_tensor(self._number).data
        self._tensor.shape = data.shape
        self._tensor.data[...] = data.view(self._dtype)


def _bytes(tensor: ov.Tensor) -> np.ndarray[Any, Any]:
    data: np.ndarray[Any, Any] = tensor.data
    return data.reshape(-1).view(np.uint8)


class OpenVinoRequest(InferRequest):
    """An `ov.InferRequest` and its own tensors, wrapped once."""

    def __init__(
        self,
        signature: ModelSignature,
        graph: CompiledGraph,
        *,
        stateful: bool,
        spoils: bool = False,
        forwarded: frozenset[int] = frozenset(),
        ports: Sequence[InputPort] | None = None,
    ) -> None:
        """`spoils`: a call that fails leaves the graph such that later ones may be wrong; then it is this request's own.

        `forwarded`: outputs that are inputs, with nothing in between.

        `ports`: the inputs of a model that is prepared for fewer shapes than the signature says.
        """
        super().__init__(signature)
        self._graph = graph
        self._spoils = spoils
        self._spoilt = False
        """A call failed, and the graph is still the one that it ran on."""
        self.engine_request = request = graph.compiled.create_infer_request()
        """OpenVINO's own."""
        self._stateful = stateful
        self.running = False
        """A call that `start_async` began is not over, or `infer` runs."""
        bounds = upper_bounds(signature) if ports is None else port_bounds(ports)
        self._tensors = tuple(
            OpenVinoTensor(self, number, port, bound, reserve=at_once)
            for number, (port, bound, at_once) in enumerate(
                zip(ports or signature.inputs, bounds, reserved(bounds), strict=True)
            )
        )
        self._dtypes = tuple(dtype_of(port.element_type) for port in signature.outputs)
        self._outside = False
        """True if some input tensor stands for one of the caller's."""
        self._forwarded = forwarded
        self._ports = ports
        self._set_outputs: dict[int, SetOutput | CopiedOutput] = {}
        if ports is None:
            reserve_outputs(signature, request)

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The request's own input tensors, in the order of the signature."""
        return self._tensors

    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run to the end, on `inputs` where they are given; raises `InferenceError` with OpenVINO's words.

        Other threads run meanwhile.

        By `start_async` and `wait`, and never by OpenVINO's own `infer`. That costs 10 us of CPU instead of 22 us (61 us
        when OpenVINO's thread must be woken up), but on one stream with one thread it swallows the error of a call that
        failed, leaving the outputs of an earlier one (2026.4.1).
        """
        if inputs is not None:
            self.fill(inputs)
        self.start_async()
        self.wait()
        return InferResults(self)

    def start_async(self) -> None:
        """Begin to run on a thread of OpenVINO's."""
        if self._spoilt:
            self._renew()
        if self._outside:
            self._show_outside()
        self.running = True
        try:
            if self._stateful:
                self.engine_request.reset_state()
            self.engine_request.start_async()
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until the call is over; raises `InferenceError` with OpenVINO's words. Other threads run meanwhile."""
        try:
            self.engine_request.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            self.running = False
        for output in self._set_outputs.values():
            output.take_up()

    def outputs(self) -> list[Array]:
        """The outputs of the last call, as views of OpenVINO's memory: copy before the next call."""
        tensor = self.engine_request.get_output_tensor
        return [
            data if (data := tensor(number).data).dtype == dtype else data.view(dtype)
            for number, dtype in enumerate(self._dtypes)
        ]

    def _failed(self, error: RuntimeError) -> InferenceError:
        """The error of a call; the model is compiled anew at once, so that no later call waits for that."""
        self.running = False
        self._spoilt = self._spoils
        if self._spoilt:
            self._renew()
        return InferenceError(engine_words(error))

    def _renew(self) -> None:
        """Go on with the model compiled anew, on the same tensors. Raises `ModelLoadError`: then the next call tries again.

        The nodes of a dynamic graph that did not run keep the shapes of an earlier call for their inputs, and of the call
        that failed for their outputs. A call of those earlier shapes would compute on both (2026.4.1).
        """
        self._graph.renew()
        self.engine_request = fresh = self._graph.compiled.create_infer_request()
        for tensor in self._tensors:
            tensor.move()
        if self._ports is None:
            reserve_outputs(self.signature, fresh)
        for output in self._set_outputs.values():
            output.move(fresh)
        self._spoilt = False

    def _use_input(self, number: int, tensor: TensorLike | None) -> None:
        self._tensors[number].use(tensor)
        self._outside = any(own.is_outside for own in self._tensors)

    def _use_output(self, number: int, tensor: Tensor) -> None:
        if self.running:
            raise InferenceError("an output tensor cannot be exchanged while its request runs")
        # OpenVINO takes the tensor of such an output for that of the input as well, from then on.
        kind = CopiedOutput if number in self._forwarded else SetOutput
        self._set_outputs[number] = kind(self.signature, self.engine_request, number, tensor)

    def _show_outside(self) -> None:
        for tensor in self._tensors:
            tensor.show()

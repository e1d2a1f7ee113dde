"""OpenVINO's inference requests, with input tensors that are resized in place and reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov

from shapestream_engine.arrays import InputArrays, array_dtype
from shapestream_engine.backends.openvino.input_tensor import (
    OpenVinoStringTensor,
    OpenVinoTensor,
    strings_of,
    tensor_over,
)
from shapestream_engine.backends.openvino.narrowing import check_range
from shapestream_engine.backends.openvino.runtime import engine_words
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError
from shapestream_engine.infer_request import BackgroundCall, InferRequest, InferResults
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
    """A compiled model, and the means to compile it again."""

    def __init__(
        self,
        compile_model: Callable[[], ov.CompiledModel],
        properties_of: Callable[[ov.CompiledModel], Mapping[str, Any]],
    ) -> None:
        self._compile = compile_model
        self.compiled = compile_model()
        self.properties = properties_of(self.compiled)
        """The properties in effect, as plain data."""
        self.user: Callable[[], object | None] = lambda: None
        """Weak reference to the last request of the graph."""

    def renew(self) -> None:
        """Compile the model again, after a failed call corrupted it."""
        self.compiled = self._compile()


def reserve_outputs(signature: ModelSignature, request: ov.InferRequest) -> None:
    """Reserve memory for outputs with small upper bounds, so that no call reallocates them.

    Afterwards they have no elements again. Reserved memory costs address space first, and RAM once it is written.
    """
    for number, at_once in enumerate(reserved(output_bounds(signature))):
        if at_once and signature.outputs[number].is_dynamic:
            tensor = request.get_output_tensor(number)
            # A copy, because OpenVINO's shape object changes with the tensor.
            before = list(map(int, tensor.shape))
            tensor.shape = bound_shape(signature, number)
            tensor.shape = before


class SetOutput:
    """An output that OpenVINO writes into a tensor of the caller's."""

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
            assert bound is not None  # the caller refuses unbounded outputs
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
        """Attach the output to this request."""
        request.set_output_tensor(self._number, self._engine_tensor)

    def take_up(self) -> None:
        """Update the caller's tensor after a call."""
        shape = tuple(map(int, self._engine_tensor.shape))
        if self._lent:
            self._tensor.shape = shape
            return
        now = _bytes(self._engine_tensor)
        if now.nbytes > self._memory.nbytes or (now.nbytes and now.ctypes.data != self._memory.ctypes.data):
            self._memory = now  # it grew, perhaps at the same address
        self._tensor.rest_on(self._memory, shape)


class CopiedOutput:
    """An output that is an input of the model: it is copied into a tensor of the caller's."""

    def __init__(
        self, signature: ModelSignature, request: ov.InferRequest, number: int, tensor: Tensor
    ) -> None:
        self._request, self._number, self._tensor = request, number, tensor
        self._dtype = dtype_of(signature.outputs[number].element_type)

    def move(self, request: ov.InferRequest) -> None:
        """Copy outputs of this request from now on."""
        self._request = request

    def take_up(self) -> None:
        """Copy the output of the finished call to the caller's tensor."""
        data = self._request.get_output_tensor(self._number).data
        self._tensor.shape = data.shape
        self._tensor.data[...] = data.view(self._dtype)


def _array(tensor: ov.Tensor, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "O":
        return strings_of(tensor)
    data: Array = tensor.data
    return data if data.dtype == dtype else data.view(dtype)


def _bytes(tensor: ov.Tensor) -> np.ndarray[Any, Any]:
    data: np.ndarray[Any, Any] = tensor.data
    return data.reshape(-1).view(np.uint8)


class OpenVinoRequest(InferRequest):
    """An `ov.InferRequest` with its input tensors."""

    def __init__(
        self,
        signature: ModelSignature,
        graph: CompiledGraph,
        *,
        stateful: bool,
        in_caller: bool = False,
        spoils: bool = False,
        forwarded: frozenset[int] = frozenset(),
        bounded: Sequence[int] = (),
        ports: Sequence[InputPort] | None = None,
    ) -> None:
        """`in_caller`: OpenVINO's own `infer` may be used, which computes in the calling thread.

        `spoils`: a failed call corrupts the graph, which then belongs to this request only.

        `forwarded`: numbers of outputs that are inputs without an operation between.

        `bounded`: numbers of inputs whose values must fit i32.

        `ports`: the inputs of a model that is prepared for fewer shapes than the signature allows.
        """
        super().__init__(signature)
        self._graph = graph
        self._spoils = spoils
        self._spoilt = False
        """True after a failed call until the model is compiled again."""
        self.engine_request = request = graph.compiled.create_infer_request()
        """OpenVINO's request."""
        self._stateful = stateful
        # OpenVINO's own `infer` copies strings into a result, with a warning for each call.
        self._in_caller = in_caller and not any(port.is_string for port in signature.outputs)
        self._background = BackgroundCall()
        """The call that `start_async` started, where OpenVINO has no thread for it."""
        self.running = False
        """True during a call."""
        bounds = upper_bounds(signature) if ports is None else port_bounds(ports)
        self._tensors = tuple(
            OpenVinoStringTensor(self, number, port)
            if port.is_string
            else OpenVinoTensor(self, number, port, bound, reserve=at_once)
            for number, (port, bound, at_once) in enumerate(
                zip(ports or signature.inputs, bounds, reserved(bounds), strict=True)
            )
        )
        self._dtypes = tuple(array_dtype(port.element_type) for port in signature.outputs)
        self._outside = any(own.is_outside for own in self._tensors)
        """True if some input tensor is shown to OpenVINO before each call: it stands for one of the caller's, or is of
        strings."""
        self._forwarded = forwarded
        self._bounded = [(signature.inputs[number].name, self._tensors[number]) for number in bounded]
        self._ports = ports
        self._set_outputs: dict[int, SetOutput | CopiedOutput] = {}
        if ports is None:
            reserve_outputs(signature, request)

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The input tensors, in the order of the signature."""
        return self._tensors

    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run a call, in the calling thread where OpenVINO can do that, which saves two wake-ups."""
        if not self._in_caller:
            return super().infer(inputs)
        if inputs is not None:
            self.fill(inputs)
        self._begin()
        self._end(self._compute)
        return self._results

    def start_async(self) -> None:
        """Start a call on a thread of OpenVINO, or on one of the request; raises `RuntimeError` if one runs."""
        self._begin()
        if self._in_caller:
            self._background.start(self._compute)
            return
        try:
            if self._stateful:
                self.engine_request.reset_state()
            self.engine_request.start_async()
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait for the end of the call; raises `InferenceError` with OpenVINO's message."""
        self._end(self._background.wait if self._in_caller else self.engine_request.wait)

    def _begin(self) -> None:
        if self.running:
            raise RuntimeError("the last call was not waited for")
        if self._spoilt:
            self._renew()
        if self._outside:
            for tensor in self._tensors:
                tensor.show()
        for name, bounded in self._bounded:
            check_range(name, bounded.data)
        self.running = True

    def _compute(self) -> None:
        if self._stateful:
            self.engine_request.reset_state()
        self.engine_request.infer(share_outputs=True)

    def _end(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            self.running = False
        for output in self._set_outputs.values():
            output.take_up()

    def outputs(self) -> list[Array]:
        """Return the outputs of the last call, as views of OpenVINO's memory; copy them before the next call."""
        tensor = self.engine_request.get_output_tensor
        return [_array(tensor(number), dtype) for number, dtype in enumerate(self._dtypes)]

    def _failed(self, error: RuntimeError) -> InferenceError:
        """Compile the model again, so that no later call waits for it, and return the error of the failed call."""
        self.running = False
        self._spoilt = self._spoils
        if self._spoilt:
            self._renew()
        return InferenceError(engine_words(error))

    def _renew(self) -> None:
        """Compile the model again and attach the same tensors; on `ModelLoadError`, the next call tries again.

        In a dynamic graph, nodes that did not run keep input shapes of an earlier call and output shapes of the failed
        call. A later call of the earlier shapes would compute on both (2026.4.1).
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
        if self.signature.outputs[number].is_string:
            raise InferenceError(
                f"output {self.signature.outputs[number].name!r} is of strings, which OpenVINO writes to no other tensor"
            )
        # OpenVINO would use the tensor of such an output for the input as well.
        kind = CopiedOutput if number in self._forwarded else SetOutput
        self._set_outputs[number] = kind(self.signature, self.engine_request, number, tensor)

"""Inference requests: the interface of one call at a time, and the code that all backends share.

A request has its own input tensors, which are resized in place, filled and reused. A program that uses the engine alone
may replace them, and outputs, by its own tensors; slots never do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shapestream_engine.arrays import InputArrays, as_port_array, in_port_order
from shapestream_engine.errors import ElementTypeError, InferenceError, ShapeError
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array, ArrayTensor, Tensor, TensorLike, output_bounds


class Runs(Protocol):
    """A request, as its tensors see it."""

    running: bool


class RequestTensor:
    """Base of a request's input tensors: each takes the shapes of its port, and no new shape while the request runs."""

    __slots__ = ()
    _request: Runs
    _port: InputPort
    _shape: tuple[int, ...]
    _data: Array
    outside: TensorLike | None
    """A tensor of the caller's, which the engine then reads instead."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis. Setting it resizes in place, and raises `ShapeError` for what the port does not take."""
        return self._shape if self.outside is None else self.outside.shape

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        if shape == self._shape and self.outside is None:
            return
        sizes = self._port.admitted(shape)
        if self._request.running:
            raise InferenceError(f"input {self._port.name!r} cannot be resized while its request runs")
        if self.outside is None:
            self._resize(sizes)
        else:
            self.outside.shape = sizes

    def set_shape(self, shape: Sequence[int]) -> None:
        """Resize in place, as by `shape`.

        request.input_tensor("ids").set_shape((2, 7))  # two rows of seven tokens
        """
        self.shape = tuple(shape)

    @property
    def data(self) -> Array:
        """A C-contiguous view of exactly `shape`; valid until the shape is set again."""
        return self._data if self.outside is None else self.outside.data

    def use(self, outside: TensorLike | None) -> None:
        """Let the engine read the tensor `outside`; None: this tensor again."""
        if self._request.running:
            raise InferenceError(f"input {self._port.name!r} cannot be exchanged while its request runs")
        self.outside = outside  # type: ignore[misc]  # a slot of the class that this one is mixed into

    if TYPE_CHECKING:  # of the tensor that this class is mixed into

        def _resize(self, sizes: tuple[int, ...]) -> None: ...


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output of the last call, in the engine's memory; valid until the next call."""

    element_type: str
    data: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(self.data.shape)


class InferResults(Mapping[str, np.ndarray[Any, Any]]):
    """The outputs of the last call, by name or number: views that are valid until the next call.

    results = request.infer({"x": array})
    kept = results["y"].copy()
    """

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
    """Runs one call at a time of a compiled model, on its own input tensors.

    A request belongs to one thread. A call that has begun runs to its end; no engine is asked to stop a call
    (docs/backends.md says why). Before the first call, outputs have size 0 in each dynamic dimension.
    """

    def __init__(self, signature: ModelSignature) -> None:
        self.signature = signature
        self._results = InferResults(self)

    @property
    @abstractmethod
    def input_tensors(self) -> Sequence[TensorLike]:
        """The input tensors, in the order of the signature; they can be resized in place."""

    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run a call to its end and return the outputs by name, as views until the next call.

        `inputs` are first copied by `fill`; without them, the call runs on the contents of the input tensors. Raises
        `InferenceError`; the request stays usable.

            request.infer({"ids": [[101, 2054, 102]]})["scores"].copy()
        """
        if inputs is not None:
            self.fill(inputs)
        self.start_async()
        self.wait()
        return self._results

    @abstractmethod
    def start_async(self) -> None:
        """Start a call; the tensors must not be touched until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the call that `start_async` started; raises `InferenceError` if it failed."""

    @abstractmethod
    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """Return the outputs of the last call, as views of the engine's memory; copy them before the next call."""

    def input_tensor(self, port: int | str = 0) -> TensorLike:
        """Return the input tensor of a port, given by number or name."""
        return self.input_tensors[port_number("input", port, self.signature)]

    def output_tensor(self, port: int | str = 0) -> OutputTensor:
        """Return the last call's output of a port, given by number or name."""
        number = port_number("output", port, self.signature)
        return OutputTensor(self.signature.outputs[number].element_type, self.outputs()[number])

    def fill(self, inputs: InputArrays) -> None:
        """Set every input: arrays are copied into the request's tensors, tensors are passed to `set_input_tensor`.

        Raises `ShapeError` for a value that a port does not take; earlier inputs are set by then.
        """
        values = in_port_order(self.signature.inputs, inputs)
        for number, (port, value) in enumerate(zip(self.signature.inputs, values, strict=True)):
            # Arrays are tested first, because `data` fails for arrays without a buffer type, such as bf16.
            if not isinstance(value, np.ndarray) and isinstance(value, TensorLike):
                self.set_input_tensor(number, value)
                continue
            array = as_port_array(port, value)
            self.set_input_tensor(number, None)
            tensor = self.input_tensors[number]
            tensor.shape = array.shape
            tensor.data[...] = array

    def set_input_tensor(self, port: int | str, tensor: TensorLike | None) -> None:
        """Let later calls read this input from `tensor`; None: from the request's own tensor again.

        Until then, the request's input tensor stands for `tensor`: resizing one resizes both. Each call reads the contents
        at its start. OpenVINO, ONNX Runtime, PyTorch on a CPU and functions read the memory without a copy. A call with a
        shape that the port does not take is refused when it starts.

            request.set_input_tensor("x", ArrayTensor(array))
        """
        number = port_number("input", port, self.signature)
        if tensor is not None:
            _check_element_type("input", self.signature.inputs[number], tensor)
        self._use_input(number, tensor)

    def set_output_tensor(self, port: int | str, tensor: Tensor) -> None:
        """Let later calls write this output to `tensor`, and resize the tensor in place to the output's shape.

        An `ArrayTensor` cannot grow. It is refused with `ShapeError` unless the output's upper bound fits; other tensors
        grow. OpenVINO writes without a copy: into the array, or into its own memory of at least equal capacity, which the
        tensor adopts. Other engines copy.
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
        """Number of reallocations of the input tensors since the request was made."""
        return sum(tensor.reallocations for tensor in self.input_tensors)


class BackgroundCall:
    """Runs one call at a time on a thread of its own, for engines that compute in the calling thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        """One thread, started by the first call."""
        self._call: Future[None] | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Start `call`, after `check_free`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="infer")
        self._call = self._thread.submit(call)

    def check_free(self) -> None:
        """Raise `RuntimeError` if nothing waited for the last call."""
        if self._call is not None:
            raise RuntimeError("the last call was not waited for")

    def wait(self) -> None:
        """Wait for the call, and raise its error. Without a call, return at once."""
        call, self._call = self._call, None
        if call is not None:
            call.result()


def port_number(kind: str, port: int | str, signature: ModelSignature) -> int:
    """Return the number of a port, given by number or name; raises `KeyError` that lists the names."""
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

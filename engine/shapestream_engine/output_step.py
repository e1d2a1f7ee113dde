"""Steps that make other outputs of a model's, after each call and in the same thread, on any engine.

A step says what the outputs are (`signature`), and makes them of a call's inputs and outputs (`bind`). What the engine has
made then never leaves the slot: only the result is divided among requests and sent. `Pooling` and `Postprocess` are steps.

A step keeps the rows of the batch apart: it makes each row of a result of the same row of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from shapestream_engine.arrays import InputArrays, array_dtype
from shapestream_engine.compiled_model import CompiledModel, Preparations, PreparedSizes
from shapestream_engine.infer_request import InferRequest, InferResults
from shapestream_engine.ports import OutputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array, Tensor, TensorLike

Run: TypeAlias = Callable[[Sequence[TensorLike], Sequence[Array]], list[Array]]
"""Makes the outputs of a step of a call's inputs and outputs; raises `InferenceError` for outputs that do not fit."""


class OutputStep(Protocol):
    """A step after each call of a model."""

    def signature(self, own: ModelSignature) -> ModelSignature:
        """Return the signature of a model with this step; raises `SignatureError` where the step does not fit."""

    def replaced(self, own: ModelSignature) -> frozenset[str]:
        """Return the names of the outputs in whose place others come."""

    def bind(self, own: ModelSignature) -> Run:
        """Return what runs after each call of a model with this signature."""


class SteppedModel(CompiledModel):
    """A compiled model of any engine, with a step after each call."""

    def __init__(self, model: CompiledModel, step: OutputStep) -> None:
        """Wrap a model; raises `SignatureError` if the step does not fit it."""
        super().__init__(step.signature(model.signature), model.properties)
        self._model = model
        self._step = step
        self.prepares = model.prepares
        self.states = model.states

    @property
    def nbytes(self) -> int:
        """Memory of the engine's model in bytes."""
        return self._model.nbytes

    @property
    def preparations(self) -> Preparations | None:
        """Preparations of the engine's model."""
        return self._model.preparations

    def prepare(self, sizes: PreparedSizes) -> CompiledModel:
        """Compile the engine's model for calls of these sizes, with the same step."""
        return SteppedModel(self._model.prepare(sizes), self._step)

    def create_infer_request(self) -> SteppedRequest:
        """Create a request of the engine's model that runs the step after each call."""
        return SteppedRequest(self.signature, self._model.create_infer_request(), self._step)

    def close(self) -> None:
        """Close the engine's model."""
        self._model.close()


class SteppedRequest(InferRequest):
    """A request of an engine, with its tensors, and the outputs of a step in place of the engine's."""

    def __init__(self, signature: ModelSignature, request: InferRequest, step: OutputStep) -> None:
        super().__init__(signature)
        self._request = request
        self._run = step.bind(request.signature)
        replaced = step.replaced(request.signature)
        names = [port.name for port in request.signature.outputs]
        self._own = [
            names.index(port.name) if port.name in names and port.name not in replaced else None
            for port in signature.outputs
        ]
        """By output, the number of the engine's that it is; None for those that the step makes."""
        self._made: list[Array] | None = None
        """The outputs of the last call; None before the first one."""
        self._started = False

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The engine's input tensors."""
        return self._request.input_tensors

    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run a call of the engine, in this thread where the engine can do that, and the step."""
        self._request.infer(inputs)
        self._finish()
        return self._results

    def start_async(self) -> None:
        """Start a call of the engine; `wait` runs the step."""
        self._request.start_async()
        self._started = True

    def wait(self) -> None:
        """Wait for the engine's call, and run the step. Without a call, return at once."""
        started, self._started = self._started, False
        self._request.wait()
        if started:
            self._finish()

    def outputs(self) -> list[Array]:
        """Return the outputs of the last call, those of the step among them; copy them before the next call."""
        if self._made is not None:
            return list(self._made)
        engine = self._request.outputs()
        return [
            _empty(port) if number is None else engine[number]
            for port, number in zip(self.signature.outputs, self._own, strict=True)
        ]

    def _finish(self) -> None:
        self._made = self._run(self.input_tensors, self._request.outputs())

    def _use_input(self, number: int, tensor: TensorLike | None) -> None:
        self._request.set_input_tensor(number, tensor)

    def _use_output(self, number: int, tensor: Tensor) -> None:
        own = self._own[number]
        if own is None:
            super()._use_output(number, tensor)
        else:
            self._request.set_output_tensor(own, tensor)


def _empty(port: OutputPort) -> Array:
    sizes = [0 if size.is_dynamic else size.minimum for size in port.shape.dimensions]
    return np.zeros(sizes, array_dtype(port.element_type))

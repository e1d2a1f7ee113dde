"""The live model on the bench: calls as they come, batches through a slot as they are served, and requests run alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shapestream_engine.batch import BatchInputs
from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError
from shapestream_engine.layout import RequestShape, Tensors
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner
from shapestream_engine.tensor import Array

Announce: TypeAlias = Callable[[str, str], None]
"""Called before each call with the phase and the case in words, so that a crash can be blamed on a case."""


@dataclass(slots=True, eq=False)
class Sample:
    """One request, and its results alone, per output; None while it has not run, or if it failed."""

    tensors: Tensors
    shape: RequestShape
    words: str
    results: list[Array] | None = None
    magnitude: tuple[int, int] | None = None
    """Requests that agree in it have values in the same range; None: in any."""
    near: frozenset[int] = frozenset()
    """Outputs that a request beside it, which is nearly equal, gets otherwise: it lies near a threshold of each."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each dimension of the signature."""
        return self.shape.sizes


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """A call that ran: its sizes, its requests, and the outputs before they were divided."""

    sizes: tuple[int, ...]
    members: tuple[Sample, ...]
    outputs: tuple[Array, ...]


class Bench:
    """A request of one model that runs calls of any shape, one after another. `phase` is what the calls are made for.

    `signature` is the one that requests are made for, with a strategy that `model` need not know of.
    """

    def __init__(
        self, model: CompiledModel, signature: ModelSignature, announce: Announce, *, keep: int = 0
    ) -> None:
        self.signature = signature
        self.announce = announce
        self.phase = ""
        self._keep = keep
        self.observations: list[Observation] = []
        """The first `keep` calls that ran, with copies of their outputs."""
        self.shapes: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
        """The sizes of each call that ran, and the shape of each output."""
        self._assembly = Assembly(signature)
        self._request = model.create_infer_request()

    def run(self, sizes: tuple[int, ...], members: Sequence[Sample], words: str) -> list[list[Array]]:
        """The results of each member, per output; raises the `EngineError` that a slot would report."""
        self.announce(self.phase, words)
        shapes = [member.shape for member in members]
        self._assembly.gather(
            sizes, [member.tensors for member in members], shapes, self._request.input_tensors
        )
        self._request.infer()
        outputs = self._request.outputs()
        self.shapes.append((sizes, tuple(tuple(output.shape) for output in outputs)))
        if len(self.observations) < self._keep:
            copies = tuple(np.array(output) for output in outputs)
            self.observations.append(Observation(sizes, tuple(members), copies))
        return [arrays_of(result) for result in self._assembly.split(sizes, shapes, outputs)]


def arrays_of(result: Tensors) -> list[Array]:
    """A result's arrays, in the order of the outputs."""
    return [
        np.frombuffer(buffer, dtype_of(element_type)).reshape(shape)
        for (_, element_type, shape), buffer in zip(result.layout, result.buffers, strict=True)
    ]


class Service:
    """One slot with the model as it is served: the strategy chooses the sizes of the calls, and prepared models run them.

    `phase` is what the calls are made for. A request alone is filled up with itself, again and again.
    """

    def __init__(self, model: CompiledModel, announce: Announce) -> None:
        self.signature = model.signature
        self.phase = ""
        self._announce = announce
        self._runner = Runner("probe", {self.signature.name: RequestPool(model, 1)})

    def run(self, sizes: tuple[int, ...], members: Sequence[Sample], words: str) -> list[list[Array]]:
        """The results of each member, per output; raises `InferenceError` for the errors that a slot reports."""
        self._announce(self.phase, words)
        report = self._runner.run(
            BatchInputs(
                batch=0,
                model=self.signature.name,
                sizes=merge_sizes(self.signature, [member.shape.rounded for member in members]),
                members=tuple(member.tensors for member in members),
                shapes=tuple(member.shape for member in members),
            )
        )
        assert report is not None  # nothing withdraws it
        if report.outputs is None:
            raise InferenceError(report.message)
        return [arrays_of(result) for result in report.outputs if result is not None]

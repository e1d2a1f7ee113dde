"""Requests to try a model with: made when they are asked for, each run alone once, and kept with its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.bench import Sample, spell_sizes
from shapestream_engine.probing.values import Array, Extreme, Values, drawn, extremes, filled
from shapestream_engine.signature import ModelSignature

__all__ = ["Pool", "Runner", "make_request"]


class Runner(Protocol):
    """What runs a request alone: a bench, or the model as it is served. `phase`: what for."""

    phase: str

    @property
    def signature(self) -> ModelSignature:
        """What requests are made for."""

    def run(self, sizes: tuple[int, ...], members: Sequence[Sample], words: str) -> list[list[Array]]:
        """The results of each member, per output."""


class Pool:
    """Samples by sizes. One that the model refuses alone is None: it would be no fair neighbour."""

    def __init__(self, bench: Runner, values: Mapping[str, Values], *, seed: int) -> None:
        self._bench = bench
        self.values = dict(values)
        self._seed = seed
        self._made: dict[tuple[Any, ...], Sample | None] = {}
        self.complaint = ""
        """Of the last sample that failed."""

    def typical(self, sizes: tuple[int, ...], number: int) -> Sample | None:
        """An ordinary request; each `number` is another one."""
        key = (sizes, number)
        if key not in self._made:
            signature = self._bench.signature
            tensors = make_request(signature, self.values, sizes, number=number, seed=self._seed)
            words = f"{spell_sizes(signature.dimensions, sizes)}, inputs no. {number}"
            self._made[key] = self._alone(tensors, words)
        return self._made[key]

    def extreme(self, sizes: tuple[int, ...], kind: Extreme) -> Sample | None:
        """A request whose inputs are all at one end; None too where no input knows that kind."""
        key = (sizes, kind)
        if key not in self._made:
            signature = self._bench.signature
            tensors = _extreme_request(signature, self.values, sizes, kind)
            words = f"{spell_sizes(signature.dimensions, sizes)}, {kind} values"
            before = self._bench.phase
            # A model that crashes on such values by itself is another matter than one whose batches do.
            self._bench.phase = f"neighbours/{kind}"
            self._made[key] = None if tensors is None else self._alone(tensors, words)
            self._bench.phase = before
        return self._made[key]

    def all_results(self, output: int) -> list[tuple[tuple[int, ...], Array]]:
        """What ordinary requests gave alone, with the sizes of each."""
        return [
            (sample.sizes, sample.results[output])
            for (_, number), sample in self._made.items()
            if isinstance(number, int) and sample is not None and sample.results is not None
        ]

    def _alone(self, tensors: Tensors, words: str) -> Sample | None:
        try:
            # Larger than any size that the strategy runs it at, it is refused here.
            sample = Sample(tensors, self._bench.signature.resolve(tensors.layout), words)
            (sample.results,) = self._bench.run(sample.sizes, [sample], f"alone: {words}")
        except (EngineError, RuntimeError) as error:
            self.complaint = str(error)
            return None
        return sample


def make_request(
    signature: ModelSignature,
    values: Mapping[str, Values],
    sizes: tuple[int, ...],
    *,
    number: int = 0,
    seed: int = 0,
) -> Tensors:
    """A request of these sizes. Masks that the server can make are left out of every second one."""
    random = np.random.default_rng([seed, number, *sizes])
    arrays: dict[int, Array] = {}
    for index, (port, shape) in enumerate(zip(signature.inputs, signature.input_shapes(sizes), strict=True)):
        if port.mask_of is not None and number % 2 == 0:
            continue
        arrays[index] = (
            filled(1, port.element_type, shape)
            if port.mask_of is not None
            else drawn(values[port.name], port.element_type, shape, random, number=number)
        )
    return _tensors(signature, arrays)


def _extreme_request(
    signature: ModelSignature, values: Mapping[str, Values], sizes: tuple[int, ...], kind: Extreme
) -> Tensors | None:
    arrays: dict[int, Array] = {}
    matches = False
    for index, (port, shape) in enumerate(zip(signature.inputs, signature.input_shapes(sizes), strict=True)):
        if port.mask_of is not None:
            continue
        known: dict[Extreme, float] = dict(extremes(values[port.name], port.element_type))
        matches |= kind in known
        value = known[kind] if kind in known else known["largest"]
        arrays[index] = filled(value, port.element_type, shape)
    return _tensors(signature, arrays) if matches else None


def _tensors(signature: ModelSignature, arrays: Mapping[int, Array]) -> Tensors:
    layout = tuple(
        (index, signature.inputs[index].element_type, tuple(array.shape)) for index, array in arrays.items()
    )
    return Tensors(layout=layout, buffers=[array.tobytes() for array in arrays.values()])

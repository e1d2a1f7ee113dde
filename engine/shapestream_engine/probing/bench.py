"""The live model on the bench: calls through the same gathering and splitting that serve, and what came of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_engine.model import CompiledModel
from shapestream_engine.probing.values import Array
from shapestream_engine.signature import ModelSignature, RequestShape

__all__ = ["Announce", "Bench", "Observation", "Sample", "arrays_of", "spell_sizes"]

Announce: TypeAlias = Callable[[str, str], None]
"""Told before each call: the phase, and the case in words. Whoever listens can say what a crash was about."""


@dataclass(slots=True, eq=False)
class Sample:
    """One request, and its results alone, per output; None while it has not run, or if it failed."""

    tensors: Tensors
    shape: RequestShape
    words: str
    results: list[Array] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each dimension of the signature."""
        return self.shape.sizes


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """A call that ran: its sizes, its requests, and the outputs before they were divided."""

    sizes: tuple[int, ...]
    members: tuple[Sample, ...]
    outputs: tuple[Array, ...]


class Bench:
    """Runs calls of one model, of any shape, one after another. `phase` is what the calls are made for.

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
        """The first `keep` calls that ran, with copies of all that came of them."""
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


def spell_sizes(names: Sequence[str], sizes: Sequence[int]) -> str:
    """`batch 2, seq 7`."""
    return ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True)) or "the only shape"

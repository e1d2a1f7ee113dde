"""A slot on which tests run requests that are given as arrays, and read the results as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shapestream_engine import (
    BatchInputs,
    BatchReport,
    CompiledModel,
    ModelSignature,
    RequestPool,
    Runner,
    Tensors,
    element_type_of,
)
from shapestream_engine.arrays import array_of, sent_array
from shapestream_engine.batching.calls import merge_sizes

Array = np.ndarray[Any, Any]
Request = Array | Mapping[str, Array]
"""The arrays of a request by name; an array alone is that of the first input."""


def tensors_of(signature: ModelSignature, request: Request) -> Tensors:
    """The request as it arrives."""
    arrays = request if isinstance(request, Mapping) else {signature.inputs[0].name: request}
    numbers = {port.name: number for number, port in enumerate(signature.inputs)}
    layout, buffers = [], []
    for name, array in arrays.items():
        port = signature.inputs[numbers[name]]
        element_type = port.element_type if port.is_string else element_type_of(array.dtype)
        shape, buffer = sent_array(element_type, array)
        layout.append((numbers[name], element_type, shape))
        # An odd offset, as received frames have: nothing may depend on the alignment of a buffer.
        buffers.append(memoryview(b"\0" + buffer)[1:])
    return Tensors(layout=tuple(layout), buffers=buffers)


def arrays_of(signature: ModelSignature, result: Tensors | None) -> dict[str, Array]:
    """The tensors of a result by the outputs' names, all of them in their order."""
    assert result is not None
    assert list(range(len(signature.outputs))) == [number for number, *_ in result.layout]
    return {
        port.name: array_of(element_type, shape, buffer)
        for port, (_, element_type, shape), buffer in zip(
            signature.outputs, result.layout, result.buffers, strict=True
        )
    }


class SlotBench:
    """Slots of one compiled model."""

    def __init__(self, model: CompiledModel, slots: int = 1) -> None:
        self.model = model
        self.signature = model.signature
        self.pool = RequestPool(model, slots)
        self.slots = [Runner(str(number), {self.signature.name: self.pool}) for number in range(slots)]

    def batch(self, *requests: Request, **more: Any) -> BatchInputs:
        """A batch of these requests; by default at the smallest sizes that hold them as their strategy rounds them."""
        members = tuple(tensors_of(self.signature, request) for request in requests)
        shapes = tuple(self.signature.resolve(member.layout) for member in members)
        known: dict[str, Any] = {
            "batch": 1,
            "model": self.signature.name,
            "members": members,
            "shapes": shapes,
        }
        if "sizes" not in more:
            known["sizes"] = merge_sizes(self.signature, [shape.rounded for shape in shapes])
        return BatchInputs(**{**known, **more})

    def run(self, *requests: Request, slot: int = 0, **more: Any) -> BatchReport:
        """One batch on a slot, and its report."""
        report = self.slots[slot].run(self.batch(*requests, **more))
        assert report is not None  # nothing withdraws it
        return report

    def results(self, *requests: Request, **more: Any) -> list[dict[str, Array]]:
        """One batch that runs: each request's outputs by name."""
        return self.arrays(self.run(*requests, **more))

    def arrays(self, report: BatchReport) -> list[dict[str, Array]]:
        """Each request's outputs by name, of a batch that has run."""
        assert (None, "") == (report.code, report.message)
        return [arrays_of(self.signature, result) for result in report.outputs or ()]

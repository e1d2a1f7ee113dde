"""Copies requests into a call's input tensors, and outputs into results: the only copies that a slot makes.

The code runs on the slot's thread, between the received buffers and the `InferRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shapestream_engine.arrays import array_of
from shapestream_engine.batching.gather import InputGatherer, StringGatherer
from shapestream_engine.batching.split import Column, Division, splitters_of
from shapestream_engine.errors import RuleError, ShapeError
from shapestream_engine.layout import RequestShape, Tensors
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import TensorLike


class Assembly:
    """Gathers and splits the calls of one model, and joins results of several calls.

    Each signature has one assembly, which any number of threads may use. `sizes` are always the call's sizes. `shapes` are
    the `resolve` results of the requests, in the order of their rows.
    """

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._gatherers = tuple(
            (StringGatherer if port.is_string else InputGatherer)(number, port, signature.table)
            for number, port in enumerate(signature.inputs)
        )
        self._splitters = splitters_of(signature)
        self._in_order = sorted(self._splitters, key=lambda splitter: splitter.number)

    def gather(
        self,
        sizes: tuple[int, ...],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
        tensors: Sequence[TensorLike],
    ) -> int:
        """Resize each input tensor to the call's shape, and copy each request's bytes into it; return the number of
        reallocations.

        Padding gets the port's padding value; missing masks are made. Raises `ShapeError` if the requests do not add up to
        a call of these sizes, or a buffer's length does not match its shape.
        """
        self._check_call(sizes, shapes)
        reallocations = 0
        for gatherer, tensor in zip(self._gatherers, tensors, strict=True):
            shape = gatherer.shape(sizes)
            if tensor.shape != shape:
                before = tensor.reallocations
                tensor.shape = shape
                reallocations += tensor.reallocations - before
            gatherer.fill(tensor.data, sizes, members, shapes)
        return reallocations

    def split(
        self,
        sizes: tuple[int, ...],
        shapes: Sequence[RequestShape],
        outputs: Sequence[np.ndarray[Any, Any]],
    ) -> list[Tensors]:
        """Divide the outputs into a copy for each request, in order; layouts hold output numbers.

        Results of rows beyond the requests' own are dropped. Raises `RuleError` if an output breaks its rule.
        """
        expected = len(self._splitters)
        if len(outputs) != expected:
            raise RuleError(f"the model gave {len(outputs)} outputs, its signature has {expected}")
        rows = [shape.rows for shape in shapes]
        batch = sizes[0] if self._signature.has_batch else 1
        if sum(rows) > batch:
            raise ShapeError(f"the requests have {sum(rows)} rows, the call {batch}")
        division = Division(outputs, sizes, shapes, rows, batch)
        columns = [Column([], [])] * expected
        for splitter in self._splitters:
            columns[splitter.number] = splitter.divide(division)
        entries, buffers = zip(*columns, strict=True)
        results = zip(zip(*entries, strict=True), zip(*buffers, strict=True), strict=True)
        return [Tensors(layout=layout, buffers=parts) for layout, parts in results]

    def join(self, parts: Sequence[Tensors], rows: Sequence[int]) -> Tensors:
        """Join the results of one request from several calls, in order; `rows` has its rows in each call.

        Raises `RuleError` if the parts do not fit together.
        """
        layout: list[tuple[int, str, tuple[int, ...]]] = []
        buffers = []
        for splitter in self._in_order:
            number = splitter.number
            element_type = self._signature.outputs[number].element_type
            own = [array_of(element_type, part.layout[number][2], part.buffers[number]) for part in parts]
            entry, buffer = splitter.joined(own, rows)
            layout.append(entry)
            buffers.append(buffer)
        return Tensors(layout=tuple(layout), buffers=buffers)

    def _check_call(self, sizes: tuple[int, ...], shapes: Sequence[RequestShape]) -> None:
        """Check that the requests fill the call exactly; otherwise, rows of an earlier call would stay in the
        tensors."""
        signature = self._signature
        if len(sizes) != len(signature.dimensions):
            raise ShapeError(f"a call has {len(signature.dimensions)} sizes, not {len(sizes)}")
        if signature.has_batch:
            rows = 0
            for shape in shapes:
                rows += shape.rows
            if rows != sizes[0]:
                raise ShapeError(f"the requests have {rows} rows, the call {sizes[0]}")
            most = signature.strategy.most_rows
            if most is not None and rows > most and sum([shape.rows > 0 for shape in shapes]) > 1:
                raise ShapeError(_company_refused(signature.name, rows, most))
        elif len(shapes) != 1:
            raise ShapeError(f"model {signature.name!r} has no batch axis; it runs one request per call")
        first = 1 if signature.has_batch else 0
        wanted = sizes[first:]
        for shape in shapes:
            own = shape.sizes
            if own[first:] == wanted:
                continue
            for number in range(first, len(sizes)):
                if own[number] > sizes[number] or (
                    own[number] < sizes[number] and not signature.paddable[number]
                ):
                    raise ShapeError(
                        f"dimension {signature.dimensions[number]!r} is {own[number]} in a request and "
                        f"{sizes[number]} in the call"
                    )


def _company_refused(model: str, rows: int, most: int) -> str:
    if most == 1:
        return f"requests of model {model!r} run alone; a call has no other rows"
    return f"requests of model {model!r} share calls of up to {most} rows, not of {rows}"

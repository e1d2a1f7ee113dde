"""A model without an engine: what it answers, and how long it takes, is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import InvalidRequest
from shapestream.wire.tensor_frames import from_array, to_array
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Arrays = Mapping[str, npt.NDArray[Any]]


class ScriptedModel:
    """`answer` maps named inputs to named outputs, or raises a `RequestError`; `duration_s` is how long that takes.

    Anything else that `answer` raises is answered as `InternalError`, and kept in the server's `errors`. Both functions are
    asked for each request by itself: a scripted model does not batch. Without `answer` the inputs come back, in the order
    of the ports. The duration passes on trio's clock, so under a `MockClock` it takes no time.
    """

    def __init__(
        self,
        signature: ModelSignature,
        answer: Callable[[Arrays], Arrays] | None = None,
        *,
        duration_s: float | Callable[[Arrays], float] = 0.0,
    ) -> None:
        self.signature = signature
        self._answer = answer
        self._duration_s = duration_s

    def duration_of(self, request: Tensors) -> float:
        """Return the seconds that this request takes."""
        return self._duration_s(self._inputs(request)) if callable(self._duration_s) else self._duration_s

    def run(self, request: Tensors) -> Tensors:
        """Return the outputs; raises what `answer` raises, KeyError for an output left out, and TypeError for no tensor."""
        if self._answer is None:
            return request
        outputs = self._answer(self._inputs(request))
        try:
            return tensors_of([np.asarray(outputs[port.name]) for port in self.signature.outputs])
        except InvalidRequest as error:  # the answer's fault, not the request's
            raise TypeError(error.message) from error

    def _inputs(self, request: Tensors) -> Arrays:
        return {
            self.signature.inputs[port].name: to_array(element_type, shape, buffer)
            for (port, element_type, shape), buffer in zip(request.layout, request.buffers, strict=True)
        }


def identity_signature(
    name: str = "identity", shape: str = "batch:1..64, 16", element_type: str = "f32"
) -> ModelSignature:
    """Describe a model with one input `x` and one output `y` of the same shape."""
    named = NamedShape.parse(shape)
    batched = any(
        axis == "batch" and size.is_dynamic for axis, size in zip(named.names, named.dimensions, strict=True)
    )
    output = OutputPort("y", element_type, named, Rows() if batched else Whole())
    return ModelSignature(name=name, inputs=(InputPort("x", element_type, named),), outputs=(output,))


def tensors_of(arrays: list[npt.NDArray[Any]]) -> Tensors:
    """Return these arrays as they travel, as ports 0, 1, …"""
    encoded = [from_array(array) for array in arrays]
    return Tensors(
        layout=tuple((port, element_type, shape) for port, (element_type, shape, _) in enumerate(encoded)),
        buffers=[buffer for _, _, buffer in encoded],
    )

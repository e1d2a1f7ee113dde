"""Made-up inputs of given sizes, with values as the probe draws them: traces hold shapes, never data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from shapestream.settings import ModelSettings
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.inputs import Values, default_values, make_request
from shapestream_engine.signature import ModelSignature
from shapestream_workers.proof import probe_options

__all__ = ["InputMaker"]

MAX_KEPT_BYTES = 256 << 20
"""Of inputs that are kept for their next use; those used longest ago go first."""


class InputMaker:
    """Makes a request for given sizes, the same one each time: making one must not weigh on what is measured."""

    def __init__(self, settings: ModelSettings, signature: ModelSignature) -> None:
        given = values_of(signature, probe_options(settings))
        first = {port.name: default_values(port.element_type)[0] for port in signature.inputs}
        self._values: Mapping[str, Values] = {**first, **given}
        self._signature = signature
        self._kept: OrderedDict[tuple[int, ...], Tensors] = OrderedDict()
        self._kept_bytes = 0

    def tensors(self, sizes: tuple[int, ...]) -> Tensors:
        """As a slot takes them. Masks that are made where they are missing are left out."""
        made = self._kept.get(sizes)
        if made is not None:
            self._kept.move_to_end(sizes)
            return made
        made = self._kept[sizes] = make_request(self._signature, self._values, sizes)
        self._kept_bytes += _nbytes(made)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= _nbytes(dropped)
        return made

    def arrays(self, sizes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
        """As a client takes them, by name."""
        made = self.tensors(sizes)
        return {
            self._signature.inputs[number].name: np.frombuffer(buffer, dtype_of(element_type)).reshape(shape)
            for (number, element_type, shape), buffer in zip(made.layout, made.buffers, strict=True)
        }


def _nbytes(tensors: Tensors) -> int:
    return sum(memoryview(buffer).nbytes for buffer in tensors.buffers)

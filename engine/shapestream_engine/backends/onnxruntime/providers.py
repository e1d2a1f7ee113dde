"""Execution providers of ONNX Runtime and their options, computed from a device's name and a model's bounds.

Pure functions: they load nothing and ask nothing, so they are tested without the devices. No session with them has ever
run here, since no card was at hand. Names and values of the options are those of ONNX Runtime's own documents.

ONNX Runtime's defaults suit models of one shape. Here the shapes change with each call:

- **TensorRT** builds an engine for a range of shapes, the *profile*, and takes seconds to minutes for it. Without a
  profile it begins with the first call's shape, and builds anew whenever a call lies outside what it has seen. So the
  profile is the whole range of the model's bounds, and a dimension without an upper bound is refused.
- **cuDNN** by default times every algorithm of a convolution at each new shape (`EXHAUSTIVE`). `HEURISTIC` asks for one.
- **The arena** by default grows to the next power of two. Calls of many shapes then hold up to twice what the largest
  takes. `kSameAsRequested` adds what a call lacks.

Options that the properties of a model name (`provider.NAME`) override these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shapestream_engine.errors import SignatureError
from shapestream_engine.ports import DimensionTable, InputPort
from shapestream_engine.shapes import BATCH, Dimension

_SUFFIX = "ExecutionProvider"
_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"

Options: TypeAlias = dict[str, str]
Providers: TypeAlias = list[tuple[str, Options]]
"""Providers in the order in which a session offers them the nodes of its graph, each with its options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderDevice:
    """A device of ONNX Runtime: its execution provider, and the number of the card."""

    provider: str
    number: str = ""
    """Digits, or empty where the device's name has none: then ONNX Runtime takes the first card."""

    @classmethod
    def parse(cls, device: str, available: Sequence[str]) -> ProviderDevice | None:
        """Return the device of this name (`CPU`, `cuda`, `CUDA:1`, `TensorRT:0`), among the providers that this ONNX
        Runtime has; None if it is not one of them."""
        name, colon, number = device.partition(":")
        found = next((each for each in available if name.lower() == short_name(each).lower()), None)
        if found is None or (colon and not (number.isascii() and number.isdecimal())):
            return None
        return cls(provider=found, number=str(int(number)) if number else "")

    @property
    def needs_bounds(self) -> bool:
        """Tell whether the options follow from the bounds of the model."""
        return self.provider in (_CUDA, _TENSORRT)

    def reading(self, available: Sequence[str]) -> Providers:
        """Return the providers of a session that only tells the ports of a file. TensorRT would build an engine."""
        if self.provider == _TENSORRT:
            return [(_CUDA, self._card()) if _CUDA in available else (_CPU, {})]
        return [(self.provider, self._card())]

    def running(
        self, inputs: Sequence[InputPort], own: Mapping[str, str], available: Sequence[str]
    ) -> Providers:
        """Return the providers of a session that runs calls within the bounds of these inputs.

        `own` overrides the options of the device's provider. Nodes that TensorRT does not take run on CUDA, where
        `available` has it. Raises `SignatureError` for a dimension that TensorRT cannot bound.
        """
        options, rest = self._card(), []
        if self.provider == _CUDA:
            options |= cuda_options(inputs)
        elif self.provider == _TENSORRT:
            options |= {} if own.keys() & _PROFILE else trt_profile(inputs)
            rest = [(_CUDA, self._card() | cuda_options(inputs))] if _CUDA in available else []
        return [(self.provider, options | dict(own)), *rest]

    def _card(self) -> Options:
        return {"device_id": self.number} if self.number else {}


def short_name(provider: str) -> str:
    """Return the name by which a `device` calls the provider: `CPU`, `CUDA`, `Tensorrt`."""
    return provider.removesuffix(_SUFFIX)


def cuda_options(inputs: Sequence[InputPort]) -> Options:
    """Return the options of CUDA for calls of these inputs. f32 is computed in f32, as with every engine."""
    options = {"use_tf32": "0"}
    if any(port.is_dynamic for port in inputs):
        options |= {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}
    return options


_PROFILE = frozenset({"trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"})
"""TensorRT takes all three or none, so properties that state one must state the others."""


def trt_profile(inputs: Sequence[InputPort]) -> Options:
    """Return the range of shapes for which TensorRT builds an engine, as options of its provider; empty without dynamic
    dimensions.

    From the least to the largest sizes that all inputs admit, and at least 1: a call has elements. TensorRT chooses its
    kernels for the *optimal* shape. That is the largest batch, since batches are full where speed counts, and in the
    other dimensions the geometric mean of the bounds: lengths of texts and sides of pictures spread by factors.

    Raises `SignatureError` for a dimension without an upper bound.
    """
    table = DimensionTable.of(inputs)
    for name, bound in zip(table.names, table.bounds, strict=True):
        if bound.maximum is None:
            port = next(port for port in inputs if name in port.axis_names)
            raise SignatureError(
                f"dimension {name!r} of input {port.name!r} has no upper bound, and TensorRT builds an engine for a range "
                f"of sizes; give it one under inputs ({name}:1..64)",
                key=("inputs", port.name),
            )
    shapes: dict[str, list[str]] = {option: [] for option in sorted(_PROFILE)}
    for port, axes in zip(inputs, table.axes, strict=True):
        if port.is_string or not port.is_dynamic:
            continue
        triples = [
            _static(own) if number is None else _sizes(table.names[number], table.bounds[number])
            for number, own in zip(axes, port.shape.dimensions, strict=True)
        ]
        for option, sizes in zip(("min", "opt", "max"), zip(*triples, strict=True), strict=True):
            shapes[f"trt_profile_{option}_shapes"].append(f"{port.name}:{'x'.join(map(str, sizes))}")
    return {option: ",".join(each) for option, each in shapes.items() if each}


def _static(dimension: Dimension) -> tuple[int, int, int]:
    return (dimension.minimum,) * 3


def _sizes(name: str, bound: Dimension) -> tuple[int, int, int]:
    """Return the least, the optimal and the largest size of a dynamic dimension."""
    assert bound.maximum is not None  # `trt_profile` has refused it
    most = max(1, bound.maximum)
    least = max(1, bound.minimum)
    return least, most if name == BATCH else math.isqrt(least * most), most

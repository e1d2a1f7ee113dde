"""A model that is read but not compiled yet: its ports can be looked at, and reshaped, as often as one likes.

model = read_model(Path("model.xml"))
print(model.input().partial_shape)                        # [?,?]
model = model.reshape([(1, 10), "8..512"])
print(model.output().partial_shape)                       # [1..10,8..512]
request = model.compile().create_infer_request()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from shapestream_engine.backends.registry import load_backend
from shapestream_engine.errors import SignatureError
from shapestream_engine.infer_request import port_number
from shapestream_engine.model import CompiledModel, ModelSpec, compile_model, spec_of
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape, ShapeLike
from shapestream_engine.signature import ModelSignature

__all__ = ["ReadModel", "read_model"]


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The inputs and outputs of a model, by its file and its spec together. Frozen: `reshape` gives another one."""

    spec: ModelSpec
    signature: ModelSignature

    @property
    def inputs(self) -> tuple[InputPort, ...]:
        """All inputs, in the order of the model's ports."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        """All outputs, in the order of the model's ports."""
        return self.signature.outputs

    def input(self, port: int | str = 0) -> InputPort:
        """An input, by number or name; its `partial_shape` is what it may be."""
        return self.signature.inputs[port_number("input", port, self.signature)]

    def output(self, port: int | str = 0) -> OutputPort:
        """An output, by number or name; its `partial_shape` is what shape inference shows of it."""
        return self.signature.outputs[port_number("output", port, self.signature)]

    def reshape(self, shapes: ShapeLike | Mapping[int | str, ShapeLike]) -> ReadModel:
        """The same model for other shapes: of its only input, or of inputs by name or number.

        In any spelling: `"1, ?"`, `[1, -1]`, `[(1, 10), "8..512"]`. An axis keeps its name unless it is given another.
        Raises `ShapeError` for what is no shape, and `SignatureError` for one that the model does not take.
        """
        if not isinstance(shapes, Mapping):
            if len(self.signature.inputs) != 1:
                names = ", ".join(port.name for port in self.signature.inputs)
                raise SignatureError(
                    f"model {self.spec.name!r} has several inputs, {names}: say whose shape it is"
                )
            shapes = {0: shapes}
        wanted = {}
        for key, value in cast("Mapping[int | str, ShapeLike]", shapes).items():
            port, shape = self.input(key), NamedShape.of(value)
            if len(shape) == len(port.shape):
                kept = (new or own for new, own in zip(shape.names, port.shape.names, strict=True))
                shape = NamedShape(tuple(kept), shape.dimensions)
            wanted[port.name] = shape
        return read_model(self.spec.reshape(wanted))

    def compile(
        self,
        *,
        device: str | None = None,
        properties: Mapping[str, Any] | None = None,
        slots: int = 1,
        threads: int | None = None,
    ) -> CompiledModel:
        """The model, ready to run; see `compile_model`.

        `device` and `properties` are the engine's own, as in `ModelSpec`; None: as the spec says.
        """
        spec = self.spec
        if device is not None:
            spec = replace(spec, device=device)
        if properties is not None:
            spec = replace(spec, properties=properties)
        return compile_model(spec, slots=slots, threads=threads)


def read_model(model: ModelSpec | Path | str) -> ReadModel:
    """Read a model, given by its file or by a spec, without compiling it for its device where the engine can do that.

    Raises what `compile_model` raises, except for what only the device could object to.
    """
    spec = spec_of(model)
    backend = load_backend(spec.effective_engine)
    read_spec = getattr(backend, "read_spec", None)
    if read_spec is not None:
        return ReadModel(spec, read_spec(spec))
    compiled = backend.compile_spec(spec, slots=1, threads=1)
    compiled.close()
    return ReadModel(spec, compiled.signature)

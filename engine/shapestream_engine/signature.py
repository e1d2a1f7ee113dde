"""What a model takes and gives: ports, their shared dimensions, and how its outputs are divided.

A signature checks itself when it is made, and afterwards every request against itself (`resolve`). It travels
to clients and from workers as plain data.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shapestream_engine.batching.native import Native
from shapestream_engine.batching.strategies import parse_strategy
from shapestream_engine.batching.strategy import Planner, Strategy
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.empty_answer import empty_answer
from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.layout import Layout
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.resolution import RequestShape, resolve_layout
from shapestream_engine.rule_check import check_rule
from shapestream_engine.shapes import Dimension

__all__ = ["InputPort", "ModelSignature", "OutputPort", "RequestShape"]

MAX_PORTS = 64
"""Inputs, and outputs, in a description that comes from elsewhere."""
_REMEMBERED = 4096
"""Layouts and shapes remembered per signature; when so many are known, all are forgotten and learnt anew.

Forgetting everything is rare, costs a slow check per layout in use, and needs no bookkeeping on the hot path.
"""


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The ports of a model. Raises `SignatureError` where they contradict each other or a rule cannot hold.

    Derived from the inputs: `dimensions` (names of the dynamic ones, `batch` first), and parallel to it
    `bounds` (what all inputs admit together) and `paddable`; `has_batch`, whether requests can share a call;
    `planner`, the strategy as it applies here, or None where every shape is run as it comes.
    """

    name: str
    inputs: tuple[InputPort, ...]
    outputs: tuple[OutputPort, ...]
    strategy: Strategy = Native()  # noqa: RUF009 - frozen
    dimensions: tuple[str, ...] = field(init=False, repr=False, compare=False)
    bounds: tuple[Dimension, ...] = field(init=False, repr=False, compare=False)
    paddable: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    has_batch: bool = field(init=False, repr=False, compare=False)
    table: DimensionTable = field(init=False, repr=False, compare=False)
    planner: Planner | None = field(init=False, repr=False, compare=False)
    _resolved: dict[bytes, RequestShape] = field(init=False, repr=False, compare=False, default_factory=dict)
    _input_shapes: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        try:
            _check_names("input", [port.name for port in self.inputs])
            _check_names("output", [port.name for port in self.outputs])
            if not self.outputs:
                raise SignatureError("a model needs at least one output")
            table = DimensionTable.of(self.inputs)
            for port in self.inputs:
                _check_mask(port, self.inputs)
            for output in self.outputs:
                with EngineError.about("outputs", output.name):
                    check_rule(output, self.outputs, table)
            planner = self.strategy.bind(table)
        except SignatureError as error:
            raise SignatureError(f"model {self.name!r}: {error}", key=error.key) from error
        for derived, value in (
            ("dimensions", table.names),
            ("bounds", table.bounds),
            ("paddable", table.paddable),
            ("has_batch", table.has_batch),
            ("table", table),
            ("planner", planner),
        ):
            object.__setattr__(self, derived, value)

    def resolve(self, layout: Layout) -> RequestShape:
        """The request's sizes and bytes, once its layout is known to fit; raises `ShapeError` otherwise.

        The tensors' bytes are not looked at: their lengths must equal the `nbytes` that this returns.
        """
        try:
            # Not the tuple itself: True, 1.0 and 1 are equal as keys, and of these only 1 is a size. Marshal
            # writes each type differently, and in format 2 never refers back to what it wrote before.
            key = marshal.dumps(layout, 2)
        except ValueError:
            return self._checked(layout)
        request = self._resolved.get(key)
        if request is None:
            request = self._checked(layout)
            if len(self._resolved) >= _REMEMBERED:
                self._resolved.clear()
            self._resolved[key] = request
        return request

    def _checked(self, layout: Layout) -> RequestShape:
        request = resolve_layout(self.inputs, self.table, self.planner, layout)
        if request.total_nbytes or not self.inputs:
            return request
        return replace(
            request, answer=empty_answer(self.inputs, self.outputs, self.table, self.planner, request)
        )

    def input_shapes(self, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shape of each input in a call of these sizes (parallel to `dimensions`)."""
        shapes = self._input_shapes.get(sizes)
        if shapes is None:
            shapes = tuple(
                tuple(
                    dimension.minimum if number is None else sizes[number]
                    for number, dimension in zip(axes, port.shape.dimensions, strict=True)
                )
                for port, axes in zip(self.inputs, self.table.axes, strict=True)
            )
            if len(self._input_shapes) >= _REMEMBERED:
                self._input_shapes.clear()
            self._input_shapes[sizes] = shapes
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the wire, that `from_dict` turns into an equal signature."""
        return {
            "name": self.name,
            "inputs": [port.to_dict() for port in self.inputs],
            "outputs": [port.to_dict() for port in self.outputs],
            **({} if self.strategy == Native() else {"shapes": self.strategy.to_dict()}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ModelSignature:
        """The signature that `plain` describes; it may come from anywhere.

        Raises `SignatureError` for whatever is wrong with it.
        """
        try:
            match plain:
                case {"name": str(name), "inputs": [*inputs], "outputs": [*outputs]}:
                    if max(len(inputs), len(outputs)) > MAX_PORTS:
                        raise SignatureError(
                            f"{len(inputs)} inputs, {len(outputs)} outputs; at most {MAX_PORTS}"
                        )
                    return cls(
                        name,
                        tuple(InputPort.from_dict(_mapping(port)) for port in inputs),
                        tuple(OutputPort.from_dict(_mapping(port)) for port in outputs),
                        parse_strategy(plain.get("shapes", {})),
                    )
        except SignatureError:
            raise
        except EngineError as error:
            raise SignatureError(str(error), key=error.key) from error
        raise SignatureError("a signature has a name, a list of inputs and a list of outputs")

    def describe(self) -> list[str]:
        """Lines for a human: the ports, then each dynamic dimension, its bounds and what is done along it."""
        lines = [f"model {self.name}"]
        lines += [f"  input  {port}" for port in self.inputs]
        lines += [f"  output {port}" for port in self.outputs]
        for name, bounds, paddable in zip(self.dimensions, self.bounds, self.paddable, strict=True):
            if (planned := self.strategy.words(name)) is not None:
                use = planned
            elif name == BATCH and self.has_batch:
                use = self._sharing()
            else:
                use = "may be padded" if paddable else self._why_not_padded(name)
            lines.append(f"  {name}: {bounds}, {use}")
        if not self.has_batch:
            lines.append("  no batch axis: every request runs alone")
        if replace(self.strategy, most_rows=None) != Native():
            lines.append(f"  shapes: {self.strategy}")
        return lines

    def _sharing(self) -> str:
        most = self.strategy.most_rows
        if most is None:
            return "requests share calls along it"
        return "no rows of others" if most == 1 else f"requests share calls of up to {most} rows along it"

    def _why_not_padded(self, dimension: str) -> str:
        ports = [port for port in self.inputs if dimension in port.axis_names]
        refusing = [port.name for port in ports if not port.pads(dimension)]
        # Padding that some inputs allow and others do not is probably an oversight, and worth a word.
        blame = f" ({', '.join(refusing)} does not allow it)" if len(refusing) < len(ports) else ""
        together = ": only requests of the same size share a call" if self.has_batch else ""
        return f"never padded{blame}{together}"


def _check_names(kind: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SignatureError(f"two {kind}s are called {twice[0]!r}")


def _check_mask(port: InputPort, inputs: Sequence[InputPort]) -> None:
    if port.mask_of is None:
        return
    source = next((other for other in inputs if other.name == port.mask_of), None)
    if source is None or source is port:
        raise SignatureError(
            f"input {port.name!r}: mask_of names no other input: {port.mask_of!r}", key=("inputs", port.name)
        )
    if source.mask_of is not None:
        raise SignatureError(
            f"input {port.name!r}: mask_of names {source.name!r}, which is a mask itself",
            key=("inputs", port.name),
        )
    strange = [name for name in port.axis_names if name is not None and name not in source.axis_names]
    if strange:
        raise SignatureError(
            f"input {port.name!r}: its dimension {strange[0]!r} is none of {source.name!r}, which it masks",
            key=("inputs", port.name),
        )


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SignatureError(f"a port is a mapping, not {value!r}")
    return value

"""What a model takes and gives: ports, their shared dimensions, and how its outputs are divided.

A signature checks itself when it is made, and afterwards every request against itself (`resolve`). It travels
to clients and from workers as plain data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.empty_answer import empty_answer
from shapestream_engine.errors import EngineError, ShapeError, SignatureError
from shapestream_engine.layout import Layout
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.resolution import RequestShape, resolve_layout
from shapestream_engine.rule_check import check_rule
from shapestream_engine.shapes import Dimension
from shapestream_engine.strategy import Sizes, Strategy, parse_strategy

__all__ = ["InputPort", "ModelSignature", "OutputPort", "RequestShape"]

MAX_PORTS = 64
"""Inputs, and outputs, in a description that comes from elsewhere."""


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The ports of a model. Raises `SignatureError` where they contradict each other or a rule cannot hold.

    Derived from the inputs: `dimensions` (names of the dynamic ones, `batch` first), and parallel to it
    `bounds` (what all inputs admit together), `paddable` and `allowed` (the strategy's sizes, None for any);
    `has_batch`, whether requests can share a call; `static_sizes`, call shapes with a model of their own.
    """

    name: str
    inputs: tuple[InputPort, ...]
    outputs: tuple[OutputPort, ...]
    strategy: Strategy = Strategy()  # noqa: RUF009 - frozen
    dimensions: tuple[str, ...] = field(init=False, repr=False, compare=False)
    bounds: tuple[Dimension, ...] = field(init=False, repr=False, compare=False)
    paddable: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    has_batch: bool = field(init=False, repr=False, compare=False)
    table: DimensionTable = field(init=False, repr=False, compare=False)
    allowed: tuple[Sizes | None, ...] = field(init=False, repr=False, compare=False)
    static_sizes: tuple[Sizes, ...] = field(init=False, repr=False, compare=False)

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
            allowed, static = self.strategy.allowed(table), self.strategy.static_sizes(table)
        except SignatureError as error:
            raise SignatureError(f"model {self.name!r}: {error}", key=error.key) from error
        for derived, value in (
            ("dimensions", table.names),
            ("bounds", table.bounds),
            ("paddable", table.paddable),
            ("has_batch", table.has_batch),
            ("table", table),
            ("allowed", allowed),
            ("static_sizes", static),
        ):
            object.__setattr__(self, derived, value)

    def resolve(self, layout: Layout) -> RequestShape:
        """The request's sizes and bytes, once its layout is known to fit; raises `ShapeError` otherwise.

        The tensors' bytes are not looked at: their lengths must equal the `nbytes` that this returns. Nothing is remembered
        here: callers on the way of a request keep a `Memo` of the layouts that they have read.
        """
        request = resolve_layout(self.inputs, self.table, self.round_up, layout)
        if request.total_nbytes or not self.inputs:
            return request
        answer = empty_answer(
            self.inputs, self.outputs, self.table, request, exactly=self.runs_exactly(request.sizes)
        )
        return replace(request, answer=answer)

    def round_up(self, sizes: Sizes) -> Sizes:
        """The sizes that a request of these is padded to: the next allowed ones. Its rows stay, as requests add up.

        Raises `ShapeError` for a size beyond the largest that is allowed.
        """
        if not self.strategy.sizes:
            return sizes
        rounded = list(sizes)
        for number in range(1 if self.has_batch else 0, len(sizes)):
            allowed = self.allowed[number]
            if allowed is None:
                continue
            place = bisect_left(allowed, sizes[number])
            if place == len(allowed):
                raise ShapeError(
                    f"dimension {self.dimensions[number]!r} is {sizes[number]}, which is more than {allowed[-1]}, "
                    f"the largest size that the model is run at"
                )
            rounded[number] = allowed[place]
        return tuple(rounded)

    def runs_exactly(self, sizes: Sizes) -> bool:
        """Whether a batch of these sizes is sure to be one call of them: nothing is padded, filled up or divided."""
        if self.strategy.max_prepared is not None:
            return False
        rows_are_free = not self.has_batch or self.allowed[0] is None
        return rows_are_free and self.round_up(sizes) == sizes

    def input_shapes(self, sizes: Sizes) -> tuple[Sizes, ...]:
        """The shape of each input in a call of these sizes (parallel to `dimensions`)."""
        return tuple(
            tuple(
                dimension.minimum if number is None else sizes[number]
                for number, dimension in zip(axes, port.shape.dimensions, strict=True)
            )
            for port, axes in zip(self.inputs, self.table.axes, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the wire, that `from_dict` turns into an equal signature."""
        return {
            "name": self.name,
            "inputs": [port.to_dict() for port in self.inputs],
            "outputs": [port.to_dict() for port in self.outputs],
            **({} if self.strategy == Strategy() else {"shapes": self.strategy.to_dict()}),
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
        if replace(self.strategy, most_rows=None) != Strategy():
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

"""The signature of a model: its ports, their shared dimensions, and the check of each request against them.

A signature is a value. It checks itself when it is made. It is sent to clients and from workers as plain data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from shapestream_engine.arrays import array_dtype, sent_array
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ElementTypeError, EngineError, ShapeError, SignatureError
from shapestream_engine.layout import Layout, RequestShape, Tensors
from shapestream_engine.output_rules import Recount
from shapestream_engine.ports import DimensionTable, InputPort, OutputPort
from shapestream_engine.rule_check import RuleCheck
from shapestream_engine.shapes import BATCH, MAX_SIZE, Dimension, exact_nbytes
from shapestream_engine.strategy import Sizes, Strategy, parse_strategy
from shapestream_engine.string_arrays import LENGTH

# ---------------------------------------------------------------- requests


def _resolved(signature: ModelSignature, layout: Any) -> RequestShape:
    """Check a layout without the tensors' bytes, and return the request's sizes. Raises `ShapeError` that names the
    port, the dimension and the remedy."""
    inputs, table = signature.inputs, signature.table
    positions = _positions(inputs, layout)
    sizes: list[int | None] = [None] * len(table.names)
    first_port: dict[int, str] = {}
    nbytes = [0] * len(layout)
    for number, port in enumerate(inputs):
        position = positions[number]
        if position is None:
            continue
        _, element_type, shape = layout[position]
        _check_tensor(port, element_type, shape)
        for axis, dimension in enumerate(table.axes[number]):
            if dimension is None:
                continue
            known = sizes[dimension]
            if known is None:
                sizes[dimension], first_port[dimension] = shape[axis], port.name
            elif known != shape[axis]:
                raise ShapeError(
                    f"input {port.name!r}: dimension {table.names[dimension]!r} is {shape[axis]}, "
                    f"but {known} in input {first_port[dimension]!r}; the same name is the same size"
                )
        if (implied := table.strings[number]) is not None:
            sizes[implied], first_port[implied] = _mean_bytes(port, shape), port.name
        nbytes[position] = _nbytes(port, shape)
    total = sum(nbytes)
    if total > MAX_SIZE:
        raise ShapeError(f"the request has {total} bytes, which is more than {MAX_SIZE}")
    own = _within_bounds(table, sizes, first_port)
    return RequestShape(
        sizes=own,
        rows=own[0] if table.has_batch else 1,
        nbytes=tuple(nbytes),
        total_nbytes=total,
        positions=tuple(positions),
        rounded=signature.round_up(own),
    )


def _positions(inputs: Sequence[InputPort], layout: Any) -> list[int | None]:
    """Return the position of each input in the layout; None for one that is left out, and that the server makes."""
    if not isinstance(layout, tuple):
        raise ShapeError(f"a layout is a tuple of (port, element type, shape), not {type(layout).__name__}")
    positions: list[int | None] = [None] * len(inputs)
    for position, entry in enumerate(layout):
        if not isinstance(entry, tuple) or len(entry) != 3:
            raise ShapeError(f"a layout's entry is (port, element type, shape), not {entry!r}")
        number = entry[0]
        if type(number) is not int or not 0 <= number < len(inputs):
            raise ShapeError(f"there is no input number {number!r}; the model has {_listing(inputs)}")
        if positions[number] is not None:
            raise ShapeError(f"input {inputs[number].name!r} is given twice")
        positions[number] = position
    missing = [
        port.name
        for port, position in zip(inputs, positions, strict=True)
        if position is None and not port.may_lack
    ]
    if missing:
        raise ShapeError(
            f"missing input {', '.join(map(repr, missing))}; the model has {_listing(inputs)}; "
            "only masks and fixed values may be left out (send all others, also where a function has a default)"
        )
    return positions


def _check_tensor(port: InputPort, element_type: Any, shape: Any) -> None:
    """Check element type, rank, and each size on its own."""
    if element_type != port.element_type:
        raise ElementTypeError(
            f"input {port.name!r} is of element type {port.element_type}, not {element_type!r}; "
            f"convert it before sending"
        )
    if not isinstance(shape, tuple):
        raise ShapeError(f"input {port.name!r}: a shape is a tuple of integers, not {shape!r}")
    rank = port.shape.rank + port.is_string
    if len(shape) != rank:
        last = ", and the bytes of all its strings" if port.is_string else ""
        raise ShapeError(
            f"input {port.name!r} has {port.shape.rank} dimensions, [{port.shape}]{last}, "
            f"not {len(shape)}: {list(shape)}"
        )
    if port.is_string:
        _check_bytes(port, shape)
        shape = shape[:-1]
    for axis, (size, admitted) in enumerate(zip(shape, port.shape.dimensions, strict=True)):
        if size in admitted:
            continue
        where = f"input {port.name!r}: {_axis_text(port, axis)}"
        if type(size) is not int:
            raise ShapeError(f"{where} is {size!r}; a size is an integer")
        if not 0 <= size <= MAX_SIZE:
            side = "negative" if size < 0 else "too large"
            raise ShapeError(f"{where} is {side}; a size lies within 0..{MAX_SIZE}")
        raise ShapeError(f"{where} is {size}, the model takes {admitted}: [{port.shape}]")


def _check_bytes(port: InputPort, shape: tuple[Any, ...]) -> None:
    """Check the bytes of all strings, the last size."""
    *sizes, nbytes = shape
    where = f"input {port.name!r}: the bytes of all its strings"
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_SIZE:
        raise ShapeError(f"{where} are an integer within 0..{MAX_SIZE}, not {nbytes!r}")
    if nbytes and 0 in sizes:
        raise ShapeError(f"{where} are {nbytes}, but there are none: {sizes}")


def _mean_bytes(port: InputPort, shape: tuple[int, ...]) -> int:
    """Return the mean bytes of the strings, rounded up, and at least 1: empty strings are elements, too.

    If it exceeds the bound, so does a string, which is refused by its index where its bytes are at hand. So the bound
    stands for such a mean here.
    """
    assert port.at_most_bytes is not None  # of strings
    return max(1, min(port.at_most_bytes, -(-shape[-1] // (prod(shape[:-1]) or 1))))


def _nbytes(port: InputPort, shape: tuple[int, ...]) -> int:
    try:
        if port.is_string:
            return exact_nbytes(LENGTH.itemsize, shape[:-1]) + shape[-1]
        return exact_nbytes(dtype_of(port.element_type).itemsize, shape)
    except ShapeError as error:
        raise ShapeError(f"input {port.name!r}: {error}") from error


def _within_bounds(
    table: DimensionTable, sizes: Sequence[int | None], first_port: dict[int, str]
) -> tuple[int, ...]:
    """Check the sizes against the bounds of all inputs, which may be tighter than a single port's."""
    own = []
    for number, size in enumerate(sizes):
        # The size is always known: a mask has no dimension that its source lacks, and a fixed value has none.
        assert size is not None
        if size not in table.bounds[number]:
            raise ShapeError(
                f"input {first_port[number]!r}: dimension {table.names[number]!r} is {size}, "
                f"the inputs together take {table.bounds[number]}"
            )
        own.append(size)
    return tuple(own)


def _axis_text(port: InputPort, axis: int) -> str:
    name = port.shape.names[axis]
    return f"axis {axis}" if name is None else f"dimension {name!r}"


def _listing(inputs: Sequence[InputPort]) -> str:
    if not inputs:
        return "no inputs"
    return "; ".join(f"{number} {port.name!r}" for number, port in enumerate(inputs))


# ---------------------------------------------------------------- requests without elements
#
# Such a request has no bytes, and may state any sizes beside its 0. The results of a padded or filled-up call would depend
# on that statement alone. So if the ports do not determine the results, the request never runs at padded sizes.


def _has_elements(signature: ModelSignature, request: RequestShape) -> bool:
    """Tell whether a request has elements of its own, those that it has in common with others apart."""
    if not signature.has_batch:
        return request.total_nbytes > 0
    return any(
        position is not None and request.nbytes[position] and not signature.is_common(port)
        for port, position in zip(signature.inputs, request.positions, strict=True)
    )


def _empty_answer(signature: ModelSignature, request: RequestShape) -> Tensors | None:
    """Return the results of a request without elements; None if only a call of exactly its sizes shows them. Raises
    `ShapeError` if the call may be padded or filled up, or needs a mask that is larger than the request."""
    own = dict(zip(signature.dimensions, request.sizes, strict=True))
    has_rows = not signature.has_batch or request.rows > 0
    shapes = [_shape(port, own, has_rows=has_rows) for port in signature.outputs]
    unknown = [port.name for port, shape in zip(signature.outputs, shapes, strict=True) if shape is None]
    if not unknown:
        return _tensors(signature.outputs, [shape for shape in shapes if shape is not None])
    about = f"a request without elements, of the sizes {list(request.sizes)}, cannot be answered: "
    if not signature.runs_exactly(request.sizes):
        raise ShapeError(
            f"{about}output {unknown[0]!r} needs a call, which would hold padding alone; send elements"
        )
    for number, port in enumerate(signature.inputs):
        is_lacking = request.positions[number] is None and port.value is None
        if is_lacking and all(own.get(name or "", 1) for name in port.axis_names):
            raise ShapeError(f"{about}send the mask {port.name!r}, which has more elements than the request")
    return None


def _shape(port: OutputPort, own: Mapping[str, int], *, has_rows: bool) -> tuple[int, ...] | None:
    """Return the output's shape for a request without elements; None if the data decides, or the model adds elements."""
    rule = port.rule
    data_axis = port.data_axis
    if isinstance(rule, Recount):
        return None if has_rows else (1,) * port.shape.rank
    # No rows have no detections. Only the model knows the number of detections in rows without elements.
    if data_axis is not None and has_rows:
        return None
    sizes = []
    for axis, (size, dimension) in enumerate(zip(port.own_sizes(own), port.shape.dimensions, strict=True)):
        if axis == data_axis:
            sizes.append(0)
        elif size is not None:
            sizes.append(size)
        elif dimension.is_dynamic:
            return None
        else:
            sizes.append(dimension.minimum)
    return tuple(sizes) if 0 in sizes else None


def _tensors(outputs: Sequence[OutputPort], shapes: Sequence[tuple[int, ...]]) -> Tensors:
    layout, buffers = [], []
    for number, (port, shape) in enumerate(zip(outputs, shapes, strict=True)):
        dtype = array_dtype(port.element_type)
        exact_nbytes(dtype.itemsize, shape)  # a shape that no array can have cannot be received either
        sent_shape, buffer = sent_array(port.element_type, np.zeros(shape, dtype))
        layout.append((number, port.element_type, sent_shape))
        buffers.append(buffer)
    return Tensors(layout=tuple(layout), buffers=buffers)


# ---------------------------------------------------------------- models

MAX_PORTS = 64
"""Largest number of inputs, and of outputs, in a description of unknown origin."""


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The ports of a model; raises `SignatureError` if they contradict each other or a rule does not fit.

    The inputs determine the derived fields. `dimensions` has the names of the dynamic dimensions, `batch` first. Parallel
    to it are `bounds` (the sizes that all inputs admit), `paddable`, and `allowed` (the strategy's sizes; None: any).
    `has_batch` tells whether requests can share a call. `static_sizes` has the call shapes with a prepared model.
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
                with EngineError.about("inputs", port.name):
                    _check_mask(port, self.inputs)
            for output in self.outputs:
                with EngineError.about("outputs", output.name):
                    RuleCheck(output, self.outputs, table).run()
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
        """Check a layout and return the request's sizes and bytes; raises `ShapeError` if it does not fit.

        The lengths of the buffers are not checked: they must equal the returned `nbytes`. Nothing is cached here; callers
        remember layouts.
        """
        request = _resolved(self, layout)
        if not self.inputs or _has_elements(self, request):
            return request
        return replace(request, answer=_empty_answer(self, request))

    def is_common(self, port: InputPort) -> bool:
        """Tell whether a call has this input once for all its requests."""
        return self.has_batch and port.is_common

    def round_up(self, sizes: Sizes) -> Sizes:
        """Return the next allowed sizes, to which a request is padded. Rows stay, because requests add up.

        Raises `ShapeError` for a size beyond the largest allowed size.
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
        """Tell whether a batch of these sizes certainly runs as one call: not padded, filled up or divided."""
        if self.strategy.max_prepared is not None:
            return False
        rows_are_free = not self.has_batch or self.allowed[0] is None
        return rows_are_free and self.round_up(sizes) == sizes

    def input_shapes(self, sizes: Sizes) -> tuple[Sizes, ...]:
        """Return the shape of each input in a call; `sizes` is parallel to `dimensions`."""
        return tuple(
            tuple(
                dimension.minimum if number is None else sizes[number]
                for number, dimension in zip(axes, port.shape.dimensions, strict=True)
            )
            for port, axes in zip(self.inputs, self.table.axes, strict=True)
        )

    def shape_of_tensors(self, sizes: Sizes) -> Sizes:
        """Return the sizes of a call with 1 in place of mean bytes, which are no size of a tensor."""
        strings = self.table.strings
        if strings.count(None) == len(strings):
            return sizes
        return tuple([1 if number in strings else size for number, size in enumerate(sizes)])

    def sent_shapes(self, sizes: Sizes) -> tuple[Sizes, ...]:
        """Return the shape of each input in a layout of these sizes: that of strings ends with the bytes of all."""
        return tuple(
            shape if number is None else (*shape, prod(shape) * sizes[number])
            for shape, number in zip(self.input_shapes(sizes), self.table.strings, strict=True)
        )

    def spell(self, sizes: Sequence[int]) -> str:
        """Return the sizes as text: `batch 2, seq 7`."""
        named = zip(self.dimensions, sizes, strict=True)
        return ", ".join(f"{name} {size}" for name, size in named) or "the only shape"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the wire; `from_dict` makes an equal signature of it."""
        return {
            "name": self.name,
            "inputs": [port.to_dict() for port in self.inputs],
            "outputs": [port.to_dict() for port in self.outputs],
            **({} if self.strategy == Strategy() else {"shapes": self.strategy.to_dict()}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ModelSignature:
        """Return the signature that `plain`, data of any origin, describes. Raises `SignatureError` for invalid data."""
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
        """Describe the signature in text lines: the ports, then each dynamic dimension with bounds and use."""
        lines = [f"model {self.name}"]
        lines += [f"  input  {port}" for port in self.inputs]
        lines += [f"  output {port}" for port in self.outputs]
        dimensions = zip(self.dimensions, self.bounds, self.paddable, strict=True)
        for number, (name, bounds, paddable) in enumerate(dimensions):
            if (planned := self.strategy.words(name)) is not None:
                use = planned
            elif name == BATCH and self.has_batch:
                use = self._sharing()
            elif number in self.table.strings:
                use = "mean bytes of a string; requests of any share a call, and nothing is padded"
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
        # If only some inputs allow padding, this is probably an oversight.
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
        raise SignatureError(f"input {port.name!r}: mask_of names no other input: {port.mask_of!r}")
    if source.mask_of is not None:
        raise SignatureError(f"input {port.name!r}: mask_of names {source.name!r}, which is a mask itself")
    strange = [name for name in port.axis_names if name is not None and name not in source.axis_names]
    if strange:
        raise SignatureError(
            f"input {port.name!r}: its dimension {strange[0]!r} is none of {source.name!r}, which it masks"
        )


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SignatureError(f"a port is a mapping, not {value!r}")
    return value

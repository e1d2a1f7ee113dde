"""The fit of a version to the signature that its name announced: whether it takes the same requests, and its ports' places.

Tensors travel by place. A client that opened `embeddings` sends the inputs in the order of the signature that it was told,
and the version that its request is drawn for may have them in another one. `Fit` maps the places of ports by name.

`misfit` decides whether a version may get requests that named none. It must take all that the announced signature allows,
and answer as that describes. A version that clients ask for by its own name may have any signature. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shapestream_engine.layout import Layout, Tensors
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.signature import ModelSignature


@dataclass(frozen=True, slots=True)
class Fit:
    """The places of a version's ports, by the places that clients know. None: they are the same."""

    inputs: tuple[int, ...] | None
    """For each announced input, its place at the version."""
    outputs: tuple[int, ...] | None
    """For each output of the version, its announced place."""

    @classmethod
    def of(cls, announced: ModelSignature, version: ModelSignature) -> Fit:
        """Return the places of a version without a `misfit`."""
        there = [port.name for port in version.inputs]
        known = [port.name for port in announced.outputs]
        return cls(
            _moved([there.index(port.name) for port in announced.inputs]),
            _moved([known.index(port.name) for port in version.outputs]),
        )


def _moved(places: list[int]) -> tuple[int, ...] | None:
    return None if places == [*range(len(places))] else tuple(places)


def rearranged(tensors: Tensors, places: Sequence[int]) -> Tensors:
    """Return the tensors with the ports' other numbers, in the order of these. Numbers that are no port's stay, and are
    refused with the layout."""
    most = len(places)
    rows = [
        ((places[number] if number < most else number, kind, shape), buffer)
        for (number, kind, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True)
    ]
    rows.sort(key=lambda row: row[0][0])
    layout: Layout = tuple([row for row, _ in rows])
    return Tensors(layout=layout, buffers=[buffer for _, buffer in rows])


def misfit(announced: ModelSignature, version: ModelSignature) -> str | None:
    """Return why requests of the announced signature do not fit a version, with the port; None where all fit."""
    return next(_misfits(announced, version), None)


def other_ports(announced: ModelSignature, version: ModelSignature) -> str | None:
    """Return why no request of the announced signature fits a version, whatever its sizes are; None where some may."""
    return next(_port_misfits(announced, version), None)


def _port_misfits(announced: ModelSignature, version: ModelSignature) -> Iterator[str]:
    """Yield ports that only one of the two has, and those with another type, rank or rule."""
    yield from _name_misfits(announced, version)
    theirs = {port.name: port for port in version.inputs}
    for port in announced.inputs:
        for why in _kind_misfits(port, theirs[port.name]):
            yield f"input {port.name!r}: {why}"
    answers = {port.name: port for port in version.outputs}
    for output in announced.outputs:
        for why in _kind_misfits(output, answers[output.name]):
            yield f"output {output.name!r}: {why}"
        if output.rule != answers[output.name].rule:
            there = answers[output.name].rule.NAME
            yield f"output {output.name!r}: its rule is {there}, and clients know {output.rule.NAME}"


def _misfits(announced: ModelSignature, version: ModelSignature) -> Iterator[str]:
    yield from _name_misfits(announced, version)
    theirs = {port.name: port for port in version.inputs}
    for port in announced.inputs:
        there_port = theirs[port.name]
        for why in (*_input_misfits(port, there_port), *_bound_misfits(announced, port, there_port)):
            yield f"input {port.name!r}: {why}"
    answers = {port.name: port for port in version.outputs}
    for output in announced.outputs:
        for why in _output_misfits(output, answers[output.name]):
            yield f"output {output.name!r}: {why}"
    if announced.has_batch != version.has_batch:
        yield f"only one of the two has an axis {BATCH!r} on which requests share calls"
    yield from _size_misfits(announced, version)


def _name_misfits(announced: ModelSignature, version: ModelSignature) -> Iterator[str]:
    for kind in ("input", "output"):
        known, there = (
            [port.name for port in (one.inputs if kind == "input" else one.outputs)]
            for one in (announced, version)
        )
        for name in known:
            if name not in there:
                yield f"it has no {kind} {name!r}"
        for name in there:
            if name not in known:
                yield f"its {kind} {name!r} is new"


def _input_misfits(known: InputPort, there: InputPort) -> Iterator[str]:
    yield from _kind_misfits(known, there)
    if known.may_lack and (known.mask_of, known.value) != (there.mask_of, there.value):
        yield "clients may leave it out, and this version does not make the same of that"
    most, takes = known.at_most_bytes, there.at_most_bytes
    if takes is not None and (most is None or takes < most):
        yield f"at_most_bytes is {takes}, and clients may send {most}"


def _bound_misfits(announced: ModelSignature, known: InputPort, there: InputPort) -> Iterator[str]:
    """Yield the axes along which a version does not take all sizes that clients may send."""
    for number, (_, taken) in enumerate(_pairs(known.shape, there.shape)):
        sent = _sent(announced, known, number)
        if not _holds(taken, sent):
            yield f"axis {number} takes {taken}, and clients may send {sent}"


def _sent(signature: ModelSignature, port: InputPort, axis: int) -> Dimension:
    """Return the sizes that clients may send along an axis, as all inputs together allow them."""
    name = port.shape.names[axis]
    if name not in signature.dimensions:
        return port.shape.dimensions[axis]
    number = signature.dimensions.index(name)
    bounds, allowed = signature.bounds[number], signature.allowed[number]
    if allowed is None or name == BATCH:
        return bounds
    most = allowed[-1] if bounds.maximum is None else min(bounds.maximum, allowed[-1])
    return Dimension(min(bounds.minimum, most), most)


def _output_misfits(known: OutputPort, there: OutputPort) -> Iterator[str]:
    yield from _kind_misfits(known, there)
    if known.rule != there.rule:
        yield f"its rule is {there.rule.NAME}, and clients know {known.rule.NAME}"
    for number, (told, given) in enumerate(_pairs(known.shape, there.shape)):
        if not _holds(told, given):
            yield f"axis {number} has {given}, and clients expect {told}"


def _kind_misfits(known: InputPort | OutputPort, there: InputPort | OutputPort) -> Iterator[str]:
    if known.element_type != there.element_type:
        yield f"its type is {there.element_type}, and clients know {known.element_type}"
    if known.shape.rank != there.shape.rank:
        yield f"it has {there.shape.rank} axes, and clients know {known.shape.rank}"


def _pairs(known: NamedShape, there: NamedShape) -> Iterator[tuple[Dimension, Dimension]]:
    if known.rank == there.rank:
        yield from zip(known.dimensions, there.dimensions, strict=True)


def _holds(outer: Dimension, inner: Dimension) -> bool:
    """Tell whether every size of `inner` is one of `outer`."""
    if outer.minimum > inner.minimum:
        return False
    return outer.maximum is None or (inner.maximum is not None and inner.maximum <= outer.maximum)


def _size_misfits(announced: ModelSignature, version: ModelSignature) -> Iterator[str]:
    """Yield what several inputs together allow: equal sizes of axes that clients may choose apart, and largest sizes."""
    theirs = {port.name: port.shape for port in version.inputs}
    axes: dict[str, tuple[object, str]] = {}
    for port in announced.inputs:
        shape = theirs[port.name]
        if shape.rank != port.shape.rank:
            continue
        for number, name in enumerate(shape.names):
            if name is None:
                continue
            size = port.shape.dimensions[number]
            known: object = port.shape.names[number] or (
                size.minimum if size.is_static else (port.name, number)
            )
            first, where = axes.setdefault(name, (known, port.name))
            if first != known:
                yield f"inputs {where!r} and {port.name!r} must have one size {name!r}, and clients may send two"
    largest = {
        name: sizes[-1]
        for name, sizes in zip(version.dimensions, version.allowed, strict=True)
        if sizes is not None and name != BATCH
    }
    for port in announced.inputs:
        for number, name in enumerate(theirs[port.name].names):
            if name in largest and number < port.shape.rank:
                most = _sent(announced, port, number).maximum
                if most is None or most > largest[name]:
                    sent = "any size" if most is None else f"up to {most}"
                    yield f"it is run at {name!r} up to {largest[name]}, and clients may send {sent}"

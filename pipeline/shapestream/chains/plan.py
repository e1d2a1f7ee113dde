"""A chain that is held against the signatures of its models: typed edges, the stages' outputs, and its own signature.

A chain is a model to clients. Its signature has no batch axis, since its request is one, whatever rows it has; an axis that
its stages call `batch` is called `rows` there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from shapestream.chains.spec import OK, ChainSpec, Key, Problem, Source, Spread, StageSpec
from shapestream_engine.errors import ShapeError, SignatureError
from shapestream_engine.ports import BATCH, InputPort, OutputPort, Rows, Whole, list_ports
from shapestream_engine.shapes import Dimension, NamedShape
from shapestream_engine.signature import ModelSignature

ROWS = "rows"
"""The name of a chain's axis that its stages call `batch`."""


OF_NO_MODEL = -1
"""The number of a stage's output that no output of its model makes: `ok`."""


class Gathering(Enum):
    """The way in which the results of a stage's requests become one output of the stage."""

    ONLY = "only"
    """It has one request, whose result it is."""
    STACKED = "stacked"
    """A tensor with a row per request."""
    LISTED = "listed"
    """A list with a tensor per request, since their shapes may differ."""


class ChainRefused(ValueError):
    """A chain does not fit its models. `problems` has all mistakes, with places in the chain's section."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        super().__init__(f"chain {name!r}: {'; '.join(text for _, text in problems)}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Type:
    """The type of an edge: a tensor's, or that of a list's arrays."""

    element_type: str
    shape: NamedShape
    """The shape of the tensor, or of one array."""
    is_list: bool = False

    def __str__(self) -> str:
        return f"{'list of ' if self.is_list else ''}{self.element_type} [{self.shape}]"


@dataclass(frozen=True, slots=True)
class Feed:
    """One input of a stage's requests."""

    port: int
    """Number of the model's input."""
    name: str
    """Its name."""
    source: Source
    spread: Spread
    adds_row: bool = False
    """True if an item, or a row, is one row of the model's batch axis: `[1, …]`."""

    def __str__(self) -> str:
        if self.spread is Spread.WHOLE:
            return f"{self.name}: {self.source}"
        how = self.spread.value if self.spread is Spread.BATCH else f"each {self.spread.value}"
        return f"{self.name}: {how} of {self.source}"


@dataclass(frozen=True, slots=True)
class StageOutput:
    """One output of a stage that a later stage or the chain uses."""

    number: int
    """Number of the model's output; of a list, that of its elements."""
    type: Type
    gathering: Gathering
    drop_row: bool = False
    """True if the arrays of the list lack the first axis of the results, which has size 1."""
    shapes: int | None = None
    """Number of the output with a list's shapes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, checked."""

    name: str
    model: str
    feeds: tuple[Feed, ...]
    needs: frozenset[str]
    """The stages whose outputs it takes."""
    fans_out: bool
    """True if it has a request for each item or row; else it has one, or none for an empty batch."""
    at_most: int
    at_most_bytes: int
    outputs: Mapping[str, StageOutput]
    """The outputs that are used, by name."""
    is_counted: bool = field(init=False)
    """True if the number of its requests, or the rows of its batch, depends on the data."""

    def __post_init__(self) -> None:
        counted = self.fans_out or any(feed.spread is Spread.BATCH for feed in self.feeds)
        object.__setattr__(self, "is_counted", counted)  # it is asked at every answer

    @property
    def limits(self) -> str:
        """Spell what one request of the chain may have here; empty if that does not depend on the data."""
        if not self.is_counted:
            return ""
        rows = "requests" if self.fans_out else "rows"
        return f", at most {self.at_most} {rows} and {_mebibytes(self.at_most_bytes)}"


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain that can run. Its stages are in an order in which each one follows those that it needs."""

    spec: ChainSpec
    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    """Names of its inputs, in the order of the signature."""
    outputs: Mapping[str, Source]
    signature: ModelSignature
    users: Mapping[Source, int]
    """How many stages take each source; the chain's own outputs count as one more."""

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.spec.name

    @property
    def skips(self) -> bool:
        """Tell whether failed rows are marked; if not, the first one fails the request."""
        return self.spec.skips

    @property
    def models(self) -> frozenset[str]:
        """The models of its stages."""
        return frozenset(stage.model for stage in self.stages)

    def lines(self) -> Iterator[str]:
        """Yield the chain as text: its inputs, each stage as a call with its outputs below, and its outputs."""
        yield f"chain {self.name}"
        yield from (
            f"  input  {port.name}: {port.element_type} [{port.shape}]" for port in self.signature.inputs
        )
        types: dict[Source, Type] = {}
        for stage in self.stages:
            types |= {Source(stage.name, name): output.type for name, output in stage.outputs.items()}
            arguments = ", ".join(map(str, stage.feeds))
            yield f"  {stage.name} = {stage.model}({arguments}){stage.limits}"
            yield from (f"    {stage.name}.{name}: {output.type}" for name, output in stage.outputs.items())
        yield from (f"  output {name}: {types[source]} = {source}" for name, source in self.outputs.items())
        for name in (stage.name for stage in self.stages if stage.fans_out):
            mark = Source(name, OK)
            used = "" if mark in self.users else ", which nothing takes"
            effect = f"is marked in {mark}{used}" if self.skips else "fails the request"
            yield f"  a row that fails in {name} {effect}"


def plan_chain(spec: ChainSpec, signatures: Mapping[str, ModelSignature]) -> Chain:
    """Hold a chain against the signatures of its models. Raises `ChainRefused` with every mistake."""
    problems = [*spec.problems()]
    for index, stage in enumerate(spec.stages):
        if stage.model not in signatures:
            problems.append((("stages", index, "model"), f'there is no model "{stage.model}"'))
    if problems:
        raise ChainRefused(spec.name, problems)
    planner = _Planner(spec, signatures)
    try:
        chain = planner.plan()
    except SignatureError as error:
        raise ChainRefused(spec.name, [*planner.problems, ((), str(error))]) from error
    if planner.problems:
        raise ChainRefused(spec.name, planner.problems)
    return chain


class _Planner:
    """Makes the stages in their order, and collects mistakes."""

    def __init__(self, spec: ChainSpec, signatures: Mapping[str, ModelSignature]) -> None:
        self._spec = spec
        self._signatures = signatures
        self._types: dict[Source, Type] = {}
        self.problems: list[Problem] = []

    def plan(self) -> Chain:
        spec = self._spec
        inputs = [*self._inputs()]
        stages = [self._stage(index, stage) for index, stage in self._in_order()]
        outputs = {name: Source.parse(text) for name, text in spec.outputs.items()}
        for name, source in outputs.items():
            self._type_of(source, ("outputs", name))
        ports = [
            port
            for name, source in outputs.items()
            if source in self._types
            for port in _output_ports(name, self._types[source])
        ]
        if self.problems:
            raise ChainRefused(spec.name, self.problems)
        users = Counter(feed.source for stage in stages for feed in stage.feeds)
        users.update(outputs.values())
        used = [self._with_used_outputs(stage, users) for stage in stages]
        signature = ModelSignature(spec.name, tuple(inputs), tuple(ports))
        return Chain(
            spec=spec,
            stages=tuple(used),
            inputs=tuple(port.name for port in inputs),
            outputs=outputs,
            signature=signature,
            users=users,
        )

    def _in_order(self) -> Iterator[tuple[int, StageSpec]]:
        done: set[str | None] = {None}
        left = dict(enumerate(self._spec.stages))
        while left:
            for index, stage in [*left.items()]:
                if {Source.parse(text).stage for text in stage.inputs.values()} <= done:
                    done.add(stage.name)
                    yield index, left.pop(index)

    def _inputs(self) -> Iterator[InputPort]:
        """Yield the chain's inputs. A dimension keeps its name where one stage takes all that have it."""
        found: list[tuple[str, str, InputPort]] = []
        for name, text in self._spec.inputs.items():
            source = Source.parse(text)
            stage = next(stage for stage in self._spec.stages if stage.name == source.stage)
            port = _port(self._signatures[stage.model].inputs, source.name)
            if port is None:
                self._add(("inputs", name), f'model "{stage.model}" has no input "{source.name}"')
                continue
            found.append((name, stage.name, self._before_spread(name, stage, port)))
        users: dict[str, set[str]] = {}
        for _, stage_name, port in found:
            for dimension in filter(None, port.shape.names):
                users.setdefault(dimension, set()).add(stage_name)
        for name, _, port in found:
            names = [name if name is None or len(users[name]) == 1 else None for name in port.shape.names]
            shape = NamedShape(
                tuple(ROWS if each == BATCH else each for each in names), port.shape.dimensions
            )
            self._types[Source(None, name)] = Type(port.element_type, shape)
            yield InputPort(name, port.element_type, shape)

    def _before_spread(self, name: str, stage: StageSpec, port: InputPort) -> InputPort:
        """Return the port of a chain's input that this stage takes: all rows where the stage takes one at a time."""
        spread = stage.spreads().get(Source(None, name), Spread.WHOLE)
        if spread is Spread.ITEM:
            self._add(
                ("inputs", name),
                f'an input of a chain is no list (write row of {name} in stage "{stage.name}")',
            )
        if spread is not Spread.ROW:
            return port
        names, dimensions = port.shape.names, port.shape.dimensions
        if self._has_rows(stage, port):
            names, dimensions = names[1:], dimensions[1:]
        return InputPort(name, port.element_type, NamedShape((None, *names), (Dimension(), *dimensions)))

    def _has_rows(self, stage: StageSpec, port: InputPort) -> bool:
        """Tell whether the first axis of this input is its model's batch axis."""
        return (
            self._signatures[stage.model].has_batch and port.shape.rank > 0 and port.shape.names[0] == BATCH
        )

    def _stage(self, index: int, spec: StageSpec) -> Stage:
        signature, place = self._signatures[spec.model], ("stages", index)
        spreads = spec.spreads()
        feeds = []
        for number, port in enumerate(signature.inputs):
            text = spec.inputs.get(port.name)
            if text is None:
                if port.mask_of is None:
                    self._add((*place, "in"), f'model "{spec.model}" needs the input "{port.name}"')
                continue
            source = Source.parse(text)
            type_ = self._type_of(source, (*place, "in", port.name))
            if type_ is not None:
                spread = spreads.get(source, Spread.WHOLE)
                has_rows = self._has_rows(spec, port)
                feeds.append(
                    self._feed(number, port, source, type_, spread, has_rows, (*place, "in", port.name))
                )
        for name in spec.inputs:
            if _port(signature.inputs, name) is None:
                known = ", ".join(port.name for port in signature.inputs)
                self._add(
                    (*place, "in", name), f'model "{spec.model}" has no input "{name}" (it has {known})'
                )
        several = {Spread.ITEM, Spread.ROW}
        fans_out = any(spread in several for spread in spreads.values())
        one_row = fans_out and all(feed.adds_row for feed in feeds if feed.spread in several)
        outputs = dict(_outputs(signature, fans_out=fans_out, one_row=one_row))
        if fans_out and self._spec.skips:
            if OK in outputs:
                self._add(
                    place, f'model "{spec.model}" has an output "{OK}", the name of what marks skipped rows'
                )
            outputs[OK] = StageOutput(
                OF_NO_MODEL, Type("boolean", NamedShape((None,), (Dimension(),))), Gathering.STACKED
            )
        for name, output in outputs.items():
            self._types[Source(spec.name, name)] = output.type
        return Stage(
            name=spec.name,
            model=spec.model,
            feeds=tuple(feeds),
            needs=frozenset(feed.source.stage for feed in feeds if feed.source.stage is not None),
            fans_out=fans_out,
            at_most=spec.at_most,
            at_most_bytes=spec.at_most_bytes,
            outputs=outputs,
        )

    def _feed(
        self,
        number: int,
        port: InputPort,
        source: Source,
        given: Type,
        spread: Spread,
        has_rows: bool,
        place: Key,
    ) -> Feed:
        """Hold an edge against its input: element type, rank, and each dimension."""
        axes = [*zip(given.shape.names, given.shape.dimensions, strict=True)]
        adds_row = False
        if spread is Spread.ITEM and not given.is_list:
            self._add(place, f"{source} is {given}, which has no items (write row of {source})")
        elif spread in (Spread.WHOLE, Spread.ROW) and given.is_list:
            self._add(place, f"{source} is a {given} (write each: item of {source}, or batch of {source})")
        elif spread in (Spread.ROW, Spread.BATCH) and not given.is_list and not axes:
            self._add(place, f"{source} is {given}, which has no rows")
        else:
            inner = axes[1:] if spread is Spread.ROW else axes
            if spread is Spread.BATCH and given.is_list:
                inner = [(None, Dimension()), *inner]
            elif spread in (Spread.ITEM, Spread.ROW) and has_rows and port.shape.rank == len(inner) + 1:
                adds_row, inner = True, [(None, Dimension(1, 1)), *inner]
            self._hold(port, given, [dimension for _, dimension in inner], source, place)
        return Feed(number, port.name, source, spread, adds_row)

    def _hold(
        self, port: InputPort, given: Type, dimensions: Sequence[Dimension], source: Source, place: Key
    ) -> None:
        if given.element_type != port.element_type:
            self._add(place, f'"{port.name}" takes {port.element_type}, and {source} is {given}')
        elif len(dimensions) != port.shape.rank:
            self._add(place, f'"{port.name}" takes [{port.shape}], and {source} is {given}')
        else:
            for axis, (ours, theirs) in enumerate(zip(dimensions, port.shape.dimensions, strict=True)):
                try:
                    ours.intersection(theirs)
                except ShapeError:
                    self._add(
                        place, f'"{port.name}" takes {theirs} along axis {axis}, and {source} has {ours}'
                    )

    def _type_of(self, source: Source, place: Key) -> Type | None:
        known = self._types.get(source)
        if known is None and not self.problems:
            names = ", ".join(str(each) for each in self._types if each.stage == source.stage)
            self._add(place, f'there is no "{source}" (there are {names})')
        return known

    def _add(self, place: Key, text: str) -> None:
        self.problems.append((place, text))

    def _with_used_outputs(self, stage: Stage, users: Mapping[Source, int]) -> Stage:
        used = {name: output for name, output in stage.outputs.items() if users.get(Source(stage.name, name))}
        return replace(stage, outputs=used)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes % (1 << 20) else f"{nbytes >> 20} MiB"


def _port(ports: Sequence[InputPort], name: str) -> InputPort | None:
    return next((port for port in ports if port.name == name), None)


def _outputs(
    signature: ModelSignature, *, fans_out: bool, one_row: bool
) -> Iterator[tuple[str, StageOutput]]:
    """Yield the outputs that a stage of this model has, with the way in which they are gathered."""
    numbers = {port.name: number for number, port in enumerate(signature.outputs)}
    shapes = {f"{port.name}.shapes" for port in signature.outputs if port.item is not None}
    for number, port in enumerate(signature.outputs):
        if port.item is not None:
            if not fans_out:  # lists of lists are none of a chain's types
                type_ = Type(port.element_type, _unnamed(port.item), is_list=True)
                yield (
                    port.name,
                    StageOutput(number, type_, Gathering.ONLY, shapes=numbers[f"{port.name}.shapes"]),
                )
        elif port.name not in shapes:
            yield port.name, _output(number, port, signature, fans_out=fans_out, one_row=one_row)


def _output(
    number: int, port: OutputPort, signature: ModelSignature, *, fans_out: bool, one_row: bool
) -> StageOutput:
    shape = _unnamed(port.shape)
    if not fans_out:
        return StageOutput(number, Type(port.element_type, shape), Gathering.ONLY)
    is_row = one_row and isinstance(port.rule, Rows) and port.batch_axis == 0
    inner = NamedShape(shape.names[1:], shape.dimensions[1:]) if is_row else shape
    if (is_row or not signature.has_batch) and not inner.is_dynamic:
        rows = NamedShape((None, *inner.names), (Dimension(), *inner.dimensions))
        return StageOutput(number, Type(port.element_type, rows), Gathering.STACKED)
    return StageOutput(
        number, Type(port.element_type, inner, is_list=True), Gathering.LISTED, drop_row=is_row
    )


def _unnamed(shape: NamedShape) -> NamedShape:
    """Return a shape whose dynamic dimensions have no names: equal names of two models mean nothing."""
    return NamedShape((None,) * shape.rank, shape.dimensions)


def _output_ports(name: str, type_: Type) -> tuple[OutputPort, ...]:
    if type_.is_list:
        return list_ports(name, type_.element_type, type_.shape)
    return (OutputPort(name, type_.element_type, type_.shape, Whole()),)

"""A chain that is held against the signatures of its models: typed edges, the stages' outputs, and its own signature.

A chain is a model to clients. Its signature has no batch axis, since its request is one, whatever rows it has; an axis that
its stages call `batch` is called `rows` there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from shapestream.chains.spec import OK, ChainSpec, Key, Problem, Source, Spread, StageSpec
from shapestream.errors import closest, did_you_mean
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ShapeError, SignatureError
from shapestream_engine.output_rules import List, Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
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

    @property
    def smallest(self) -> tuple[int, ...]:
        """The smallest shape of it, or of one array."""
        return tuple([dimension.minimum for dimension in self.shape.dimensions])

    def __str__(self) -> str:
        return f"{'list of ' if self.is_list else ''}{self.element_type} [{self.shape}]"


class Held(NamedTuple):
    """The requests and bytes that a request of a chain may hold, or holds."""

    requests: int
    nbytes: int


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
    empty: tuple[int, ...] | None = None
    """Its shape after a batch without rows; None: its signature has no empty shape."""


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
    row_nbytes: int | None = None
    """The most bytes of one row's inputs, by the signature; None: any number."""
    rows_of: tuple[str, int] | None = None
    """The chain's input, and its axis, whose size is the number of rows; None: it depends on the data."""
    may_lack_rows: bool = False
    """True if it has a batch, which may have no rows: then it has no request, and its outputs are empty."""
    is_counted: bool = field(init=False)
    """True if the number of its requests, or the rows of its batch, depends on the data."""

    @property
    def never_empty(self) -> list[str]:
        """The outputs without which a request of the chain ends if the batch has no rows."""
        if not self.may_lack_rows:
            return []
        return [
            name for name, output in self.outputs.items() if output.empty is None and not output.type.is_list
        ]

    def __post_init__(self) -> None:
        counted = self.fans_out or any(feed.spread is Spread.BATCH for feed in self.feeds)
        object.__setattr__(self, "is_counted", counted)  # it is asked at every answer

    def most(self, shapes: Mapping[str, tuple[int, ...]]) -> Held:
        """Return the most that it may hold for a request whose inputs have these shapes; of some, they may be unknown."""
        rows, nbytes = self.at_most, self.at_most_bytes
        if (known := self.rows(shapes)) is not None:
            rows = min(rows, known)
        if self.row_nbytes is not None:
            nbytes = min(nbytes, rows * self.row_nbytes)
        return Held(rows, nbytes)

    def rows(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Return its number of rows for inputs of these shapes; None while that is not known."""
        if self.rows_of is None or self.rows_of[0] not in shapes:
            return None
        return shapes[self.rows_of[0]][self.rows_of[1]]

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
    then: Mapping[str, tuple[Stage, ...]]
    """By stage, those that follow it one after the other, along the longest way."""
    counted: Mapping[Source, Stage] = field(init=False)
    """By source, of the stages that have a request or a row for each of its items or rows, the one that may have fewest."""

    def __post_init__(self) -> None:
        counted: dict[Source, Stage] = {}
        for stage in self.stages:
            for feed in stage.feeds:
                known = counted.get(feed.source)
                if feed.spread is not Spread.WHOLE and (known is None or stage.at_most < known.at_most):
                    counted[feed.source] = stage
        object.__setattr__(self, "counted", counted)

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
        for stage in self.stages:
            for name in stage.never_empty:
                source = Source(stage.name, name)
                yield f"  a batch without rows in {stage.name} fails the request: {source} is never empty"
        for name in (stage.name for stage in self.stages if stage.fans_out):
            mark = Source(name, OK)
            used = "" if mark in self.users else ", which nothing takes"
            effect = f"is marked in {mark}{used}" if self.skips else "fails the request"
            yield f"  a row that fails in {name} {effect}"


def followers(stages: Sequence[Stage]) -> dict[str, tuple[Stage, ...]]:
    """Return, by stage, those along the longest way from it to the chain's end. A stage comes after its needs."""
    then: dict[str, tuple[Stage, ...]] = {}
    for stage in reversed(stages):
        ways = [(user, *then[user.name]) for user in stages if stage.name in user.needs]
        then[stage.name] = max(ways, key=len, default=())
    return then


def plan_chain(spec: ChainSpec, signatures: Mapping[str, ModelSignature]) -> Chain:
    """Hold a chain against the signatures of its models. Raises `ChainRefused` with every mistake."""
    problems = [*spec.problems()]
    for index, stage in enumerate(spec.stages):
        if stage.model not in signatures:
            hint = did_you_mean(stage.model, [*signatures])
            problems.append((("stages", index, "model"), f'there is no model "{stage.model}" {hint}'))
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
            then=followers(used),
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
                known = [port.name for port in self._signatures[stage.model].inputs]
                hint = did_you_mean(source.name, known)
                self._add(("inputs", name), f'model "{stage.model}" has no input "{source.name}" {hint}')
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
            yield InputPort(name, port.element_type, shape, at_most_bytes=port.at_most_bytes)

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
        shape = NamedShape((None, *names), (Dimension(), *dimensions))
        return InputPort(name, port.element_type, shape, at_most_bytes=port.at_most_bytes)

    def _has_rows(self, stage: StageSpec, port: InputPort) -> bool:
        """Tell whether the first axis of this input is its model's batch axis."""
        return (
            self._signatures[stage.model].has_batch and port.shape.rank > 0 and port.shape.names[0] == BATCH
        )

    def _stage(self, index: int, spec: StageSpec) -> Stage:
        signature, place = self._signatures[spec.model], ("stages", index)
        spreads = spec.spreads()
        feeds = self._feeds(spec, place)
        several = {Spread.ITEM, Spread.ROW}
        fans_out = any(spread in several for spread in spreads.values())
        one_row = fans_out and all(feed.adds_row for feed in feeds if feed.spread in several)
        batches = [feed for feed in feeds if feed.spread is Spread.BATCH]
        rows = {name for feed in batches for name in signature.inputs[feed.port].shape.names[:1]}
        outputs = dict(_outputs(signature, rows - {None}, fans_out=fans_out, one_row=one_row))
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
            feeds=feeds,
            needs=frozenset(feed.source.stage for feed in feeds if feed.source.stage is not None),
            fans_out=fans_out,
            at_most=spec.at_most,
            at_most_bytes=spec.at_most_bytes,
            outputs=outputs,
            row_nbytes=_row_nbytes(signature, feeds),
            rows_of=next(filter(None, map(self._rows_of, feeds)), None),
            may_lack_rows=bool(batches) and all(_may_lack_rows(self._types[feed.source]) for feed in batches),
        )

    def _feeds(self, spec: StageSpec, place: tuple[str | int, ...]) -> tuple[Feed, ...]:
        """Return the edges into a stage, one for each input of its model that the chain feeds."""
        signature, spreads = self._signatures[spec.model], spec.spreads()
        feeds = []
        names = [port.name for port in signature.inputs]
        misspelt = {closest(name, names) for name in spec.inputs if name not in names}
        for number, port in enumerate(signature.inputs):
            text = spec.inputs.get(port.name)
            if text is None:
                if not port.may_lack and port.name not in misspelt:
                    self._add((*place, "inputs"), f'model "{spec.model}" needs the input "{port.name}"')
                continue
            source = Source.parse(text)
            type_ = self._type_of(source, (*place, "inputs", port.name))
            if type_ is not None:
                spread = spreads.get(source, Spread.WHOLE)
                has_rows = self._has_rows(spec, port)
                feeds.append(
                    self._feed(number, port, source, type_, spread, has_rows, (*place, "inputs", port.name))
                )
        for name in spec.inputs:
            if name not in names:
                hint = did_you_mean(name, names)
                self._add((*place, "inputs", name), f'model "{spec.model}" has no input "{name}" {hint}')
        return tuple(feeds)

    def _rows_of(self, feed: Feed) -> tuple[str, int] | None:
        """Return the chain's input, and its axis, that has as many indices as this edge has rows; None for none."""
        source = feed.source
        if feed.spread is Spread.WHOLE:
            return None
        if source.stage is None:
            return source.name, 0
        stage = next(stage for stage in self._spec.stages if stage.name == source.stage)
        signature = self._signatures[stage.model]
        rule = next(port.rule for port in signature.outputs if port.name == source.name)
        if not isinstance(rule, List) or rule.count is None:
            return None
        for port in signature.inputs:
            given = stage.inputs.get(port.name)
            if rule.count in port.shape.names and given is not None and Source.parse(given).stage is None:
                return Source.parse(given).name, port.shape.names.index(rule.count)
        return None

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
        if known is None and source.stage is not None:  # a chain's input without a type has been told
            stage = next(stage for stage in self._spec.stages if stage.name == source.stage)
            output = next(
                (port for port in self._signatures[stage.model].outputs if port.name == source.name), None
            )
            if output is not None and output.item is not None:
                hint = f'(each request of "{stage.name}" returns a list, and chains have no lists of lists)'
            else:
                hint = did_you_mean(
                    str(source), [str(each) for each in self._types if each.stage == stage.name]
                )
            self._add(place, f'there is no "{source}" {hint}')
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


def _row_nbytes(signature: ModelSignature, feeds: Sequence[Feed]) -> int | None:
    """Return the most bytes of the inputs of one row; None if the signature does not bound them."""
    total = 0
    for feed in feeds:
        port = signature.inputs[feed.port]
        if port.is_string:
            return None
        nbytes = dtype_of(port.element_type).itemsize
        for name, dimension in zip(port.shape.names, port.shape.dimensions, strict=True):
            most = 1 if name == BATCH and feed.spread is not Spread.WHOLE else dimension.maximum
            if most is None:
                return None
            nbytes *= most
        total += nbytes
    return total


def _may_lack_rows(type_: Type) -> bool:
    return type_.is_list or not (type_.shape.rank and type_.shape.dimensions[0].minimum)


def _outputs(
    signature: ModelSignature, rows: Set[str | None], *, fans_out: bool, one_row: bool
) -> Iterator[tuple[str, StageOutput]]:
    """Yield the outputs that a stage of this model has, with the way in which they are gathered.

    `rows` are the names of the axes along which its inputs are batches.
    """
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
            if fans_out:
                yield port.name, _output(number, port, signature, one_row=one_row)
            else:
                yield port.name, _only_output(number, port, rows)


def _only_output(number: int, port: OutputPort, rows: Set[str | None]) -> StageOutput:
    """Return the output of a stage that has one request, or none if its batch has no rows."""
    shape = _unnamed(port.shape)
    row_axis = _row_axis(port, rows)
    if row_axis is None:
        return StageOutput(number, Type(port.element_type, shape), Gathering.ONLY)
    dimensions = [*shape.dimensions]
    if rows:
        dimensions[row_axis] = Dimension(0, dimensions[row_axis].maximum)
    empty = [0 if axis == row_axis else each.minimum for axis, each in enumerate(dimensions)]
    type_ = Type(port.element_type, NamedShape(shape.names, tuple(dimensions)))
    return StageOutput(number, type_, Gathering.ONLY, empty=tuple(empty))


def _row_axis(port: OutputPort, rows: Set[str | None]) -> int | None:
    """Return the axis of an output whose size is 0 where the inputs have no rows; None if it has no such axis.

    It is the axis named like that of the inputs, or that whose size the data decides, or else the first that may be 0.
    """
    axes = [*enumerate(port.shape.dimensions)]
    named = [axis for axis, each in axes if each.is_dynamic and port.shape.names[axis] in rows]
    if named:
        return named[0]
    if port.data_axis is not None:
        return port.data_axis
    return next((axis for axis, each in axes if not each.minimum), None)


def _output(number: int, port: OutputPort, signature: ModelSignature, *, one_row: bool) -> StageOutput:
    """Return the output of a stage that has a request for each row."""
    shape = _unnamed(port.shape)
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

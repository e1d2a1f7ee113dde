"""Finds the rule of an output on the live model, where neither file nor configuration states one.

Each possible rule divides the outputs of recorded calls. A rule holds if every part equals the result that the same
request got alone. A rule is certain if no other rule of its kind holds. If none holds, but exactly one axis has the rows of
every call, that axis is taken: the results differ in company, and the proof finds out where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from shapestream_engine.arrays import arrays_of
from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError
from shapestream_engine.output_rules import Counts, IndexColumn, Recount, Rows, Shared, With, rule_to_dict
from shapestream_engine.ports import OutputPort
from shapestream_engine.probing.baseline import Baseline, find_baseline, tells
from shapestream_engine.probing.cases import SMALL_BATCH, batching_cases, most_rows
from shapestream_engine.probing.inputs import Values
from shapestream_engine.probing.model_calls import Announce, DirectCalls, RecordedCall
from shapestream_engine.probing.tolerances import OutputTolerance, coarser, compare
from shapestream_engine.shapes import BATCH, NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

_CASES = 24
_REMEMBERED = 400
"""Recorded calls; in most of them a request runs alone."""
_COLUMNS = 16
"""Columns that may hold a batch index."""
_MOST_NUMBERS = 1 << 20
"""Numbers of the results that a tolerance is learned from. Those of a recogniser with 6,625 classes take 0.14 s for each
request, which a busy machine makes so long that the process seems to hang."""
_ENOUGH = 3
"""Parts that must agree and not be empty."""


def guess_rules(
    model: CompiledModel,
    unknown: Sequence[str],
    values: Mapping[str, Values],
    *,
    max_batch: int | None,
    seed: int,
    announce: Announce,
    skip: frozenset[str],
) -> tuple[dict[str, OutputPort], dict[str, str]]:
    """Return the ports, with rule and axis names, of the `unknown` outputs whose rule is certain, or must be proved; and of
    the others what was tried and what came of it, in words.

    The signature of `model` declares unknown outputs as `shared`, so that they are not divided.
    """
    signature = model.signature
    calls = DirectCalls(model, signature, announce, keep=_REMEMBERED)
    baseline, complaint = find_baseline(calls, values, seed=seed, computed_in=None, skip=skip)
    rows = min(SMALL_BATCH, most_rows(signature, max_batch))
    if baseline is None:
        return {}, dict.fromkeys(
            unknown, f"no rule could be tried, since the model took no request: {complaint}"
        )
    if rows < 2:
        return {}, dict.fromkeys(unknown, "no rule could be tried, since no call has several rows")
    with calls.phase("rules"):
        for case in islice(batching_cases(baseline, rows), _CASES):
            with suppress(EngineError, RuntimeError):
                calls.run(case.sizes, case.members, case.words)
    search = _Search(signature, calls.recorded, announce)
    decided: dict[str, OutputPort] = {}
    while True:
        known = {port.name: port for port in signature.outputs if port.name not in unknown} | decided
        unruled = [port for port in signature.outputs if port.name not in known]
        new = {port.name: found for port in unruled if (found := search.only_rule(port, known)) is not None}
        # No rule holds of the others. The proof says in which request they differ.
        new = new or {
            port.name: found for port in unruled if (found := search.rows_by_shape(port)) is not None
        }
        if not new:
            certain = _without_doubtful_shared(signature, decided, known, baseline)
            left = [port for port in signature.outputs if port.name in unknown and port.name not in certain]
            return certain, {port.name: search.words(port, known) for port in left}
        decided |= new


def _without_doubtful_shared(
    signature: ModelSignature,
    decided: Mapping[str, OutputPort],
    known: Mapping[str, OutputPort],
    baseline: Baseline,
) -> dict[str, OutputPort]:
    """Leave out outputs that seem shared but may just never have changed: keep them only if all other outputs did
    change."""
    others = [
        (number, port.name)
        for number, port in enumerate(signature.outputs)
        if port.name not in known or not isinstance(known[port.name].rule, Shared)
    ]
    if others and all(name in known and number not in baseline.blank for number, name in others):
        return dict(decided)
    return {name: port for name, port in decided.items() if not isinstance(port.rule, Shared)}


@dataclass(frozen=True, slots=True)
class _Search:
    """Divides recorded calls by a rule and compares the parts."""

    signature: ModelSignature
    recorded: Sequence[RecordedCall]
    announce: Announce
    """Large outputs take long to compare, and a silent process counts as hanging."""

    def words(self, port: OutputPort, known: Mapping[str, OutputPort]) -> str:
        """Say which rules were tried for an output whose rule is not certain, and which lines would hold."""
        tried = [*self._independent(port), *_dependent(port, known)]
        held = [line_of(each) for each in tried if self._holds(each, known)]
        on = f"on {sum(len(seen.members) > 1 for seen in self.recorded)} calls of several requests"
        if len(held) > 1:
            return f"{on} these hold alike: {' and '.join(held)} (write the one that is meant)"
        if held:
            return f"{on} only {held[0]} holds, but some output never changed (write it if it is meant)"
        rules = ", ".join(dict.fromkeys(each.rule.NAME for each in tried))
        return (
            f"tried {on}: {rules}; with none does each request get what it gets alone (docs/configuration.md#outputs has "
            "the others)"
        )

    def only_rule(self, port: OutputPort, known: Mapping[str, OutputPort]) -> OutputPort | None:
        """Return the port with the only rule that holds; None if none or several hold."""
        independent = [each for each in self._independent(port) if self._holds(each, known)]
        if independent:
            return independent[0] if len(independent) == 1 else None
        # Rows that are parallel to two outputs are parallel to both, so the first rule that holds will do.
        return next((each for each in _dependent(port, known) if self._holds(each, known)), None)

    def rows_by_shape(self, port: OutputPort) -> OutputPort | None:
        """Return the port with the rule of rows if exactly one axis has the rows of every call, whatever the values."""
        found = list(self._by_rows(port))
        return found[0] if len(found) == 1 else None

    def _by_rows(self, port: OutputPort) -> Iterator[OutputPort]:
        number = self.signature.outputs.index(port)
        shapes = [(seen.sizes[0], seen.outputs[number].shape) for seen in self.recorded]
        for axis, (name, dimension) in enumerate(zip(port.shape.names, port.shape.dimensions, strict=True)):
            follows = all(len(shape) > axis and shape[axis] == rows for rows, shape in shapes)
            if name is None and dimension.is_dynamic and follows and len({rows for rows, _ in shapes}) > 1:
                names = (*port.shape.names[:axis], BATCH, *port.shape.names[axis + 1 :])
                yield replace(port, shape=NamedShape(names, port.shape.dimensions), rule=Rows())

    def _independent(self, port: OutputPort) -> Iterator[OutputPort]:
        yield replace(port, rule=Shared())
        yield from self._by_rows(port)
        number = self.signature.outputs.index(port)
        shapes = [seen.outputs[number].shape for seen in self.recorded]
        columns = {1} if port.shape.rank == 1 else {shape[1] for shape in shapes if len(shape) == 2}
        if port.shape.rank in (1, 2) and len(columns) == 1:
            for column in range(min(_COLUMNS, columns.pop())):
                yield replace(port, rule=IndexColumn(column))

    def _holds(self, port: OutputPort, known: Mapping[str, OutputPort]) -> bool:
        """Tell whether every part equals its request's result alone, and enough parts are not empty."""
        ruled = {**known, port.name: port}
        places = [place for place, other in enumerate(self.signature.outputs) if other.name in ruled]
        ports = [ruled[self.signature.outputs[place].name] for place in places]
        try:
            assembly = Assembly(ModelSignature(self.signature.name, self.signature.inputs, tuple(ports)))
            return self._agrees(assembly, places, ports.index(port))
        except EngineError:
            return False

    def _agrees(self, assembly: Assembly, places: Sequence[int], column: int) -> bool:
        alone: dict[int, Array] = {}
        together: list[tuple[int, Array]] = []
        for seen in self.recorded:
            self.announce("rules", "dividing a call among its requests")
            shapes = [member.shape for member in seen.members]
            parts = assembly.split(seen.sizes, shapes, [seen.outputs[place] for place in places])
            for member, part in zip(seen.members, parts, strict=True):
                result = arrays_of(part)[column]
                if len(seen.members) == 1:
                    alone[id(member)] = result
                else:
                    together.append((id(member), result))
        element_type = self.signature.outputs[places[column]].element_type
        compared = [(alone[member], result) for member, result in together if member in alone]
        own = [*{id(first): first for first, _ in compared}.values()]
        count = max(_ENOUGH, _MOST_NUMBERS // max(1, *[result.size for result in own]))
        tolerance = OutputTolerance.of(coarser(element_type, None), own[:count])
        for first, second in compared:
            self.announce("rules", "comparing the parts of a call")
            if not compare(first, second, tolerance).within:
                return False
        return sum(tells(first) and not tolerance.hides(first) for first, _ in compared) >= _ENOUGH


def line_of(port: OutputPort) -> str:
    """Return the line of YAML that states the rule of an output."""
    if isinstance(port.rule, Rows):
        return f"outputs: {{{port.name}: {{shape: '{port.shape}'}}}}"
    arguments = ", ".join(f"{key}: {value}" for key, value in rule_to_dict(port.rule).items())
    return f"outputs: {{{port.name}: {{{arguments}}}}}"


def _dependent(port: OutputPort, known: Mapping[str, OutputPort]) -> Iterator[OutputPort]:
    leaders = [name for name, other in known.items() if isinstance(other.rule, IndexColumn | Counts)]
    yield from (replace(port, rule=With(name)) for name in leaders)
    yield from (replace(port, rule=Recount(name)) for name in leaders)
    counters = [name for name, other in known.items() if isinstance(other.rule, Rows)]
    yield from (replace(port, rule=Counts(name)) for name in counters)

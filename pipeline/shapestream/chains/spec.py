"""Chains as the YAML states them, and the mistakes that need no model to be found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from shapestream.errors import closest, did_you_mean

Key: TypeAlias = tuple[str | int, ...]
"""The place of a statement in the chain's section: `("stages", 1, "inputs", "image")`."""
Problem: TypeAlias = tuple[Key, str]
"""What is wrong, with its place and the remedy."""

OK = "ok"
"""The output of a stage that skips failures: which rows have a result."""
_EACH = re.compile(r"(item|row|batch) of (\S+)")


class Source(NamedTuple):
    """The origin of a tensor: an output of a stage, or an input of the chain."""

    stage: str | None
    """None: an input of the chain."""
    name: str

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read `crop.images`, an output of a stage, or `image`, an input of the chain."""
        stage, dot, name = text.partition(".")
        return cls(stage, name) if dot else cls(None, text)

    def __str__(self) -> str:
        return self.name if self.stage is None else f"{self.stage}.{self.name}"


class Spread(Enum):
    """The way in which a source becomes inputs of a stage's requests."""

    WHOLE = "whole"
    """Each request of the stage has all of it."""
    ITEM = "item"
    """A request for each array of a list."""
    ROW = "row"
    """A request for each index of the first axis."""
    BATCH = "batch"
    """One request that has all rows, or all arrays of a list, which must have equal shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage: a model, the origin of its inputs, and the number of its requests."""

    name: str
    model: str
    inputs: Mapping[str, str]
    """The source of each input of the model, by the input's name."""
    each: Sequence[str] = ()
    """`item of crop.images`, `row of find.boxes`, `batch of crop.images`. Empty: one request that has everything."""
    at_most: int = 256
    """Requests of this stage for one request of the chain, or rows of its batch."""
    at_most_bytes: int = 64 << 20
    """Bytes of the inputs of all these."""

    def spreads(self) -> dict[Source, Spread]:
        """Return how each source is spread; those that are not named are whole. Raises ValueError for other words."""
        found = {}
        for text in self.each:
            match = _EACH.fullmatch(text)
            if match is None:
                raise ValueError(f'"{text}" says no way (write item of, row of or batch of, and a source)')
            found[Source.parse(match[2])] = Spread(match[1])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSpec:
    """A chain, as the YAML states it."""

    name: str
    inputs: Mapping[str, str]
    """The input of a stage that tells the type of each input of the chain: `find.image`."""
    stages: Sequence[StageSpec]
    outputs: Mapping[str, str]
    """The source of each output."""
    skips: bool = False
    """True if failed rows are marked in the output `ok` of their stage. If not, the first one fails the request."""

    def stage(self, name: str | None) -> StageSpec | None:
        """Return the stage of this name, or None."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def problems(self) -> Iterator[Problem]:
        """Yield the mistakes in names and edges, each with its place and the remedy."""
        stages: dict[str, int] = {}
        for index, stage in enumerate(self.stages):
            if stages.setdefault(stage.name, index) != index:
                yield (
                    ("stages", index, "name"),
                    f'stages[{stages[stage.name]}] has the name "{stage.name}" too',
                )
            yield from self._stage_problems(index, stage)
        for name, text in self.inputs.items():
            port = Source.parse(text)
            fed = [stage for stage in self.stages if stage.name == port.stage]
            given = fed[0].inputs.get(port.name) if fed else None
            if given != name and not self._is_unknown_input(given):  # that is told where it stands
                yield ("inputs", name), self._words_of_input(name, text, has_stage=bool(fed))
        for name, text in self.outputs.items():
            yield from self._source_problems(("outputs", name), text)
            if Source.parse(text).stage is None:
                yield ("outputs", name), f'"{text}" is an input of the chain (name an output of a stage)'
        if len({stage.name for stage in self.stages}) == len(self.stages):  # else names say nothing
            yield from self._circles()

    def _is_unknown_input(self, text: str | None) -> bool:
        return text is not None and Source.parse(text).stage is None and text not in self.inputs

    def _words_of_input(self, name: str, text: str, *, has_stage: bool) -> str:
        """Say why the chain's input `name` has no type by `text`."""
        takers = [
            f"{stage.name}.{port}"
            for stage in self.stages
            for port, source in stage.inputs.items()
            if source == name
        ]
        words = f'"{text}" takes its tensors elsewhere' if has_stage else f'"{text}" is no input of a stage'
        if takers:
            return f"{words} {did_you_mean(text, takers)}"
        if has_stage:
            return f"{words} (add inputs: {{{Source.parse(text).name}: {name}}} to it)"
        return f"{words} (write STAGE.INPUT: it tells the type)"

    def _stage_problems(self, index: int, stage: StageSpec) -> Iterator[Problem]:
        for name, text in stage.inputs.items():
            yield from self._source_problems(("stages", index, "inputs", name), text)
        try:
            spreads = stage.spreads()
        except ValueError as error:
            yield ("stages", index, "each"), str(error)
            return
        given = {Source.parse(text) for text in stage.inputs.values()}
        for source in spreads.keys() - given:
            yield (
                ("stages", index, "each"),
                f'no input of "{stage.name}" is {source} (write a source of in, which has '
                f"{', '.join(map(str, sorted(given, key=str)))})",
            )
        if Spread.BATCH in spreads.values() and len(set(spreads.values())) > 1:
            yield (
                ("stages", index, "each"),
                "a batch is one request, and items or rows are several (choose one of them)",
            )

    def _source_problems(self, place: Key, text: str) -> Iterator[Problem]:
        source = Source.parse(text)
        names = [stage.name for stage in self.stages]
        if source.stage is None and source.name not in self.inputs:
            close = closest(text, [*self.inputs])
            hint = f'did you mean "{close}"?' if close else f"it has {', '.join(self.inputs)}"
            yield place, f'the chain has no input "{text}" ({hint}; an output of a stage is STAGE.OUTPUT)'
        elif source.stage is not None and source.stage not in names:
            yield place, f'there is no stage "{source.stage}" {did_you_mean(source.stage, names)}'

    def _circles(self) -> Iterator[Problem]:
        """Yield the stages that wait for each other."""
        needs = {
            stage.name: {Source.parse(text).stage for text in stage.inputs.values()} - {None}
            for stage in self.stages
        }
        ready: set[str | None] = {None}
        left = dict(needs)
        while free := [name for name, needed in left.items() if needed & left.keys() == set()]:
            ready.update(free)
            for name in free:
                del left[name]
        for index, stage in enumerate(self.stages):
            if stage.name in left:
                others = ", ".join(sorted(str(name) for name in needs[stage.name] & left.keys()))
                yield (
                    ("stages", index, "inputs"),
                    f'"{stage.name}" waits in a circle, for {others} (break it)',
                )
                return

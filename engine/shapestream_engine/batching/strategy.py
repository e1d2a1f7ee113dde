"""What a strategy is: which call shapes a model is given, and how a batch of any shape is made of these.

A strategy names dimensions and their allowed sizes; dimensions that it does not name may have any. It is part of a
model's signature and travels with it. Bound to the model's dimensions it becomes a `Planner`, which knows nothing of
tensors, engines or time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, product
from math import prod
from typing import Any, ClassVar, TypeAlias

from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import ShapeError, SignatureError

__all__ = ["PlannedCall", "Planner", "Sizes", "SizesPlanner", "Strategy", "complaint_about", "listed"]

Sizes: TypeAlias = tuple[int, ...]

_REMEMBERED = 4096
"""Calls remembered per planner, of all its plans; when they would be more, all are forgotten. A client chooses how many
calls its rows take, so plans are not what is counted."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call: rows `start` to `stop` of the batch, run at `sizes`. What is missing to its rows is filled up."""

    sizes: Sizes
    start: int
    stop: int


class Planner(ABC):
    """A strategy, bound to the dimensions of a model. All sizes are parallel to these. Used from any thread."""

    @abstractmethod
    def round_up(self, sizes: Sizes) -> Sizes:
        """What a request of these sizes is padded to. Its rows stay, since requests add up along them.

        Raises `ShapeError` for a size beyond the largest that is allowed.
        """

    @abstractmethod
    def plan(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        """The calls for a batch of these sizes: every row in exactly one of them, in order."""

    @abstractmethod
    def prepared_sizes(self, sizes: Sizes) -> tuple[int | None, ...] | None:
        """What a model has to be prepared for to run a call of `sizes`; None for a dimension of any size.

        None as a whole: nothing is prepared, the model takes every shape as it comes.
        """

    @abstractmethod
    def runs_exactly(self, sizes: Sizes) -> bool:
        """Whether a batch of these sizes is sure to be one call of them: nothing is padded, filled up or divided."""


@dataclass(frozen=True, slots=True)
class Strategy(ABC):
    """Which call shapes a model is given: per dimension its allowed sizes, ascending.

    Raises `SignatureError` for sizes that cannot be meant.
    """

    NAME: ClassVar[str]

    sizes: Mapping[str, Sizes] = field(default_factory=dict, hash=False)
    most_rows: int | None = field(default=None, kw_only=True)
    """Rows that a call may have where it holds more than one request alone: as far as batching was tried.

    1: nothing says that rows are independent. None: as many as the model takes.
    """

    def __post_init__(self) -> None:
        if self.most_rows is not None:
            self._check_most_rows(self.most_rows)
        for dimension, sizes in self.sizes.items():
            if (complaint := complaint_about(sizes)) is not None:
                raise SignatureError(f"{self.about(dimension)}: {complaint}", key=("strategy", dimension))
        self._check_own()

    @property
    def alone(self) -> bool:
        """Tell whether a call has the rows of one request and no others."""
        return self.most_rows == 1

    def _check_most_rows(self, most: object) -> None:
        if type(most) is not int or most < 1:
            raise SignatureError(
                f"strategy {self.NAME}: most_rows is an integer from 1, not {most!r}", key=("strategy",)
            )
        if BATCH in self.sizes:
            raise SignatureError(
                f"{self.about(BATCH)}: calls of set numbers of rows fill requests up and divide them, "
                f"so this model has no most_rows",
                key=("strategy", BATCH),
            )

    @abstractmethod
    def _check_own(self) -> None:
        """Raises `SignatureError` for what this strategy in particular cannot do."""

    @abstractmethod
    def bind(self, table: DimensionTable) -> Planner | None:
        """Its planner for a model with these dimensions; None if every shape is run as it comes.

        Raises `SignatureError` where the model has no such dimension, admits no such size, or may not be padded.
        """

    @abstractmethod
    def words(self, dimension: str) -> str | None:
        """What is done along a dimension, for a human; None if nothing special is."""

    def about(self, dimension: str) -> str:
        """How an error about a dimension begins."""
        return f"strategy {self.NAME}: {dimension!r}"

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse_strategy` turns into an equal strategy."""
        return {
            "strategy": self.NAME,
            **{name: list(sizes) for name, sizes in self.sizes.items()},
            **self._plain_limit(),
        }

    def __str__(self) -> str:
        sizes = [f"{name} {listed(sizes)}" for name, sizes in self.sizes.items()]
        return ", ".join([self.NAME, *sizes, *self._words_of_limit()])

    def _plain_limit(self) -> dict[str, int]:
        return {} if self.most_rows is None else {"most_rows": self.most_rows}

    def _words_of_limit(self) -> list[str]:
        if self.most_rows is None:
            return []
        return [
            "every request alone" if self.alone else f"requests share calls of up to {self.most_rows} rows"
        ]

    def check_against(self, table: DimensionTable) -> None:
        """Raises `SignatureError` unless a model with these dimensions can be run at these sizes."""
        for dimension, sizes in self.sizes.items():
            about = self.about(dimension)
            if dimension not in table.names:
                has = f"it has {', '.join(table.names)}" if table.names else "all of its dimensions are fixed"
                raise SignatureError(
                    f"{about} is no dynamic dimension of the model; {has}", key=("strategy", dimension)
                )
            number = table.names.index(dimension)
            if dimension != BATCH and not table.paddable[number]:
                raise SignatureError(
                    f"{about} may not be padded, which its sizes need; allow it by pad: {{{dimension}: VALUE}} "
                    f"at each input that has it",
                    key=("strategy", dimension),
                )
            if dimension == BATCH and not table.has_batch:
                raise SignatureError(
                    f"{about} is not the batch axis of every input, so it cannot be filled up",
                    key=("strategy", dimension),
                )
            outside = [size for size in sizes if size not in table.bounds[number]]
            if outside:
                raise SignatureError(
                    f"{about}: {listed(outside)} is not within {table.bounds[number]}, which the model takes",
                    key=("strategy", dimension),
                )


class SizesPlanner(Planner):
    """Every dimension that has allowed sizes is padded to the next of them, and rows are covered by calls.

    Independent dimensions each padded to the next size make the call with the fewest padded elements.
    """

    def __init__(
        self, strategy: Strategy, table: DimensionTable, cover: Callable[[int], tuple[int, ...]] | None
    ) -> None:
        """`cover` gives the rows of each call for a number of rows; None: one call of just as many."""
        self._names = table.names
        self._has_batch = table.has_batch
        self._allowed = tuple(strategy.sizes.get(name) for name in table.names)
        self._cover = cover
        self._plans: dict[Sizes, tuple[PlannedCall, ...]] = {}
        self._remembered = 0

    def round_up(self, sizes: Sizes) -> Sizes:
        """Each size but the rows becomes the next allowed one; raises `ShapeError` beyond the largest."""
        rounded = list(sizes)
        for number in range(1 if self._has_batch else 0, len(sizes)):
            allowed = self._allowed[number]
            if allowed is None:
                continue
            place = bisect_left(allowed, sizes[number])
            if place == len(allowed):
                raise ShapeError(
                    f"dimension {self._names[number]!r} is {sizes[number]}, which is more than {allowed[-1]}, "
                    f"the largest size that the model is run at"
                )
            rounded[number] = allowed[place]
        return tuple(rounded)

    def plan(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        """The calls, the largest first; what fills up is in the last one."""
        calls = self._plans.get(sizes)
        if calls is None:
            calls = self._planned(sizes)
            if self._remembered + len(calls) > _REMEMBERED:
                self._plans.clear()
                self._remembered = 0
            self._remembered += len(calls)
            self._plans[sizes] = calls
        return calls

    def _planned(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        rounded = self.round_up(sizes)
        if not self._has_batch:
            return (PlannedCall(rounded, 0, 1),)
        rows, others = rounded[0], rounded[1:]
        calls = []
        start = 0
        for call_rows in (rows,) if self._cover is None else self._cover(rows):
            stop = min(rows, start + call_rows)
            calls.append(PlannedCall((call_rows, *others), start, stop))
            start = stop
        return tuple(calls)

    def prepared_sizes(self, sizes: Sizes) -> tuple[int | None, ...]:
        """The call's size where sizes are allowed one by one, None where any is."""
        return tuple(
            None if allowed is None else size for size, allowed in zip(sizes, self._allowed, strict=True)
        )

    def runs_exactly(self, sizes: Sizes) -> bool:
        """Where any number of rows is one call, and each other size is an allowed one."""
        rows_are_free = not self._has_batch or self._allowed[0] is None
        return rows_are_free and self.round_up(sizes) == sizes

    @property
    def allowed(self) -> tuple[Sizes | None, ...]:
        """Per dimension its allowed sizes; None: any."""
        return self._allowed

    def prepared_shapes(self, most: int = 1024) -> list[tuple[int | None, ...]]:
        """What models may have to be prepared for, the fewest elements first; no more than `most`."""
        choices = [(None,) if allowed is None else allowed for allowed in self._allowed]
        shapes = islice(product(*choices), most)
        return sorted(shapes, key=lambda sizes: prod(size or 1 for size in sizes))

    def extreme_shapes(self) -> list[tuple[int | None, ...]]:
        """The largest of them, and the smallest."""
        ends = [
            tuple(None if allowed is None else allowed[end] for allowed in self._allowed) for end in (-1, 0)
        ]
        return list(dict.fromkeys(ends))


def listed(sizes: Sizes | list[int], joint: str = "or") -> str:
    """`1, 2 or 4`."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} {joint} {last}" if most else last


def complaint_about(sizes: Sequence[object]) -> str | None:
    """Why these cannot be the allowed sizes of a dimension; None if they can."""
    if not sizes:
        return "there is no size; write at least one"
    known = [size for size in sizes if type(size) is int and 1 <= size < 1 << 31]
    for size in sizes:
        if size not in known or type(size) is not int:
            return f"{size!r} is no size; write an integer from 1"
    for before, after in pairwise(known):
        if before == after:
            return f"{before} is listed twice"
        if before > after:
            return f"sizes ascend; {after} comes after {before}"
    return None

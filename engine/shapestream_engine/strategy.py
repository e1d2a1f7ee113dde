"""A strategy: the call shapes that a model is given. A value, which is part of a signature and travels with it.

    {strategy: native}                             any shape
    {strategy: native, max_prepared: 64}           at most so many different ones: a scheduler rounds sizes up
    {strategy: bucketed, seq: [32, 64, 128]}       sizes are padded to the next that is allowed, rows filled up to it
    {strategy: padded, seq: 512}                   the same with one size per dimension
    {strategy: partitioned, batch: [1, 2, 4, 8]}   rows are divided rather than filled up: 5 run as 4 + 1

`batching/calls.py` cuts a batch into calls by it. What static shapes gain, and cost: docs/strategies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any, TypeAlias, TypeGuard

from shapestream_engine.errors import SignatureError
from shapestream_engine.ports import BATCH, DimensionTable

Sizes: TypeAlias = tuple[int, ...]
StaticShape: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes, in the order of the names, so that equal shapes are equal however they were written."""

NAMES = ("native", "padded", "bucketed", "partitioned")
MAX_STATIC = 256
"""Static models of one model, at most: each keeps a copy of most weights in memory."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Allowed sizes by dimension, ascending; a dimension that is not named may have any size.

    Raises `SignatureError` for sizes that cannot be meant, and for arguments that exclude each other.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=dict, hash=False)
    partitioned: bool = field(default=False, kw_only=True)
    """Rows are divided into calls of exactly the allowed sizes, as few as possible, rather than filled up."""
    max_prepared: int | None = field(default=None, kw_only=True)
    """Different call shapes, for each size of the dimensions that may not be rounded. Only without `sizes`."""
    static_shapes: tuple[StaticShape, ...] = field(default=(), kw_only=True)
    """Call shapes with a model of their own, where the engine makes such: a size for every dynamic dimension."""
    fill_rows: bool = field(default=False, kw_only=True)
    """Under `max_prepared` rows are rounded up too, by copies of a row: only for a model whose rows are independent."""
    most_rows: int | None = field(default=None, kw_only=True)
    """Rows of a call that holds more than one request: as far as batching was tried.

    1: nothing says that rows are independent. None: as many as the model takes.
    """

    def __post_init__(self) -> None:
        for dimension, sizes in self.sizes.items():
            if (complaint := complaint_about(sizes)) is not None:
                raise _refused(f"{self.about(dimension)}: {complaint}", dimension)
        if self.partitioned and BATCH not in self.sizes:
            raise _refused("strategy partitioned: name the sizes of batch: batch: [1, 2, 4, 8]")
        if self.sizes and (self.max_prepared is not None or self.static_shapes or self.fill_rows):
            raise _refused(
                f"strategy {self.name}: max_prepared, static and fill_rows are for the strategy native"
            )
        cap = self.max_prepared
        if cap is not None and (type(cap) is not int or cap < 2):
            raise _refused(f"strategy {self.name}: max_prepared is an integer from 2", "max_prepared")
        if self.most_rows is not None:
            self._check_most_rows(self.most_rows)
        _check_static(self.static_shapes)

    def _check_most_rows(self, most: object) -> None:
        if type(most) is not int or most < 1:
            raise _refused(f"strategy {self.name}: most_rows is an integer from 1, not {most!r}")
        if BATCH in self.sizes:
            raise _refused(
                f"{self.about(BATCH)}: calls of set numbers of rows fill requests up and divide them, "
                f"so this model has no most_rows",
                BATCH,
            )
        if self.fill_rows:
            raise _refused(
                f"strategy {self.name}: fill_rows fills calls up to the bound of the rows, so there is no most_rows"
            )

    @property
    def name(self) -> str:
        """The strategy's name in a configuration; one size per dimension is `padded`, also where it was `bucketed`."""
        if not self.sizes:
            return "native"
        if self.partitioned:
            return "partitioned"
        return "padded" if all(len(sizes) == 1 for sizes in self.sizes.values()) else "bucketed"

    @property
    def alone(self) -> bool:
        """Tell whether a call has the rows of one request and no others."""
        return self.most_rows == 1

    @property
    def calibration_shapes(self) -> int | None:
        """Different shapes that a process may spend on measuring calls: an eighth of the cap; None: any number."""
        return None if self.max_prepared is None else self.max_prepared // 8

    @property
    def chosen_shapes(self) -> int | None:
        """Different shapes that a scheduler may choose: what calibration leaves of the cap; None: any number."""
        return None if self.max_prepared is None else self.max_prepared - self.max_prepared // 8

    def allowed(self, table: DimensionTable) -> tuple[Sizes | None, ...]:
        """Return the allowed sizes of each dimension of the model; None: any size.

        Raises `SignatureError` where the model has no such dimension, admits no such size, or may not be padded, and
        for a cap on shapes without an upper bound to round up to.
        """
        for dimension, sizes in self.sizes.items():
            self._check_sizes(dimension, sizes, table)
        if self.max_prepared is not None:
            for name, bounds, paddable in zip(table.names, table.bounds, table.paddable, strict=True):
                if (paddable or (name == BATCH and self.fill_rows)) and bounds.maximum is None:
                    raise _refused(
                        f"{self.about(name)} has no upper bound, and max_prepared needs one to round up to; "
                        f'state it in the shape of an input: "{name}:1..64"',
                        name,
                    )
        return tuple([self.sizes.get(name) for name in table.names])

    def _check_sizes(self, dimension: str, sizes: Sizes, table: DimensionTable) -> None:
        about = self.about(dimension)
        if dimension not in table.names:
            has = f"it has {', '.join(table.names)}" if table.names else "all of its dimensions are fixed"
            raise _refused(f"{about} is no dynamic dimension of the model; {has}", dimension)
        number = table.names.index(dimension)
        if dimension != BATCH and not table.paddable[number]:
            raise _refused(
                f"{about} may not be padded, which its sizes need; allow it by pad: {{{dimension}: VALUE}} "
                f"at each input that has it",
                dimension,
            )
        if dimension == BATCH and not table.has_batch:
            raise _refused(
                f"{about} is not the batch axis of every input, so it cannot be filled up", dimension
            )
        outside = [size for size in sizes if size not in table.bounds[number]]
        if outside:
            raise _refused(
                f"{about}: {_listed(outside)} is not within {table.bounds[number]}, which the model takes",
                dimension,
            )

    def static_sizes(self, table: DimensionTable) -> tuple[Sizes, ...]:
        """The static shapes as sizes of the model's dimensions, in the order in which they were named.

        Raises `SignatureError` where one leaves out a dimension, names one that is none, or is more than the model takes.
        """
        return tuple([_static_sizes(shape, table) for shape in self.static_shapes])

    def words(self, dimension: str) -> str | None:
        """Describe the treatment of a dimension, for people; None if it has any size."""
        sizes = self.sizes.get(dimension)
        if sizes is None:
            return None
        if dimension != BATCH:
            return f"padded to {_listed(sizes)}"
        if self.partitioned:
            return f"divided into calls of {_listed(sizes)}, as few as possible"
        return f"filled up to calls of {_listed(sizes)}"

    def about(self, dimension: str) -> str:
        """The beginning of an error about a dimension."""
        return f"strategy {self.name}: {dimension!r}"

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse_strategy` turns into an equal strategy."""
        return {
            "strategy": self.name,
            **{name: list(sizes) for name, sizes in self.sizes.items()},
            **({} if self.max_prepared is None else {"max_prepared": self.max_prepared}),
            **({"static": [dict(shape) for shape in self.static_shapes]} if self.static_shapes else {}),
            **({"fill_rows": True} if self.fill_rows else {}),
            **({} if self.most_rows is None else {"most_rows": self.most_rows}),
        }

    def __str__(self) -> str:
        words = [self.name, *(f"{name} {_listed(sizes)}" for name, sizes in self.sizes.items())]
        if self.max_prepared is not None:
            rows = "" if self.fill_rows else " for each number of rows"
            words.append(f"rounded up so that there are at most {self.max_prepared}{rows}")
        if self.static_shapes:
            shapes = [" x ".join(f"{name} {size}" for name, size in shape) for shape in self.static_shapes]
            words.append(f"static models for {', '.join(shapes)}")
        if self.alone:
            words.append("every request alone")
        elif self.most_rows is not None:
            words.append(f"requests share calls of up to {self.most_rows} rows")
        return ", ".join(words)


def _refused(message: str, *key: str) -> SignatureError:
    return SignatureError(message, key=("strategy", *key))


def parse_strategy(value: Mapping[str, Any]) -> Strategy:
    """The strategy that a mapping states; every key is a dimension but `strategy` and what native has besides.

    A size alone is as good as a list of one. Raises `SignatureError` for an unknown strategy and for wrong sizes.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refused(f"shapes are a mapping such as {{strategy: bucketed, seq: [32, 64]}}, not {value!r}")
    arguments = dict(value)
    name = arguments.pop("strategy", "native")
    if name not in NAMES:
        raise _refused(f"unknown strategy {name!r}; known are {', '.join(NAMES)}")
    # No size is `True`, so a dimension may be called like a flag.
    fill_rows = arguments.get("fill_rows") is True
    if fill_rows:
        del arguments["fill_rows"]
    # Sizes of a dimension of that name come as a list.
    most_rows = arguments.pop("most_rows") if type(arguments.get("most_rows")) is int else None
    if name == "native":
        cap, static = arguments.pop("max_prepared", None), _parse_static(arguments.pop("static", ()))
        for dimension in arguments:
            raise _refused(
                f"strategy native: {dimension!r}: any size is run as it comes; sizes are for the others",
                dimension,
            )
        return Strategy(max_prepared=cap, static_shapes=static, fill_rows=fill_rows, most_rows=most_rows)
    if fill_rows:
        raise _refused(f"strategy {name}: fill_rows is for the strategy native")
    sizes = {
        dimension: tuple(given) if isinstance(given, list | tuple) else (given,)
        for dimension, given in arguments.items()
    }
    _check_stated(name, sizes)
    return Strategy(sizes, partitioned=name == "partitioned", most_rows=most_rows)


def _check_stated(name: str, sizes: Mapping[str, Sizes]) -> None:
    """Raises `SignatureError` for what the strategy of this name in particular cannot do."""
    if name == "padded":
        if not sizes:
            raise _refused("strategy padded: name the dimensions to pad, each with its size: seq: 512")
        for dimension, given in sizes.items():
            if len(given) > 1:
                raise _refused(
                    f"strategy padded: {dimension!r} takes one size; several are the strategy bucketed",
                    dimension,
                )
    elif name == "bucketed" and not sizes:
        raise _refused("strategy bucketed: name the dimensions and their sizes: seq: [32, 64, 128]")


def complaint_about(sizes: Sequence[object]) -> str | None:
    """Why these cannot be the allowed sizes of a dimension; None if they can."""
    if not sizes:
        return "there is no size; write at least one"
    known = [size for size in sizes if _is_size(size)]
    for size in sizes:
        if not _is_size(size):
            return f"{size!r} is no size; write an integer from 1"
    for before, after in pairwise(known):
        if before == after:
            return f"{before} is listed twice"
        if before > after:
            return f"sizes ascend; {after} comes after {before}"
    return None


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 1 <= value < 1 << 31


def _listed(sizes: Sequence[int]) -> str:
    """`1, 2 or 4`."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


# ---------------------------------------------------------------- static shapes


def _parse_static(value: object) -> tuple[StaticShape, ...]:
    """The shapes that a list of mappings means: `static: [{batch: 1, seq: [8, 16]}, {batch: 4, seq: 16}]`.

    A list of sizes stands for one shape per size. Raises `SignatureError`.
    """
    complaint = "strategy native: static: a list of shapes such as [{{batch: 1, seq: 16}}], not {!r}"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _refused(complaint.format(value), "static")
    shapes: list[StaticShape] = []
    for entry in value:
        if not isinstance(entry, Mapping) or not entry or not all(isinstance(name, str) for name in entry):
            raise _refused(complaint.format(entry), "static")
        columns = [
            sizes if isinstance(sizes, list | tuple) else (sizes,)
            for _, sizes in sorted(entry.items(), key=lambda item: str(item[0]))
        ]
        # Counted before they are made: a few long lists are already more than any memory holds.
        if len(shapes) + prod(map(len, columns)) > MAX_STATIC:
            raise _refused(f"strategy native: static: no more than {MAX_STATIC} shapes", "static")
        shapes += [tuple(zip(sorted(entry), sizes, strict=True)) for sizes in product(*columns)]
    return tuple(shapes)


def _check_static(shapes: Sequence[StaticShape]) -> None:
    """Raises `SignatureError` for sizes that cannot be meant, and for a shape that is listed twice."""
    if len(shapes) > MAX_STATIC:
        raise _refused(f"strategy native: static: no more than {MAX_STATIC} shapes", "static")
    for shape in shapes:
        if [name for name, _ in shape] != sorted({name for name, _ in shape}):
            raise _refused(
                f"strategy native: static: {_spelled(shape)}: names stand once, in their order", "static"
            )
        for name, size in shape:
            if not _is_size(size):
                raise _refused(
                    f"strategy native: static: {name!r}: {size!r} is no size; write an integer from 1",
                    "static",
                )
    twice = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if twice is not None:
        raise _refused(f"strategy native: static: {_spelled(twice)} is listed twice", "static")


def _static_sizes(shape: StaticShape, table: DimensionTable) -> Sizes:
    sizes = dict(shape)
    about = f"strategy native: static: {_spelled(shape)}"
    has = f"it has {', '.join(table.names)}" if table.names else "all of its dimensions are fixed"
    for name in sizes:
        if name not in table.names:
            raise _refused(f"{about}: {name!r} is no dynamic dimension of the model; {has}", "static")
    for name, bounds in zip(table.names, table.bounds, strict=True):
        if name not in sizes:
            raise _refused(
                f"{about}: it says nothing of {name!r}; a static shape has a size for each dimension: {has}",
                "static",
            )
        if sizes[name] not in bounds:
            raise _refused(
                f"{about}: {name!r}: {sizes[name]} is not within {bounds}, which the model takes", "static"
            )
    return tuple([sizes[name] for name in table.names])


def _spelled(shape: StaticShape) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in shape) + "}"

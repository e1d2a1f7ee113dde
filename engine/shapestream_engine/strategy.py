"""A strategy: the call shapes of a model. It is a value, part of the signature.

    {strategy: native}                             any shape
    {strategy: native, max_prepared: 64}           64 different shapes: a scheduler rounds sizes up
    {strategy: bucketed, seq: [32, 64, 128]}       sizes are padded to the next allowed size, rows filled up
    {strategy: padded, seq: 512}                   the same with one size per dimension
    {strategy: partitioned, batch: [1, 2, 4, 8]}   rows are divided, not filled up: 5 run as 4 + 1

`batching/calls.py` divides batches into calls by the strategy. docs/strategies.md has the gains and costs of static
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any, TypeAlias, TypeGuard

from shapestream_engine.errors import SignatureError
from shapestream_engine.ports import DimensionTable
from shapestream_engine.shapes import BATCH

Sizes: TypeAlias = tuple[int, ...]
StaticShape: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes, sorted by name, so that equal shapes compare equal."""

NAMES = ("native", "padded", "bucketed", "partitioned")
MAX_STATIC = 256
"""Largest number of static models per model; each keeps a copy of most weights."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Ascending allowed sizes by dimension; other dimensions may have any size.

        Strategy({"seq": (32, 64, 128)})

    Raises `SignatureError` for invalid sizes, and for arguments that exclude each other.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=dict, hash=False)
    partitioned: bool = field(default=False, kw_only=True)
    """True: rows are divided into as few calls of allowed sizes as possible, not filled up."""
    max_prepared: int | None = field(default=None, kw_only=True)
    """Largest number of call shapes, for each size of the dimensions that may not be rounded. Only without `sizes`."""
    static_shapes: tuple[StaticShape, ...] = field(default=(), kw_only=True)
    """Call shapes with a prepared model, if the engine makes such: a size for every dynamic dimension."""
    fill_rows: bool = field(default=False, kw_only=True)
    """True: under `max_prepared`, rows are also rounded up by copies; only for a model with independent rows."""
    most_rows: int | None = field(default=None, kw_only=True)
    """Largest number of rows of a call that requests share, as far as batching was proved. 1: rows may depend on
    each other, so every request runs alone. None: no limit beside the model's."""

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
        """The strategy's name in a configuration; one size per dimension is always `padded`."""
        if not self.sizes:
            return "native"
        if self.partitioned:
            return "partitioned"
        return "padded" if all(len(sizes) == 1 for sizes in self.sizes.values()) else "bucketed"

    @property
    def alone(self) -> bool:
        """Tell whether each call holds one request only."""
        return self.most_rows == 1

    @property
    def calibration_shapes(self) -> int | None:
        """Number of shapes for calibration, an eighth of the cap; None: any number."""
        return None if self.max_prepared is None else self.max_prepared // 8

    @property
    def chosen_shapes(self) -> int | None:
        """Number of shapes for the scheduler, the rest of the cap; None: any number."""
        return None if self.max_prepared is None else self.max_prepared - self.max_prepared // 8

    def allowed(self, table: DimensionTable) -> tuple[Sizes | None, ...]:
        """Return the allowed sizes of each dimension of the model; None: any size.

        Raises `SignatureError` for a dimension that the model lacks or may not pad, for sizes that it does not admit, and
        for a cap on shapes without an upper bound.
        """
        for dimension, sizes in self.sizes.items():
            self._check_sizes(dimension, sizes, table)
        if self.max_prepared is not None:
            self._check_strings("max_prepared", table)
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
        if number in table.strings:
            raise _refused(
                f"{about} is the mean bytes of strings, which are never padded; leave it out", dimension
            )
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
        """Return the static shapes as sizes of the model's dimensions, in configured order.

        Raises `SignatureError` for a shape that lacks a dimension, has an unknown one, or exceeds the model's bounds.
        """
        if self.static_shapes:
            self._check_strings("static", table)
        return tuple([_static_sizes(shape, table) for shape in self.static_shapes])

    def _check_strings(self, key: str, table: DimensionTable) -> None:
        """Raise `SignatureError` for a limit on shapes, or fixed shapes, of a model that takes strings."""
        number = next((number for number in table.strings if number is not None), None)
        if number is not None:
            raise _refused(
                f"strategy {self.name}: {key} is for models of fixed and padded sizes, and this one takes strings of "
                f"any length ({table.names[number]!r}); leave it out",
                key,
            )

    def words(self, dimension: str) -> str | None:
        """Describe the use of a dimension as text; None if it may have any size."""
        sizes = self.sizes.get(dimension)
        if sizes is None:
            return None
        if dimension != BATCH:
            return f"padded to {_listed(sizes)}"
        if self.partitioned:
            return f"divided into calls of {_listed(sizes)}, as few as possible"
        return f"filled up to calls of {_listed(sizes)}"

    def about(self, dimension: str) -> str:
        """Return the beginning of an error message about a dimension."""
        return f"strategy {self.name}: {dimension!r}"

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping from which `parse_strategy` makes an equal strategy."""
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
    """Parse a strategy; every key is a dimension, except `strategy` and the arguments of native.

        parse_strategy({"strategy": "bucketed", "seq": [32, 64, 128]})

    A single size stands for a list of one. Raises `SignatureError` for an unknown strategy and invalid sizes.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refused(f"shapes are a mapping such as {{strategy: bucketed, seq: [32, 64]}}, not {value!r}")
    arguments = dict(value)
    name = arguments.pop("strategy", "native")
    if name not in NAMES:
        raise _refused(f"unknown strategy {name!r}; known are {', '.join(NAMES)}")
    # `True` is no size, so a dimension may have a flag's name.
    fill_rows = arguments.get("fill_rows") is True
    if fill_rows:
        del arguments["fill_rows"]
    # A dimension of this name has a list of sizes.
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
    """Raise `SignatureError` for arguments that the named strategy cannot have."""
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
    """Return the reason why these sizes are invalid; None if they are valid."""
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
    """Return the sizes as text: `1, 2 or 4`."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


# ---------------------------------------------------------------- static shapes


def _parse_static(value: object) -> tuple[StaticShape, ...]:
    """Parse static shapes: `static: [{batch: 1, seq: [8, 16]}, {batch: 4, seq: 16}]`. A list of sizes stands for one
    shape per size. Raises `SignatureError`."""
    complaint = "a list of shapes such as [{{batch: 1, seq: 16}}], not {!r}"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _refused_static(complaint.format(value))
    shapes: list[StaticShape] = []
    for entry in value:
        if not isinstance(entry, Mapping) or not entry or not all(isinstance(name, str) for name in entry):
            raise _refused_static(complaint.format(entry))
        columns = [
            sizes if isinstance(sizes, list | tuple) else (sizes,)
            for _, sizes in sorted(entry.items(), key=lambda item: str(item[0]))
        ]
        # The shapes are counted first, because a few long lists would exceed memory.
        if len(shapes) + prod(map(len, columns)) > MAX_STATIC:
            raise _refused_static(f"no more than {MAX_STATIC} shapes")
        shapes += [tuple(zip(sorted(entry), sizes, strict=True)) for sizes in product(*columns)]
    return tuple(shapes)


def _check_static(shapes: Sequence[StaticShape]) -> None:
    """Raise `SignatureError` for invalid sizes and for repeated shapes."""
    if len(shapes) > MAX_STATIC:
        raise _refused_static(f"no more than {MAX_STATIC} shapes")
    for shape in shapes:
        if [name for name, _ in shape] != sorted({name for name, _ in shape}):
            raise _refused_static(f"{_spelled(shape)}: each name stands once, in alphabetical order")
        for name, size in shape:
            if not _is_size(size):
                raise _refused_static(f"{name!r}: {size!r} is no size; write an integer from 1")
    twice = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if twice is not None:
        raise _refused_static(f"{_spelled(twice)} is listed twice")


def _static_sizes(shape: StaticShape, table: DimensionTable) -> Sizes:
    sizes = dict(shape)
    about = _spelled(shape)
    has = f"it has {', '.join(table.names)}" if table.names else "all of its dimensions are fixed"
    for name in sizes:
        if name not in table.names:
            raise _refused_static(f"{about}: {name!r} is no dynamic dimension of the model; {has}")
    for name, bounds in zip(table.names, table.bounds, strict=True):
        if name not in sizes:
            raise _refused_static(
                f"{about}: the size of {name!r} is missing; a static shape has a size for each dimension: {has}"
            )
        if sizes[name] not in bounds:
            raise _refused_static(
                f"{about}: {name!r}: {sizes[name]} is not within {bounds}, which the model takes"
            )
    return tuple([sizes[name] for name in table.names])


def _refused_static(message: str) -> SignatureError:
    return _refused(f"strategy native: static: {message}", "static")


def _spelled(shape: StaticShape) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in shape) + "}"

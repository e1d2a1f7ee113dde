"""Contents: requests whose values lie above, below or around the padding value.

Padding changes a minimum only where all values lie above the padding value, and a maximum only where all lie below. So the
proof has one request per *recipe*. A recipe has an anchor (the padding value or the middle of ordinary values), a side of
the anchor, a reach (the largest distance from the anchor), and a pattern: random; all at the end of the reach; sparse;
different from the anchor at the first or last position only; constant along padded axes.

Declared values bound all contents, and contents of declared whole numbers are whole. Without a declaration, floats reach
`_WIDE`, and ids reach the largest id that the model takes, up to `MOST_ID`. Requests that the model refuses alone have no
result that could be wrong; they are left out. Contents hold no NaN and no infinity; only neighbours do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product, takewhile
from typing import Literal, TypeAlias, get_args

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort
from shapestream_engine.probing.inputs import (
    Samples,
    Texts,
    Values,
    alike_array,
    drawn_texts,
    held,
    is_alike,
    request_of,
)
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

Side: TypeAlias = Literal["above", "below", "around"]
Pattern: TypeAlias = Literal["random", "end", "sparse", "edge", "constant"]

_WIDE = 1000.0
"""Largest absolute float without a declaration; decibels, degrees and pixels lie within."""
MOST_ID = 999
"""Largest integer without a declaration."""
_STEP = 10.0
"""Ratio of neighbouring reaches."""
_NARROWER = 2
"""Reaches of floats below the ordinary reach. Reaches of integers go down to 1."""
_SPARSE = 0.9
"""Share of the values that equal the anchor."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of content. Inputs with fewer reaches or anchors use their last."""

    reach: int
    pattern: Pattern
    side: Side
    anchor: int

    @property
    def magnitude(self) -> tuple[int, int]:
        """Anchor and reach: requests with equal magnitude have values in the same range."""
        return self.anchor, self.reach

    def __str__(self) -> str:
        return f"{self.pattern} values {self.side} {('the padding', 'the middle')[self.anchor]}, reach {self.reach}"


@dataclass(frozen=True, slots=True)
class Domain:
    """The range of values of one input in a proof."""

    low: float
    high: float
    anchors: tuple[float, ...]
    reaches: tuple[float, ...]
    """The ordinary reach, then larger ones, then smaller ones."""
    outer: int
    """Number of the larger reaches, if nobody declared that such values exist; otherwise 0."""
    padded_axes: tuple[int, ...]
    is_whole: bool
    """True for integers, and for floats that are declared or sampled as whole numbers."""

    @classmethod
    def of(cls, port: InputPort, values: Values, *, is_declared: bool, largest: int | None) -> Domain:
        """Return the domain of an input with these ordinary values; `largest` is the largest id, or None without ids.

        `is_declared`: contents stay within the ordinary values.
        """
        assert not isinstance(values, Texts)
        ordinary = values.range()
        low, high = ordinary
        kind = dtype_of(port.element_type).kind
        if not is_declared and kind not in "biu":
            low, high = -_WIDE, _WIDE
        elif largest is not None:
            high = max(high, largest)
        pad = float(min(max(next(iter(port.pad.values()), 0), low), high))
        middle = sum(ordinary) / 2
        own = max(ordinary[1] - ordinary[0], 0.0)
        least = 1.0 if kind in "biu" else 0.0
        reaches = [own]
        while reaches[-1] < high - low:
            reaches.append(min(reaches[-1] * _STEP or _STEP, high - low))
        outer = 0 if is_declared else len(reaches) - 1
        turns = count(1) if kind in "biu" else range(1, _NARROWER + 1)
        reaches += takewhile(lambda reach: reach > least, (own / _STEP**turn for turn in turns))
        axes = tuple(axis for axis, name in enumerate(port.axis_names) if name in port.pad)
        anchors = tuple(dict.fromkeys((pad, middle)))
        return cls(low, high, anchors, tuple(reaches), outer, axes, kind in "biu" or values.is_whole)

    def is_beyond(self, recipe: Recipe | None) -> bool:
        """Tell whether a recipe, or a random mixture, may exceed the ordinary values, which nobody declared."""
        if recipe is None:
            return self.outer > 0
        return 1 <= min(recipe.reach, len(self.reaches) - 1) <= self.outer

    def any(self, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        """Draw values from the whole domain, as 64-bit floats."""
        return random.uniform(self.low, self.high, shape)

    def draw(self, recipe: Recipe, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        """Draw values of a recipe, as 64-bit floats."""
        anchor = self.anchors[min(recipe.anchor, len(self.anchors) - 1)]
        reach = self.reaches[min(recipe.reach, len(self.reaches) - 1)]
        low = anchor if recipe.side == "above" else max(self.low, anchor - reach)
        high = anchor if recipe.side == "below" else min(self.high, anchor + reach)
        match recipe.pattern:
            case "random":
                return random.uniform(low, high, shape)
            case "end":
                ends = {"above": (high, high), "below": (low, low), "around": (low, high)}[recipe.side]
                return random.choice(ends, shape)
            case "sparse":
                return np.where(random.random(shape) < _SPARSE, anchor, random.uniform(low, high, shape))
            case "edge":
                place = -int(random.integers(2))
                own = tuple(place if axis in self.padded_axes else slice(None) for axis in range(len(shape)))
                values = np.full(shape, anchor)
                values[own] = random.uniform(low, high, values[own].shape)
                return values
            case "constant":
                one = [1 if axis in self.padded_axes else size for axis, size in enumerate(shape)]
                return np.broadcast_to(random.uniform(low, high, one), shape)


def has_ids(signature: ModelSignature, port: InputPort, declared: frozenset[str]) -> bool:
    """Tell whether an input may hold ids whose number is not declared."""
    if port.is_string:
        return False
    is_whole = dtype_of(port.element_type).kind in "iu" and port.element_type not in ("u8", "i8")
    return is_whole and port.mask_of is None and not is_alike(signature, port) and port.name not in declared


def domains(
    signature: ModelSignature,
    values: Mapping[str, Values],
    declared: frozenset[str],
    largest_ids: Mapping[str, int],
    *,
    is_narrow: bool = False,
) -> dict[str, Domain]:
    """Return the domain of each input of numbers; the user described the values of those in `declared`.

    `is_narrow`: all contents stay within the ordinary values, because the model crashed on others.
    """
    return {
        port.name: Domain.of(
            port,
            values[port.name],
            is_declared=is_narrow or port.name in declared,
            largest=None if is_narrow else largest_ids.get(port.name),
        )
        for port in signature.inputs
        if port.mask_of is None and not port.is_string and not is_alike(signature, port)
    }


def recipes(known: Mapping[str, Domain]) -> list[Recipe]:
    """Return all recipes, the ones of ordinary reach first."""
    reaches = max((len(domain.reaches) for domain in known.values()), default=0)
    anchors = max((len(domain.anchors) for domain in known.values()), default=0)
    return [
        Recipe(reach, pattern, side, anchor)
        for reach, pattern, side, anchor in product(
            range(reaches), get_args(Pattern), get_args(Side), range(anchors)
        )
    ]


def content_request(
    signature: ModelSignature,
    values: Mapping[str, Values],
    known: Mapping[str, Domain],
    all_recipes: Sequence[Recipe],
    sizes: tuple[int, ...],
    *,
    number: int,
    seed: int,
    variant: int = 0,
) -> tuple[Tensors, Recipe | None]:
    """Return the request of this number and its recipe; masks are left to the server.

    Beyond the number of recipes the recipe is None: each float input has a random recipe, and integers are drawn from the
    whole domain. Ids have no order, so bisection finds no threshold between two ids; only chance does.
    """
    random = np.random.default_rng([seed, number, *sizes, 1])
    own_recipe = all_recipes[number] if number < len(all_recipes) else None

    def array(port: InputPort, shape: tuple[int, ...]) -> Array | None:
        if port.mask_of is not None:
            return None
        if is_alike(signature, port):
            return alike_array(port, values[port.name], variant)
        if port.is_string:
            return drawn_texts(port, values[port.name], shape, random, number=number)
        recipe = own_recipe or all_recipes[int(random.integers(len(all_recipes)))]
        own, domain = values[port.name], known[port.name]
        if isinstance(own, Samples) and recipe.pattern != "end":
            return own.cut(shape, number).astype(dtype_of(port.element_type))
        is_any = domain.is_whole and number >= len(all_recipes)
        drawn = domain.any(shape, random) if is_any else domain.draw(recipe, shape, random)
        return held(np.rint(drawn) if domain.is_whole else drawn, dtype_of(port.element_type))

    return request_of(signature, sizes, array), own_recipe

"""The ground truth about a drawn model: hundreds of random requests alone, padded and in company, in NumPy alone.

A difference counts where it is larger than rounding could make it. Nothing of the product takes part: neither how it
pads nor how it compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from tests.engine.wrong_models.families import Drawn, Source

from shapestream_engine.probing.inputs import Integers, Uniform

Array: TypeAlias = np.ndarray[Any, Any]
Truth: TypeAlias = Literal["right", "wrong", "unclear"]

_LONGEST = 40
"""Positions of a request; calls may be longer."""
_OF_SPREAD, _OF_LARGEST = 1e-3, 1e-5
"""What rounding may do: parts of the standard deviation of the answers to such requests, and of the answer."""
_CLEAR = 10.0
"""Differences of so many times that are wrong, of so small a part of it right; between the two nothing is said."""
_NUDGE = 2e-6
"""Part of a value by which a request is changed, to see whether its answer hangs on rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The truth about one model, and the request that showed it."""

    padding: Truth
    batching: Truth
    varies: bool
    """False if all answers of a length were the same: nothing can be said of such a model."""
    why: str = ""


def judge(drawn: Drawn, random: np.random.Generator, *, requests: int = 320) -> Judged:
    """The truth after so many requests, each padded to several sizes and put beside others."""
    kinds = list(_contents(drawn.source))
    per_kind = max(4, requests // len(kinds))
    padding = batching = 0.0
    why = ""
    varies = False
    first: dict[tuple[int, ...], Array] = {}
    for words, content in kinds:
        found = _made(drawn, content, random, per_kind)
        if len(found) < 2:
            continue
        varies = varies or any(
            not np.array_equal(
                first.setdefault(given.shape, answer), answer, equal_nan=answer.dtype.kind == "f"
            )
            for given, answer in found
        )
        spread = _spread([answer for _, answer in found])
        for given, alone in found if padding <= _CLEAR else ():
            for longer in _longer(given.shape[1], drawn.source.most, random):
                padded = _padded(drawn, given, longer)
                own = _excess(drawn, given, alone, lambda padded=padded: _run(drawn, *padded), spread, random)
                if own > max(1.0, padding):
                    why = f"padding: {words}, {given.shape[1]} to {longer}"
                padding = max(padding, own)
        for number, (given, alone) in enumerate(found if batching <= _CLEAR else ()):
            others = [other for other, _ in found[number + 1 :] if other.shape == given.shape][:3]
            others += [_of_length(drawn, content, given.shape[1], random) for _ in range(3 - len(others))]
            for place in (0, len(others)):
                crowd = np.concatenate([*others[:place], given, *others[place:]])
                own = _excess(
                    drawn,
                    given,
                    alone,
                    lambda crowd=crowd, place=place: _rows(_run(drawn, crowd, _mask(drawn, crowd)), place),
                    spread,
                    random,
                )
                if own > max(1.0, batching):
                    why = f"batching: {words}, of {given.shape[1]}"
                batching = max(batching, own)
    return Judged(padding=_truth(padding), batching=_truth(batching), varies=varies, why=why)


def _truth(excess: float) -> Truth:
    if excess > _CLEAR:
        return "wrong"
    return "right" if excess < 1 / _CLEAR else "unclear"


def _contents(
    source: Source,
) -> Iterator[tuple[str, Callable[[np.random.Generator, tuple[int, ...]], Array]]]:
    """Realistic kinds of values: as declared, else of many sorts."""
    if source.vocabulary is not None:
        low, high = 0, source.vocabulary - 1
        if isinstance(source.domain, Integers):
            low, high = source.domain.low, source.domain.high
        high = max(low, high)
        yield "ids", lambda random, shape: random.integers(low, high, shape, endpoint=True)
        yield (
            "small ids",
            lambda random, shape: random.integers(low, min(high, low + 4), shape, endpoint=True),
        )
        if high > 1:
            yield (
                "ids other than padding",
                lambda random, shape: random.integers(max(low, 2), high, shape, endpoint=True),
            )
        yield "one id", lambda random, shape: np.full(shape, random.integers(low, high, endpoint=True))
        yield (
            "rare ids",
            lambda random, shape: np.where(
                random.random(shape) < 0.9, low, random.integers(low, high, shape, endpoint=True)
            ),
        )
        return
    if isinstance(source.domain, Uniform):
        least, most = source.domain.low, source.domain.high
        yield "as declared", lambda random, shape: random.uniform(least, most, shape)
        for words, part in (("low part", (0.0, 0.2)), ("high part", (0.8, 1.0)), ("middle", (0.4, 0.6))):
            ends = [least + share * (most - least) for share in part]
            yield words, lambda random, shape, ends=ends: random.uniform(*ends, shape)
        yield "constant", lambda random, shape: np.full(shape, random.uniform(least, most))
        zero = min(max(0.0, least), most)
        yield (
            "sparse",
            lambda random, shape: np.where(
                random.random(shape) < 0.9, zero, random.uniform(least, most, shape)
            ),
        )
        return
    yield "mixed", lambda random, shape: random.normal(size=shape) * 10 ** random.uniform(-1, 2)
    yield "unit normal", lambda random, shape: random.normal(size=shape)
    yield "non-negative", lambda random, shape: random.random(shape)
    yield "pixels", lambda random, shape: random.integers(0, 255, shape).astype(float)
    yield "dB", lambda random, shape: random.uniform(-80, 0, shape)
    yield "small and negative", lambda random, shape: -np.abs(random.normal(size=shape))
    yield "constant", lambda random, shape: np.full(shape, random.normal() * 10 ** random.uniform(-1, 2))
    yield "temperatures", lambda random, shape: random.normal(20, 3, shape)
    yield (
        "sparse",
        lambda random, shape: np.where(
            random.random(shape) < 0.9, 0.0, np.abs(random.normal(size=shape)) * 5
        ),
    )


def _of_length(drawn: Drawn, content: Any, length: int, random: np.random.Generator) -> Array:
    source = drawn.source
    shape = (1, length) if source.features is None else (1, length, source.features)
    dtype = {"i64": np.int64, "f32": np.float32, "f64": np.float64}[source.element_type]
    return content(random, shape).astype(dtype)


def _made(drawn: Drawn, content: Any, random: np.random.Generator, count: int) -> list[tuple[Array, Array]]:
    """Requests that run alone, with their answers."""
    found = []
    for _ in range(count):
        length = int(random.integers(1, min(_LONGEST, drawn.source.most - 1) + 1))
        given = _of_length(drawn, content, length, random)
        answer = _run(drawn, given, _mask(drawn, given))
        if answer is not None:
            found.append((given, answer))
    return found


def _mask(drawn: Drawn, given: Array) -> Array | None:
    return np.ones(given.shape[:2], np.int64) if drawn.source.has_mask else None


def _padded(drawn: Drawn, given: Array, longer: int) -> tuple[Array, Array | None]:
    wide = np.full((given.shape[0], longer, *given.shape[2:]), drawn.source.pad, given.dtype)
    wide[:, : given.shape[1]] = given
    mask = _mask(drawn, wide)
    if mask is not None:
        mask[:, given.shape[1] :] = 0
    return wide, mask


def _longer(length: int, most: int, random: np.random.Generator) -> list[int]:
    return sorted({length + 1, int(random.integers(length + 1, min(most, 64) + 1)), most})


def _run(drawn: Drawn, given: Array, mask: Array | None) -> Array | None:
    inputs = {drawn.source.name: given} | ({} if mask is None else {"mask": mask})
    try:
        return drawn.exact(**inputs)
    except (ValueError, IndexError):
        return None


def _rows(answer: Array | None, place: int) -> Array | None:
    return None if answer is None else answer[place : place + 1]


def _cut(answer: Array, like: Array) -> Array:
    """Without the positions that were added, where the answer has them."""
    return answer[tuple(slice(size) for size in like.shape)]


def _spread(answers: list[Array]) -> float:
    numbers = np.concatenate([answer.reshape(-1) for answer in answers]).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    return float(finite.std()) if finite.size else 0.0


def _excess(
    drawn: Drawn,
    given: Array,
    alone: Array,
    together: Callable[[], Array | None],
    spread: float,
    random: np.random.Generator,
) -> float:
    """How many times larger than rounding the difference is."""
    result = together()
    if result is None:
        return np.inf
    off = _distance(alone, _cut(result, alone), spread)
    if off < 1 / _CLEAR or given.dtype.kind == "i":
        return off
    # Both ways to the same answer may round to either side of a step.
    for _ in range(3):
        nudged = (given * (1 + _NUDGE * random.uniform(-1, 1, given.shape))).astype(given.dtype)
        again = _run(drawn, nudged, _mask(drawn, nudged))
        if again is None or _distance(alone, again, spread) >= off / _CLEAR:
            return 0.0
    return off


def _distance(alone: Array, other: Array, spread: float) -> float:
    if alone.shape != other.shape:
        return np.inf
    if alone.tobytes() == other.tobytes():
        return 0.0
    if alone.dtype.kind in "bi":
        return 0.0 if np.array_equal(alone, other) else np.inf
    first, second = alone.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where((first == second) | (np.isnan(first) & np.isnan(second)), 0.0, np.abs(first - second))
    off = np.where(np.isnan(off), np.inf, off)
    finite = np.abs(first[np.isfinite(first)])
    allowed = _OF_SPREAD * spread + _OF_LARGEST * (float(finite.max()) if finite.size else 0.0)
    most = float(off.max()) if off.size else 0.0
    return 0.0 if most == 0 else most / max(allowed, 1e-12)

"""The cases of each treatment of requests: which requests go into one call, where, and at what sizes.

Hostile on purpose: neighbours at the ends of their range and beyond, first, in the middle and last, from one row
of padding to far more padding than data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from shapestream_engine.probing.baseline import Baseline, is_affordable, rungs
from shapestream_engine.probing.bench import Sample, spell_sizes
from shapestream_engine.probing.values import Extreme
from shapestream_engine.signature import ModelSignature

__all__ = ["Case", "batching_cases", "case_of", "most_rows", "padding_cases", "strategy_cases"]

_USUAL_BATCH = 8
"""Rows in the largest call that is tried: more would show nothing that these do not."""
_EXTREMES: tuple[Extreme, ...] = get_args(Extreme)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call."""

    sizes: tuple[int, ...]
    members: tuple[Sample, ...]
    words: str


def most_rows(signature: ModelSignature, max_batch: int | None) -> int:
    """Rows that a call may have at most, as far as it is worth trying."""
    if not signature.has_batch:
        return 1
    # What a strategy fills up to is run whatever the scheduler puts together.
    allowed = max(signature.strategy.sizes.get("batch", (0,)))
    wanted = None if max_batch is None else max(max_batch, allowed)
    limits = [limit for limit in (wanted, signature.bounds[0].maximum, _USUAL_BATCH) if limit is not None]
    return min(limits)


def batching_cases(signature: ModelSignature, baseline: Baseline, rows: int) -> Iterator[Case]:
    """Requests of one size beside others of the same size."""
    for sizes in baseline.sizes:
        own = sizes[0]
        room = rows // own
        if room < 2:
            return
        one, two, three = (baseline.pool.typical(sizes, number) for number in range(3))
        yield from case_of(signature, "two requests", [one, two], rows)
        yield from case_of(signature, "the same two the other way round", [two, one], rows)
        yield from case_of(signature, "a request twice, around another", [one, three, one], rows)
        for number, kind in enumerate(_EXTREMES):
            if (hostile := baseline.pool.extreme(sizes, kind)) is None:
                continue
            position = number % 2
            pair = [one, hostile] if position == 0 else [hostile, one]
            where = "last" if position == 0 else "first"
            yield from case_of(signature, f"beside {kind} values, which come {where}", pair, rows)
            yield from case_of(signature, f"between {kind} values", [hostile, two, hostile], rows)
        double = baseline.pool.typical((2 * own, *sizes[1:]), 3) if 2 * own in signature.bounds[0] else None
        yield from case_of(
            signature, "a request of several rows between two others", [one, double, two], rows
        )
        crowd = [baseline.pool.typical(sizes, number % 3) for number in range(room)]
        yield from case_of(signature, f"{room} requests", crowd, rows)


def padding_cases(
    signature: ModelSignature,
    baseline: Baseline,
    padded: Sequence[int],
    rows: int,
) -> Iterator[Case]:
    """Small requests padded, along the dimensions numbered `padded`, to the size of others, and to set sizes."""
    for number, base in enumerate(baseline.sizes):
        ladder = sorted(set(_ladder(signature, baseline, padded, base)), key=sum)
        small = [sizes for sizes in ladder if baseline.pool.typical(sizes, 0) is not None]
        if len(small) >= 2:
            least, middle, largest = small[0], small[len(small) // 2], small[-1]
            yield from _beside_longer(signature, baseline, (least, middle, largest), rows)
            for target in small[1:]:
                yield from _alone(signature, baseline, least, target)
            yield from _alone(signature, baseline, small[-2], small[-1])
        if number == 0 and small:
            for target in _set_sizes(signature, baseline, padded, small[0]):
                yield from _alone(signature, baseline, small[0], target)


def strategy_cases(signature: ModelSignature, baseline: Baseline, rows: int) -> Iterator[Case]:
    """From one row up to as many as are tried: what has to be filled up, and what has to be divided."""
    for sizes in baseline.sizes:
        if not signature.has_batch:
            for number in range(3):
                yield from _as_it_is(baseline, sizes, number)
            continue
        for count in range(1, rows // sizes[0] + 1):
            members = [baseline.pool.typical(sizes, number % 3) for number in range(count)]
            yield from case_of(signature, f"{count} requests", members, rows)
        for kind in _EXTREMES:
            hostile = baseline.pool.extreme(sizes, kind)
            members = [baseline.pool.typical(sizes, 0), hostile, baseline.pool.typical(sizes, 1)]
            yield from case_of(signature, f"around {kind} values", members, rows)


def _as_it_is(baseline: Baseline, sizes: tuple[int, ...], number: int) -> Iterator[Case]:
    sample = baseline.pool.typical(sizes, number)
    if sample is not None:
        yield Case(sizes, (sample,), sample.words)


def _beside_longer(
    signature: ModelSignature, baseline: Baseline, three: tuple[tuple[int, ...], ...], rows: int
) -> Iterator[Case]:
    least, middle, largest = three
    if not signature.has_batch:
        return
    one, other = baseline.pool.typical(least, 0), baseline.pool.typical(least, 1)
    long, medium = baseline.pool.typical(largest, 0), baseline.pool.typical(middle, 1)
    yield from case_of(signature, "a short request before a long one", [one, long], rows)
    yield from case_of(signature, "a short request behind a long one", [long, other], rows)
    yield from case_of(signature, "short, middling and long", [other, medium, long], rows)
    for kind in _EXTREMES:
        hostile = baseline.pool.extreme(largest, kind)
        yield from case_of(
            signature, f"a short request beside a long one of {kind} values", [hostile, one], rows
        )
    yield from case_of(signature, "a short request between long ones", [long, one, long], rows)


def _alone(
    signature: ModelSignature, baseline: Baseline, own: tuple[int, ...], target: tuple[int, ...]
) -> Iterator[Case]:
    sample = baseline.pool.typical(own, 2)
    if sample is not None and own != target:
        words = f"alone, {spell_sizes(signature.dimensions, own)}, padded to {spell_sizes(signature.dimensions, target)}"
        yield Case(target, (sample,), words)


def _ladder(
    signature: ModelSignature, baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """The base with other sizes along the padded dimensions, all of them together."""
    per_dimension = [rungs(signature.bounds[number], baseline.ladder) for number in padded]
    for turn in range(max(map(len, per_dimension))):
        sizes = list(base)
        for number, known in zip(padded, per_dimension, strict=True):
            sizes[number] = known[min(turn, len(known) - 1)]
        if is_affordable(signature, tuple(sizes)):
            yield tuple(sizes)


def _set_sizes(
    signature: ModelSignature,
    baseline: Baseline,
    padded: Sequence[int],
    own: tuple[int, ...],
) -> Iterator[tuple[int, ...]]:
    """The sizes that the strategy pads to, and the upper bounds."""
    targets = signature.strategy.sizes
    for place in range(max((len(targets.get(signature.dimensions[n], ())) for n in padded), default=0)):
        sizes = list(own)
        for number in padded:
            if known := targets.get(signature.dimensions[number]):
                sizes[number] = max(own[number], known[min(place, len(known) - 1)])
        if is_affordable(signature, tuple(sizes)):
            yield tuple(sizes)
    most = list(own)
    for number in padded:
        maximum = signature.bounds[number].maximum
        most[number] = own[number] if maximum is None else maximum
    # Only where a request of that size would run as well: a bound may promise more than the model can do.
    if is_affordable(signature, tuple(most)) and baseline.pool.typical(tuple(most), 0) is not None:
        yield tuple(most)


def case_of(
    signature: ModelSignature, words: str, members: Sequence[Sample | None], rows: int
) -> Iterator[Case]:
    """The call that these requests make up; nothing where one failed alone, or the call would be too large."""
    present = [member for member in members if member is not None]
    if len(present) < len(members):
        return
    sizes = [max(member.sizes[number] for member in present) for number in range(len(signature.dimensions))]
    sizes[0] = sum(member.shape.rows for member in present)
    if sizes[0] > rows:
        return
    yield Case(tuple(sizes), tuple(present), f"{words}, {spell_sizes(signature.dimensions, sizes)}")

"""The cases of each treatment of requests: which requests go into one call, where, and at what sizes.

Hostile on purpose: neighbours at the ends of their range and beyond, first, in the middle and last, from one row
of padding to far more padding than data. The last ones run as the model is served: on static models beside the dynamic
one, and in fixed numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import get_args

import numpy as np

from shapestream_engine.calibration_shapes import MOST_NBYTES, call_nbytes, stages
from shapestream_engine.calibration_shapes import most_rows as most_rows_of_call
from shapestream_engine.probing.baseline import Baseline, is_affordable, rungs
from shapestream_engine.probing.bench import Sample
from shapestream_engine.probing.inputs import Extreme, spell_sizes
from shapestream_engine.signature import ModelSignature

SMALL_BATCH = 8
"""Rows in the largest call of the many cases; `crowds` has the few larger ones."""
_DIFFERENT = 5
"""Ordinary requests that a crowd is made of."""
_FAR = 512
"""The longest padding along a dimension without an upper bound."""
_TYPICAL = 3
"""Ordinary requests that differ, of a static shape and in a call of a fixed number of rows."""
_CONTENTS = 12
"""Contents of one size at a time, so that all sizes had some before one has all."""
_WAYS = 2
"""Ways between two requests at a time, for each output."""
_EXTREMES: tuple[Extreme, ...] = get_args(Extreme)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call."""

    sizes: tuple[int, ...]
    members: tuple[Sample, ...]
    words: str
    guests: tuple[Sample, ...] = ()
    """Members that are there for the others: what they get themselves is full of ties, which rounding breaks."""


def most_rows(signature: ModelSignature, max_batch: int | None) -> int:
    """Rows that a call may have at most where requests share it."""
    rows = most_rows_of_call(signature, max_batch)
    if not signature.has_batch:
        return rows
    strategy, maximum = signature.strategy, signature.bounds[0].maximum
    # What a strategy fills up to is run whatever the scheduler puts together; calls of one row divide larger requests.
    if strategy.fill_rows:
        most = maximum or rows
    elif "batch" in strategy.sizes:
        most = max(rows, 2, *strategy.sizes["batch"])
    else:
        return rows
    return most if maximum is None else min(most, maximum)


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
        crowd = [baseline.pool.typical(sizes, number % 3) for number in range(min(room, SMALL_BATCH))]
        yield from case_of(signature, f"{len(crowd)} requests", crowd, rows)
    for turn in range(_rounds(baseline)):
        for sizes in baseline.sizes:
            for group in _grouped(_varied(baseline, sizes, turn), min(rows // sizes[0], SMALL_BATCH)):
                yield from case_of(signature, "requests of many contents", group, rows)


def crowds(signature: ModelSignature, baseline: Baseline, padded: Sequence[int], rows: int) -> Iterator[Case]:
    """Calls of twice as many requests each time, up to `rows` rows: at last the largest that may be served.

    Requests are of the smallest size that the model took, or of two sizes where dimensions are padded.
    """
    small = min(baseline.sizes, key=prod)
    kinds = _two_sizes(signature, baseline, padded, small) if padded else [small]
    samples = [
        sample
        for sizes in kinds
        for number in range(_DIFFERENT)
        if (sample := baseline.pool.typical(sizes, number)) is not None
    ]
    if not samples or len(kinds) < (2 if padded else 1):
        return
    room = rows // small[0]
    counts = [2**power for power in range(1, room.bit_length()) if 2**power < room]
    for count in (count for count in (*counts, room) if count > 1):
        yield from case_of(signature, f"{count} requests", _mixed(samples, count), rows)
    if room < 2:
        return
    found = {kind: baseline.pool.extreme(small, kind) for kind in _EXTREMES}
    guests = [sample for sample in found.values() if sample is not None][: room - 1]
    around = _mixed(samples, room - len(guests), turn=1)
    for place, guest in enumerate(guests):
        around.insert((2 * place + 1) * room // (2 * len(guests)), guest)
    kinds_of = " and ".join(kind for kind, sample in found.items() if sample in guests)
    if guests:
        yield from case_of(signature, f"{room} requests, among them {kinds_of} values", around, rows, guests)


def _mixed(samples: Sequence[Sample], count: int, turn: int = 0) -> list[Sample]:
    """`count` of the samples, in no order that repeats: rows that change places do not look alike."""
    random = np.random.default_rng([count, turn])
    return [samples[place] for place in random.integers(len(samples), size=count)]


def _two_sizes(
    signature: ModelSignature, baseline: Baseline, padded: Sequence[int], small: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The smallest two of the ladder that the model takes."""
    ladder = sorted(set(_ladder(signature, baseline, padded, small)), key=sum)
    return [sizes for sizes in ladder if baseline.pool.typical(sizes, 0) is not None][:2]


def grid_cases(signature: ModelSignature, baseline: Baseline, max_batch: int | None) -> Iterator[Case]:
    """The calls of several rows that a calibration runs, small ones first."""
    rows = most_rows(signature, max_batch)
    own = max(1, signature.bounds[0].minimum)
    kept: dict[tuple[int, ...], int] = {}
    for sizes in sorted(chain.from_iterable(stages(signature, max_batch)), key=prod):
        if not own < sizes[0] <= rows or sizes[0] % own:
            continue
        kept[sizes[1:]] = call_nbytes(signature, (own, *sizes[1:]))
        if sum(kept.values()) > MOST_NBYTES:
            return
        # Not the odd ones: a blocky picture of many sizes is full of ties, which any order breaks.
        samples = [baseline.pool.typical((own, *sizes[1:]), number) for number in (0, 2)]
        members = [samples[number % 2] for number in range(sizes[0] // own)]
        yield from case_of(signature, f"{len(members)} requests", members, rows)


def padding_cases(
    signature: ModelSignature,
    baseline: Baseline,
    padded: Sequence[int],
    rows: int,
) -> Iterator[Case]:
    """Small requests padded, along the dimensions numbered `padded`, to the size of others, and to set sizes."""
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    long: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for base in baseline.sizes:
        small = _taken(signature, baseline, padded, base)
        if len(small) >= 2:
            least, middle, largest = small[0], small[len(small) // 2], small[-1]
            yield from _beside_longer(signature, baseline, (least, middle, largest), rows)
        if small:
            targets = list(_set_sizes(signature, baseline, padded, small[0]))
            steps += _steps(small, targets)
            long += [
                (own, target)
                for target in targets[-1:]
                if baseline.pool.typical(own := _less_one(signature, padded, target), 0) is not None
            ]
    for own, target in dict.fromkeys(long):
        yield from _alone(signature, baseline, own, target)
    for turn in range(_rounds(baseline)):
        for own, target in dict.fromkeys(steps):
            yield from _padded(signature, baseline, own, target, turn, rows)
        if turn == 0:
            for base in baseline.sizes:
                yield from _at_ratios(signature, baseline, padded, base)
    # Last, since their contents take most time and memory.
    for turn in range(_rounds(baseline)):
        for own, target in dict.fromkeys(long):
            yield from _padded(signature, baseline, own, target, turn, rows)


def _taken(
    signature: ModelSignature, baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The sizes of the ladder that the model takes, small ones first."""
    ladder = sorted(set(_ladder(signature, baseline, padded, base)), key=sum)
    return [sizes for sizes in ladder if baseline.pool.typical(sizes, 0) is not None]


def _steps(
    small: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes of a request and of its call: the least to each, each to the next and to the largest."""
    further = [*small[1:], *targets]
    yield from ((small[0], target) for target in further)
    yield from pairwise(small)
    yield from ((own, further[-1]) for own in small[1:] if further)


def _less_one(signature: ModelSignature, padded: Sequence[int], target: tuple[int, ...]) -> tuple[int, ...]:
    """One less along each padded dimension: what looks far ahead sees the padding from long requests only."""
    return tuple(
        size - 1 if number in padded and size - 1 in signature.bounds[number] else size
        for number, size in enumerate(target)
    )


def _rounds(baseline: Baseline) -> int:
    """Times that `_varied` gives other requests of one size."""
    return -(-baseline.pool.contents // _CONTENTS)


def _varied(baseline: Baseline, sizes: tuple[int, ...], turn: int) -> list[Sample]:
    """Some of the contents, and requests near thresholds between those that were made so far."""
    pool = baseline.pool
    found = [pool.content(sizes, number) for number in range(turn * _CONTENTS, (turn + 1) * _CONTENTS)]
    ways = range(turn * _WAYS, (turn + 1) * _WAYS)
    near = [
        sample
        for number in ways
        for output, tolerance in enumerate(baseline.tolerances)
        for sample in pool.near(sizes, output, tolerance, number)
    ]
    return list(dict.fromkeys(sample for sample in (*found, *near) if sample is not None))


def _grouped(samples: Sequence[Sample], count: int) -> Iterator[list[Sample]]:
    """So many of them each time, each beside others than those that were made next to it."""
    order = np.random.default_rng(len(samples)).permutation(len(samples))
    for first in range(0, len(samples), max(1, count)):
        yield [samples[place] for place in order[first : first + max(1, count)]]


def _padded(
    signature: ModelSignature,
    baseline: Baseline,
    own: tuple[int, ...],
    target: tuple[int, ...],
    turn: int,
    rows: int,
) -> Iterator[Case]:
    """Requests of one size in calls of another, every second call with a request that is so long."""
    if own == target:
        return
    room = min(rows // own[0], SMALL_BATCH) if signature.has_batch else 1
    long = baseline.pool.typical(target, turn % _TYPICAL) if room > 1 else None
    words = f"{spell_sizes(signature.dimensions, own)}, padded to {spell_sizes(signature.dimensions, target)}"
    for number, group in enumerate(_grouped(_varied(baseline, own, turn), max(1, room - 1))):
        members = [*group, long] if long is not None and number % 2 else group
        sizes = (len(members) * own[0], *target[1:]) if signature.has_batch else target
        yield Case(sizes, tuple(members), words)


def strategy_cases(signature: ModelSignature, baseline: Baseline, rows: int) -> Iterator[Case]:
    """Calls of one row and more: some have to be filled up, some divided."""
    for sizes in baseline.sizes:
        if not signature.has_batch:
            for number in range(3):
                yield from _as_it_is(baseline, sizes, number)
            continue
        for count in range(1, min(rows, SMALL_BATCH) // sizes[0] + 1):
            members = [baseline.pool.typical(sizes, number % 3) for number in range(count)]
            yield from case_of(signature, f"{count} requests", members, rows)
        for kind in _EXTREMES:
            hostile = baseline.pool.extreme(sizes, kind)
            members = [baseline.pool.typical(sizes, 0), hostile, baseline.pool.typical(sizes, 1)]
            yield from case_of(signature, f"around {kind} values", members, rows)
        for group in _grouped(_varied(baseline, sizes, 0), min(rows // sizes[0], SMALL_BATCH)):
            yield from case_of(signature, "requests of many contents", group, rows)


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


def _at_ratios(
    signature: ModelSignature, baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]
) -> Iterator[Case]:
    """Requests whose last cell is whole, and whose last cell has one element of theirs, where outputs have fewer cells.

    A border that reaches into a picture shows at the first, padding in a cell at the second; other sizes may hide either.
    """
    names = [signature.dimensions[number] for number in padded]
    extents = [extent for port in signature.outputs for extent in port.extents if extent is not None]
    for divisor in sorted({each.divisor for each in extents if each.dimension in names and each.divisor > 1}):
        for more in (0, 1):
            own, target = list(base), list(base)
            for number in padded:
                own[number] = -(-base[number] // divisor) * divisor + more
                target[number] = own[number] + 2 * divisor
            if all(size in bounds for size, bounds in zip(target, signature.bounds, strict=True)):
                yield from _alone(signature, baseline, tuple(own), tuple(target))


def _ladder(
    signature: ModelSignature, baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """The base with other sizes along the padded dimensions, all of them together, from the lower bounds on."""
    bounds = [signature.bounds[number] for number in padded]
    per_dimension = [[max(1, each.minimum), *rungs(each, baseline.ladder)] for each in bounds]
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
        most[number] = max(own[number], _FAR) if maximum is None else maximum
    # Only where a request of that size would run as well: a bound may promise more than the model can do.
    if is_affordable(signature, tuple(most)) and baseline.pool.typical(tuple(most), 0) is not None:
        yield tuple(most)


def case_of(
    signature: ModelSignature,
    words: str,
    members: Sequence[Sample | None],
    rows: int,
    guests: Sequence[Sample] = (),
) -> Iterator[Case]:
    """The call that these requests make up; nothing where one failed alone, or the call would be too large."""
    present = [member for member in members if member is not None]
    if len(present) < len(members):
        return
    sizes = [max(member.sizes[number] for member in present) for number in range(len(signature.dimensions))]
    sizes[0] = sum(member.shape.rows for member in present)
    if sizes[0] > rows:
        return
    spelled = f"{words}, {spell_sizes(signature.dimensions, sizes)}"
    yield Case(tuple(sizes), tuple(present), spelled, tuple(guests))


def static_cases(signature: ModelSignature, baseline: Baseline) -> Iterator[Case]:
    """Calls of exactly each static shape, all shapes once before any of them again.

    What their requests got alone came from the dynamic model.
    """
    for turn in range(_TYPICAL):
        for sizes in signature.static_sizes:
            if not signature.has_batch:
                sample = baseline.pool.typical(sizes, turn)
                if sample is not None:
                    yield Case(sizes, (sample,), sample.words)
                continue
            own = max(1, signature.bounds[0].minimum)
            count, more = divmod(sizes[0], own)
            shared = more == 0 and sizes[0] <= (signature.strategy.most_rows or sizes[0])
            rows = [own] * count if shared else [sizes[0]]
            # In no order that repeats: rows that change places must not look alike.
            numbers = np.random.default_rng([turn, *sizes]).integers(_TYPICAL, size=len(rows))
            members = [
                baseline.pool.typical((each, *sizes[1:]), int(number))
                for each, number in zip(rows, numbers, strict=True)
            ]
            yield from case_of(signature, "at its static shape", members, sizes[0])


def fixed_rows(signature: ModelSignature) -> int:
    """The rows of every call, where there is one number of them only."""
    (rows,) = signature.strategy.sizes["batch"]
    return rows


def invariance_cases(signature: ModelSignature, baseline: Baseline) -> Iterator[Case]:
    """Every request at every position of the call, beside ordinary and hostile neighbours, and in calls that are filled up.

    `baseline` holds what each got alone in a call that was filled up with itself.
    """
    rows = fixed_rows(signature)
    for sizes in baseline.sizes:
        found = [baseline.pool.typical(sizes, number) for number in range(_TYPICAL)]
        found += [baseline.pool.extreme(sizes, kind) for kind in _EXTREMES]
        samples = [sample for sample in found if sample is not None]
        room = max(1, rows // sizes[0])
        for turn in range(len(samples)):
            crowd = _around(samples, turn, room)
            yield from case_of(signature, f"turn {turn} around the call", crowd, rows)
            yield from case_of(signature, f"turn {turn}, the other way round", crowd[::-1], rows)
        for count in range(1, room):
            yield from case_of(signature, f"{count} requests", _around(samples, count, count), rows)


def _around(samples: list[Sample], first: int, count: int) -> list[Sample]:
    return [samples[(first + place) % len(samples)] for place in range(count)]

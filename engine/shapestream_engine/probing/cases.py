"""The cases of each treatment: the requests of each call, their order, and the sizes of the call.

Cases are hostile on purpose. Neighbours have extreme values and stand first, in the middle and last. Padding ranges from
one row to many times the data. Cases of the strategy, of static shapes and of batch invariance run on the model as it is
served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, pairwise
from math import prod
from typing import get_args

import numpy as np

from shapestream_engine.calibration_shapes import MOST_NBYTES, call_nbytes, stages
from shapestream_engine.calibration_shapes import most_rows as most_rows_of_call
from shapestream_engine.probing.baseline import Baseline, is_affordable, rungs
from shapestream_engine.probing.inputs import Extreme
from shapestream_engine.probing.model_calls import ProbeRequest
from shapestream_engine.signature import ModelSignature

SMALL_BATCH = 8
"""Rows of the largest ordinary case; `crowds` makes the few larger calls."""
_DIFFERENT = 12
"""Different ordinary requests in a crowd."""
EVERY_COUNT = 32
"""Every number of rows up to this one is tried: engines choose kernels, and divide work, by the number of rows."""
_SAMPLED = 64
"""Up to this number of rows, every third is tried."""
_LIMITS = (50, 51)
"""ONNX Runtime adds the trees of a row in another order beyond 50 rows."""
_SAMPLE = 8
"""Further numbers of rows, spread evenly by their ratio."""
_FAR = 512
"""Size to which a dimension without an upper bound is padded."""
_TYPICAL = 3
"""Different ordinary requests of a static shape, and of a call with a fixed number of rows."""
_LONGER = 8
"""Ratio of the lengths of strings that share a call."""
_CONTENTS = 12
"""Contents of one size per round; each size has a first round before any size has a second."""
_FIRST_CONTENTS = 24
"""Contents of the first size before other sizes: with the `_DIFFERENT` ordinary requests, enough for a proof."""
_STEPS = 6
"""Bisections per output of whole values, for calls of each number of rows."""
_WAYS = 2
"""Bisections per round and output."""
_EXTREMES: tuple[Extreme, ...] = get_args(Extreme)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call of a treatment."""

    sizes: tuple[int, ...]
    members: tuple[ProbeRequest, ...]
    words: str
    guests: tuple[ProbeRequest, ...] = ()
    """Members whose own results are not compared: their scores have many ties, which rounding breaks."""

    @property
    def judged_rows(self) -> int:
        """The rows of its requests; 0 if they repeat so often that exchanged rows may be equal: such a call tells little
        about its number of rows."""
        count, different = len(self.members), len(set(self.members))
        is_varied = different >= min(count, 3) and 2 * different >= min(count, _DIFFERENT)
        return sum(member.shape.rows for member in self.members) if is_varied else 0


def most_rows(signature: ModelSignature, max_batch: int | None) -> int:
    """Return the largest number of rows of a call that several requests share."""
    rows = most_rows_of_call(signature, max_batch)
    if not signature.has_batch:
        return rows
    strategy, maximum = signature.strategy, signature.bounds[0].maximum
    # Calls are filled up to the strategy's sizes whatever the scheduler plans, and large requests are divided.
    if strategy.fill_rows:
        most = maximum or rows
    elif "batch" in strategy.sizes:
        most = max(rows, 2, *strategy.sizes["batch"])
    else:
        return rows
    return most if maximum is None else min(most, maximum)


def batching_cases(baseline: Baseline, rows: int) -> Iterator[Case]:
    """Yield calls of requests of one size."""
    for sizes in baseline.sizes:
        own = sizes[0]
        room = rows // own
        if room < 2:
            return
        one, two, three = (baseline.requests.typical(sizes, number) for number in range(3))
        yield from case_of(baseline, "two requests", [one, two], rows)
        yield from case_of(baseline, "the same two the other way round", [two, one], rows)
        yield from case_of(baseline, "a request twice, around another", [one, three, one], rows)
        for number, kind in enumerate(_EXTREMES):
            if (hostile := baseline.requests.extreme(sizes, kind)) is None:
                continue
            position = number % 2
            pair = [one, hostile] if position == 0 else [hostile, one]
            where = "last" if position == 0 else "first"
            yield from case_of(baseline, f"beside {kind} values, which come {where}", pair, rows)
            yield from case_of(baseline, f"between {kind} values", [hostile, two, hostile], rows)
        double = (
            baseline.requests.typical((2 * own, *sizes[1:]), 3)
            if 2 * own in baseline.signature.bounds[0]
            else None
        )
        yield from case_of(baseline, "a request of several rows between two others", [one, double, two], rows)
        yield from _of_lengths(baseline, sizes, rows)
        crowd = [baseline.requests.typical(sizes, number % 3) for number in range(min(room, SMALL_BATCH))]
        yield from case_of(baseline, f"{len(crowd)} requests", crowd, rows)
        if sizes == baseline.sizes[0]:
            # Before the other sizes: a slow model must meet many contents within the budget.
            contents = [baseline.requests.content(sizes, number) for number in range(_FIRST_CONTENTS)]
            present = [request for request in dict.fromkeys(contents) if request is not None]
            for group in _descending(present, min(room, SMALL_BATCH)):
                yield from case_of(baseline, "requests of different contents", group, rows)
    for turn in range(_rounds(baseline)):
        for sizes in baseline.sizes:
            for group in _grouped(_varied(baseline, sizes, turn), min(rows // sizes[0], SMALL_BATCH)):
                yield from case_of(baseline, "requests of many contents", group, rows)


def _of_lengths(baseline: Baseline, sizes: tuple[int, ...], rows: int) -> Iterator[Case]:
    """Yield calls of requests whose strings are shorter and longer than each other's."""
    table = baseline.signature.table
    for factor in (1 / _LONGER, _LONGER):
        other = list(sizes)
        for port, number in zip(baseline.signature.inputs, table.strings, strict=True):
            if number is not None:
                assert port.at_most_bytes is not None  # of strings
                other[number] = min(port.at_most_bytes, max(1, int(sizes[number] * factor)))
        if tuple(other) != sizes:
            one, two, three = (
                baseline.requests.typical(own, number)
                for number, own in enumerate((sizes, tuple(other), sizes))
            )
            words = "strings of other lengths"
            yield from case_of(baseline, f"{words} between", [one, two, three], rows)
            yield from case_of(baseline, f"{words} first", [two, one], rows)


def row_counts(signature: ModelSignature, max_batch: int | None, rows: int, threads: int) -> list[int]:
    """Return the numbers of rows of calls that batching is tried at, ascending, from two requests to `rows`.

    The scheduler may choose any number. So every number is tried up to `EVERY_COUNT`; beyond, powers of two and the number
    of threads with their neighbours, because engines divide rows among threads; the limits of known kernels, the
    calibration's sizes, and a sample.
    """
    own = max(1, signature.bounds[0].minimum)
    counts = {*range(2, EVERY_COUNT + 1), *range(EVERY_COUNT, min(rows, _SAMPLED) + 1, 3), rows // own}
    counts |= {threads - 1, threads, threads + 1, *_LIMITS}
    counts |= {2**power + beside for power in range(5, rows.bit_length() + 1) for beside in (-1, 0, 1)}
    counts |= {sizes[0] // own for sizes in chain.from_iterable(stages(signature, max_batch))}
    ratio = rows / _SAMPLED
    counts |= {int(_SAMPLED * ratio ** ((step + 0.5) / _SAMPLE)) for step in range(_SAMPLE) if ratio > 1}
    return [count * own for count in sorted(counts) if 2 <= count <= rows // own]


def doublings(signature: ModelSignature, rows: int) -> list[int]:
    """Return the numbers of rows of 2, 4, 8, … requests, and the largest up to `rows`."""
    own = max(1, signature.bounds[0].minimum)
    room = rows // own
    counts = [2**power for power in range(1, room.bit_length()) if 2**power < room]
    return [count * own for count in (*counts, room) if count > 1]


def crowds(
    baseline: Baseline, padded: Sequence[int], counts: Sequence[int], is_judged: Callable[[int], bool]
) -> Iterator[Case]:
    """Yield a call of each of these numbers of rows, then one around hostile requests.

    Requests have the smallest size that the model takes; where dimensions are padded, they have two sizes. `is_judged` tells
    whether a call of a number of rows was judged; if it was not, others follow, up to `_TYPICAL`. Each number of rows is
    also tried with requests near the steps of outputs of whole values: others rarely show a small mixture.
    """
    small = min(baseline.sizes, key=prod)
    kinds = _taken(baseline, padded, small)[:2] if padded else [small]
    if len(kinds) < (2 if padded else 1) or not counts:
        return
    rows = counts[-1]
    for count in (count // small[0] for count in counts):
        for turn in range(_TYPICAL):
            yield from case_of(baseline, f"{count} requests", _mixed(baseline, kinds, count, turn), rows)
            if is_judged(count * small[0]):
                break
        near = [] if padded else _near_steps(baseline, small)
        for turn in range(-(-len(near) // max(1, count // 2))):
            around = _mixed(baseline, kinds, count, turn)
            own = [near[(turn * (count // 2) + place) % len(near)] for place in range(count // 2)]
            around[turn % 2 : 2 * len(own) : 2] = own
            yield from case_of(baseline, f"{count} requests, some near a change", around, rows)
    room = rows // small[0]
    found = {kind: baseline.requests.extreme(small, kind) for kind in _EXTREMES}
    guests = [request for request in found.values() if request is not None][: room - 1]
    around = _mixed(baseline, kinds, room - len(guests), turn=1)
    for place, guest in enumerate(guests):
        around.insert((2 * place + 1) * room // (2 * len(guests)), guest)
    kinds_of = " and ".join(kind for kind, request in found.items() if request in guests)
    if guests:
        yield from case_of(baseline, f"{room} requests, among them {kinds_of} values", around, rows, guests)


def _near_steps(baseline: Baseline, sizes: tuple[int, ...]) -> list[ProbeRequest]:
    """Return requests on both sides of some steps of each output of whole values."""
    found = [
        request
        for output, tolerance in enumerate(baseline.tolerances)
        if output not in baseline.blank and baseline.is_discrete(output)
        for way in range(_STEPS)
        for request in baseline.requests.near(sizes, output, tolerance, way)
        if output in request.near
    ]
    return list(dict.fromkeys(found))


def _mixed(
    baseline: Baseline, kinds: Sequence[tuple[int, ...]], count: int, turn: int = 0
) -> list[ProbeRequest]:
    """Choose `count` requests of these sizes in an irregular order, so that exchanged rows differ: all are different, up
    to `_DIFFERENT` of them."""
    random = np.random.default_rng([count, turn])
    number = -(-min(count, _DIFFERENT) // len(kinds))
    requests = [
        request
        for each in range(number)
        for sizes in kinds
        if (request := baseline.requests.typical(sizes, each)) is not None
    ]
    order = chain.from_iterable(random.permutation(len(requests)) for _ in range(-(-count // len(requests))))
    return [requests[place] for place in islice(order, count)]


def grid_cases(baseline: Baseline, max_batch: int | None) -> Iterator[Case]:
    """Yield the calibration's calls of several rows, the smallest first."""
    rows = most_rows(baseline.signature, max_batch)
    own = max(1, baseline.signature.bounds[0].minimum)
    kept: dict[tuple[int, ...], int] = {}
    for sizes in sorted(chain.from_iterable(stages(baseline.signature, max_batch)), key=prod):
        if not own < sizes[0] <= rows or sizes[0] % own:
            continue
        kept[sizes[1:]] = call_nbytes(baseline.signature, (own, *sizes[1:]))
        if sum(kept.values()) > MOST_NBYTES:
            return
        # Only even numbers: odd pictures are blocky, and their many ties depend on the order of sums.
        requests = [baseline.requests.typical((own, *sizes[1:]), number) for number in (0, 2)]
        members = [requests[number % 2] for number in range(sizes[0] // own)]
        yield from case_of(baseline, f"{len(members)} requests", members, rows)


def padding_cases(baseline: Baseline, padded: Sequence[int], rows: int) -> Iterator[Case]:
    """Yield small requests that are padded along `padded`, to the size of others and to the strategy's sizes."""
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    long: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for base in baseline.sizes:
        small = _taken(baseline, padded, base)
        if len(small) >= 2:
            least, middle, largest = small[0], small[len(small) // 2], small[-1]
            yield from _beside_longer(baseline, (least, middle, largest), rows)
        if small:
            targets = list(_set_sizes(baseline, padded, small[0]))
            steps += _steps(small, targets)
            long += [
                (own, target)
                for target in targets[-1:]
                if baseline.requests.typical(own := _less_one(baseline.signature, padded, target), 0)
                is not None
            ]
    for own, target in dict.fromkeys(long):
        yield from _alone(baseline, own, target)
    for turn in range(_rounds(baseline)):
        for own, target in dict.fromkeys(steps):
            yield from _padded(baseline, own, target, turn, rows)
        if turn == 0:
            for base in baseline.sizes:
                yield from _at_ratios(baseline, padded, base)
    # Last, because their contents take most time and memory.
    for turn in range(_rounds(baseline)):
        for own, target in dict.fromkeys(long):
            yield from _padded(baseline, own, target, turn, rows)


def _taken(baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the sizes of the ladder that the model takes, the smallest first."""
    ladder = sorted(set(_ladder(baseline, padded, base)), key=sum)
    return [sizes for sizes in ladder if baseline.requests.typical(sizes, 0) is not None]


def _steps(
    small: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the sizes of a request and of its call: the smallest to each larger, each to the next and to the
    largest."""
    further = [*small[1:], *targets]
    yield from ((small[0], target) for target in further)
    yield from pairwise(small)
    yield from ((own, further[-1]) for own in small[1:] if further)


def _less_one(signature: ModelSignature, padded: Sequence[int], target: tuple[int, ...]) -> tuple[int, ...]:
    """Return the target less one along each padded dimension: a model that looks far ahead meets the padding only in long
    requests."""
    return tuple(
        size - 1 if number in padded and size - 1 in signature.bounds[number] else size
        for number, size in enumerate(target)
    )


def _rounds(baseline: Baseline) -> int:
    """Return rounds in which `_varied` has requests of one size."""
    return -(-baseline.requests.contents // _CONTENTS)


def _varied(baseline: Baseline, sizes: tuple[int, ...], turn: int) -> list[ProbeRequest]:
    """Return the contents of one round, and requests near thresholds between the requests so far."""
    pool = baseline.requests
    found = [pool.content(sizes, number) for number in range(turn * _CONTENTS, (turn + 1) * _CONTENTS)]
    ways = range(turn * _WAYS, (turn + 1) * _WAYS)
    near = [
        request
        for number in ways
        for output, tolerance in enumerate(baseline.tolerances)
        for request in pool.near(sizes, output, tolerance, number)
    ]
    return list(dict.fromkeys(request for request in (*found, *near) if request is not None))


def _grouped(requests: Sequence[ProbeRequest], count: int) -> Iterator[list[ProbeRequest]]:
    """Yield groups of `count` requests, shuffled so that neighbours differ."""
    order = np.random.default_rng(len(requests)).permutation(len(requests))
    for first in range(0, len(requests), max(1, count)):
        yield [requests[place] for place in order[first : first + max(1, count)]]


def _descending(requests: Sequence[ProbeRequest], most: int) -> Iterator[list[ProbeRequest]]:
    """Yield groups of `most` requests, one less, and so on to 2, and again: of a slow model few calls of each number of
    rows are tried."""
    sizes = cycle(range(most, 1, -1))
    first = 0
    while first < len(requests):
        size = next(sizes)
        yield list(requests[first : first + size])
        first += size


def _padded(
    baseline: Baseline, own: tuple[int, ...], target: tuple[int, ...], turn: int, rows: int
) -> Iterator[Case]:
    """Yield requests of size `own` in calls of size `target`; every second call has a request of that size."""
    if own == target:
        return
    room = min(rows // own[0], SMALL_BATCH) if baseline.signature.has_batch else 1
    long = baseline.requests.typical(target, turn % _TYPICAL) if room > 1 else None
    words = f"{baseline.signature.spell(own)}, padded to {baseline.signature.spell(target)}"
    for number, group in enumerate(_grouped(_varied(baseline, own, turn), max(1, room - 1))):
        members = [*group, long] if long is not None and number % 2 else group
        sizes = (len(members) * own[0], *target[1:]) if baseline.signature.has_batch else target
        yield Case(sizes, tuple(members), words)


def strategy_cases(baseline: Baseline, rows: int) -> Iterator[Case]:
    """Yield calls from one row up; some of them are filled up or divided."""
    for sizes in baseline.sizes:
        if not baseline.signature.has_batch:
            for number in range(3):
                yield from _as_it_is(baseline, sizes, number)
            continue
        for count in range(1, min(rows, SMALL_BATCH) // sizes[0] + 1):
            members = [baseline.requests.typical(sizes, number % 3) for number in range(count)]
            yield from case_of(baseline, f"{count} requests", members, rows)
        for kind in _EXTREMES:
            hostile = baseline.requests.extreme(sizes, kind)
            members = [baseline.requests.typical(sizes, 0), hostile, baseline.requests.typical(sizes, 1)]
            yield from case_of(baseline, f"around {kind} values", members, rows)
        for group in _grouped(_varied(baseline, sizes, 0), min(rows // sizes[0], SMALL_BATCH)):
            yield from case_of(baseline, "requests of many contents", group, rows)


def _as_it_is(baseline: Baseline, sizes: tuple[int, ...], number: int) -> Iterator[Case]:
    request = baseline.requests.typical(sizes, number)
    if request is not None:
        yield Case(sizes, (request,), request.words)


def _beside_longer(baseline: Baseline, three: tuple[tuple[int, ...], ...], rows: int) -> Iterator[Case]:
    least, middle, largest = three
    if not baseline.signature.has_batch:
        return
    one, other = baseline.requests.typical(least, 0), baseline.requests.typical(least, 1)
    long, medium = baseline.requests.typical(largest, 0), baseline.requests.typical(middle, 1)
    yield from case_of(baseline, "a short request before a long one", [one, long], rows)
    yield from case_of(baseline, "a short request behind a long one", [long, other], rows)
    yield from case_of(baseline, "short, middling and long", [other, medium, long], rows)
    for kind in _EXTREMES:
        hostile = baseline.requests.extreme(largest, kind)
        yield from case_of(
            baseline, f"a short request beside a long one of {kind} values", [hostile, one], rows
        )
    yield from case_of(baseline, "a short request between long ones", [long, one, long], rows)


def _alone(baseline: Baseline, own: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Case]:
    request = baseline.requests.typical(own, 2)
    if request is not None and own != target:
        words = f"alone, {baseline.signature.spell(own)}, padded to {baseline.signature.spell(target)}"
        yield Case(target, (request,), words)


def _at_ratios(baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]) -> Iterator[Case]:
    """Yield requests whose last output cell is complete, and requests whose last cell holds one element. The first
    kind shows a border that reaches into a picture, the second padding inside a cell."""
    names = [baseline.signature.dimensions[number] for number in padded]
    extents = [extent for port in baseline.signature.outputs for extent in port.extents if extent is not None]
    for divisor in sorted({each.divisor for each in extents if each.dimension in names and each.divisor > 1}):
        for more in (0, 1):
            own, target = list(base), list(base)
            for number in padded:
                own[number] = -(-base[number] // divisor) * divisor + more
                target[number] = own[number] + 2 * divisor
            if all(size in bounds for size, bounds in zip(target, baseline.signature.bounds, strict=True)):
                yield from _alone(baseline, tuple(own), tuple(target))


def _ladder(baseline: Baseline, padded: Sequence[int], base: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the base with other sizes along the padded dimensions, from the lower bounds on."""
    bounds = [baseline.signature.bounds[number] for number in padded]
    per_dimension = [[max(1, each.minimum), *rungs(each, baseline.ladder)] for each in bounds]
    for turn in range(max(map(len, per_dimension))):
        sizes = list(base)
        for number, known in zip(padded, per_dimension, strict=True):
            sizes[number] = known[min(turn, len(known) - 1)]
        if is_affordable(baseline.signature, tuple(sizes)):
            yield tuple(sizes)


def _set_sizes(baseline: Baseline, padded: Sequence[int], own: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes that the strategy pads to, then the upper bounds."""
    signature = baseline.signature
    targets = [(number, known) for number in padded if (known := signature.allowed[number])]
    for place in range(max((len(known) for _, known in targets), default=0)):
        sizes = list(own)
        for number, known in targets:
            sizes[number] = max(own[number], known[min(place, len(known) - 1)])
        if is_affordable(signature, tuple(sizes)):
            yield tuple(sizes)
    most = list(own)
    for number in padded:
        maximum = signature.bounds[number].maximum
        most[number] = max(own[number], _FAR) if maximum is None else maximum
    # Only if a request of that size runs as well: a bound may exceed what the model can run.
    if is_affordable(signature, tuple(most)) and baseline.requests.typical(tuple(most), 0) is not None:
        yield tuple(most)


def case_of(
    baseline: Baseline,
    words: str,
    members: Sequence[ProbeRequest | None],
    rows: int,
    guests: Sequence[ProbeRequest] = (),
) -> Iterator[Case]:
    """Yield the call of these requests; nothing if one failed alone, or the call would be too large."""
    present = [member for member in members if member is not None]
    if len(present) < len(members):
        return
    sizes = [max(column) for column in zip(*[member.sizes for member in present], strict=True)]
    sizes[0] = sum(member.shape.rows for member in present)
    if sizes[0] > rows:
        return
    spelled = f"{words}, {baseline.signature.spell(sizes)}"
    yield Case(tuple(sizes), tuple(present), spelled, tuple(guests))


def static_cases(baseline: Baseline) -> Iterator[Case]:
    """Yield calls of each static shape, every shape once before any shape again.

    Reference results come from the dynamic model.
    """
    for turn in range(_TYPICAL):
        for sizes in baseline.signature.static_sizes:
            if not baseline.signature.has_batch:
                yield from _as_it_is(baseline, sizes, turn)
                continue
            own = max(1, baseline.signature.bounds[0].minimum)
            count, more = divmod(sizes[0], own)
            shared = more == 0 and sizes[0] <= (baseline.signature.strategy.most_rows or sizes[0])
            rows = [own] * count if shared else [sizes[0]]
            # An irregular order, so that exchanged rows differ.
            numbers = np.random.default_rng([turn, *sizes]).integers(_TYPICAL, size=len(rows))
            members = [
                baseline.requests.typical((each, *sizes[1:]), int(number))
                for each, number in zip(rows, numbers, strict=True)
            ]
            yield from case_of(baseline, "at its static shape", members, sizes[0])


def filling_pairs(plain: Baseline, served: Baseline) -> Iterator[tuple[ProbeRequest, ProbeRequest | None]]:
    """Yield ordinary requests as they ran by themselves, and as they run in service; None if that fails.

    Requests of several rows are among them: service may divide them.
    """
    for sizes in plain.sizes:
        for rows in (sizes[0], 2 * sizes[0], 3 * sizes[0]):
            if rows not in plain.signature.bounds[0]:
                continue
            for number in range(_TYPICAL):
                request = plain.requests.typical((rows, *sizes[1:]), number)
                if request is not None:
                    yield request, served.requests.typical((rows, *sizes[1:]), number)


def invariance_cases(baseline: Baseline) -> Iterator[Case]:
    """Yield each request at each position, beside ordinary and extreme neighbours, and in calls that are filled up; then
    requests of many contents, and near steps, in two orders.

    `baseline` has the results of each request alone, in a call filled up with copies of itself.
    """
    (rows,) = baseline.signature.strategy.sizes["batch"]
    for sizes in baseline.sizes:
        found = [baseline.requests.typical(sizes, number) for number in range(_TYPICAL)]
        one, two, three = found
        found += [baseline.requests.extreme(sizes, kind) for kind in _EXTREMES]
        requests = [request for request in found if request is not None]
        room = max(1, rows // sizes[0])
        for turn in range(len(requests)):
            crowd = _around(requests, turn, room)
            yield from case_of(baseline, f"turn {turn} around the call", crowd, rows)
            yield from case_of(baseline, f"turn {turn}, the other way round", crowd[::-1], rows)
        for count in range(1, room):
            yield from case_of(baseline, f"{count} requests", _around(requests, count, count), rows)
        for many in (2, 3):
            if (own := many * sizes[0]) in baseline.signature.bounds[0]:
                several = baseline.requests.typical((own, *sizes[1:]), 0)
                words = f"a request of {own} rows between others"
                # Together they may need several calls.
                yield from case_of(baseline, words, [one, several, two, three], own + 3 * sizes[0])
    for turn in range(_rounds(baseline)):
        for sizes in baseline.sizes:
            for group in _grouped(_varied(baseline, sizes, turn), max(1, rows // sizes[0])):
                words = "requests of many contents"
                yield from case_of(baseline, words, group, rows)
                yield from case_of(baseline, f"{words}, the other way round", group[::-1], rows)


def _around(requests: list[ProbeRequest], first: int, count: int) -> list[ProbeRequest]:
    return [requests[(first + place) % len(requests)] for place in range(count)]

"""The cases that run as the model is served: on static models beside the dynamic one, and in fixed numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np

from shapestream_engine.probing.baseline import Baseline
from shapestream_engine.probing.bench import Sample
from shapestream_engine.probing.cases import Case, case_of
from shapestream_engine.probing.values import Extreme
from shapestream_engine.signature import ModelSignature

__all__ = ["fixed_rows", "invariance_cases", "static_cases"]

_TYPICAL = 3
"""Ordinary requests that differ."""
_EXTREMES: tuple[Extreme, ...] = get_args(Extreme)


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

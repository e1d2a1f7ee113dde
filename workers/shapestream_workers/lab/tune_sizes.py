"""Allowed sizes learned from observed ones: pure functions, exact where that is cheap.

A request is run at the next allowed size, so each choice of boundaries costs padding; more boundaries cost more
prepared shapes. For a given number of boundaries the least padding is found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["best_boundaries", "powers_of_two"]

MAX_DISTINCT = 512
"""Distinct sizes that the dynamic programme looks at; more are first rounded up to so many quantiles.

It takes distinct x distinct x boundaries steps: at 512 and 8 about a second of plain Python.
"""


def best_boundaries(counts: Mapping[int, int], most: int, largest: int) -> tuple[int, ...]:
    """At most `most` sizes, ascending and ending with `largest`, that pad these observed sizes least.

    `counts` says how often each size was seen; padding is counted in elements along this one dimension. Boundaries are
    observed sizes, or `largest`, since any other one only pads more. Fewer are returned where fewer are as good.
    Raises `ValueError` for fewer than one boundary, and for sizes beyond `largest` or below 0.
    """
    if most < 1 or any(size > largest or size < 0 for size in counts):
        raise ValueError(f"at least one boundary, and sizes within 0..{largest}: {most}, {sorted(counts)}")
    seen = _condensed({size: count for size, count in counts.items() if count > 0 and size > 0})
    if not seen:
        return (largest,)
    sizes = sorted(seen.keys() | {largest})
    weights = [seen.get(size, 0) for size in sizes]
    # Requests, and their elements, among the first so many sizes: what a span costs is a difference of these.
    below, inside = [0], [0]
    for size, weight in zip(sizes, weights, strict=True):
        below.append(below[-1] + weight)
        inside.append(inside[-1] + weight * size)

    def padding(first: int, last: int) -> int:
        """Elements padded where the sizes `first..last` all run at the last of them."""
        return sizes[last] * (below[last + 1] - below[first]) - (inside[last + 1] - inside[first])

    n = len(sizes)
    # best[last]: the least padding of sizes 0..last with the current number of boundaries, of which one is `last`.
    best = [padding(0, last) for last in range(n)]
    choices: list[list[int]] = []
    totals = [best[-1]]
    for _ in range(min(most, n) - 1):
        chosen, row = [0] * n, list(best)
        for last in range(1, n):
            row[last], chosen[last] = min(
                (best[before] + padding(before + 1, last), before) for before in range(last)
            )
        choices.append(chosen)
        best = row
        totals.append(best[-1])
    used = totals.index(min(totals))
    last = n - 1
    boundaries = [sizes[last]]
    for chosen in reversed(choices[:used]):
        last = chosen[last]
        boundaries.append(sizes[last])
    return tuple(reversed(boundaries))


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, … up to `most`, which ends them."""
    powers = [1]
    while powers[-1] * 2 <= most:
        powers.append(powers[-1] * 2)
    return tuple(powers) if powers[-1] == most else (*powers, most)


def _condensed(counts: Mapping[int, int]) -> dict[int, int]:
    """The same with at most `MAX_DISTINCT` sizes: neighbours are counted at the largest of them."""
    if len(counts) <= MAX_DISTINCT:
        return dict(counts)
    total, passed, level = sum(counts.values()), 0, 1
    condensed: dict[int, int] = {}
    gathered = 0
    for size, count in sorted(counts.items()):
        passed += count
        gathered += count
        if passed * MAX_DISTINCT >= level * total:
            condensed[size] = gathered
            gathered = 0
            level = passed * MAX_DISTINCT // total + 1
    return condensed

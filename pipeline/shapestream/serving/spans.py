"""A set of numbers that come nearly in order, as the spans that they fill: a few integers for millions of numbers. Pure."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["MAX_SPANS", "Spans"]

MAX_SPANS = 256
"""Beyond it the gap between the two lowest spans counts as filled. Numbers that come in order leave one or two."""


class Spans:
    """Disjoint spans, each end included; never more than `MAX_SPANS`."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """The number of spans."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number <= self._ends[place]

    def __repr__(self) -> str:
        return " ".join(
            [f"{start}..{end}" for start, end in zip(self._starts, self._ends, strict=True)] or ["none"]
        )

    def add(self, number: int) -> None:
        """Adds a number; adding it again changes nothing."""
        starts, ends = self._starts, self._ends
        place = bisect_right(starts, number)
        if place and number <= ends[place - 1]:
            return
        follows = place > 0 and ends[place - 1] == number - 1
        precedes = place < len(starts) and starts[place] == number + 1
        if follows and precedes:
            ends[place - 1] = ends[place]
            del starts[place], ends[place]
        elif follows:
            ends[place - 1] = number
        elif precedes:
            starts[place] = number
        else:
            starts.insert(place, number)
            ends.insert(place, number)
            if len(starts) > MAX_SPANS:
                del starts[1], ends[0]

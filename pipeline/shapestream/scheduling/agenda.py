"""Slots in the order of some time: when they are predicted to become free, or to want their next batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapestream.scheduling.slot import Slot

__all__ = ["Agenda"]


class Agenda:
    """(time, slot) pairs, sorted. A slot stands in it once, with a time that the caller remembers.

    A sorted list: finding a place takes logarithmic time; making room moves 8 bytes per slot, which for thousands of
    slots is less than what one step of a heap costs in Python. Nothing dead is ever kept.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Slot]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<agenda of {len(self._entries)} slots>"

    def __iter__(self) -> Iterator[tuple[float, int, Slot]]:
        return iter(self._entries)

    def add(self, time: float, slot: Slot) -> None:
        """Puts a slot into its place."""
        insort(self._entries, (time, slot.id, slot))

    def remove(self, time: float, slot: Slot) -> None:
        """Takes a slot out; `time` is what it was added with. Nothing happens if it is not here."""
        entries = self._entries
        # A pair sorts before the triple that begins with it.
        at = bisect_left(entries, (time, slot.id))
        if at < len(entries) and entries[at][2] is slot:
            del entries[at]

    def first(self) -> tuple[float, Slot] | None:
        """The earliest."""
        return (self._entries[0][0], self._entries[0][2]) if self._entries else None

    def last(self) -> tuple[float, Slot] | None:
        """The latest."""
        return (self._entries[-1][0], self._entries[-1][2]) if self._entries else None

    def sampled(self, count: int) -> Iterator[tuple[float, Slot, int]]:
        """About `count` of the pairs, evenly spaced over the slots, each with the number of slots that it stands for."""
        entries = self._entries
        size = len(entries)
        step = -(-size // count)
        for at in range(0, size, step or 1):
            time, _, slot = entries[at]
            yield time, slot, min(step, size - at)

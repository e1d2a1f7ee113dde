"""A bounded memo of a pure function."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Values of `make` by argument; thread-safe. When the memo is full, all values are forgotten.

    That is rare, and needs no bookkeeping for each request.
    """

    __slots__ = ("_known", "_limit", "_make")

    def __init__(self, make: Callable[[K], V], limit: int = 4096) -> None:
        self._make = make
        self._limit = limit
        self._known: dict[K, V] = {}

    def __call__(self, key: K) -> V:
        """Return the value for `key`; errors of `make` are raised and not kept."""
        value = self._known.get(key)
        if value is None:
            value = self._make(key)
            if len(self._known) >= self._limit:
                self._known.clear()
            self._known[key] = value
        return value

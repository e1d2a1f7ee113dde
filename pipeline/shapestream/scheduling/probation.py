"""Probation: which clients and shapes of a model share calls only with their like, because requests of theirs failed.

A batch that fails costs up to two calls per member before any other turn. On probation, the next failure costs no other
client a call. Each request of a client whose request failed runs in a call of its own. A client whose request killed a
process shares calls only with itself: one death accuses all members at once. A shape that failed in company shares calls
only with itself.
"""

from __future__ import annotations

from typing import TypeAlias

Mark: TypeAlias = tuple[int | None, tuple[int, ...] | None]

MAX_REMEMBERED = 1024
"""Clients and shapes on probation; when another comes, the first one is forgotten. It bounds memory."""


class Probation:
    """The clients and shapes of one model that are on probation; false where there are none."""

    __slots__ = ("_left", "_needed", "_singly")

    def __init__(self, needed: int) -> None:
        """`needed`: requests in a row that have to run well before a probation ends."""
        self._needed = needed
        self._left: dict[int | tuple[int, ...], int] = {}
        """By client, or by shape: requests that are still to run well."""
        self._singly: set[int] = set()
        """Clients, of those, of whom each request runs in a call of its own."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def __repr__(self) -> str:
        return f"<probation: {list(self._left)}>"

    def blame(self, client: int, shape: tuple[int, ...], *, singly: bool) -> None:
        """Put the client of a request that was to blame on probation; `singly`: its requests share no calls.

        Its shape too, unless the client was on probation already: it could mark all shapes.
        """
        known = client in self._left
        self._put(client)
        if singly:
            self._singly.add(client)
        if not known:
            self._put(shape)

    def _put(self, key: int | tuple[int, ...]) -> None:
        self._left.pop(key, None)
        if len(self._left) >= MAX_REMEMBERED:
            self._end(next(iter(self._left)))
        self._left[key] = self._needed

    def ran_well(self, client: int, shape: tuple[int, ...]) -> None:
        """Count a request that had its result."""
        left = self._left
        for key in (client, shape):
            if key in left:
                left[key] -= 1
                if not left[key]:
                    self._end(key)

    def _end(self, key: int | tuple[int, ...]) -> None:
        del self._left[key]
        if isinstance(key, int):
            self._singly.discard(key)

    def runs_alone(self, client: int) -> bool:
        """Whether a request of this client failed lately, and killed nothing."""
        return client in self._singly

    def mark(self, client: int, shape: tuple[int, ...]) -> Mark:
        """What requests must have in common to share a call."""
        return (client if client in self._left else None, shape if shape in self._left else None)

"""The last batches and errors, which the page on the admin port shows. Pure.

The journal and egress append; `Server.live` reads. Batches and errors hold plain values only, so that no tensor and no
session outlives its end here.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, NamedTuple

MOST_BATCHES = 512
"""Batches that are kept: with 50 batches per second, those of ten seconds."""
ERRORS_PER_CODE = 10
"""Errors that are kept of each code, so that a flood of one code leaves the others in sight."""
MOST_MESSAGE = 200
"""Characters of an error's message that are kept."""


class RecentBatch(NamedTuple):
    """One batch that ran. Times are the server's own clock, in seconds."""

    started: float
    ended: float
    slot: str
    model: str
    requests: int
    rows: int
    useful: int
    """Elements of its requests."""
    computed: int
    """The same with padding."""
    new_shapes: int
    """Calls at shapes that were new and had to be prepared."""
    sizes: tuple[int, ...]


class RecentError(NamedTuple):
    """One request that ended without a result."""

    time: float
    model: str | None
    """None for a request that was refused before its model was looked up."""
    code: str
    message: str
    client: bytes
    sequence: int
    own_id: str | None
    """The id that the request's user gave it."""

    @property
    def request_id(self) -> str:
        """The id that its user knows the request by."""
        return self.own_id or f"{self.client.hex()}-{self.sequence}"


class Recent:
    """Rings of the last batches and errors."""

    __slots__ = ("_batches", "_errors", "batches")

    def __init__(self) -> None:
        self.batches = 0
        """Number of batches that were ever added."""
        self._batches: deque[tuple[Any, ...]] = deque(maxlen=MOST_BATCHES)
        """Rows of `RecentBatch`, plain since one is made for each batch."""
        self._errors: dict[str, deque[RecentError]] = {}

    def add_batch(self, row: tuple[Any, ...]) -> None:
        """Keep a row of `RecentBatch`; the oldest one goes."""
        self.batches += 1
        self._batches.append(row)

    def add_error(self, error: RecentError) -> None:
        """Keep an error; the oldest one of its code goes."""
        errors = self._errors.get(error.code)
        if errors is None:
            errors = self._errors[error.code] = deque(maxlen=ERRORS_PER_CODE)
        errors.append(error)

    def since(self, number: int) -> list[tuple[Any, ...]]:
        """The batches after the first `number` ones, oldest first, as far as they are kept."""
        return last(self._batches, self.batches - number)

    @property
    def errors(self) -> list[RecentError]:
        """All errors that are kept, newest first."""
        errors = [error for of_code in self._errors.values() for error in of_code]
        return sorted(errors, key=lambda error: error.time, reverse=True)


def last(ring: deque[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """The last `count` entries, or all there are."""
    return list(islice(ring, max(0, len(ring) - count), None))

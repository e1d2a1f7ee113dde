"""The choice among several servers for the next request: the one with the least own outstanding seconds per slot. Pure.

A client knows what it has sent and was not answered yet, but not what others have. A rule by own requests needs no word
from the servers. Loads that servers tell are old when they arrive, and clients that follow them go to one server together.

The seconds of a request are estimated from answers: the time of its call, divided by the requests that shared it. The
estimate is a mean by model and size, of the last requests for the most part. While nothing of a model is known, its
requests count like a mean request of all, and one second while nothing is known at all. A request keeps the charge that it
was sent with, so that its end takes away what its sending added.

A server with more slots takes more: its seconds, with those of the request itself, are divided by its slots, which its
counters tell. tests/pipeline/client/test_spread.py compares the rule with one queue for all, in virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

Place = TypeVar("Place")

WEIGHT = 1 / 16
"""Weight of the newest answer in a mean, once there are so many: prices drift with the load, by minutes."""
MOST_MEANS = 4096
"""Means that are kept. A client that uses more models and sizes forgets all, and learns them again."""
UNKNOWN_S = 1.0
"""Charge while nothing is known: equal for all requests, so that these are counted."""
EQUAL_S = 1e-6
"""Loads that differ by less are equal: sums of fractions that were added and taken away leave a rest."""


class Prices:
    """The estimated seconds of a request, by model and size."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], tuple[int, float]] = {}
        """By model and power of two of the bytes: the number of answers, and their mean in seconds."""
        self._all = (0, 0.0)

    def learn(self, model: str, nbytes: int, seconds: float) -> None:
        """Take an answer to a request of so many bytes: `seconds` of its call are its part."""
        if len(self._means) >= MOST_MEANS:
            self._means.clear()
        key = (model, nbytes.bit_length())
        self._means[key] = _with(self._means.get(key, (0, 0.0)), seconds)
        self._all = _with(self._all, seconds)

    def of(self, model: str, nbytes: int) -> float:
        """Return the estimated seconds of a request: those of the nearest size that is known."""
        size = nbytes.bit_length()
        if (mean := self._means.get((model, size))) is not None:
            return mean[1]
        known = [
            (abs(other - size), seconds)
            for (name, other), (_, seconds) in self._means.items()
            if name == model
        ]
        if known:
            return min(known)[1]
        return self._all[1] if self._all[0] else UNKNOWN_S


def _with(mean: tuple[int, float], seconds: float) -> tuple[int, float]:
    count, before = mean
    return count + 1, before + max(WEIGHT, 1 / (count + 1)) * (seconds - before)


def least_loaded(places: Mapping[Place, tuple[float, int]], charge: float, chance: random.Random) -> Place:
    """Return the place at which a request of `charge` seconds has the least before it, per slot.

    `places`: the outstanding seconds and the slots of each. Of equal ones chance takes one: clients begin with different
    servers.
    """
    loads = {place: (seconds + charge) / slots for place, (seconds, slots) in places.items()}
    least = min(loads.values()) + EQUAL_S
    return chance.choice([place for place, load in loads.items() if load <= least])

"""What became of the requests of a simulation, in columns: a million of them take some 40 MB."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["DONE", "EXPIRED", "FAILED", "LATE", "LEFT", "REFUSED", "Requests", "SlotTime"]

LEFT, DONE, LATE, EXPIRED, REFUSED, FAILED = range(6)
"""Unfinished; answered in time; answered after its deadline; ended by its deadline; not admitted; anything else."""


class Requests:
    """By the request's id, which counts from 1; row 0 is nobody's."""

    def __init__(self) -> None:
        self.arrived = array("d", [0.0])
        """Seconds: when it was meant to be sent."""
        self.ended = array("d", [0.0])
        self.deadline = array("d", [float("inf")])
        self.elements = array("q", [0])
        """The product of its own sizes: what it computes without padding."""
        self.outcome = bytearray([FAILED])

    def add(self, arrived: float, deadline: float, elements: int) -> int:
        """A new request; returns its id."""
        self.arrived.append(arrived)
        self.ended.append(0.0)
        self.deadline.append(deadline)
        self.elements.append(elements)
        self.outcome.append(LEFT)
        return len(self.outcome) - 1

    def __len__(self) -> int:
        return len(self.outcome) - 1

    def outcomes(self) -> NDArray[np.uint8]:
        """The outcome of each request, in the order of arrival."""
        return np.frombuffer(bytes(self.outcome), np.uint8)[1:]

    def column(self, values: array[float]) -> NDArray[np.float64]:
        """One of the columns, in the order of arrival."""
        return np.array(values, np.float64)[1:]


@dataclass(slots=True)
class SlotTime:
    """What the slots did, all together."""

    busy_s: float = 0.0
    calls: int = 0
    batches: int = 0
    members: int = 0
    computed: int = 0
    """Elements of all calls, padding included."""
    useful: int = 0
    """Elements of the requests that ran in them."""
    preparations: int = 0
    prefetched: int = 0
    """Batches that were sent while their slot was busy."""
    recalled: int = 0

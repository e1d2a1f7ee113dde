"""The words of a simulation: who decides, what comes, and what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shapestream.scheduling.events import Action, Event
from shapestream.simulation.records import Requests, SlotTime
from shapestream.simulation.trace import TraceRequest

__all__ = ["Policy", "Simulated", "Workload"]


class Policy(Protocol):
    """What decides: `Scheduler`, or a plain server."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event."""
        ...

    def next_wakeup(self) -> float | None:
        """When `TimePassed` is wanted."""
        ...

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of time."""

    requests: Iterable[TraceRequest]
    in_flight: int | None = None
    """A closed loop: so many at any time, whatever their times; None: they come when their times say."""
    round_trip_s: float = 0.0
    """In a closed loop: from an answer to the request that follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What happened."""

    requests: Requests
    slots: SlotTime
    slot_count: int
    began_s: float
    ended_s: float
    decide_s: float
    """Seconds of this machine's processor that the decisions took, all together."""
    longest_decision_s: float
    events: int
    codes: Mapping[str, int]
    """Failed requests by code."""

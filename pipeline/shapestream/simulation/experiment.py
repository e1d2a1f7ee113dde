"""One question to the simulator: this traffic, these models and slots, decided by this or that policy.

A scenario is plain values, so that a sweep is the same scenario with one value changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, nan
from pathlib import Path
from typing import Literal, TypeAlias, assert_never

from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.scheduler import Scheduler
from shapestream.simulation.distributions import BadText
from shapestream.simulation.generator import Traffic, generate, replay
from shapestream.simulation.oracle import oracle_rate
from shapestream.simulation.plain_server import PlainServer
from shapestream.simulation.simulated_slots import SlotPlan, Truth
from shapestream.simulation.simulator import Policy, Simulated, Workload, simulate
from shapestream.simulation.trace import TraceReader, TraceRequest
from shapestream.simulation.true_cost import TrueCost
from shapestream_engine.cost_table import CostTable

__all__ = [
    "ARRIVAL_ORDER",
    "ONE_AT_A_TIME",
    "PLANNED",
    "POLICIES",
    "Recorded",
    "Scenario",
    "Swept",
    "oracle_goodput",
    "play",
    "varied",
]

PLANNED, ONE_AT_A_TIME, ARRIVAL_ORDER = "shapestream", "one at a time", "arrival order, 16"
POLICIES = (PLANNED, ONE_AT_A_TIME, ARRIVAL_ORDER)
Swept: TypeAlias = Literal["slots", "rate", "in_flight", "max_batch", "deadline_ms"]

_UNBOUNDED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Traffic of a trace file, at its own rate or at another."""

    path: Path
    rate: float | None = None
    requests: int | None = None
    deadline_s: float | None = None
    """Instead of the trace's own deadlines; None: these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that a simulation depends on."""

    profiles: tuple[ModelProfile, ...]
    costs: Mapping[str, TrueCost]
    traffic: Traffic | Recorded
    slots: int = 1
    slots_per_worker: int = 1
    speeds: tuple[float, ...] = (1.0,)
    """Repeated over the slots; 2.0 takes twice the seconds."""
    in_flight: int | None = None
    """A closed loop; None: requests come when they come."""
    round_trip_s: float = 0.001
    noise: float = 0.0
    way_s: float = 0.0
    calibrated: bool = True
    """Whether the scheduler starts with the costs, as after a calibration, or learns them from traffic."""
    max_queued_requests: int = 8192
    round_up: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = field(default_factory=dict)
    """What the models' strategies round a request's sizes up to, by model; plain servers get it, too."""
    seed: int = 0

    def plans(self) -> list[SlotPlan]:
        """The slots."""
        return [
            SlotPlan(
                worker=f"w{number // self.slots_per_worker}", speed=self.speeds[number % len(self.speeds)]
            )
            for number in range(self.slots)
        ]

    def requests(self) -> Iterable[TraceRequest]:
        """The requests, from the beginning."""
        if isinstance(self.traffic, Traffic):
            return generate(self.traffic)
        recorded = self.traffic
        requests = replay(TraceReader(recorded.path), rate=recorded.rate, requests=recorded.requests)
        if recorded.deadline_s is None:
            return requests
        return (request._replace(deadline_s=recorded.deadline_s) for request in requests)


def play(scenario: Scenario, policy: str = PLANNED, *, check_every: int | None = None) -> Simulated:
    """Plays a scenario under one of `POLICIES`. Raises `ConfigurationError` for a trace that cannot be read."""
    return simulate(
        _policy(policy, scenario.max_queued_requests),
        scenario.profiles,
        scenario.plans(),
        Truth(costs=scenario.costs, noise=scenario.noise, way_s=scenario.way_s, seed=scenario.seed),
        Workload(
            requests=scenario.requests(),
            in_flight=scenario.in_flight,
            round_trip_s=scenario.round_trip_s,
        ),
        calibration=_calibration(scenario) if scenario.calibrated else None,
        round_up=scenario.round_up,
        check_every=check_every,
    )


def oracle_goodput(scenario: Scenario) -> float:
    """Requests per second if all were known beforehand; nan where nothing is known of it."""
    rate = oracle_rate(scenario.requests(), scenario.profiles, scenario.costs, scenario.plans())
    return rate or nan


def varied(scenario: Scenario, what: Swept, value: float) -> Scenario:
    """The scenario with one thing changed."""
    match what:
        case "slots":
            return replace(scenario, slots=int(value))
        case "rate":
            return replace(scenario, in_flight=None, traffic=_at_rate(scenario.traffic, value))
        case "in_flight":
            return replace(scenario, in_flight=int(value))
        case "max_batch":
            profiles = tuple(replace(profile, max_batch=int(value)) for profile in scenario.profiles)
            return replace(scenario, profiles=profiles)
        case "deadline_ms":
            return replace(scenario, traffic=replace(scenario.traffic, deadline_s=value / 1000))
        case _:
            assert_never(what)


def _at_rate(traffic: Traffic | Recorded, rate: float) -> Traffic | Recorded:
    if isinstance(traffic, Recorded):
        return replace(traffic, rate=rate)
    if traffic.arrivals.rate == inf:
        raise BadText(["a closed loop has no rate of its own (leave out --in-flight)"])
    return replace(traffic, arrivals=replace(traffic.arrivals, rate=rate))


def _policy(name: str, max_queued_requests: int) -> Policy:
    if name == PLANNED:
        return Scheduler(max_queued_requests=max_queued_requests, max_queued_bytes=_UNBOUNDED_BYTES)
    batch = 1 if name == ONE_AT_A_TIME else 16
    return PlainServer(batch, max_queued_requests=max_queued_requests)


def _calibration(scenario: Scenario) -> dict[str, CostTable]:
    return {
        profile.name: scenario.costs[profile.name].calibration(
            f"simulated {profile.name}", profile.dimensions, profile.max_batch
        )
        for profile in scenario.profiles
    }

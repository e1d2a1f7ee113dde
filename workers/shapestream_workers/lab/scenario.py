"""One simulation's question: traffic, models, slots and policy, read from the options of `shapestream simulate`.

A scenario is plain values, so that a sweep is the same scenario with one value changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan, prod
from pathlib import Path
from typing import Literal, TypeAlias, assert_never

from shapestream.errors import ConfigurationError
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.scheduler import Scheduler
from shapestream.settings import LoadedSettings
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.cost_table import MAX_ELEMENTS, CostTable
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.simulator import Policy, Simulated, SlotPlan, Truth, Workload, simulate
from shapestream_workers.lab.summary import oracle_rate
from shapestream_workers.lab.traffic import (
    Arrivals,
    BadText,
    SizedModel,
    Traffic,
    generate,
    parse_arrivals,
    parse_sizes,
    replay,
)
from shapestream_workers.lab.true_cost import TrueCost, true_costs

__all__ = [
    "ARRIVAL_ORDER",
    "ONE_AT_A_TIME",
    "PLANNED",
    "POLICIES",
    "Recorded",
    "Scenario",
    "ScenarioOptions",
    "Swept",
    "make_scenario",
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
    """Deadline that replaces the trace's own; None keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation depends on."""

    profiles: tuple[ModelProfile, ...]
    costs: Mapping[str, TrueCost]
    traffic: Traffic | Recorded
    slots: int = 1
    slots_per_worker: int = 1
    speeds: tuple[float, ...] = (1.0,)
    """Factors on the true seconds, repeated over the slots."""
    in_flight: int | None = None
    """Requests in flight in a closed loop; None: requests arrive at their times."""
    round_trip_s: float = 0.001
    noise: float = 0.0
    way_s: float = 0.0
    calibrated: bool = True
    """Whether the scheduler starts with a calibration, or learns costs from traffic."""
    max_queued_requests: int = 8192
    round_up: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = field(default_factory=dict)
    """Rounding of a request's sizes by the model's strategy, by model; plain servers use it too."""
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
    """Play a scenario under one of `POLICIES`. Raises `ConfigurationError` for a trace that cannot be read."""
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
    """Requests per second if all were known beforehand; nan without requests."""
    rate = oracle_rate(scenario.requests(), scenario.profiles, scenario.costs, scenario.plans())
    return rate or nan


def varied(scenario: Scenario, what: Swept, value: float) -> Scenario:
    """The scenario with one value changed."""
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


DEFAULT_REQUESTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """Options of the command line, unread."""

    loaded: LoadedSettings | None = None
    cost: Sequence[str] = ()
    costs: Path | None = None
    trace: Path | None = None
    sizes: Sequence[str] = ()
    rate: float | None = None
    arrivals: str = "poisson"
    in_flight: int | None = None
    requests: int | None = None
    clients: int = 1
    deadline_ms: float | None = None
    exact: Sequence[str] = ()
    max_batch: int = 64
    max_delay_ms: float = 0.0
    max_padding_ratio: float | None = None
    slots: int | None = None
    """Number of slots; None: those of the configuration's workers on this machine, or 1."""
    slots_per_worker: int | None = None
    speeds: str = "1"
    noise: float = 0.0
    way_ms: float = 0.0
    round_trip_ms: float = 1.0
    uncalibrated: bool = False
    max_queued_requests: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Models:
    profiles: tuple[ModelProfile, ...]
    round_up: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]]


def make_scenario(options: ScenarioOptions) -> Scenario:
    """Read a scenario from options; raises `ConfigurationError`."""
    traffic, dimensions, largest = _traffic(options)
    for name, sizes in largest.items():
        if prod([size or 1 for size in sizes]) > MAX_ELEMENTS:
            raise ConfigurationError(
                [f"model {name!r}: requests of {list(sizes)} are more than anything computes"]
            )
    models = _models_of_file(options, dimensions) if options.loaded else _models(options, dimensions)
    costs = true_costs(options.cost, options.costs, options.loaded, models.profiles, largest)
    slots, slots_per_worker = _slots(options)
    return Scenario(
        profiles=models.profiles,
        costs=costs,
        traffic=traffic,
        slots=slots,
        slots_per_worker=slots_per_worker,
        speeds=_speeds(options.speeds),
        in_flight=options.in_flight,
        round_trip_s=options.round_trip_ms / 1000,
        noise=options.noise,
        way_s=options.way_ms / 1000,
        calibrated=not options.uncalibrated,
        max_queued_requests=options.max_queued_requests,
        round_up=models.round_up,
        seed=options.seed,
    )


# ------------------------------------------------------------ traffic

Dimensions = Mapping[str, tuple[str, ...]]


def _traffic(options: ScenarioOptions) -> tuple[Traffic | Recorded, Dimensions, dict[str, tuple[int, ...]]]:
    """The traffic, its models with their dimensions, and the largest sizes of each."""
    deadline_s = None if options.deadline_ms is None else options.deadline_ms / 1000
    if options.rate is not None and options.in_flight is not None:
        raise BadText(["--rate and --in-flight exclude each other: a closed loop finds its own rate"])
    if options.trace is not None:
        if options.sizes:
            raise BadText(["--trace has sizes of its own (leave out --sizes, or write --sizes trace:FILE)"])
        recorded = Recorded(
            path=options.trace, rate=options.rate, requests=options.requests, deadline_s=deadline_s
        )
        reader = TraceReader(options.trace)
        largest: dict[str, tuple[int, ...]] = {}
        for request in reader:
            name = list(reader.models)[request.model]
            largest[name] = tuple(map(max, largest.get(name, request.sizes), request.sizes))
        if not largest:
            raise ConfigurationError([f"{options.trace}: no requests in it"])
        return recorded, reader.models, largest
    if not options.sizes:
        raise BadText(
            ["no traffic: --trace FILE, or sizes such as --sizes seq=lognormal:24,0.9,4..256 with --rate 100"]
        )
    models = [parse_sizes(text) for text in options.sizes]
    if len({model.name for model in models}) != len(models):
        raise BadText(["--sizes: two models of one name (write NAME/DIMENSION=..., NAME2/...)"])
    traffic = Traffic(
        models=models,
        arrivals=_arrivals(options),
        requests=options.requests or DEFAULT_REQUESTS,
        clients=options.clients,
        deadline_s=deadline_s,
        seed=options.seed,
    )
    return traffic, {model.name: model.dimensions for model in models}, _largest(models)


def _arrivals(options: ScenarioOptions) -> Arrivals:
    if options.in_flight is not None:
        return Arrivals(rate=inf)
    if options.rate is None:
        raise BadText(["no rate: --rate REQUESTS_PER_SECOND, or --in-flight N for a closed loop"])
    return parse_arrivals(options.arrivals, options.rate)


def _largest(models: Sequence[SizedModel]) -> dict[str, tuple[int, ...]]:
    """Largest sizes in a sample, by model: a calibration's range."""
    import numpy as np

    rng = np.random.default_rng(0)
    return {model.name: tuple(map(max, zip(*model.draw(rng, 4096), strict=True))) for model in models}


# ------------------------------------------------------------ models


def _models(options: ScenarioOptions, dimensions: Dimensions) -> _Models:
    """Models without a file: every dimension but those named by --exact may be padded."""
    known = {name for names in dimensions.values() for name in names}
    for name in options.exact:
        if name not in known:
            raise ConfigurationError(
                [f"--exact {name}: no such dimension (there are {', '.join(sorted(known))})"]
            )
    profiles = tuple(
        ModelProfile(
            name=model,
            dimensions=names,
            has_batch="batch" in names[:1],
            paddable=tuple(name not in options.exact for name in names),
            max_batch=options.max_batch,
            max_delay_s=options.max_delay_ms / 1000,
            max_padding_ratio=options.max_padding_ratio,
        )
        for model, names in dimensions.items()
    )
    return _Models(profiles, {})


def _models_of_file(options: ScenarioOptions, dimensions: Dimensions) -> _Models:
    """Models as the server of this file knows them, with shapes, strategies and batching settings."""
    from shapestream.serving.models import ServedModel
    from shapestream_workers.models import read_signatures
    from shapestream_workers.serve import model_options

    assert options.loaded is not None
    settings = options.loaded.settings
    batching = model_options(settings)
    served = {
        signature.name: ServedModel(0, signature.name, signature, batching[signature.name])
        for signature in read_signatures(options.loaded).signatures
    }
    profiles: list[ModelProfile] = []
    round_up: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {}
    only = next(iter(served)) if len(served) == 1 else None
    for name, names in dimensions.items():
        model = served.get(name) or (served[only] if only is not None and name == "model" else None)
        if model is None:
            there = ", ".join(served) or "no models"
            raise ConfigurationError(
                [f"{options.loaded.path}: no model {name!r}, which the traffic is for (it has {there})"]
            )
        if model.profile.dimensions != names:
            expected = ", ".join(model.profile.dimensions)
            raise ConfigurationError(
                [f"model {model.name!r} has the dimensions {expected}; the traffic has {', '.join(names)}"]
            )
        profiles.append(replace(model.profile, name=name))
        round_up[name] = model.signature.round_up
    return _Models(tuple(profiles), round_up)


def _slots(options: ScenarioOptions) -> tuple[int, int]:
    """Number of slots, and of slots per worker."""
    slots, per_worker = options.slots, options.slots_per_worker
    if options.loaded is not None and options.loaded.settings.models:
        from shapestream_workers.costs_report import slots_and_threads

        settings = options.loaded.settings
        processes = max(1, sum(group.count for group in settings.worker_groups))
        of_file, _ = slots_and_threads(settings, settings.models[0].name)
        per_worker = per_worker or of_file
        slots = slots or of_file * processes
    return slots or 1, per_worker or 1


def _speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < inf for speed in speeds):
        raise BadText([f"--speeds {text}: expected numbers above 0, such as 1,1,2 (2: half as fast)"])
    return speeds

"""From the options of `shapestream simulate` to a scenario: its traffic, models, slots and policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Literal, TypeAlias, assert_never

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.scheduler import Scheduler
from shapestream.settings import LoadedSettings
from shapestream.telemetry.trace import TraceReader
from shapestream_engine.cost_table import MAX_ELEMENTS
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.simulator import Policy, Scenario
from shapestream_workers.lab.traffic import (
    Arrivals,
    BadText,
    Recorded,
    Traffic,
    parse_arrivals,
    parse_sizes,
)
from shapestream_workers.lab.true_cost import true_costs

__all__ = ["PLANNED", "POLICIES", "ScenarioOptions", "Swept", "make_scenario", "policy_of", "varied"]

PLANNED = "shapestream"
_BATCHES = {"one at a time": 1, "arrival order, 16": 16}
POLICIES = (PLANNED, *_BATCHES)
Swept: TypeAlias = Literal["slots", "rate", "in_flight", "max_batch", "deadline_ms"]
DEFAULT_REQUESTS = 20_000
_UNBOUNDED_BYTES = 1 << 62
_SAMPLE = 4096
"""Requests whose largest sizes are a calibration's range."""

Dimensions: TypeAlias = Mapping[str, tuple[str, ...]]
RoundUp: TypeAlias = Callable[[tuple[int, ...]], tuple[int, ...]]


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


def policy_of(name: str, scenario: Scenario) -> Policy:
    """A fresh policy of this name, one of `POLICIES`."""
    bound = scenario.max_queued_requests
    if name == PLANNED:
        return Scheduler(max_queued_requests=bound, max_queued_bytes=_UNBOUNDED_BYTES)
    return PlainServer(_BATCHES[name], max_queued_requests=bound)


def varied(scenario: Scenario, what: Swept, value: float) -> Scenario:
    """The scenario with one value changed."""
    traffic = scenario.traffic
    assert isinstance(traffic, Traffic | Recorded)  # as the options made it
    match what:
        case "slots":
            return replace(scenario, slots=int(value))
        case "rate":
            if isinstance(traffic, Recorded):
                return replace(scenario, in_flight=None, traffic=replace(traffic, rate=value))
            if traffic.arrivals.rate == inf:
                raise BadText(["a closed loop has no rate of its own (leave out --in-flight)"])
            arrivals = replace(traffic.arrivals, rate=value)
            return replace(scenario, in_flight=None, traffic=replace(traffic, arrivals=arrivals))
        case "in_flight":
            return replace(scenario, in_flight=int(value))
        case "max_batch":
            profiles = tuple(replace(profile, max_batch=int(value)) for profile in scenario.profiles)
            return replace(scenario, profiles=profiles)
        case "deadline_ms":
            return replace(scenario, traffic=replace(traffic, deadline_s=value / 1000))
        case _:
            assert_never(what)


def make_scenario(options: ScenarioOptions) -> Scenario:
    """Read a scenario from options; raises `ConfigurationError`."""
    traffic, dimensions, largest = _traffic(options)
    for name, sizes in largest.items():
        if prod([size or 1 for size in sizes]) > MAX_ELEMENTS:
            raise ConfigurationError(
                [f"model {name!r}: requests of {list(sizes)} are more than anything computes"]
            )
    if options.loaded is not None:
        profiles, round_up = _models_of_file(options.loaded, dimensions)
    else:
        profiles, round_up = _models(options, dimensions), {}
    costs = true_costs(options.cost, options.costs, options.loaded, profiles, largest)
    slots, slots_per_worker = _slots(options)
    return Scenario(
        profiles=profiles,
        costs=costs,
        traffic=traffic,
        believed={} if options.uncalibrated else costs,
        slots=slots,
        slots_per_worker=slots_per_worker,
        speeds=_speeds(options.speeds),
        in_flight=options.in_flight,
        round_trip_s=options.round_trip_ms / 1000,
        noise=options.noise,
        way_s=options.way_ms / 1000,
        max_queued_requests=options.max_queued_requests,
        round_up=round_up,
        seed=options.seed,
    )


# ------------------------------------------------------------ traffic


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
    rng = np.random.default_rng(0)
    sampled = {model.name: tuple(map(max, zip(*model.draw(rng, _SAMPLE), strict=True))) for model in models}
    return traffic, {model.name: model.dimensions for model in models}, sampled


def _arrivals(options: ScenarioOptions) -> Arrivals:
    if options.in_flight is not None:
        return Arrivals(rate=inf)
    if options.rate is None:
        raise BadText(["no rate: --rate REQUESTS_PER_SECOND, or --in-flight N for a closed loop"])
    return parse_arrivals(options.arrivals, options.rate)


# ------------------------------------------------------------ models


def _models(options: ScenarioOptions, dimensions: Dimensions) -> tuple[ModelProfile, ...]:
    """Models without a file: every dimension but those named by --exact may be padded."""
    known = {name for names in dimensions.values() for name in names}
    for name in options.exact:
        if name not in known:
            raise ConfigurationError(
                [f"--exact {name}: no such dimension (there are {', '.join(sorted(known))})"]
            )
    return tuple(
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


def _models_of_file(
    loaded: LoadedSettings, dimensions: Dimensions
) -> tuple[tuple[ModelProfile, ...], dict[str, RoundUp]]:
    """Models as the server of this file knows them, and the rounding of their strategies."""
    from shapestream.serving.models import ServedModel
    from shapestream_workers.models import read_signatures

    settings = loaded.settings.models_by_name
    served = {
        signature.name: ServedModel(0, signature.name, signature, settings[signature.name])
        for signature in read_signatures(loaded).signatures
    }
    profiles: list[ModelProfile] = []
    round_up: dict[str, RoundUp] = {}
    only = next(iter(served)) if len(served) == 1 else None
    for name, names in dimensions.items():
        model = served.get(name) or (served[only] if only is not None and name == "model" else None)
        if model is None:
            there = ", ".join(served) or "no models"
            raise ConfigurationError(
                [f"{loaded.path}: no model {name!r}, which the traffic is for (it has {there})"]
            )
        if model.profile.dimensions != names:
            expected = ", ".join(model.profile.dimensions)
            raise ConfigurationError(
                [f"model {model.name!r} has the dimensions {expected}; the traffic has {', '.join(names)}"]
            )
        profiles.append(replace(model.profile, name=name))
        round_up[name] = model.signature.round_up
    return tuple(profiles), round_up


def _slots(options: ScenarioOptions) -> tuple[int, int]:
    """Number of slots, and of slots per worker."""
    slots, per_worker = options.slots, options.slots_per_worker
    if options.loaded is not None and options.loaded.settings.models:
        from shapestream_workers.costs import slots_and_threads

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

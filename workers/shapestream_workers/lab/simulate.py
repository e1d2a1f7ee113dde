"""`shapestream simulate`: from its options to scenarios, their runs and figures, and the table, JSON and verdict.

A sweep is one scenario with one value changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf, isfinite, isnan, nan, prod
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never, get_args

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from shapestream.chains.plan import Chain
from shapestream.errors import ConfigurationError
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.scheduler import Scheduler
from shapestream.settings import LoadedSettings, load_settings
from shapestream.telemetry.logging import configure
from shapestream.telemetry.trace import TraceReader
from shapestream_engine.cost_table import MAX_ELEMENTS
from shapestream_engine.errors import EngineError
from shapestream_workers.lab.options import MAX_SLOTS, SimulateOptions
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.played_chains import chain_of
from shapestream_workers.lab.simulator import (
    DONE,
    EXPIRED,
    FAILED,
    LATE,
    LEFT,
    OF_STAGE,
    REFUSED,
    Policy,
    Scenario,
    Simulated,
    simulate,
)
from shapestream_workers.lab.traffic import Recorded, Traffic, parse_arrivals, parse_sizes
from shapestream_workers.lab.true_cost import true_costs
from shapestream_workers.printing import table_of

PLANNED = "shapestream"
_BATCHES = {"one at a time": 1, "arrival order, 16": 16}
POLICIES = (PLANNED, *_BATCHES)
Swept: TypeAlias = Literal["slots", "rate", "in_flight", "max_batch", "deadline_ms"]
MAX_STEPS = 64
DEFAULT_REQUESTS = 20_000
_UNBOUNDED_BYTES = 1 << 62
_SAMPLE = 4096
"""Requests whose largest sizes are a calibration's range."""

MOST_LOST = 0.001
"""Largest share of requests that may be refused or late where a p99 is asked for."""

Dimensions: TypeAlias = Mapping[str, tuple[str, ...]]
RoundUp: TypeAlias = Callable[[tuple[int, ...]], tuple[int, ...]]
Run: TypeAlias = Mapping[str, Any]
"""One simulation, as JSON has it: `policy`, `value` of a sweep, and the figures of `figures_of`."""


class Sweep(NamedTuple):
    """A value of the scenario to vary, and its settings."""

    what: Swept
    values: tuple[float, ...]


def policy_of(name: str, scenario: Scenario) -> Policy:
    """Return a fresh policy of this name, one of `POLICIES`."""
    bound = scenario.max_queued_requests
    if name == PLANNED:
        return Scheduler(max_queued_requests=bound, max_queued_bytes=_UNBOUNDED_BYTES)
    return PlainServer(_BATCHES[name], max_queued_requests=bound)


def varied(scenario: Scenario, sweep: Sweep, value: float) -> Scenario:
    """Return the scenario with one value changed."""
    traffic = scenario.traffic
    assert isinstance(traffic, Traffic | Recorded)  # as the options made it
    match sweep.what:
        case "slots" | "in_flight":
            whole: dict[str, Any] = {sweep.what: int(value)}
            return replace(scenario, **whole)
        case "rate":
            return replace(scenario, traffic=replace(traffic, rate=value))
        case "deadline_ms":
            return replace(scenario, traffic=replace(traffic, deadline_s=value / 1000))
        case "max_batch":
            profiles = tuple(replace(profile, max_batch=int(value)) for profile in scenario.profiles)
            return replace(scenario, profiles=profiles)
        case _:
            assert_never(sweep.what)


def make_scenario(options: SimulateOptions) -> Scenario:
    """Read a scenario from options, and from the file that they name; raises `ConfigurationError`."""
    loaded = None
    if options.config is not None:
        loaded = load_settings(options.config)
        configure("warning", "auto")  # models may be compiled for it, which is no news here
    traffic, dimensions, largest, chains = _traffic(options)
    for name, sizes in largest.items():
        if prod([size or 1 for size in sizes]) > MAX_ELEMENTS:
            raise ConfigurationError(
                [f"model {name!r}: requests of {list(sizes)} are more than anything computes"]
            )
    if loaded is not None:
        profiles, round_up = _models_of_file(loaded, dimensions)
    else:
        profiles, round_up = _models(options, dimensions), {}
    costs = true_costs(options.cost or (), options.costs, loaded, profiles, largest)
    slots, slots_per_worker = _slots(options, loaded)
    return Scenario(
        profiles=profiles,
        costs=costs,
        traffic=traffic,
        chains=chains,
        believed={} if options.uncalibrated else costs,
        slots=slots,
        slots_of=_slots_of(options.slots_of or (), dimensions),
        slots_per_worker=slots_per_worker,
        wide=options.wide,
        in_flight=options.in_flight,
        round_trip_s=options.round_trip_ms / 1000,
        noise=options.noise,
        way_s=options.way_ms / 1000,
        max_queued_requests=options.queue,
        round_up=round_up,
        seed=options.seed,
    )


def _traffic(
    options: SimulateOptions,
) -> tuple[Traffic | Recorded, Dimensions, dict[str, tuple[int, ...]], list[Chain]]:
    """Return the traffic, its models with their dimensions, the largest sizes of each, and its chains."""
    deadline_s = None if options.deadline_ms is None else options.deadline_ms / 1000
    if options.rate is not None and options.in_flight is not None:
        raise typer.BadParameter(
            "--rate and --in-flight exclude each other: a closed loop finds its own rate"
        )
    if options.trace is not None:
        if options.sizes:
            raise typer.BadParameter("--trace and --sizes exclude each other: a trace has sizes")
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
        return recorded, reader.models, largest, [chain_of(*chain) for chain in reader.chains]
    if not options.sizes:
        raise typer.BadParameter(
            "no traffic: --trace FILE, or sizes such as --sizes seq=lognormal:24,0.9,4..256 with --rate 100"
        )
    if options.rate is None and options.in_flight is None:
        raise typer.BadParameter("no rate: --rate REQUESTS_PER_SECOND, or --in-flight N for a closed loop")
    models = [parse_sizes(text) for text in options.sizes]
    if len({model.name for model in models}) != len(models):
        raise typer.BadParameter("--sizes: two models of one name (write NAME/DIMENSION=..., NAME2/...)")
    traffic = Traffic(
        models=models,
        rate=inf if options.rate is None else options.rate,
        burst=parse_arrivals(options.arrivals),
        requests=options.requests or DEFAULT_REQUESTS,
        clients=options.clients,
        deadline_s=deadline_s,
        seed=options.seed,
    )
    rng = np.random.default_rng(0)
    sampled = {model.name: tuple(map(max, zip(*model.draw(rng, _SAMPLE), strict=True))) for model in models}
    return traffic, {model.name: model.dimensions for model in models}, sampled, []


def _models(options: SimulateOptions, dimensions: Dimensions) -> tuple[ModelProfile, ...]:
    """Return the models without a file: every dimension may be padded, and a free slot waits for nothing."""
    return tuple(
        ModelProfile(
            name=model,
            dimensions=names,
            has_batch="batch" in names[:1],
            paddable=(True,) * len(names),
            max_batch=options.max_batch,
            free_sizes=True,
        )
        for model, names in dimensions.items()
    )


def _models_of_file(
    loaded: LoadedSettings, dimensions: Dimensions
) -> tuple[tuple[ModelProfile, ...], dict[str, RoundUp]]:
    """Return the models as the server of this file knows them, and the rounding of their strategies."""
    from shapestream.loading.models import read_signatures
    from shapestream.serving.served_models import ServedModel

    settings = loaded.settings.models_by_name
    served = {
        signature.name: ServedModel(0, signature.name, signature, settings[signature.name])
        for signature in read_signatures(loaded).signatures
    }
    profiles: list[ModelProfile] = []
    round_up: dict[str, RoundUp] = {}
    if len(served) == 1:  # made-up traffic need not name the only model
        served.setdefault("model", *served.values())
    for name, names in dimensions.items():
        model = served.get(name)
        if model is None:
            there = ", ".join(settings) or "no models"
            raise ConfigurationError(
                [f"{loaded.path}: no model {name!r}, which the traffic is for (it has {there})"]
            )
        if model.profile.dimensions != names:
            expected = ", ".join(model.profile.dimensions)
            raise ConfigurationError(
                [f"model {model.name!r} has the dimensions {expected}; the traffic has {', '.join(names)}"]
            )
        profiles.append(replace(model.profile, name=name))
        round_up[name] = cache(model.signature.round_up)
    return tuple(profiles), round_up


def _slots(options: SimulateOptions, loaded: LoadedSettings | None) -> tuple[int, int]:
    """Return the number of slots, and of slots per worker."""
    slots, per_worker = options.slots, options.slots_per_worker
    if loaded is not None and loaded.settings.models:
        from shapestream.loading.models import slots_and_threads

        settings = loaded.settings
        processes = max(1, sum(group.count for group in settings.worker_groups))
        of_file, _ = slots_and_threads(settings, settings.models[0].name)
        per_worker = per_worker or of_file
        slots = slots or of_file * processes
    return slots or 1, per_worker or 1


def _slots_of(texts: Sequence[str], dimensions: Dimensions) -> dict[str, int]:
    """Read `MODEL=N`; raises `BadParameter`."""
    slots: dict[str, int] = {}
    for text in texts:
        model, _, number = text.rpartition("=")
        if model not in dimensions or not (number.isdecimal() and 0 < int(number) <= MAX_SLOTS):
            there = ", ".join(dimensions)
            raise typer.BadParameter(f"--slots-of {text}: expected MODEL=N, with one of the models {there}")
        slots[model] = int(number)
    return slots


def figures_of(simulated: Simulated) -> dict[str, float]:
    """Return the figures of a simulation by name, as JSON has them: seconds, and rates per second of virtual time.

    Requests are those of clients; one of a chain counts once. Latencies are those of answered requests from their intended
    arrivals; nan where nothing was answered.
    """
    requests = simulated.requests
    outcomes, chains = requests.outcomes(), requests.chains()
    sent = chains != OF_STAGE
    counts = np.bincount(outcomes[sent], minlength=6).tolist()
    done, asked = counts[DONE], int(sent.sum())
    latencies = latencies_s(simulated)
    p50_s, p95_s, p99_s, max_s = _percentiles(latencies, 50, 95, 99, 100)
    duration_s = max(simulated.ended_s - simulated.began_s, 1e-12)
    elements = requests.column(requests.elements)  # type: ignore[arg-type]  # integers, which become floats
    decided = max(
        int((chains < 0).sum()), 1
    )  # all but those of chains, which only their stages' requests are
    return {
        "requests": asked,
        "done": done,  # answered in time
        "late": counts[LATE] + counts[EXPIRED],
        "refused": counts[REFUSED],
        "failed": counts[FAILED],
        "left": counts[LEFT],  # neither answered nor ended, with no event left for them
        "duration_s": duration_s,
        "offered": asked / duration_s,
        "goodput": done / duration_s,
        "elements_per_s": float(elements[outcomes == DONE].sum()) / duration_s,  # without padding
        "mean_s": float(latencies.mean()) if len(latencies) else nan,
        "p50_s": p50_s,
        "p95_s": p95_s,
        "p99_s": p99_s,
        "max_s": max_s,
        "padding_ratio": 1.0 - simulated.useful / simulated.computed if simulated.computed else 0.0,
        "utilisation": simulated.busy_s / (simulated.slot_count * duration_s),
        "mean_batch": simulated.members / max(simulated.batches, 1),
        "batches": simulated.batches,
        "prefetched": simulated.prefetched,
        "recalled": simulated.recalled,
        "preparations": simulated.preparations,
        "decide_us": simulated.decide_s / decided * 1e6,  # processor time here, per request
    }


def figures_by_chain(simulated: Simulated, chains: Sequence[Chain]) -> dict[str, dict[str, float]]:
    """Return the number of each chain's requests, of those that were answered in time, and their latencies."""
    outcomes, numbers = simulated.requests.outcomes(), simulated.requests.chains()
    figures: dict[str, dict[str, float]] = {}
    for name in {chain.name: None for chain in chains}:
        own = np.isin(numbers, [number for number, chain in enumerate(chains) if chain.name == name])
        p50_s, p99_s = _percentiles(latencies_s(simulated, own), 50, 99)
        done = int((outcomes[own] == DONE).sum())
        figures[name] = {"requests": int(own.sum()), "done": done, "p50_s": p50_s, "p99_s": p99_s}
    return figures


def _percentiles(latencies: NDArray[np.float64], *which: float) -> list[float]:
    found: list[float] = np.percentile(latencies, which).tolist() if len(latencies) else [nan] * len(which)
    return found


def lost_ratio(run: Run) -> float:
    """Return the share of requests that were not answered in time."""
    return 1.0 - run["done"] / run["requests"] if run["requests"] else 0.0


def reaches(run: Run, p99_s: float) -> bool:
    """Tell whether a run had a p99 of at most `p99_s`, and lost at most `MOST_LOST` of its requests."""
    return run["p99_s"] <= p99_s and lost_ratio(run) <= MOST_LOST


def latencies_s(simulated: Simulated, among: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Return the latencies of clients' answered requests, in time or late, in the order of arrival; all or `among` these."""
    requests = simulated.requests
    outcomes = requests.outcomes()
    answered = (outcomes == DONE) | (outcomes == LATE)
    answered &= requests.chains() != OF_STAGE if among is None else among
    took_s = requests.column(requests.ended) - requests.column(requests.arrived)
    latencies: NDArray[np.float64] = took_s[answered]
    return latencies


def run_all(scenario: Scenario, sweep: Sweep | None, *, compare: bool) -> list[Run]:
    """Play every policy at every value."""
    runs: list[Run] = []
    for value in (None,) if sweep is None else sweep.values:
        changed = scenario if sweep is None or value is None else varied(scenario, sweep, value)
        swept = {} if value is None else {"value": value}
        for policy in POLICIES if compare else (PLANNED,):
            simulated = simulate(policy_of(policy, changed), changed)
            run = {"policy": policy, **swept, **figures_of(simulated)}
            if scenario.chains:
                run["chains"] = figures_by_chain(simulated, scenario.chains)
            runs.append(run)
    return runs


def fewest_slots(runs: Sequence[Run], p99_s: float) -> float | None:
    """Return the fewest slots of a sweep that reach this p99 with the planned policy, as every larger number does."""
    planned = [run for run in runs if run["policy"] == PLANNED]
    too_few = max((run["value"] for run in planned if not reaches(run, p99_s)), default=0)
    return min((run["value"] for run in planned if run["value"] > too_few), default=None)


def parse_sweep(text: str) -> Sweep:
    """Read `slots=1..16` or `rate=50,100,200`; raises `BadParameter`."""
    name, _, rest = text.partition("=")
    what = name.strip().replace("-", "_")
    low, dots, high = rest.partition("..")
    most = MAX_SLOTS if what == "slots" else 1e9
    try:
        if what not in get_args(Swept):
            raise ValueError(f"what can be swept: {', '.join(get_args(Swept))}")
        read = float if what in ("rate", "deadline_ms") else int
        values = range(int(low), int(high) + 1) if dots else [read(word) for word in rest.split(",")]
        if not 1 <= len(values) <= MAX_STEPS or not all(0 < value <= most for value in values):
            raise ValueError(f"1 to {MAX_STEPS} values above 0, up to {most:,.0f}")
    except (ValueError, OverflowError) as error:
        message = f"--sweep {text}: {error} (expected such as slots=1..16 or rate=50,100,200)"
        raise typer.BadParameter(message) from error
    return Sweep(what, tuple(values))  # type: ignore[arg-type]  # one of them, as was checked


def run_simulate(options: SimulateOptions) -> None:
    """Simulate and print. Raises `ConfigurationError` and `BadParameter` before anything runs."""
    scenario = make_scenario(options)
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    if sweep is not None and sweep.what == "rate" and options.in_flight is not None:
        raise typer.BadParameter("--in-flight and a sweep of the rate exclude each other")
    with Console(stderr=True).status("simulating"):
        try:
            runs = run_all(scenario, sweep, compare=options.compare)
        except EngineError as error:  # costs that no table can hold: a formula may say anything
            raise ConfigurationError([f"the calls of this traffic cost too much: {error}"]) from error
    p99_s = None if options.p99_ms is None else options.p99_ms / 1000
    if options.as_json:
        typer.echo(json.dumps(_plain(runs, sweep, p99_s), indent=2))
        return
    typer.echo(table_of(list(_rows(runs, sweep)), words=("policy",)))
    if p99_s is not None:
        typer.echo(_verdict(runs, sweep, p99_s))


def _plain(runs: Sequence[Run], sweep: Sweep | None, p99_s: float | None) -> dict[str, object]:
    plain: dict[str, object] = {"runs": [_finite(run) for run in runs]}
    if sweep is not None:
        plain["sweep"] = sweep.what
    if p99_s is not None:
        plain["p99_ms"] = p99_s * 1000
        plain["met"] = [reaches(run, p99_s) for run in runs]
        if sweep is not None and sweep.what == "slots":
            plain["fewest_slots"] = fewest_slots(runs, p99_s)
    return plain


def _finite(value: Any) -> Any:
    """Return a value with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _rows(runs: Sequence[Run], sweep: Sweep | None) -> Iterator[dict[str, str]]:
    """Yield the rows of a table, one per simulation; times in milliseconds."""
    for run in runs:
        swept: dict[str, str] = {} if sweep is None else {sweep.what: f"{run['value']:g}"}
        yield {
            **swept,
            "policy": run["policy"],
            "answered/s": _number(run["goodput"]),
            "elements/s": _number(run["elements_per_s"]),
            **{f"{name} ms": _number(run[f"{name}_s"] * 1e3) for name in ("p50", "p95", "p99")},
            "lost %": f"{lost_ratio(run) * 100:.1f}",
            "padding %": f"{run['padding_ratio'] * 100:.1f}",
            "busy %": f"{run['utilisation'] * 100:.0f}",
            "per batch": f"{run['mean_batch']:.1f}",
            "CPU us": f"{run['decide_us']:.1f}",
            **{
                f"{name} {which} ms": _number(figures[f"{which}_s"] * 1e3)
                for name, figures in run.get("chains", {}).items()
                for which in ("p50", "p99")
            },
        }


def _number(value: float) -> str:
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _verdict(runs: Sequence[Run], sweep: Sweep | None, p99_s: float) -> str:
    words = f"p99 <= {p99_s * 1000:g} ms and at most {MOST_LOST:.1%} lost: "
    if sweep is not None and sweep.what == "slots":
        best = fewest_slots(runs, p99_s)
        return words + ("not with these slots" if best is None else f"{best:g} slots are enough")
    met = [run for run in runs if reaches(run, p99_s)]
    if sweep is None:
        return words + (", ".join(run["policy"] for run in met) or "not reached")
    values = ", ".join(f"{run['value']:g} ({run['policy']})" for run in met)
    return f"{words}{sweep.what} {values or 'at none of these'}"

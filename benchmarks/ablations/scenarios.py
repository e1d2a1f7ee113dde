"""Traffic for the ablations, on virtual time, and the figures of one run.

Everything of the product is imported by name at run time: this file is checked beside one commit, and runs with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import merge
from importlib import import_module
from math import inf, nan, prod
from typing import Any

import numpy as np

SCHEDULING = "shapestream.scheduling."


def found(name: str, *modules: str) -> Any:
    """A name in the first of these modules that there is, the baseline's or this checkout's."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(name)


BASELINE = "shapestream.simulation."
LAB = "shapestream_workers.lab."
TRUE_COSTS = (BASELINE + "true_cost", LAB + "true_cost")

EVENT_S, REQUEST_S, BATCH_S = 20e-6, 20e-6, 60e-6
"""Seconds of the server's event loop per event, per request that arrives and per batch that starts, programmes apart."""
ROUND_TRIP_S = 0.001
"""In a closed loop: seconds from an answer to the next request."""
MINILM = {
    (1, 8): 3.328e-3, (1, 24): 6.864e-3, (1, 64): 15.36e-3, (1, 256): 62.976e-3, (4, 8): 8.448e-3,
    (4, 24): 21.888e-3, (4, 64): 54.784e-3, (16, 8): 30.208e-3, (16, 24): 85.248e-3, (16, 64): 0.22528,
    (16, 128): 0.479232,
}  # fmt: skip
"""Seconds of calls, by rows and tokens: docs/data/minilm-costs.json."""

Sizes = tuple[int, ...]
Draw = Callable[[np.random.Generator, int], list[Sizes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The requests of one client: Poisson at `rate` per second; inf: all at once, as a closed loop wants them."""

    rate: float = inf
    requests: int = 1500
    burst: int = 1
    """Requests that come together."""
    deadlines_s: tuple[float | None, ...] = (None,)
    """Values of which each request gets one at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a run depends on, besides its seed and what is turned off."""

    name: str
    draw: Draw
    cost: Callable[[], Any]
    """Makes the truth: a `TrueCost`."""
    dimensions: tuple[str, ...] = ("batch", "seq")
    paddable: tuple[bool, ...] = (False, True)
    bounds: tuple[int | None, ...] = (None, 256)
    max_batch: int = 32
    max_shapes: int | None = None
    streams: Sequence[Stream] = (Stream(),)
    in_flight: int | None = None
    apart_s: float = 0.0
    """In a closed loop: seconds from the first request that follows the answers of a batch to the last."""
    speeds: Sequence[float] = (1.0, 1.0)
    """Speed of each slot; each has a worker of its own, unless all are equally fast."""
    way_s: float = 0.25e-3
    noise: float = 0.1
    stalls_s: tuple[float, float] | None = None
    """Mean seconds between stalls of the event loop, and of each slot, and their mean length; exponential, both."""
    stall: tuple[float, float] | None = None
    """When the first slot stands still once, and for how many seconds."""
    belief: float = 1.0
    """Calibrated seconds / true seconds."""
    measured_rows: int | None = None
    """The most rows of a call that was calibrated; None: as many as a batch may have."""
    then: tuple[float, Callable[[], Any]] | None = None
    """After so many seconds the truth is another one."""
    queue: int = 8192
    figures: tuple[str, ...] = ("goodput", "p99")


def run(scenario: Scenario, seed: int, spent: Callable[[], float]) -> dict[str, float]:
    """Plays a scenario; `spent` returns the seconds that dynamic programmes have taken so far, as they are priced."""
    events = import_module(SCHEDULING + "events")
    scheduler = import_module(SCHEDULING + "scheduler").Scheduler(scenario.queue, 1 << 62)
    profile = events.ModelProfile(
        name="m",
        dimensions=scenario.dimensions,
        has_batch=True,
        paddable=scenario.paddable,
        max_batch=scenario.max_batch,
        bounds=scenario.bounds,
        max_shapes=scenario.max_shapes,
    )
    requests = list(_requests(scenario, seed))
    alike = len(set(scenario.speeds)) == 1
    simulation = _with_loop(
        found("_Simulation", BASELINE + "simulator", LAB + "simulator"), spent, scenario, seed
    )
    try:
        slots = import_module(BASELINE + "simulated_slots")
    except ModuleNotFoundError:
        simulated = simulation(
            scheduler,
            import_module(LAB + "simulator").Scenario(
                profiles=[profile],
                costs={"m": _truth(scenario)},
                traffic=requests,
                believed={"m": _Believed(scenario.cost(), scenario.belief, scenario.measured_rows)},
                slots=len(scenario.speeds),
                slots_per_worker=len(scenario.speeds) if alike else 1,
                speeds=tuple(scenario.speeds),
                in_flight=scenario.in_flight,
                round_trip_s=ROUND_TRIP_S,
                noise=scenario.noise,
                way_s=scenario.way_s,
                seed=seed,
            ),
        ).run()
    else:
        simulated = simulation(
            scheduler,
            [profile],
            [
                slots.SlotPlan(worker="w" if alike else f"w{number}", speed=speed)
                for number, speed in enumerate(scenario.speeds)
            ],
            slots.Truth(costs={"m": scenario.cost()}, noise=scenario.noise, way_s=scenario.way_s, seed=seed),
            import_module(BASELINE + "play").Workload(
                requests=iter(requests), in_flight=scenario.in_flight, round_trip_s=ROUND_TRIP_S
            ),
            {
                "m": _Believed(scenario.cost(), scenario.belief).calibration(
                    "k", profile.dimensions, profile.max_batch
                )
            },
            {},
        ).run(None)
    return _figures(scenario, simulated, requests)


def _with_loop(simulation: Any, spent: Callable[[], float], scenario: Scenario, seed: int) -> Any:
    """The simulation, with one thread that decides: events wait for it, and what is decided leaves it later."""
    in_flight = scenario.in_flight

    class Looped(simulation):  # type: ignore[misc]  # a class of another commit
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._free_at = 0.0
            self._stalls = _stalls(scenario, seed, 0)
            slots: Any = getattr(self, "_slots", self)
            call_s, stalls = (
                slots._call_s,
                [_stalls(scenario, seed, slot) for slot in (1, 2, 3, 4, 5, 6, 7, 8)],
            )

            def stalled(job: Any) -> float:
                """Seconds of a batch, with the stalls that begin while it runs."""
                if scenario.then is not None:
                    slots._scenario.costs["m"].now = job.began
                ends = job.began + call_s(job)
                # The baseline's batches were actions.
                own = stalls[job.action.slot if hasattr(job, "action") else job.batch.slot.id]
                while own and own[0][0] < ends:
                    ends += own.pop(0)[1]
                return float(ends - job.began)

            slots._call_s = stalled

        def _handle(self, event: Any, at: float) -> None:
            self._now = at
            while self._stalls and self._stalls[0][0] <= at:
                began, seconds = self._stalls.pop(0)
                self._free_at = max(self._free_at, began + seconds)
            begins = max(at, self._free_at)
            before = spent()
            actions = self._policy.handle(event, begins)
            starts = sum([type(action).__name__ == "StartBatch" for action in actions])
            took = EVENT_S + REQUEST_S * len(getattr(event, "requests", ())) + BATCH_S * starts
            ends = self._free_at = begins + took + spent() - before
            finished = self._finished
            for action in actions:
                self._act(action, ends)
            if in_flight is not None and self._finished > finished:
                count = self._finished - finished
                if scenario.apart_s:
                    gap_s = scenario.apart_s / max(1, count - 1)
                    self._returning.extend(
                        [(ends + ROUND_TRIP_S + number * gap_s, 1) for number in range(count)]
                    )
                else:
                    self._returning.append((ends + ROUND_TRIP_S, count))

    return Looped


def _stalls(scenario: Scenario, seed: int, which: int) -> list[tuple[float, float]]:
    """When something stands still, and for how long, in order of time: the loop (0), or a slot."""
    if scenario.stall is not None and which == 1:
        return [scenario.stall]
    if scenario.stalls_s is None:
        return []
    rng = np.random.default_rng((seed, which))
    every_s, mean_s = scenario.stalls_s
    return list(
        zip(
            np.cumsum(rng.exponential(every_s, 200)).tolist(),
            rng.exponential(mean_s, 200).tolist(),
            strict=True,
        )
    )


class _Believed:
    """A calibration of true costs, all of them wrong by one factor, up to some number of rows."""

    def __init__(self, cost: Any, factor: float, measured_rows: int | None = None) -> None:
        self._cost = cost
        self._factor = factor
        self._rows = inf if measured_rows is None else measured_rows

    def calibration(self, *arguments: Any) -> Any:
        """The table that a worker brings."""
        table = self._cost.calibration(*arguments)
        if self._rows < inf:
            table = replace(
                table, points=tuple(point for point in table.points if point.sizes[0] <= self._rows)
            )
        return table if self._factor == 1.0 else _scaled(table, self._factor)


class _Changing:
    """A truth that is replaced by another after so many seconds."""

    def __init__(self, first: Any, at_s: float, second: Any) -> None:
        self.now = 0.0
        """When the next call begins."""
        self._at_s = at_s
        self._truths = first, second
        self.prepare_s = first.prepare_s

    def seconds(self, sizes: Sizes) -> float:
        """Seconds of the next call."""
        return float(self._truths[self.now >= self._at_s].seconds(sizes))


def _truth(scenario: Scenario) -> Any:
    if scenario.then is None:
        return scenario.cost()
    at_s, second = scenario.then
    return _Changing(scenario.cost(), at_s, second())


def _scaled(table: Any, factor: float) -> Any:
    points = tuple(replace(point, seconds=point.seconds * factor) for point in table.points)
    return replace(table, points=points)


def _requests(scenario: Scenario, seed: int) -> Iterator[Any]:
    """In order of time; clients are numbered as their streams are."""
    request = found("TraceRequest", BASELINE + "trace", "shapestream.telemetry.trace")
    rng = np.random.default_rng(seed)

    def one(client: int, stream: Stream) -> list[Any]:
        count = stream.requests
        times = np.zeros(count) if stream.rate == inf else _times(rng, stream)
        drawn = scenario.draw(rng, count)
        which = rng.integers(0, len(stream.deadlines_s), count).tolist()
        return [
            request(at_s, 0, client, sizes, stream.deadlines_s[number], 0)
            for at_s, sizes, number in zip(times.tolist(), drawn, which, strict=True)
        ]

    return merge(*[one(client, stream) for client, stream in enumerate(scenario.streams)])


def _times(rng: np.random.Generator, stream: Stream) -> Any:
    gaps = rng.exponential(stream.burst / stream.rate, stream.requests)
    gaps[np.arange(stream.requests) % stream.burst != 0] = 0.0
    return np.cumsum(gaps)


def _figures(scenario: Scenario, simulated: Any, requests: Sequence[Any]) -> dict[str, float]:
    """Elements per second answered in time, and latencies; with several clients how evenly they were served."""
    outcomes = simulated.requests.outcomes()
    done = outcomes == 1
    took_s = simulated.requests.column(simulated.requests.ended) - simulated.requests.column(
        simulated.requests.arrived
    )
    seconds = simulated.ended_s - simulated.began_s
    elements = np.array([prod(request.sizes) for request in requests], float)
    clients = np.array([request.client for request in requests])
    # In a closed loop requests arrive in order, so the n-th of both is the same.
    found = {
        "goodput": float(elements[: len(done)][done].sum()) / seconds,
        "served": float(done.sum()) / seconds,
        "mean": float(took_s[done].mean()) if done.any() else nan,
        "p99": float(np.percentile(took_s[done], 99)) if done.any() else nan,
        "late": float(np.isin(outcomes, (2, 3)).mean()),
    }
    if len(scenario.streams) > 1:
        shares = np.array([done[clients == client].mean() for client in range(len(scenario.streams))])
        alike = [s.rate == scenario.streams[-1].rate for s in scenario.streams]
        found["modest"] = float(shares[alike].min())
        found["fairness"] = float(shares[alike].min() / max(shares[alike].max(), 1e-9))
    return {name: found[name] for name in scenario.figures}


# ------------------------------------------------------------ what is asked


def lognormal(rng: np.random.Generator, count: int) -> list[Sizes]:
    """Lengths of the limit's first trace."""
    lengths = np.clip(np.rint(24 * np.exp(0.9 * rng.standard_normal(count))), 4, 256).astype(int)
    return [(1, length) for length in lengths.tolist()]


DOCSTRINGS = (5, 6, 8, 10, 12, 14, 15, 17, 20, 23, 27, 32, 38, 46, 56, 68, 83, 103, 133, 190, 256)
"""Lengths of the limit's second trace: every twentieth part of its sentences lies between two of these."""


def docstrings(rng: np.random.Generator, count: int) -> list[Sizes]:
    """Lengths that are distributed as those of Python's docstrings."""
    at = rng.random(count) * (len(DOCSTRINGS) - 1)
    lengths = np.rint(np.interp(at, np.arange(len(DOCSTRINGS)), DOCSTRINGS)).astype(int)
    return [(1, length) for length in lengths.tolist()]


def few(rng: np.random.Generator, count: int) -> list[Sizes]:
    """Four lengths."""
    return [(1, length) for length in rng.choice([17, 33, 65, 129], count).tolist()]


def pictures(rng: np.random.Generator, count: int) -> list[Sizes]:
    """Heights and widths without end: 4,225 shapes, all as likely."""
    return [(1, *size) for size in rng.integers(32, 97, (count, 2)).tolist()]


def equal(rng: np.random.Generator, count: int) -> list[Sizes]:
    """One shape."""
    return [(1, 16)] * count


@cache
def minilm() -> Any:
    """MiniLM's measured costs."""
    engine = import_module("shapestream_engine.cost_table")
    points = tuple(engine.CostPoint(sizes=sizes, seconds=seconds) for sizes, seconds in MINILM.items())
    table = engine.CostTable(key="minilm", dimensions=("batch", "seq"), points=points)
    return found("TableCost", *TRUE_COSTS)(table)


def formula(fixed_ms: float, ms_per_element: float, **more: Any) -> Callable[[], Any]:
    """A fixed part and one per element."""

    @cache
    def make() -> Any:
        return found("FormulaCost", *TRUE_COSTS)(
            fixed_s=fixed_ms / 1e3, per_element_s=ms_per_element / 1e3, **more
        )

    return make


def text(name: str, draw: Draw, **more: Any) -> Scenario:
    """MiniLM in two slots."""
    return Scenario(name=name, **{"draw": draw, "cost": minilm, **more})


def single_rate(share: float) -> float:
    """Requests per second: a share of what MiniLM does one at a time on two slots."""
    return share * 2 / 10.7e-3


def overload(name: str, streams: Sequence[Stream], **more: Any) -> Scenario:
    """The sleeping model of `benchmarks.overload`."""
    given: dict[str, Any] = {
        "draw": equal, "cost": formula(8.0, 0.25, largest=(8, 16)), "bounds": (8, 16), "max_batch": 8,
        "speeds": (1.0,), "way_s": 1e-3, "noise": 0.02, "streams": streams,
    }  # fmt: skip
    return Scenario(name=name, **{**given, **more})


def shaped(name: str, cost: Callable[[], Any], **more: Any) -> Scenario:
    """A model on one slot whose costs are no straight line, or change; 3,000 requests of one length by default."""
    given: dict[str, Any] = {
        "draw": equal, "bounds": (None, 256), "max_batch": 64, "in_flight": 64, "speeds": (1.0,),
        "streams": (Stream(requests=3000),), **more,
    }  # fmt: skip
    return Scenario(name=name, cost=cost, **given)


def rows(fixed_ms: float, ms_per_row: float, **more: Any) -> Callable[[], Any]:
    """A fixed part and one per row, whatever its length."""
    return formula(fixed_ms, 0.0, per_row_s=ms_per_row / 1e3, **more)


@cache
def cliff() -> Any:
    """From 33 rows on a call takes ten times as long: what it needs does not fit into fast memory any more."""
    plain = formula(20.0, 0.05, largest=(64, 256))()
    seconds = plain.seconds

    class Cliff(type(plain)):  # type: ignore[misc]  # a class of another commit
        def _seconds(self, sizes: Sizes) -> float:
            return float(seconds(sizes)) * (10.0 if sizes[0] > 32 else 1.0)

    return Cliff(fixed_s=plain.fixed_s, per_element_s=plain.per_element_s, largest=plain.largest)


CAPACITY = 8 / 0.04
"""Requests per second of the sleeping model."""
DETECTOR: dict[str, Any] = {
    "draw": pictures, "cost": formula(0.2, 0.4 / 4096, prepare_s=2e-3, largest=(16, 96, 96)),
    "dimensions": ("batch", "height", "width"), "bounds": (None, 96, 96), "max_batch": 16, "speeds": (1.0,),
    "in_flight": 64, "streams": (Stream(requests=3000),),
}  # fmt: skip
CHEAP: dict[str, Any] = {"streams": (Stream(requests=4000),), "speeds": (1.0,), "in_flight": 64}


STALLS_S = (0.7, 0.15)
"""Seconds between two stalls, and of one stall: two cores with several times their work stand still for so long."""


def _equal_clients(requests: int, rate: float, *deadlines_s: float | None) -> list[Stream]:
    return [Stream(rate=rate / 4, requests=requests // 4, deadlines_s=deadlines_s)] * 4


def _greedy(capacity: float, seconds: float, deadline_s: float | None, times: float = 10.0) -> list[Stream]:
    modest = Stream(rate=capacity / 8, requests=round(seconds * capacity / 8), deadlines_s=(deadline_s,))
    greedy = Stream(
        rate=times * capacity, requests=round(seconds * times * capacity), deadlines_s=(deadline_s,)
    )
    return [greedy, modest, modest, modest]


SERVED = ("served", "goodput", "late", "p99", "fairness")
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        text("lognormal, 64", lognormal, in_flight=64),
        text("lognormal, 256", lognormal, in_flight=256),
        text("docstrings, 64", docstrings, in_flight=64),
        text("docstrings, 256", docstrings, in_flight=256),
        text("lognormal, 64, two workers", lognormal, in_flight=64, way_s=1e-3),
        text("lognormal, 60 %", lognormal, streams=(Stream(rate=single_rate(0.6)),), figures=("mean", "p99")),
        text("lognormal, 90 %", lognormal, streams=(Stream(rate=single_rate(0.9)),), figures=("mean", "p99")),
        text(
            "docstrings, 90 %", docstrings, streams=(Stream(rate=single_rate(0.9) * 0.65),),
            figures=("mean", "p99"),
        ),
        text("unequal workers, 64", lognormal, in_flight=64, speeds=(1.0, 1.0, 1.0, 2.5), way_s=1e-3),
        text(
            "unequal workers, 90 %", lognormal, streams=(Stream(rate=single_rate(0.9)),),
            speeds=(1.0, 1.0, 1.0, 2.5), way_s=1e-3, figures=("mean", "p99"),
        ),
        text(
            "bursts, 8 slots", lognormal, streams=(Stream(rate=single_rate(2.4), burst=12),),
            speeds=(1.0,) * 8, figures=("mean", "p99"),
        ),
        overload("overload, equal", _equal_clients(16_000, 10 * CAPACITY, 0.5), figures=SERVED),
        overload("overload, greedy", _greedy(CAPACITY, 8.0, 0.5), figures=("served", "late", "modest")),
        overload(
            "overload, noisy", _equal_clients(6_000, 3 * CAPACITY, 0.5), noise=0.4, figures=SERVED
        ),
        overload(
            "overload, costs believed 0.6", _equal_clients(6_000, 3 * CAPACITY, 0.5), belief=0.6,
            figures=SERVED,
        ),
        overload("stalls, equal", _equal_clients(6_000, 10 * CAPACITY, 0.5), stalls_s=STALLS_S, figures=SERVED),
        overload(
            "stalls, greedy", _greedy(CAPACITY, 4.0, 0.5), stalls_s=STALLS_S, figures=("served", "late", "modest")
        ),
        overload(
            "stalls, twice the capacity", _equal_clients(3_000, 2 * CAPACITY, 0.5), stalls_s=STALLS_S, figures=SERVED
        ),
        overload(
            "costs believed 60 times", _equal_clients(2_000, CAPACITY / 2, 0.2), belief=60.0,
            figures=("served",),
        ),
        text(
            "overload, lognormal", lognormal, streams=_equal_clients(6_000, 3 * single_rate(1.3), 0.5),
            figures=SERVED,
        ),
        text(
            "overload, mixed clients", lognormal,
            streams=[
                *[Stream(rate=single_rate(0.6), requests=1200, deadlines_s=(0.15,))] * 2,
                *[Stream(rate=single_rate(0.6), requests=1200, deadlines_s=(2.0,))] * 2,
            ],
            figures=("served", "late", "modest"),
        ),
        text(
            "overload, mixed deadlines", lognormal,
            streams=_equal_clients(5_000, single_rate(2.0), 0.15, 0.5, 2.0), figures=SERVED,
        ),
        overload(
            "flood, no deadline", _greedy(CAPACITY, 10.0, None, times=4.0), queue=256,
            figures=("served", "modest"),
        ),
        Scenario(name="endless, padded", **{**DETECTOR, "paddable": (False, True, True)}),
        Scenario(name="endless, exact", **{**DETECTOR, "paddable": (False, False, False)}),
        Scenario(
            name="endless, 64 shapes",
            **{
                **DETECTOR, "paddable": (True, True, True), "max_shapes": 64,
                "streams": (Stream(requests=1500),),
            },
        ),
        Scenario(
            name="endless lengths, 32 shapes", draw=lognormal, cost=formula(3.0, 0.13, prepare_s=20e-3),
            max_shapes=32, in_flight=64, paddable=(True, True),
        ),
        Scenario(
            name="few lengths, 32 shapes", draw=few, cost=formula(3.0, 0.13, prepare_s=20e-3),
            max_shapes=32, in_flight=16, paddable=(True, True),
        ),
        shaped(
            "device not full, 64", formula(1.0, 0.01, full_rows=32, largest=(64, 256)), draw=lognormal, speeds=(1.0, 1.0)
        ),
        shaped(
            "steps of 8 rows, 64", formula(1.0, 0.02, step_rows=8, largest=(64, 256)), draw=lognormal, speeds=(1.0, 1.0)
        ),
        shaped(
            "attention, 64", formula(1.0, 0.01, per_pair_s=1e-7, largest=(64, 256)), draw=lognormal, speeds=(1.0, 1.0)
        ),
        shaped("cliff at 32 rows", cliff, measured_rows=32, in_flight=256),
        shaped("calls of 1 s, 32", rows(1e3, 0.0), in_flight=32, streams=(Stream(requests=1000),)),
        shaped(
            "one point of 1 s, 32", rows(1e3, 0.0, largest=(64, 1)), in_flight=32, measured_rows=1,
            streams=(Stream(requests=1000),),
        ),
        shaped(
            "one point of 0.3 s, 32", rows(300.0, 0.0, largest=(64, 1)), in_flight=32, measured_rows=1,
            streams=(Stream(requests=1000),),
        ),
        *[
            shaped(f"heavy, {name}", rows(300.0, 10.0), max_batch=16, **more)
            for name, more in (
                ("16 in flight", {"in_flight": 16, "apart_s": 2e-3, "streams": (Stream(requests=800),)}),
                ("16 in flight, two slots", {
                    "in_flight": 16, "apart_s": 2e-3, "streams": (Stream(requests=800),), "speeds": (1.0, 1.0),
                }),
                ("24 in flight", {"in_flight": 24, "apart_s": 2e-3, "streams": (Stream(requests=1200),)}),
                ("30 %", {"in_flight": None, "streams": (Stream(rate=10.5, requests=800),), "figures": ("mean", "p99")}),
                ("60 %", {"in_flight": None, "streams": (Stream(rate=21.0, requests=800),), "figures": ("mean", "p99")}),
                ("90 %", {"in_flight": None, "streams": (Stream(rate=31.0, requests=800),), "figures": ("mean", "p99")}),
            )
        ],
        shaped(
            "one point of 1 s, 16", rows(1e3, 0.0, largest=(64, 1)), in_flight=16, measured_rows=1, apart_s=2e-3,
            streams=(Stream(requests=480),),
        ),
        shaped(
            "one row measured, linear", formula(0.2, 0.1, largest=(64, 256)), draw=lognormal, measured_rows=1,
            in_flight=32, streams=(Stream(requests=1500),),
        ),
        shaped(
            "the first shared call stalls", rows(20.0, 0.2, largest=(64, 1)), measured_rows=1, in_flight=32,
            stall=(0.03, 0.2), streams=(Stream(requests=6000),),
        ),
        shaped("linear, sharing pays now", rows(0.0, 10.0), then=(3.0, rows(10.0, 0.0))),
        shaped("sharing paid, linear now", rows(10.0, 0.0), then=(0.3, rows(0.0, 10.0))),
        shaped("ten times slower", rows(5.0, 0.5), then=(1.0, rows(50.0, 5.0))),
        shaped("ten times faster", rows(50.0, 5.0), then=(10.0, rows(5.0, 0.5))),
        shaped("a cliff appears", rows(5.0, 0.1), then=(0.3, cliff), in_flight=256),
        Scenario(name="cheap, 0.25 ms", draw=lognormal, cost=formula(0.2, 0.0015), **CHEAP),
        Scenario(name="cheap, 0.5 ms", draw=lognormal, cost=formula(0.3, 0.006), **CHEAP),
        Scenario(
            name="cheap, 0.5 ms, 256", draw=lognormal, cost=formula(0.3, 0.006),
            **{**CHEAP, "in_flight": 256},
        ),
    )
}  # fmt: skip

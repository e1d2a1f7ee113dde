"""Traffic for the ablations on virtual time, and the figures of one run.

The scheduler and the simulator are the product's own. The event loop is modelled: it is one thread, each decision takes it
a fixed time, and each dynamic programme takes it what `programme_s` says. So the figures do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import merge
from itertools import count
from math import exp, inf, nan
from typing import Any

import numpy as np

from shapestream.scheduling import Scheduler
from shapestream.scheduling.actions import StartBatch
from shapestream.scheduling.events import Event, ModelProfile
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.telemetry.trace import Sent, TraceChain, TraceRequest, TraceStage
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_workers.lab import simulator
from shapestream_workers.lab.played_chains import chain_of
from shapestream_workers.lab.simulator import DONE, EXPIRED, LATE, NO_CHAIN, Simulated
from shapestream_workers.lab.true_cost import FormulaCost, TableCost, TrueCost

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
    priority: int = 0
    models: int = 1
    """Each request is for one of so many models, at random."""
    draw: Draw | None = None
    """Sizes of its requests; None: the scenario's."""
    together: int | None = None
    """Requests that are submitted as one, as the rows of a chain's stage are; `rate` and `requests` then count chains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a run depends on, besides its seed and what is turned off."""

    name: str
    draw: Draw
    cost: Callable[[], TrueCost]
    """Makes the true costs."""
    dimensions: tuple[str, ...] = ("batch", "seq")
    paddable: tuple[bool, ...] = (False, True)
    bounds: tuple[int | None, ...] = (None, 256)
    max_batch: int = 32
    max_shapes: int | None = None
    free_sizes: bool = False
    models: int = 1
    """Models that every slot serves, all with the same costs."""
    streams: Sequence[Stream] = (Stream(),)
    in_flight: int | None = None
    in_flight_of: Mapping[int, int] = field(default_factory=dict)
    """By client, requests in flight in a closed loop of its own."""
    one_client: bool = False
    """True: all streams are those of one client, as of one web application."""
    failing: Mapping[int, float] = field(default_factory=dict)
    """By client, the share of its requests that fail each call with them."""
    apart_s: float = 0.0
    """In a closed loop: seconds from the first request that follows the answers of a batch to the last."""
    speeds: Sequence[float] = (1.0, 1.0)
    """Factor on the seconds of each slot; each has a worker of its own, unless all are equally fast."""
    way_s: float = 0.25e-3
    noise: float = 0.1
    stalls_s: tuple[float, float] | None = None
    """Mean seconds between stalls of the event loop, and of each slot, and their mean length; exponential, both."""
    stall: tuple[float, float] | None = None
    """When the first slot stands still once, and for how many seconds."""
    believed: float | None = 1.0
    """Calibrated seconds / true seconds; None: nothing was calibrated."""
    points_off: float = 0.0
    """Sigma of a lognormal factor on each calibrated point."""
    measured_rows: int | None = None
    """The most rows of a call that was calibrated; None: as many as a batch may have."""
    then: tuple[float, Callable[[], TrueCost]] | None = None
    """After so many seconds these are the true costs."""
    queue: int = 8192
    hangs: HangLimits | None = None
    figures: tuple[str, ...] = ("goodput", "p99")


def run(scenario: Scenario, seed: int, spent: Callable[[], float]) -> dict[str, float]:
    """Play a scenario; `spent` returns the modelled seconds of all programmes so far."""
    profiles = [
        ModelProfile(
            name=f"m{number}",
            dimensions=scenario.dimensions,
            has_batch=True,
            paddable=scenario.paddable,
            max_batch=scenario.max_batch,
            bounds=scenario.bounds,
            max_shapes=scenario.max_shapes,
            free_sizes=scenario.free_sizes,
        )
        for number in range(scenario.models)
    ]
    names = [profile.name for profile in profiles]
    requests = list(_requests(scenario, seed))
    alike = len(set(scenario.speeds)) == 1
    simulated = _Simulation(
        Scheduler(scenario.queue, 1 << 62, hangs=scenario.hangs),
        simulator.Scenario(
            profiles=profiles,
            costs=dict.fromkeys(names, _truth(scenario)),
            traffic=requests,
            chains=[
                chain_of(f"{together} together", {"rows": TraceStage((), at_most=together)})
                for together in _together(scenario)
            ],
            believed={}
            if scenario.believed is None
            else dict.fromkeys(names, _Believed(scenario, scenario.believed, seed)),
            slots=len(scenario.speeds),
            slots_per_worker=len(scenario.speeds) if alike else 1,
            speeds=tuple(scenario.speeds),
            in_flight=scenario.in_flight,
            in_flight_of=scenario.in_flight_of,
            failing=scenario.failing,
            round_trip_s=ROUND_TRIP_S,
            noise=scenario.noise,
            way_s=scenario.way_s,
            seed=seed,
        ),
        scenario,
        seed,
        spent,
    ).run()
    return _figures(scenario, simulated)


class _Simulation(simulator._Simulation):
    """The simulation with one thread that decides: events wait for it, and its decisions leave it later."""

    def __init__(
        self,
        policy: Scheduler,
        simulated: simulator.Scenario,
        scenario: Scenario,
        seed: int,
        spent: Callable[[], float],
    ) -> None:
        super().__init__(policy, simulated)
        self._spent = spent
        self._played = scenario
        self._free_at = 0.0
        self._loop_stalls = _stalls(scenario, seed, 0)
        self._slot_stalls = [_stalls(scenario, seed, 1 + slot) for slot in range(len(scenario.speeds))]

    def _call_s(self, job: Any) -> float:
        """Seconds of a batch, with the stalls that begin while it runs."""
        if self._played.then is not None:
            for cost in self._scenario.costs.values():
                cost.now = job.began  # type: ignore[attr-defined]  # a _Changing
        ends = job.began + super()._call_s(job)
        own = self._slot_stalls[job.batch.slot.id]
        while own and own[0][0] < ends:
            ends += own.pop(0)[1]
        return float(ends - job.began)

    def _decide(self, event: Event, at: float) -> None:
        while self._loop_stalls and self._loop_stalls[0][0] <= at:
            began, seconds = self._loop_stalls.pop(0)
            self._free_at = max(self._free_at, began + seconds)
        begins = max(at, self._free_at)
        before = self._spent()
        actions = self._policy.handle(event, begins)
        starts = sum([len(action.batches) for action in actions if isinstance(action, StartBatch)])
        took = EVENT_S + REQUEST_S * len(getattr(event, "requests", ())) + BATCH_S * starts
        ends = self._free_at = begins + took + self._spent() - before
        for action in actions:
            self._act(action, ends)

    def _return(self, count: int, at: float) -> None:
        if self._played.apart_s:
            gap_s = self._played.apart_s / max(1, count - 1)
            self._returning.extend(
                [(self._free_at + ROUND_TRIP_S + number * gap_s, 1) for number in range(count)]
            )
        else:
            self._returning.append((self._free_at + ROUND_TRIP_S, count))


def programme_s(requests: int, reach: int, dimensions: int) -> float:
    """Seconds of a dynamic programme over so many requests, `reach` of them in a segment at most.

    On two busy cores a window of 64 took 0.55 ms with one padded dimension and 1.0 ms with two.
    """
    segments = requests * min(requests, reach, 128)
    if dimensions < 2:
        return 300e-6 + requests * 4e-6 + segments * 30e-9
    return 600e-6 + requests * 4e-6 + segments * (dimensions // 2) * 240e-9


NEAREST_S = 0.55e-3
"""Seconds of the search for the nearest of a window: 0.65 of a programme over 32 requests of two padded dimensions."""


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


class _Believed(TrueCost):
    """A calibration of true costs, wrong by one factor for all points and one for each, up to some number of rows."""

    def __init__(self, scenario: Scenario, factor: float, seed: int) -> None:
        super().__init__()
        self._cost = scenario.cost()
        self._factor = factor
        self._rows = inf if scenario.measured_rows is None else scenario.measured_rows
        self._sigma = scenario.points_off
        self._rng = np.random.default_rng((seed, 9))

    def _seconds(self, sizes: Sizes) -> float:
        return self._factor * self._cost.seconds(sizes)

    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """The table that a worker brings."""
        table = self._cost.calibration(profile_key, dimensions, max_batch)
        points = tuple(
            replace(
                point, seconds=self._factor * point.seconds * exp(self._sigma * self._rng.standard_normal())
            )
            for point in table.points
            if point.sizes[0] <= self._rows
        )
        return replace(table, points=points)


class _Changing(TrueCost):
    """True costs that are replaced by others after so many seconds."""

    def __init__(self, first: TrueCost, at_s: float, second: TrueCost) -> None:
        super().__init__(prepare_s=first.prepare_s)
        self.now = 0.0
        """When the next call begins."""
        self._at_s = at_s
        self._truths = first, second

    def seconds(self, sizes: Sizes) -> float:
        """Seconds of the next call."""
        return self._truths[self.now >= self._at_s].seconds(sizes)

    def _seconds(self, sizes: Sizes) -> float:
        raise NotImplementedError

    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """What the first costs say."""
        return self._truths[0].calibration(profile_key, dimensions, max_batch)


def _truth(scenario: Scenario) -> TrueCost:
    if scenario.then is None:
        return scenario.cost()
    at_s, second = scenario.then
    return _Changing(scenario.cost(), at_s, second())


def _together(scenario: Scenario) -> list[int]:
    """By number of chain, the rows of each."""
    return [stream.together for stream in scenario.streams if stream.together is not None]


def _requests(scenario: Scenario, seed: int) -> Iterator[Sent]:
    """In order of time; clients are numbered as their streams are."""
    rng = np.random.default_rng(seed)

    def chains(client: int, stream: Stream, together: int) -> list[Sent]:
        chain = _together(scenario).index(together)
        return [
            TraceChain(at_s, chain, client, rows=([(0, sizes) for sizes in drawn],))
            for at_s in _times(rng, stream).tolist()
            for drawn in [(stream.draw or scenario.draw)(rng, together)]
        ]

    def one(client: int, stream: Stream) -> list[Sent]:
        if stream.together is not None:
            return chains(client, stream, stream.together)
        number = stream.requests
        # Where clients have loops of their own, their requests alternate.
        times = np.arange(number) * 1e-9 if stream.rate == inf else _times(rng, stream)
        drawn = (stream.draw or scenario.draw)(rng, number)
        which = rng.integers(0, len(stream.deadlines_s), number).tolist()
        models = rng.integers(0, stream.models, number).tolist()
        return [
            TraceRequest(at_s, model, client, sizes, stream.deadlines_s[place], stream.priority)
            for at_s, model, sizes, place in zip(times.tolist(), models, drawn, which, strict=True)
        ]

    order = count()
    each = [
        one(0 if scenario.one_client else client, stream) for client, stream in enumerate(scenario.streams)
    ]
    return merge(*each, key=lambda request: (request.at_s, next(order)))


def _times(rng: np.random.Generator, stream: Stream) -> Any:
    gaps = rng.exponential(stream.burst / stream.rate, stream.requests)
    gaps[np.arange(stream.requests) % stream.burst != 0] = 0.0
    return np.cumsum(gaps)


def _figures(scenario: Scenario, simulated: Simulated) -> dict[str, float]:
    """The figures of a run that its scenario names.

    `goodput`: elements per second that were answered in time. `served`: requests. `mean`, `p99`: seconds. `late`: the share
    that missed its deadline. `lost`: the share without an answer in time. `modest`, `fairness`: of the clients with the last
    one's rate, the smallest share served, and that share / the largest. `failing`, `beside`, `p99 beside`: answers per
    second of the first and the last client, and seconds of the last one's, until one of them has no more requests.
    """
    outcomes = simulated.requests.outcomes()
    done = outcomes == DONE
    column = simulated.requests.column
    arrived, ended = column(simulated.requests.arrived), column(simulated.requests.ended)
    took_s = ended - arrived
    seconds = simulated.ended_s - simulated.began_s
    elements = np.array(simulated.requests.elements, float)
    clients = np.array(simulated.requests.client)
    found = {
        "goodput": float(elements[done].sum()) / seconds,
        "served": float(done.sum()) / seconds,
        "mean": float(took_s[done].mean()) if done.any() else nan,
        "p99": float(np.percentile(took_s[done], 99)) if done.any() else nan,
        "late": float(np.isin(outcomes, (LATE, EXPIRED)).mean()),
        "lost": 1.0 - float(done.mean()),
    }
    if scenario.in_flight_of:
        until = min(arrived[clients == client].max() for client in scenario.in_flight_of)
        first, last = [done & (ended <= until) & (clients == c) for c in (0, len(scenario.in_flight_of) - 1)]
        found |= {
            "failing": float(first.sum() / until),
            "beside": float(last.sum() / until),
            "p99 beside": float(np.percentile(took_s[last], 99)) if last.any() else nan,
        }
    elif len(scenario.streams) > 1 and not scenario.one_client:
        shares = np.array([done[clients == client].mean() for client in range(len(scenario.streams))])
        alike = [s.rate == scenario.streams[-1].rate for s in scenario.streams]
        found["modest"] = float(shares[alike].min())
        found["fairness"] = float(shares[alike].min() / max(shares[alike].max(), 1e-9))
        modest = done & np.isin(clients, np.flatnonzero(alike))
        found["modest p99"] = float(np.percentile(took_s[modest], 99)) if modest.any() else nan
    chains = simulated.requests.chains()
    if _together(scenario):
        single, whole = took_s[done & (chains == NO_CHAIN)], took_s[done & (chains >= 0)]
        found |= {
            "single p50": float(np.median(single)),
            "single p99": float(np.percentile(single, 99)),
            "whole": float(whole.mean()),
        }
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


def long(rng: np.random.Generator, count: int) -> list[Sizes]:
    """Lengths from 128 to 256, all as likely."""
    return [(1, length) for length in rng.integers(128, 257, count).tolist()]


def pictures(rng: np.random.Generator, count: int) -> list[Sizes]:
    """Heights and widths without end: 4,225 shapes, all as likely."""
    return [(1, *size) for size in rng.integers(32, 97, (count, 2)).tolist()]


def equal(rng: np.random.Generator, count: int) -> list[Sizes]:
    """One shape."""
    return [(1, 16)] * count


@cache
def minilm() -> TrueCost:
    """MiniLM's measured costs."""
    points = tuple(CostPoint(sizes=sizes, seconds=seconds) for sizes, seconds in MINILM.items())
    return TableCost(CostTable(key="minilm", dimensions=("batch", "seq"), points=points))


def formula(fixed_ms: float, ms_per_element: float, **more: Any) -> Callable[[], FormulaCost]:
    """A fixed part and one per element."""

    @cache
    def make() -> FormulaCost:
        return FormulaCost(fixed_s=fixed_ms / 1e3, per_element_s=ms_per_element / 1e3, **more)

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


def shaped(name: str, cost: Callable[[], TrueCost], **more: Any) -> Scenario:
    """A model on one slot whose costs are no straight line, or change; 3,000 requests of one length by default."""
    given: dict[str, Any] = {
        "draw": equal, "bounds": (None, 256), "max_batch": 64, "in_flight": 64, "speeds": (1.0,),
        "streams": (Stream(requests=3000),), **more,
    }  # fmt: skip
    return Scenario(name=name, cost=cost, **given)


def rows(fixed_ms: float, ms_per_row: float, **more: Any) -> Callable[[], FormulaCost]:
    """A fixed part and one per row, whatever its length."""
    return formula(fixed_ms, 0.0, per_row_s=ms_per_row / 1e3, **more)


class _Cliff(FormulaCost):
    """From 33 rows on a call takes ten times as long: its memory does not fit into the cache any more."""

    def _seconds(self, sizes: Sizes) -> float:
        return FormulaCost._seconds(self, sizes) * (10.0 if sizes[0] > 32 else 1.0)


@cache
def cliff() -> TrueCost:
    """20 ms and 0.05 ms per element, up to 32 rows."""
    return _Cliff(fixed_s=20e-3, per_element_s=0.05e-3, largest=(64, 256))


CAPACITY = 8 / 0.04
"""Requests per second of the sleeping model."""
DETECTOR: dict[str, Any] = {
    "draw": pictures, "cost": formula(0.2, 0.4 / 4096, prepare_s=2e-3, largest=(16, 96, 96)),
    "dimensions": ("batch", "height", "width"), "bounds": (None, 96, 96), "max_batch": 16, "speeds": (1.0,),
    "in_flight": 64, "streams": (Stream(requests=3000),),
}  # fmt: skip
APART: dict[str, Any] = {
    **DETECTOR, "cost": formula(0.2, 0.4 / 4096, largest=(16, 96, 96)), "paddable": (False, False, False),
    "speeds": (1.0, 1.0),
}  # fmt: skip
"""Pictures that share no call, in sizes that are prepared; two slots run 3,500 of them per second."""
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


def _beside_failing(name: str, **more: Any) -> Scenario:
    """A client with 64 requests in flight of which a share fails, beside one with 16 (`python -m benchmarks.failures`)."""
    given: dict[str, Any] = {
        "draw": equal, "cost": formula(2.0, 0.0, per_row_s=2e-5, largest=(64, 256)), "paddable": (False, False),
        "max_batch": 64, "speeds": (1.0,), "streams": (Stream(requests=1500), Stream(requests=1500)),
        "in_flight_of": {0: 64, 1: 16}, "figures": ("failing", "beside", "p99 beside"),
    }  # fmt: skip
    return Scenario(name=name, **{**given, **more})


def _urgent(name: str, load: float, deadline_s: float, **more: Any) -> Scenario:
    """A client with deadlines beside one that sends 32 requests at a time."""
    given: dict[str, Any] = {
        "draw": lognormal, "cost": minilm, "figures": ("served", "late", "modest", "mean", "modest p99"),
        "streams": [
            Stream(rate=load * single_rate(0.5), burst=32),
            Stream(rate=load * single_rate(0.2), requests=600, deadlines_s=(deadline_s,)),
        ],
    }  # fmt: skip
    return Scenario(name=f"urgent beside bulk, {name}", **{**given, **more})


MINILM_ALIKE: dict[str, Any] = {"draw": lognormal, "cost": minilm, "paddable": (False, True), "max_batch": 32}
SERVED = ("served", "goodput", "late", "p99", "fairness")
LATENCY = ("mean", "p99")
ALL = (
    text("lognormal, 64", lognormal, in_flight=64),
    text("lognormal, 256", lognormal, in_flight=256),
    text("lognormal, 64, way of 1 ms", lognormal, in_flight=64, way_s=1e-3),
    text("lognormal, 60 %", lognormal, streams=(Stream(rate=single_rate(0.6)),), figures=LATENCY),
    text("lognormal, 90 %", lognormal, streams=(Stream(rate=single_rate(0.9)),), figures=LATENCY),
    text("docstrings, 64", docstrings, in_flight=64),
    text("nothing measured, 64", lognormal, in_flight=64, believed=None),
    text("unequal workers, 64", lognormal, in_flight=64, speeds=(1.0, 1.0, 1.0, 2.5), way_s=1e-3),
    text(
        "unequal workers, 90 %", lognormal, streams=(Stream(rate=single_rate(0.9)),),
        speeds=(1.0, 1.0, 1.0, 2.5), way_s=1e-3, figures=LATENCY,
    ),
    text(
        "bursts, 8 slots", lognormal, streams=(Stream(rate=single_rate(2.4), burst=12),),
        speeds=(1.0,) * 8, figures=LATENCY,
    ),
    text(
        "three models, two clients", lognormal, models=3,
        streams=(Stream(rate=single_rate(0.8), models=3), Stream(rate=single_rate(0.2), requests=400)),
        figures=("mean", "p99", "modest p99"),
    ),
    Scenario(name="cheap, 0.25 ms", draw=lognormal, cost=formula(0.2, 0.0015), **CHEAP),
    Scenario(name="cheap, 0.5 ms", draw=lognormal, cost=formula(0.3, 0.006), **CHEAP),
    Scenario(
        name="cheap, batches of 128", draw=lognormal, cost=formula(0.3, 0.001), max_batch=128, speeds=(1.0,), in_flight=256,
        streams=(Stream(requests=6000),),
    ),
    Scenario(name="endless, padded", **{**DETECTOR, "paddable": (False, True, True)}),
    Scenario(name="endless, free sizes", **{**DETECTOR, "paddable": (False, True, True), "free_sizes": True}),
    Scenario(name="endless, exact", **{**DETECTOR, "paddable": (False, False, False)}),
    Scenario(name="apart, 64", **APART),
    Scenario(
        name="apart, 8 clients",
        **{**APART, "in_flight": None, "in_flight_of": dict.fromkeys(range(8), 8), "streams": (Stream(requests=400),) * 8},
    ),
    *[
        Scenario(
            name=f"apart, {load:.0%}".replace("%", " %"),
            **{**APART, "in_flight": None, "streams": (Stream(rate=load * 3500.0, requests=4000),), "figures": LATENCY},
        )
        for load in (0.6, 0.8)
    ],
    Scenario(
        name="apart, flood",
        **{
            **APART, "in_flight": None, "figures": ("goodput", "modest p99"),
            "streams": (Stream(rate=5000.0, requests=4000), Stream(rate=150.0, requests=150)),
        },
    ),
    text("linear, 64", lognormal, cost=formula(0.02, 0.02, largest=(32, 256)), in_flight=64),
    Scenario(
        name="64 shapes of two sizes",
        **{**DETECTOR, "paddable": (True, True, True), "max_shapes": 64},
    ),
    *[
        Scenario(
            name=name, draw=draw, cost=formula(3.0, 0.13, prepare_s=20e-3), max_shapes=32, in_flight=in_flight,
            paddable=(True, True),
        )
        for name, draw, in_flight in (
            ("32 shapes of one size", lognormal, 64), ("32 shapes, docstrings", docstrings, 64),
            ("32 shapes, four lengths", few, 16),
        )
    ],
    shaped(
        "device not full, 64", formula(1.0, 0.01, full_rows=32, largest=(64, 256)), draw=lognormal, speeds=(1.0, 1.0)
    ),
    shaped(
        "steps of 8 rows, 64", formula(1.0, 0.02, step_rows=8, largest=(64, 256)), draw=lognormal, speeds=(1.0, 1.0)
    ),
    shaped(
        "attention, 64", formula(1.0, 0.01, per_pair_s=1e-7, largest=(64, 256)), draw=lognormal, speeds=(1.0, 1.0)
    ),
    *[
        shaped(
            f"{name}, points off by 40 %", cost, draw=lognormal, speeds=(1.0, 1.0), points_off=0.4,
            streams=(Stream(requests=6000),),
        )
        for name, cost in (
            ("device not full", formula(1.0, 0.01, full_rows=32, largest=(64, 256))),
            ("steps of 8 rows", formula(1.0, 0.02, step_rows=8, largest=(64, 256))),
        )
    ],
    shaped("cliff at 32 rows", cliff, measured_rows=32, in_flight=256),
    shaped(
        "one point of 1 s, 16", rows(1e3, 0.0, largest=(64, 1)), in_flight=16, measured_rows=1, apart_s=2e-3,
        streams=(Stream(requests=480),),
    ),
    shaped(
        "one point of 1 s, 32", rows(1e3, 0.0, largest=(64, 1)), in_flight=32, measured_rows=1,
        streams=(Stream(requests=1000),),
    ),
    shaped(
        "one row measured, linear", formula(0.2, 0.1, largest=(64, 256)), draw=lognormal, measured_rows=1,
        in_flight=32, streams=(Stream(requests=1500),),
    ),
    shaped(
        "the first shared call stalls", rows(20.0, 0.2, largest=(64, 1)), measured_rows=1, in_flight=32,
        stall=(0.03, 0.2),
    ),
    shaped("linear, sharing pays now", rows(0.0, 10.0), then=(3.0, rows(10.0, 0.0))),
    shaped("sharing paid, linear now", rows(10.0, 0.0), then=(0.3, rows(0.0, 10.0))),
    shaped("ten times slower", rows(5.0, 0.5), then=(1.0, rows(50.0, 5.0))),
    shaped("ten times faster", rows(50.0, 5.0), then=(10.0, rows(5.0, 0.5))),
    shaped("a cliff appears", rows(5.0, 0.1), then=(0.3, cliff), in_flight=256),
    text("calls vary by 40 %", lognormal, in_flight=64, noise=0.4),
    *[
        shaped(f"calls of 0.3 s, {name}", rows(300.0, 10.0), max_batch=16, **more)
        for name, more in (
            ("16 in flight", {"in_flight": 16, "apart_s": 2e-3, "streams": (Stream(requests=800),)}),
            ("two slots", {
                "in_flight": 16, "apart_s": 2e-3, "streams": (Stream(requests=800),), "speeds": (1.0, 1.0),
            }),
            ("60 %", {"in_flight": None, "streams": (Stream(rate=21.0, requests=800),), "figures": LATENCY}),
        )
    ],
    overload("overload, equal", _equal_clients(8_000, 10 * CAPACITY, 0.5), figures=SERVED),
    overload("overload, greedy", _greedy(CAPACITY, 4.0, 0.5), figures=("served", "late", "modest")),
    overload("overload, noisy", _equal_clients(6_000, 3 * CAPACITY, 0.5), noise=0.4, figures=SERVED),
    overload("overload, costs believed 0.6", _equal_clients(6_000, 3 * CAPACITY, 0.5), believed=0.6, figures=SERVED),
    overload("costs believed 60 times", _equal_clients(2_000, CAPACITY / 2, 0.2), believed=60.0, figures=("served",)),
    overload("stalls, equal", _equal_clients(6_000, 10 * CAPACITY, 0.5), stalls_s=STALLS_S, figures=SERVED),
    overload(
        "stalls, greedy", _greedy(CAPACITY, 4.0, 0.5), stalls_s=STALLS_S, figures=("served", "late", "modest")
    ),
    overload(
        "stalls, twice the capacity", _equal_clients(3_000, 2 * CAPACITY, 0.5), stalls_s=STALLS_S, figures=SERVED
    ),
    text(
        "overload, lognormal", lognormal, streams=_equal_clients(4_000, 3 * single_rate(1.3), 0.5), figures=SERVED
    ),
    text(
        "overload, mixed clients", lognormal,
        streams=[
            *[Stream(rate=single_rate(0.6), requests=900, deadlines_s=(0.15,))] * 2,
            *[Stream(rate=single_rate(0.6), requests=900, deadlines_s=(2.0,))] * 2,
        ],
        figures=("served", "goodput", "late", "modest"),
    ),
    text(
        "overload, mixed deadlines", lognormal, streams=_equal_clients(4_000, single_rate(2.0), 0.15, 0.5, 2.0),
        figures=SERVED,
    ),
    _urgent("MiniLM", 1.0, 0.15),
    _urgent("0.25 s a batch", 1.0, 0.15, cost=formula(8.0, 0.16), max_batch=64),
    _urgent("0.4 s a batch", 0.4, 0.5, draw=equal, cost=rows(100.0, 20.0), max_batch=16),
    *[
        text(
            f"urgent beside long, {name}", long, cost=formula(1.0, 0.01, full_rows=full_rows, largest=(64, 256)),
            max_batch=64, speeds=(1.0,), figures=("served", "late", "modest", "mean"), streams=[
                Stream(rate=rate, burst=16, requests=1500),
                Stream(rate=20.0, requests=400, deadlines_s=(deadline_s,), draw=equal),
            ],
        )
        for name, full_rows, rate, deadline_s in (
            ("device not full", 32, 160.0, 0.15), ("device not full, 0.1 s", 32, 160.0, 0.1), ("linear", 1, 250.0, 0.1),
        )
    ],
    overload("flood, no deadline", _greedy(CAPACITY, 10.0, None, times=4.0), queue=256, figures=("served", "modest")),
    overload(
        "flood of one client", _greedy(CAPACITY, 6.0, None, times=2.0), queue=8192, figures=("served", "modest p99")
    ),
    *[
        text(
            f"texts beside calls of 64, {name}", docstrings, one_client=True,
            figures=("single p50", "single p99", "whole"), streams=(
                Stream(rate=rate, requests=round(40 * rate), together=64), Stream(rate=20.0, requests=800),
            ),
        )
        for name, rate in (("half of the time", 0.6), ("nearly all of it", 1.2))
    ],
    *[_beside_failing(f"{share:.1%} fail, 2 ms", failing={0: share}) for share in (0.001, 0.01, 0.1)],
    *[_beside_failing(f"{share:.1%} fail, MiniLM", failing={0: share}, **MINILM_ALIKE) for share in (0.01, 0.1)],
    *[
        shaped(
            f"times vary {name}", rows(3000.0, 30.0), max_batch=8, in_flight=16, noise=noise,
            streams=(Stream(requests=6000),), hangs=HangLimits(min_s=10.0, grace_s=5.0), figures=("goodput", "lost"),
        )
        for name, noise in (("by half", 0.5), ("threefold", 0.8), ("wildly", 1.3))
    ],
)  # fmt: skip
SCENARIOS = {scenario.name: scenario for scenario in ALL}

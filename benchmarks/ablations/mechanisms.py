"""The mechanisms that the ablations turn off, each by replacing names of today's scheduler.

A name that the scheduler has no more is a KeyError: whoever renames it renames it here. A mechanism that is removed loses
its entry here, and keeps its row in docs/decisions.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any

from benchmarks.ablations.scenarios import NEAREST_S, programme_s
from shapestream.scheduling import (
    answer_waits,
    boundaries,
    bundles,
    cost_grid,
    deadlines,
    fairness,
    hang_watch,
    planner,
    recovery,
    rounding,
    scheduler,
    size_steps,
    slots,
    tries,
    worker_class,
    worker_costs,
)

Patch = Callable[["Patches"], None]
Fired = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
"""A test of a call's result and its arguments, positional and named: True if the mechanism was at work."""


class Patches:
    """Replaced names, to be put back; and the counters of the run."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self.fired: Counter[str] = Counter()
        """By counter, how often its mechanism changed anything."""
        self.spent_s = 0.0
        """Modelled seconds of the dynamic programmes that ran."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace a name of a module or a class. Raises KeyError if it has none."""
        self._before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put everything back, last first."""
        while self._before:
            setattr(*self._before.pop())

    def watch(
        self, what: str, owner: Any, name: str, fired: Fired = lambda result, given, named: True
    ) -> None:
        """Count the calls of a function that `fired` picks."""
        original = owner.__dict__[name]

        def watched(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            self.fired[what] += bool(fired(result, given, named))
            return result

        self.set(owner, name, watched)


@contextmanager
def without(names: Sequence[str]) -> Iterator[Patches]:
    """The scheduler without these mechanisms, with everything counted."""
    patches = Patches()
    try:
        for name in names:
            MECHANISMS[name].off(patches)
        _watch_all(patches)
        _price_programmes(patches)
        yield patches
    finally:
        patches.restore()


def _watch_all(patches: Patches) -> None:
    """Install the counters around the functions that stand there now."""
    watch = patches.watch
    watch("trim", planner, "_in_time", lambda in_time, given, named: not in_time)
    watch("alone", planner, "_runs_alone", lambda alone, given, named: alone)
    watch("division", scheduler, "portion", lambda portion, given, named: portion != planner.ALL)
    watch("shed", deadlines.Deadlines, "comes_too_late", lambda late, given, named: late)
    watch("crowded", deadlines.Deadlines, "_before_s", lambda _, given, named: named["crowded"])
    watch("boundaries", boundaries.LearnedBoundaries, "look", lambda better, given, named: better)
    watch("waits after answers", answer_waits.AnswerWaits, "is_awaited", lambda waits, given, named: waits)
    watch("tries", tries.Tries, "began")
    watch("believed", cost_grid.Grid, "believe")
    watch("doubted", tries.Tries, "doubt")
    watch("blamed", fairness.FairShares, "blame")
    watch(
        "faster",
        scheduler,
        "faster_first",
        lambda s, given, named: s is not next(iter(given[0].free.values())),
    )
    watch("room", fairness.GroupRoom, "exceeds", lambda exceeds, given, named: exceeds)
    watch("stepped", size_steps.SizeSteps, "rounded", lambda _, given, named: given[0].step > 1)
    watch("behind", slots.SlotTable, "queue_behind")
    watch("bundled", bundles.Bundles, "alone", lambda cut, given, named: cut is not None)
    watch("hangs", hang_watch.HangWatch, "look", lambda due, given, named: bool(due))


def _price_programmes(patches: Patches) -> None:
    """Count the dynamic programmes, and add up what they take of the event loop."""
    cut_window = planner.__dict__["cut_window"]

    def priced(window: Any, costs: Any, limits: Any, **named: Any) -> Any:
        size = len(window)
        patches.spent_s += programme_s(size, min(limits.max_rows, size), window.shapes.shape[1])
        patches.fired["programmes"] += 1
        return cut_window(window, costs, limits, **named)

    patches.set(planner, "cut_window", priced)
    nearest = planner.__dict__["nearest"]

    def searched(*given: Any, **named: Any) -> Any:
        patches.spent_s += NEAREST_S
        patches.fired["nearest"] += 1
        return nearest(*given, **named)

    patches.set(planner, "nearest", searched)


# ------------------------------------------------------------ ways to turn off


def constant(value: float, name: str, *modules: Any) -> Patch:
    """Return the patch that gives a constant another value, in its module and in those that import it."""

    def patch(patches: Patches) -> None:
        for module in modules:
            patches.set(module, name, value)

    return patch


def returns(value: Any, owner: Any, *names: str) -> Patch:
    """Return the patch by which functions always return this."""

    def patch(patches: Patches) -> None:
        for name in names:
            patches.set(owner, name, lambda *given, **named: value)

    return patch


def several(*parts: Patch) -> Patch:
    """Return the patch that applies all of these."""

    def patch(patches: Patches) -> None:
        for part in parts:
            part(patches)

    return patch


# ------------------------------------------------------------ batches


def _greedy(patches: Patches) -> None:
    """No programme: the nearest sizes join as long as the seconds of the batch are less than those of both apart."""

    def segments(bucket: Any, costs: Any, limits: Any, delayed: Any) -> Any:
        most = limits.max_rows
        counts = {bucket: len(bucket.prefix(most))}
        rows, shape = counts[bucket], bucket.shape
        seconds = costs.call(rows, shape).seconds
        for other in _near(bucket):
            more = len(other.prefix(most - rows)) if rows < most else 0
            if not more:
                continue
            larger = tuple(map(max, shape, other.shape))
            together_s = costs.call(rows + more, larger).seconds
            if together_s <= seconds + costs.call(more, other.shape).seconds:
                counts[other] = more
                rows, shape, seconds = rows + more, larger, together_s
        buckets = bucket.lane.buckets
        return [dict(sorted(counts.items(), key=lambda item: buckets.index(item[0])))]

    patches.set(planner, "_optimal_segments", segments)


def _near(bucket: Any, reach: int = 32) -> Iterator[Any]:
    buckets = list(bucket.lane.buckets)
    at = buckets.index(bucket)
    for pair in zip_longest(buckets[at + 1 : at + 1 + reach], reversed(buckets[max(0, at - reach) : at])):
        yield from (other for other in pair if other is not None)


def _equal_only(patches: Patches) -> None:
    """Only requests of equal shape share a batch, as many as cost least."""

    def segments(bucket: Any, costs: Any, limits: Any, delayed: Any) -> Any:
        return [{bucket: planner._equal_rows(bucket, costs, limits, delayed)}]

    patches.set(planner, "_optimal_segments", segments)


def _planned_each(patches: Patches) -> None:
    """The window is cut for each batch, not once per turn of the event loop."""
    take = planner.Plan.take

    def anew(self: Any, anchor: Any, *more: Any) -> Any:
        self.forget(anchor.bucket.lane)
        return take(self, anchor, *more)

    patches.set(planner.Plan, "take", anew)


def _work_alone(patches: Patches) -> None:
    """Cuts minimise the seconds of the calls, whatever waits for them."""
    cut_window, equal_rows = planner.__dict__["cut_window"], planner.__dict__["_equal_rows"]
    patches.set(
        planner, "cut_window",
        lambda window, costs, limits, *, delayed, batch_s: cut_window(
            window, costs, limits, delayed=None, batch_s=batch_s
        ),
    )  # fmt: skip
    patches.set(
        planner, "_equal_rows", lambda bucket, costs, limits, delayed: equal_rows(bucket, costs, limits, None)
    )


def _no_prefetch(patches: Patches) -> None:
    join = slots.SlotTable.join

    def joined(
        self: Any, number: int, models: Any, prefetch_s: Any = None, *given: Any, **named: Any
    ) -> None:
        join(self, number, models, None, *given, **named)

    patches.set(slots.SlotTable, "join", joined)


def _first_free(pool: Any) -> Any:
    return next(iter(pool.free.values()))


# ------------------------------------------------------------ prices


def _no_grid(patches: Patches) -> None:
    """A fixed part and one per element, fitted to the same points and to the traffic, in the place of the grid."""
    begin = worker_class.WorkerClass.__init__

    def begun(
        self: Any, profile: Any, table: Any, versions: Any, call_bytes: Any, learned: Any = None
    ) -> None:
        begin(self, profile, table, versions, call_bytes, learned)
        if self._grid is not None and table is not None:
            self._grid = None
            for point in table.points:
                elements = cost_grid.elements_of(point.sizes)
                self._linear.observe(
                    1.0, elements, point.seconds, request_elements=elements / max(1, point.sizes[0])
                )

    patches.set(worker_class.WorkerClass, "__init__", begun)


def _no_estimates(patches: Patches) -> None:
    """Points that never ran stay as they were when others that ran have moved."""

    patches.set(tries.Tries, "estimating", lambda self: None)


def _no_slowdowns(patches: Patches) -> None:
    patches.set(worker_class, "SLOWDOWN_STEP", 0.0)
    patches.set(worker_class.WorkerClass, "slowdown", lambda self, worker: 1.0)
    patches.set(scheduler, "faster_first", _first_free)


# ------------------------------------------------------------ shapes


def _no_exact_quarter(patches: Patches) -> None:
    begin = rounding.ShapeRounding.__init__

    def begun(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self._combinations += self._exact
        self._exact = 0

    patches.set(rounding.ShapeRounding, "__init__", begun)


# ------------------------------------------------------------ overload


def _always_capped(patches: Patches) -> None:
    """The predicted wait is always capped by the work that is queued, also where newcomers replace what leaves."""
    before_s = deadlines.Deadlines._before_s

    def capped(self: Any, arrival: Any, queue: Any, queued_s: float, *, crowded: bool) -> Any:
        return before_s(self, arrival, queue, queued_s, crowded=False)

    patches.set(deadlines.Deadlines, "_before_s", capped)


def _arrival_order(patches: Patches) -> None:
    """All clients have one account, so that the order is that of arrival."""
    for name in ("client", "known", "forecast"):
        original = fairness.FairShares.__dict__[name]
        patches.set(
            fairness.FairShares, name,
            lambda self, number, *more, original=original: original(self, 0, *more),
        )  # fmt: skip


def _newcomers_last(patches: Patches) -> None:
    """A client without queued requests starts at virtual time, though another waits with an earlier account."""
    begin = fairness.FairShares.__init__

    def begun(self: Any, first_start_s: Any, room: Any) -> None:
        begin(self, lambda: None, room)

    patches.set(fairness.FairShares, "__init__", begun)


def _in_the_middle(members: list[Any]) -> tuple[list[Any], list[Any]]:
    members = sorted(members, key=lambda request: request.client)
    middle = (len(members) + 1) // 2
    return members[:middle], members[middle:]


def _reruns_first(patches: Patches) -> None:
    """Parts of failed batches go before everything else."""
    patches.set(scheduler, "by_rerun", lambda request: (-inf, request.order))


# ------------------------------------------------------------ the list


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """A mechanism that can be turned off, or a constant that can have another value."""

    off: Patch
    scenarios: Sequence[str]
    """Where it may matter."""
    watched: str = ""
    """The counter that tells how often it was at work; empty: none."""


STEADY = ("lognormal, 64", "lognormal, 256", "lognormal, 60 %", "lognormal, 90 %")
CHEAP = ("cheap, 0.25 ms", "cheap, 0.5 ms")
CURVED = ("device not full, 64", "steps of 8 rows, 64", "attention, 64")
ENDLESS = ("endless, padded", "endless, free sizes", "endless, exact")
APART = ("apart, 64", "apart, 8 clients", "apart, 60 %", "apart, 80 %", "apart, flood")
CHANGING = (
    "linear, sharing pays now", "sharing paid, linear now", "ten times slower", "ten times faster",
    "cliff at 32 rows", "a cliff appears", "one point of 1 s, 32",
)  # fmt: skip
OFF = ("device not full, points off by 40 %", "steps of 8 rows, points off by 40 %")
HEAVY = (
    "calls of 0.3 s, 16 in flight",
    "calls of 0.3 s, two slots",
    "calls of 0.3 s, 60 %",
    "one point of 1 s, 16",
)
CAPPED = (
    "32 shapes of one size",
    "32 shapes, docstrings",
    "64 shapes of two sizes",
    "32 shapes, four lengths",
)
LATE = (
    "overload, equal", "overload, greedy", "overload, noisy", "overload, costs believed 0.6", "overload, lognormal",
    "overload, mixed clients", "overload, mixed deadlines", "stalls, equal", "stalls, greedy",
    "stalls, twice the capacity",
)  # fmt: skip
UNEQUAL = ("unequal workers, 64", "unequal workers, 90 %")
URGENT = ("urgent beside bulk, MiniLM", "urgent beside bulk, 0.25 s a batch", "urgent beside bulk, 0.4 s a batch",
    "urgent beside long, device not full", "urgent beside long, device not full, 0.1 s", "urgent beside long, linear",
)  # fmt: skip
FLOODS = ("flood, no deadline", "flood of one client")
FAILING = (
    "0.1% fail, 2 ms",
    "1.0% fail, 2 ms",
    "10.0% fail, 2 ms",
    "1.0% fail, MiniLM",
    "10.0% fail, MiniLM",
)
WILD = ("times vary by half", "times vary threefold", "times vary wildly")
PLANNED = (
    "lognormal, 64", "lognormal, 90 %", *CHEAP, *CURVED, "endless, padded", "overload, lognormal",
    "three models, two clients",
)  # fmt: skip
PRICED = (*CURVED, *CHANGING, "lognormal, 64", "calls vary by 40 %")

MIXED = (
    "texts beside calls of 64, half of the time",
    "texts beside calls of 64, nearly all of it",
    "lognormal, 64",
    "lognormal, 60 %",
    "lognormal, 90 %",
    "docstrings, 64",
    "unequal workers, 64",
    "three models, two clients",
)

MECHANISMS: dict[str, Mechanism] = {
    "short before long": Mechanism(off=constant(0.0, "PATIENCE", fairness), scenarios=MIXED),
    "four times as much patience": Mechanism(off=constant(8.0, "PATIENCE", fairness), scenarios=MIXED),
    "prefetch": Mechanism(
        off=_no_prefetch, watched="behind",
        scenarios=(*STEADY, "lognormal, 64, way of 1 ms", *CHEAP, "endless, exact", "device not full, 64"),
    ),
    "prefetch margin": Mechanism(
        off=constant(0.0, "PREFETCH_MARGIN", slots),
        scenarios=(*STEADY, "lognormal, 64, way of 1 ms", *CHEAP, "endless, exact"),
    ),
    "bundles": Mechanism(
        off=returns(None, bundles.Bundles, "alone"), watched="bundled", scenarios=(*STEADY, *APART, "linear, 64")
    ),
    "bundles: small beside others": Mechanism(
        off=constant(slots.BUNDLE, "SHARED_BUNDLE", bundles), watched="bundled", scenarios=("apart, flood",)
    ),
    "programme: nearest sizes join": Mechanism(off=_greedy, watched="programmes", scenarios=PLANNED),
    "programme: equal shapes alone": Mechanism(off=_equal_only, watched="programmes", scenarios=PLANNED),
    "nearest where shapes are not nested": Mechanism(
        off=returns(True, planner, "are_nested"), watched="nearest", scenarios=(*ENDLESS[:2], "64 shapes of two sizes")
    ),
    "programme: once per turn": Mechanism(
        off=_planned_each, watched="programmes", scenarios=("bursts, 8 slots", "lognormal, 90 %", "cheap, 0.25 ms")
    ),
    "window: 64": Mechanism(off=constant(64, "WINDOW", planner), scenarios=PLANNED),
    "window: 32 at most": Mechanism(
        off=constant(32, "MOST_WINDOW", planner), scenarios=(*CHEAP, "cheap, batches of 128", *CURVED)
    ),
    "weights of waiting requests": Mechanism(off=_work_alone, scenarios=(*PLANNED, "lognormal, 60 %")),
    "lone requests skip the programme": Mechanism(
        off=returns(False, planner, "_runs_alone"), watched="alone",
        scenarios=(*STEADY, *ENDLESS[:2], "attention, 64", "cheap, 0.25 ms"),
    ),
    "division between slots": Mechanism(
        off=returns(planner.ALL, scheduler, "portion"), watched="division",
        scenarios=("bursts, 8 slots", "lognormal, 60 %", "lognormal, 90 %", "unequal workers, 90 %"),
    ),
    "faster slot first": Mechanism(
        off=lambda patches: patches.set(scheduler, "faster_first", _first_free), watched="faster", scenarios=UNEQUAL
    ),
    "speed of each worker": Mechanism(off=_no_slowdowns, watched="faster", scenarios=UNEQUAL),
    "waits after answers": Mechanism(
        off=returns(False, answer_waits.AnswerWaits, "is_awaited", "will_be_awaited"), watched="waits after answers",
        scenarios=(*HEAVY, "ten times slower", *CURVED, "lognormal, 64"),
    ),
    "preparations in cuts": Mechanism(
        off=constant(inf, "USES", worker_costs), scenarios=(*ENDLESS[:2], *CAPPED)
    ),
    "grid": Mechanism(off=_no_grid, scenarios=(*PRICED, "lognormal, 90 %", "cheap, 0.25 ms")),
    "corrections by traffic": Mechanism(
        off=several(constant(0.0, "STEP", cost_grid), constant(0.0, "LONE_STEP", cost_grid)),
        scenarios=(*PRICED, *OFF, "overload, costs believed 0.6"),
    ),
    "tries": Mechanism(off=returns(False, worker_class.WorkerClass, "is_try_due"), watched="tries", scenarios=PRICED),
    "belief": Mechanism(off=returns(True, tries.Tries, "knows"), watched="believed", scenarios=PRICED),
    "belief: any factor": Mechanism(
        off=constant(inf, "FIRST_CLIP", cost_grid), scenarios=("the first shared call stalls", *CHANGING)
    ),
    "first tries: any padding": Mechanism(
        off=constant(inf, "MOST_PADDED", worker_class), scenarios=("one row measured, linear", *CURVED)
    ),
    "doubt by four batches": Mechanism(
        off=returns(0.0, tries.Tries, "lasting_change"), watched="doubted",
        scenarios=(*CHANGING, "calls vary by 40 %"),
    ),
    "doubt by calls that were short": Mechanism(
        off=returns(None, tries.Tries, "ran"), watched="doubted",
        scenarios=(*CHANGING, "calls vary by 40 %"),
    ),
    "bounds by calls that ran lately": Mechanism(
        off=lambda patches: patches.set(cost_grid.Grid, "_bounded", lambda self, live, known: live),
        scenarios=(*CURVED, *CHANGING),
    ),
    "estimates of points that never ran": Mechanism(off=_no_estimates, scenarios=(*CURVED, *CHANGING)),
    "size steps": Mechanism(
        off=returns(False, size_steps.SizeSteps, "suits"), watched="stepped", scenarios=("endless, free sizes",)
    ),
    "learned boundaries": Mechanism(
        off=returns(False, boundaries.LearnedBoundaries, "observe"), watched="boundaries", scenarios=CAPPED
    ),
    "exact quarter": Mechanism(off=_no_exact_quarter, scenarios=CAPPED),
    "caution factor: 1.0": Mechanism(off=constant(1.0, "SAFETY", deadlines), scenarios=LATE),
    "caution factor: 1.2": Mechanism(off=constant(1.2, "SAFETY", deadlines), scenarios=LATE),
    "a call takes half of the time left at most": Mechanism(
        off=constant(inf, "CALL_OF_LEFT", deadlines), scenarios=(*LATE, *URGENT)
    ),
    "refusal of hopeless deadlines": Mechanism(
        off=constant(0.0, "OPTIMISM", deadlines), scenarios=(*LATE, "costs believed 60 times")
    ),
    "cap of the wait: always": Mechanism(off=_always_capped, watched="crowded", scenarios=LATE),
    "shedding late turns": Mechanism(
        off=returns(False, deadlines.Deadlines, "comes_too_late"), watched="shed", scenarios=LATE
    ),
    "trim for deadlines": Mechanism(off=returns(True, planner, "_in_time"), watched="trim", scenarios=(*LATE, *URGENT)),
    "fair shares": Mechanism(
        off=_arrival_order, scenarios=(*FLOODS, "three models, two clients", "overload, greedy", *FAILING[1:3])
    ),
    "debt of 32 s at most": Mechanism(
        off=constant(inf, "OWED_S", fairness), scenarios=(*FLOODS, "overload, greedy", "three models, two clients")
    ),
    "newcomers beside the first": Mechanism(
        off=_newcomers_last, scenarios=(*FLOODS, "overload, equal", "three models, two clients")
    ),
    "shares of models": Mechanism(
        off=lambda patches: patches.set(scheduler, "_of_its_models", lambda request, queues, now, ready: request),
        scenarios=("three models, two clients",),
    ),
    "fair room": Mechanism(
        off=returns(False, fairness.GroupRoom, "exceeds", "exceeds_part"), watched="room",
        scenarios=("flood, no deadline", "overload, greedy"),
    ),
    "blame": Mechanism(
        off=lambda patches: patches.set(fairness.FairShares, "blame", lambda self, flow, share_s: None),
        watched="blamed", scenarios=FAILING,
    ),
    "failed batches divided between clients": Mechanism(
        off=lambda patches: patches.set(recovery, "_parts", _in_the_middle), scenarios=FAILING
    ),
    "parts wait for their turn": Mechanism(off=_reruns_first, scenarios=FAILING),
    "hang limit, learned part": Mechanism(
        off=returns(None, hang_watch.HangWatch, "observe"), watched="hangs", scenarios=WILD
    ),
}  # fmt: skip
"""Ablations by name. A name with a colon puts another value or another way in the place of the mechanism."""

"""The mechanisms that the ablations turn off: each is replaced in the modules of the baseline, by name.

Everything of the product is imported by name at run time: this file is checked beside one commit, and runs with another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from math import inf, log
from typing import Any

Patch = Callable[["Patches"], None]
Fired = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
"""A test of a call's result and its arguments, positional and named: True if the mechanism was at work."""


def module(name: str) -> Any:
    """One of the baseline's scheduling."""
    return import_module(f"shapestream.scheduling.{name}")


class Patches:
    """Replaced names, to be put back; and the counters of the run."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self.fired: Counter[str] = Counter()
        """By what is watched, how often it changed anything."""
        self.spent_s = 0.0
        """Seconds of the programmes that ran, as the baseline prices them."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces a name of a module or a class."""
        self._before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Puts everything back, last first."""
        while self._before:
            setattr(*self._before.pop())

    def watch(
        self, what: str, owner: Any, name: str, fired: Fired = lambda result, given, named: True
    ) -> None:
        """Counts the calls of a function that `fired` picks."""
        original = owner.__dict__[name]

        def watched(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            self.fired[what] += bool(fired(result, given, named))
            return result

        self.set(owner, name, watched)


@contextmanager
def without(names: Sequence[str]) -> Iterator[Patches]:
    """The baseline without these mechanisms, and everything counted."""
    patches = Patches()
    try:
        for name in names:
            MECHANISMS[name].off(patches)
        _watch_all(patches)
        yield patches
    finally:
        patches.restore()


@contextmanager
def here(names: Sequence[str]) -> Iterator[Patches]:
    """This checkout without these of its mechanisms, with its programmes priced as the baseline's."""
    patches = Patches()
    try:
        for name in names:
            MECHANISMS[name].off(patches)
        patches.watch("tries", module("surface").Kind, "try_began")
        patches.watch("believed", module("cost_grid").Grid, "believe")
        patches.watch("awaited", module("company").Company, "is_awaited", lambda waits, given, named: waits)
        _price_programmes(patches, "planner")
        yield patches
    finally:
        patches.restore()


def turn_off(names: Sequence[str]) -> None:
    """Turn the mechanism off in a server's own process until that ends."""
    for name in names:
        MECHANISMS[name].off(Patches())


def _watch_all(patches: Patches) -> None:
    """The counters, around whatever stands there now."""
    dispatching, slots = module("dispatching"), module("slots")
    lane_plan, rounding = module("lane_plan"), module("rounding")
    watch = patches.watch
    watch("prefetch", slots.SlotTable, "send_ahead")
    watch("margin", slots.SlotTable, "_begin", lambda _, given, named: _is_early(*given[1:3]))
    watch("cached plan", lane_plan.LanePlan, "outdated", lambda outdated, given, named: not outdated)
    watch("repair", lane_plan.LanePlan, "allowed")
    watch("budget", module("planning_budget").PlanningBudget, "spend", lambda spent, given, named: not spent)
    watch("division", dispatching, "portion", lambda portion, given, named: portion != (None, None))
    watch("preparations", module("call_costs").CallCosts, "_preparations", lambda s, given, named: s.any())
    watch(
        "caution",
        module("caution").Caution,
        "ended_late",
        lambda _, given, named: given[0].factor > FIRST_CAUTION,
    )
    watch("turn exchange", dispatching, "take_turn", lambda turn, given, named: turn is not given[0])
    watch("giving up", dispatching.Dispatching, "_give_up", lambda gone, given, named: gone is not None)
    watch("brimmed", module("admission"), "ahead_s", lambda _, given, named: named["crowded"])
    watch("trim", module("company"), "_latest_s", lambda latest_s, given, named: latest_s is not None)
    watch(
        "boundaries",
        module("boundary_learning").LearnedBoundaries,
        "look",
        lambda better, given, named: better,
    )
    watch(
        "exact", rounding.ShapeRounding, "start",
        lambda _, given, named: any(group.exact for group in given[0]._groups.values()),
    )  # fmt: skip
    watch("speeds", module("cost_base").CostBase, "speed", lambda speed, given, named: speed != 1.0)
    watch(
        "faster first", dispatching, "faster_first", lambda s, given, named: s is not _longest_free(given[0])
    )
    watch("fair room", module("queue_room").QueueRoom, "exceeds", lambda exceeds, given, named: exceeds)
    _watch_recalls(patches)
    _watch_probes(patches)
    _price_programmes(patches)


FIRST_CAUTION = 1.1
"""Where the factor begins."""
DEARER = 2.0
"""Times the price of a programme in the baseline's budget: on two busy cores a window of 64 took 0.55 ms with one padded
dimension and 1.0 ms with two, not 0.31 and 0.55 ms."""


def _is_early(slot: Any, batch: Any) -> bool:
    """Tell if the next batch may be sent earlier than the way to the slot takes."""
    return batch.commit_at is not None and batch.commit_at < batch.ends_at - slot.prefetch_s - 1e-9


def _longest_free(queue: Any) -> Any:
    return next(iter(queue.free.values()))


def _watch_recalls(patches: Patches) -> None:
    """Counts those for a free slot: others are for members that have ended."""
    dispatching = module("dispatching").Dispatching
    original = dispatching._recall_for_free

    def watched(self: Any, now: float, actions: Any) -> None:
        before = self._ledger.counters.batches_recalled
        original(self, now, actions)
        patches.fired["recall"] += self._ledger.counters.batches_recalled - before

    patches.set(dispatching, "_recall_for_free", watched)


def _watch_probes(patches: Patches) -> None:
    admission = module("admission")
    original = admission.Admission._with_deadline

    def watched(self: Any, arrival: Any, deadline: float, queue: Any, *more: Any) -> Any:
        before = queue.probes
        terms = original(self, arrival, deadline, queue, *more)
        patches.fired["probes"] += queue.probes > before and not isinstance(terms, admission.Refusal)
        return terms

    patches.set(admission.Admission, "_with_deadline", watched)


def _price_programmes(patches: Patches, planner: str = "lane_plan") -> None:
    """Counts the dynamic programmes, and what they take of the event loop."""
    cut_window = module(planner).cut_window

    def priced(window: Any, costs: Any, limits: Any, **named: Any) -> Any:
        patches.spent_s += DEARER * planning_s(
            len(window), min(limits.max_rows, len(window)), window.shapes.shape[1]
        )
        patches.fired["programmes"] += 1
        return cut_window(window, costs, limits, **named)

    patches.set(module(planner), "cut_window", priced)


def planning_s(requests: int, reach: int, dimensions: int) -> float:
    """Seconds of a programme as the baseline's budget prices it: `reach` requests in a segment at most."""
    segments = requests * min(requests, reach, 128)
    if dimensions < 2:
        return 150e-6 + requests * 2e-6 + segments * 15e-9
    return 300e-6 + requests * 2e-6 + segments * (dimensions // 2) * 120e-9


# ------------------------------------------------------------ prefetch


def _no_prefetch(patches: Patches) -> None:
    table = module("slots").SlotTable
    join = table.join

    def joined(self: Any, number: int, models: Any, queues: Any, prefetch_s: Any = None, *more: Any) -> None:
        join(self, number, models, queues, None, *more)

    patches.set(table, "join", joined)


def _no_recall(patches: Patches) -> None:
    """Leave a prefetched batch where it is; recalls for hangs and suspects remain."""
    dispatching = module("dispatching").Dispatching
    wakeup = dispatching.next_wakeup

    def without(self: Any) -> Any:
        ahead, self._slots.ahead_count = self._slots.ahead_count, 0
        try:
            return wakeup(self)
        finally:
            self._slots.ahead_count = ahead

    patches.set(dispatching, "_recall_for_free", lambda self, now, actions: None)
    patches.set(dispatching, "next_wakeup", without)


def _no_margin(patches: Patches) -> None:
    patches.set(module("slots"), "EARLY", 0.0)


# ------------------------------------------------------------ planning


def replanned(window: int, *, per_turn: bool) -> Patch:
    """A programme over a fixed window, unlimited, for every batch; or for every turn of the event loop.

    Exactly the anchor's segment runs. Per turn, the other segments go to the other slots that are free, and are forgotten.
    """

    def patch(patches: Patches) -> None:
        planner, lane_plan, segments = module("planner"), module("lane_plan"), module("segments")
        dispatching = module("dispatching").Dispatching
        run = dispatching.run
        kept: dict[int, list[Any]] = {}
        """Segments by lane."""

        def new_turn(self: Any, now: float, actions: Any) -> None:
            kept.clear()
            run(self, now, actions)

        def segment_of(bucket: Any, costs: Any, limits: Any, delayed: Any, budget: Any) -> Any:
            left = kept.get(id(bucket.lane), []) if per_turn else []
            if not any(bucket.shape in segment.counts for segment in left):
                present = lane_plan._at_least(bucket.lane, bucket.first().queue)
                reach = min(limits.max_rows, lane_plan.LARGEST_REACH)
                size = min(window, present, segments.PAIRS // reach)
                left = kept[id(bucket.lane)] = lane_plan.make_plan(
                    bucket, size, costs, limits, delayed
                ).segments
            segment = next(segment for segment in left if bucket.shape in segment.counts)
            left.remove(segment)
            return segment

        patches.set(dispatching, "run", new_turn)
        patches.set(planner, "current_plan", segment_of)
        patches.set(planner, "planned_company", _members)

    return patch


def _members(segment: Any, bucket: Any, costs: Any, limits: Any) -> Any:
    """Take as many requests of each size as the segment counted, from the bucket's first on."""
    buckets = bucket.first().queue.buckets
    found = bucket.prefix(limits.max_rows, segment.counts.get(bucket.shape, 1))
    rows = sum([request.rows for request in found])
    for shape, count in segment.counts.items():
        other = buckets.get(shape)
        if other is not None and other is not bucket:
            more = other.prefix(limits.max_rows - rows, count)
            found.extend(more)
            rows += sum([request.rows for request in more])
    return found


def _exact_segments(patches: Patches) -> None:
    """No repair of the cached plan: of each size as many as it counted, as far as they are there."""

    def members(plan: Any, bucket: Any, costs: Any, limits: Any) -> Any:
        segment = plan.segment(bucket)
        return bucket.prefix(limits.max_rows) if segment is None else _members(segment, bucket, costs, limits)

    patches.set(module("planner"), "planned_company", members)


def _no_plans(patches: Patches) -> None:
    """Only requests of equal shape share a batch."""
    patches.set(module("planner"), "current_plan", lambda *arguments: None)


def _no_budget(patches: Patches) -> None:
    """The cached plan is renewed whenever it is due."""
    budget = module("planning_budget").PlanningBudget

    def spend(self: Any, seconds: float) -> bool:
        self.spent_s += seconds
        self.cuts += 1
        return True

    patches.set(budget, "spend", spend)


def _greedy(patches: Patches) -> None:
    """No programme: the nearest sizes join as long as the seconds per request, weighed as in the programme, fall."""
    planner, company = module("planner"), module("company")

    def plan_of(bucket: Any, costs: Any, limits: Any, delayed: Any, budget: Any) -> Any:
        return delayed

    def members(delayed: Any, bucket: Any, costs: Any, limits: Any) -> Any:
        most = limits.max_rows
        found = bucket.prefix(most)
        rows, shape = sum([request.rows for request in found]), bucket.shape
        seconds = costs.call(rows, shape).seconds
        for other in _near(company, bucket):
            if rows >= most:
                break
            more = other.prefix(most - rows)
            if not more:
                continue
            more_rows = rows + sum([request.rows for request in more])
            larger = tuple(map(max, shape, other.shape))
            together_s = costs.call(more_rows, larger).seconds
            alone_s = costs.call(more_rows - rows, other.shape).seconds
            if together_s > seconds + alone_s:
                continue
            found.extend(more)
            rows, shape, seconds = more_rows, larger, together_s
        return found

    patches.set(planner, "current_plan", plan_of)
    patches.set(planner, "planned_company", members)


def _near(company: Any, bucket: Any, reach: int = 32) -> Iterator[Any]:
    buckets = bucket.lane.buckets
    at = bucket.lane.position(bucket)
    above, below = buckets[at + 1 : at + 1 + reach], reversed(buckets[max(0, at - reach) : at])
    for pair in zip_longest(above, below):
        for other in pair:
            if other is not None:
                yield other


def _no_division(patches: Patches) -> None:
    division = module("division")
    patches.set(module("dispatching"), "portion", lambda *arguments: division.ALL)


def _no_preparations(patches: Patches) -> None:
    """Cuts are not priced by what shapes are new to the device."""
    patches.set(module("call_costs"), "USES", inf)


# ------------------------------------------------------------ overload


def constant_factor(value: float) -> Patch:
    """Estimates count so many times, whatever became of them."""

    def patch(patches: Patches) -> None:
        caution = module("caution").Caution

        def begin(self: Any) -> None:
            self.factor = value
            self._burst_at, self._most = -inf, 0.0

        patches.set(caution, "__init__", begin)
        patches.set(caution, "ended_late", lambda self, arrived, now: None)
        patches.set(caution, "ended_well", lambda self, requests: None)

    return patch


def _no_probes(patches: Patches) -> None:
    patches.set(module("admission"), "PROBE_EVERY", 1 << 60)


def _idle_tries(patches: Patches) -> None:
    """An idle slot tries whatever seems hopeless."""
    patches.set(module("admission"), "PROBE_EVERY", 1)


def _no_turns(patches: Patches) -> None:
    patches.set(module("dispatching"), "take_turn", lambda anchor, urgent, clients, now: anchor)


def _no_giving_up(patches: Patches) -> None:
    patches.set(module("dispatching").Dispatching, "_give_up", lambda self, request, slot, now: None)


def crowded(at: float) -> Patch:
    """The wait is always estimated without its cap by all that waits (`inf`), or never; nothing is given up."""

    def patch(patches: Patches) -> None:
        _no_giving_up(patches)
        queue = module("model_queue").ModelQueue
        slot = queue.__dict__["brimmed_at"]

        class Fixed:
            def __get__(self, instance: Any, owner: Any) -> Any:
                return self if instance is None else at

            def __set__(self, instance: Any, value: float) -> None:
                slot.__set__(instance, value)

        patches.set(queue, "brimmed_at", Fixed())

    return patch


def _no_trim(patches: Patches) -> None:
    """Batches are not cut for the deadlines of their members."""
    patches.set(module("company"), "_latest_s", lambda members, costs, speed, now: None)


# ------------------------------------------------------------ the rest


def _no_learned_boundaries(patches: Patches) -> None:
    patches.set(module("boundary_learning").LearnedBoundaries, "observe", lambda self, shape, weight: False)


def _no_exact_quarter(patches: Patches) -> None:
    rounding = module("rounding").ShapeRounding
    begin = rounding.__init__

    def begun(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self._combinations += self._exact
        self._exact = 0

    patches.set(rounding, "__init__", begun)


def _no_speeds(patches: Patches) -> None:
    base = module("cost_base")
    patches.set(base.CostBase, "speed", lambda self, worker: 1.0)
    patches.set(base, "SPEED_STEP", 0.0)
    patches.set(module("dispatching"), "faster_first", _longest_free)


def _no_faster(patches: Patches) -> None:
    """Slots that have been free longest go first, however slow."""
    patches.set(module("dispatching"), "faster_first", _longest_free)


def _no_fair_room(patches: Patches) -> None:
    room = module("queue_room").QueueRoom
    patches.set(room, "exceeds", lambda self, client, nbytes: False)
    patches.set(room, "exceeds_s", lambda self, client, share_s, queued_s: False)


# ------------------------------------------------------------ this checkout's


def _no_tries(patches: Patches) -> None:
    patches.set(module("planner"), "may_be_due", lambda kind, sizes: False)


def _no_belief(patches: Patches) -> None:
    """The first call at a node counts as any other, and nothing is doubted."""
    patches.set(module("cost_grid").Grid, "knows", lambda self, sizes: True)


def _no_grid(patches: Patches) -> None:
    """A fixed part and one per element, fitted to the same points and to the traffic, in the place of the grid."""
    kind = module("surface").Kind
    begin = kind.__init__

    def begun(self: Any, profile: Any, table: Any, versions: Any, learned: Any = None) -> None:
        begin(self, profile, table, versions, learned)
        if self._grid is not None and table is not None:
            self._grid = None
            for point in table.points:
                elements = module("cost_grid").elements_of(point.sizes)
                self._line.observe(
                    1.0, elements, point.seconds, request_elements=elements / max(1, point.sizes[0])
                )

    patches.set(kind, "__init__", begun)


def _no_company(patches: Patches) -> None:
    """A free slot never waits for the requests that follow answers, and everything is prefetched."""
    company = module("company").Company
    patches.set(company, "is_awaited", lambda self, anchor, slot, now: False)
    patches.set(company, "will_be_awaited", lambda self, anchor, slot: False)


def constant(of: str, name: str, value: float, *also: str) -> Patch:
    """Another value of a constant, in its module and in those that import it."""

    def patch(patches: Patches) -> None:
        for owner in (of, *also):
            patches.set(module(owner), name, value)

    return patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """Something that can be turned off."""

    off: Patch
    watched: str
    """The counter that tells how often it was at work: 0 where it is off."""
    scenarios: Sequence[str]
    """Where it may matter."""
    replaced: bool = False
    """Something else takes its place, which the same counter may count."""
    is_here: bool = False
    """It is one of this checkout, and is compared with this checkout instead of the baseline."""


def _several(*names: str) -> Patch:
    def patch(patches: Patches) -> None:
        for name in names:
            MECHANISMS[name].off(patches)

    return patch


LIMIT = (
    "lognormal, 64",
    "lognormal, 256",
    "docstrings, 64",
    "lognormal, 60 %",
    "lognormal, 90 %",
    "docstrings, 90 %",
)
CHEAP = ("cheap, 0.25 ms", "cheap, 0.5 ms")
PLANNED = (*LIMIT[:3], *LIMIT[4:], "overload, lognormal", "endless, padded", *CHEAP)
LATE = (
    "overload, equal", "overload, greedy", "overload, noisy", "overload, costs believed 0.6", "overload, lognormal",
    "overload, mixed clients", "overload, mixed deadlines",
    "stalls, equal", "stalls, greedy", "stalls, twice the capacity",
)  # fmt: skip
HOPELESS = ("costs believed 60 times",)
CAPPED = ("endless, 64 shapes", "endless lengths, 32 shapes")
UNEQUAL = ("unequal workers, 64", "unequal workers, 90 %")

MECHANISMS: dict[str, Mechanism] = {
    "prefetch": Mechanism(
        off=_no_prefetch, watched="prefetch",
        scenarios=(*LIMIT, "lognormal, 64, two workers", "overload, equal", "endless, exact", *CHEAP),
    ),
    "recall": Mechanism(
        off=_no_recall, watched="recall",
        scenarios=("lognormal, 60 %", "lognormal, 90 %", "docstrings, 90 %", "unequal workers, 90 %"),
    ),
    "prefetch's margin": Mechanism(
        off=_no_margin, watched="margin", scenarios=(*LIMIT, "lognormal, 64, two workers", *CHEAP)
    ),
    "cached plan: 64 per batch": Mechanism(
        off=replanned(64, per_turn=False), watched="cached plan", scenarios=(*PLANNED, "bursts, 8 slots")
    ),
    **{
        f"cached plan: {window} per turn": Mechanism(
            off=replanned(window, per_turn=True), watched="cached plan", scenarios=(*PLANNED, "bursts, 8 slots")
        )
        for window in (32, 64, 128, 256)
    },
    "programmes: nearest sizes join": Mechanism(off=_greedy, watched="programmes", scenarios=PLANNED),
    "programmes: equal shapes alone": Mechanism(off=_no_plans, watched="programmes", scenarios=PLANNED),
    "repair": Mechanism(off=_exact_segments, watched="repair", scenarios=PLANNED),
    "budget": Mechanism(off=_no_budget, watched="budget", scenarios=("endless, padded", *CHEAP)),
    "division": Mechanism(
        off=_no_division, watched="division",
        scenarios=("lognormal, 60 %", "lognormal, 90 %", "unequal workers, 90 %", "bursts, 8 slots"),
    ),
    "preparations in cuts": Mechanism(
        off=_no_preparations, watched="preparations", scenarios=("endless, padded", *CAPPED)
    ),
    "caution: 1.1": Mechanism(off=constant_factor(1.1), watched="caution", scenarios=LATE),
    "caution: 1.25": Mechanism(off=constant_factor(1.25), watched="caution", scenarios=LATE, replaced=True),
    "caution: 1.4": Mechanism(off=constant_factor(1.4), watched="caution", scenarios=LATE, replaced=True),
    "probes": Mechanism(off=_no_probes, watched="probes", scenarios=HOPELESS),
    "probes: an idle slot tries": Mechanism(
        off=_idle_tries, watched="probes", scenarios=HOPELESS, replaced=True
    ),
    "turn exchange": Mechanism(off=_no_turns, watched="turn exchange", scenarios=LATE[4:7]),
    "giving up": Mechanism(off=_no_giving_up, watched="giving up", scenarios=LATE),
    "capped wait: always": Mechanism(off=crowded(-inf), watched="brimmed", scenarios=LATE),
    "capped wait: never": Mechanism(off=crowded(inf), watched="giving up", scenarios=LATE),
    "trim for deadlines": Mechanism(off=_no_trim, watched="trim", scenarios=LATE),
    "learned boundaries": Mechanism(off=_no_learned_boundaries, watched="boundaries", scenarios=CAPPED),
    "exact quarter": Mechanism(off=_no_exact_quarter, watched="exact", scenarios=CAPPED),
    "per-worker speeds": Mechanism(off=_no_speeds, watched="speeds", scenarios=UNEQUAL),
    "faster slots first": Mechanism(off=_no_faster, watched="faster first", scenarios=UNEQUAL),
    "fair room": Mechanism(off=_no_fair_room, watched="fair room", scenarios=("flood, no deadline",)),
}  # fmt: skip
_IDLE = ("probes: an idle slot tries", "turn exchange", "capped wait: never")
MECHANISMS |= {
    f"one factor: {factor}": Mechanism(
        off=_several(f"caution: {factor}", *_IDLE), watched="turn exchange", scenarios=(*LATE, *HOPELESS)
    )
    for factor in ("1.25", "1.4")
}
MECHANISMS["one factor and cap: 1.4"] = Mechanism(
    off=_several("caution: 1.4", *_IDLE[:2], "giving up"), watched="turn exchange", scenarios=LATE
)
_GONE = ("recall", "cached plan: 64 per turn", "one factor: 1.4")
MECHANISMS["all that went"] = Mechanism(
    off=_several(*_GONE), watched="recall", scenarios=(*LIMIT, *UNEQUAL, *LATE, *HOPELESS, *CAPPED, *CHEAP,
        "lognormal, 64, two workers", "bursts, 8 slots", "endless, padded", "endless, exact", "few lengths, 32 shapes"),
)  # fmt: skip
THIS = "this checkout"
"""Stands for no ablation: what is played is this checkout, against the baseline."""
MECHANISMS[THIS] = Mechanism(
    off=lambda patches: None,
    watched="programmes",
    scenarios=MECHANISMS["all that went"].scenarios,
    replaced=True,
    is_here=True,
)
HEAVY = (
    "heavy, 16 in flight", "heavy, 16 in flight, two slots", "heavy, 24 in flight", "heavy, 30 %", "heavy, 60 %",
    "heavy, 90 %", "one point of 1 s, 16", "ten times slower",
)  # fmt: skip
NON_LINEAR = (
    "device not full, 64", "steps of 8 rows, 64", "attention, 64", "calls of 1 s, 32", "one point of 1 s, 32",
    "one point of 0.3 s, 32", "linear, sharing pays now", "sharing paid, linear now", "ten times slower",
    "ten times faster", "cliff at 32 rows", "a cliff appears",
)  # fmt: skip
EVERYWHERE = (
    *NON_LINEAR,
    *LIMIT,
    *UNEQUAL,
    *CHEAP,
    "overload, lognormal",
    "overload, mixed clients",
    "endless, padded",
)
MECHANISMS |= {
    "grid": Mechanism(off=_no_grid, watched="believed", scenarios=EVERYWHERE, is_here=True),
    "tries": Mechanism(off=_no_tries, watched="tries", scenarios=EVERYWHERE, is_here=True),
    "belief": Mechanism(off=_no_belief, watched="believed", scenarios=EVERYWHERE, is_here=True),
    "company": Mechanism(off=_no_company, watched="awaited", scenarios=(*HEAVY, *EVERYWHERE), is_here=True),
    **{
        f"company: 1/{part}": Mechanism(
            off=constant("company", "SHARE", 1 / part, "recovery"),
            watched="awaited",
            scenarios=HEAVY,
            replaced=True,
            is_here=True,
        )
        for part in (4, 16, 32, 64)
    },
    "first tries: any padding": Mechanism(
        off=constant("tries", "MOST_PADDED", inf),
        watched="tries",
        scenarios=("one row measured, linear", *EVERYWHERE),
        replaced=True,
        is_here=True,
    ),
    "belief: any factor": Mechanism(
        off=constant("cost_grid", "FIRST_CLIP", inf),
        watched="believed",
        scenarios=("the first shared call stalls", *NON_LINEAR),
        replaced=True,
        is_here=True,
    ),
    "belief: a factor of 2": Mechanism(
        off=constant("cost_grid", "FIRST_CLIP", log(2.0)),
        watched="believed",
        scenarios=("the first shared call stalls", *NON_LINEAR),
        replaced=True,
        is_here=True,
    ),
    **{
        f"lately: {calls} calls": Mechanism(
            off=constant("cost_grid", "LATELY", calls, "surface"),
            watched="believed",
            scenarios=NON_LINEAR,
            replaced=True,
            is_here=True,
        )
        for calls in (4, 64, 1 << 40)
    },
    "tries and belief": Mechanism(
        off=_several("tries", "belief"), watched="tries", scenarios=EVERYWHERE, is_here=True
    ),
}
"""Ablations by name. A name with a colon puts something else in the place of the mechanism."""

"""What everything costs, as measured: tables that workers bring, kept true by every finished batch.

The scheduler asks; it decides nothing here. Workers whose tables have equal keys are alike and share one surface, so
that what one of them shows is known of all; each has a speed of its own. No clock: seconds come with the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from typing import Any, TypeAlias

from shapestream.scheduling.cost_kind import NOTHING_LEARNED, Kind, new_kind
from shapestream.scheduling.cost_surface import Surface
from shapestream.scheduling.elements import elements_of
from shapestream.scheduling.events import ModelProfile
from shapestream_engine.cost_table import CostTable
from shapestream_engine.learned_costs import LearnedCosts

__all__ = ["CostModel"]

Sizes: TypeAlias = tuple[int, ...]

WEIGHT = 0.2
"""Weight of the newest batch in the running means."""
CLOSE = 1.05
"""Times the least per request that a call may cost and be as good: where company hardly pays, it need not be large."""
MOST_KINDS = 32
"""Kinds of slots remembered per model; those without workers make room first."""


@dataclass(slots=True)
class _Model:
    profile: ModelProfile
    kinds: dict[str, Kind] = field(default_factory=dict)
    """By the key of the table; "" where there is none."""
    slots: dict[int, tuple[Kind, str]] = field(default_factory=dict)
    """The kind and the worker of each slot that has the model."""
    batch_s: float | None = None
    request_s: float | None = None
    """Running means."""
    usual: dict[tuple[int, int, Sizes], tuple[float, float]] = field(default_factory=dict)
    """`company_s` by version, rows and shape."""


@dataclass(frozen=True, slots=True)
class _Joined:
    worker: str
    costs: Mapping[str, CostTable]
    models: frozenset[str]


class CostModel:
    """Surfaces by model and kind of slot, and speeds by worker."""

    def __init__(self, known: Mapping[str, LearnedCosts] = NOTHING_LEARNED) -> None:
        """`known`: what an earlier server learned, by the digests of the tables that it corrects."""
        self._known = known
        self._models: dict[str, _Model] = {}
        self._joined: dict[int, _Joined] = {}
        self._versions = count(1)

    # ------------------------------------------------------------ who is there

    def add_model(self, profile: ModelProfile) -> None:
        """A model may be asked about; slots that have it may have joined before."""
        model = self._models[profile.name] = _Model(profile)
        for slot, joined in self._joined.items():
            if profile.name in joined.models:
                self._connect(model, slot, joined)

    def join(self, slot: int, worker: str, costs: Mapping[str, CostTable], models: Iterable[str]) -> None:
        """A slot has joined; a worker "" is one of its own."""
        joined = self._joined[slot] = _Joined(worker or f"slot {slot}", costs, frozenset(models))
        for name in joined.models:
            if name in self._models:
                self._connect(self._models[name], slot, joined)

    def _connect(self, model: _Model, slot: int, joined: _Joined) -> None:
        table = joined.costs.get(model.profile.name)
        if table is not None and table.dimensions != model.profile.dimensions:
            table = None  # of another model that was called the same
        kind = self._kind(model, table)
        kind.slots[joined.worker] += 1
        kind.base.join(joined.worker)
        if joined.worker not in kind.surfaces:
            for gone in kind.surfaces.keys() - kind.slots.keys():
                del kind.surfaces[gone]  # of the last worker before: its devices' shapes are not this one's
            kind.surfaces[joined.worker] = Surface(model.profile, kind.base, kind.new)
        model.slots[slot] = (kind, joined.worker)

    def _kind(self, model: _Model, table: CostTable | None) -> Kind:
        key = "" if table is None else table.key
        known = model.kinds.get(key)
        if known is not None and (known.points or table is None or not table.points):
            return known
        kind = new_kind(model.profile, table, self._versions, self._known)
        if known is not None and not known.slots:
            model.kinds.pop(key)
        elif known is not None:
            return known  # somebody learns already without a table; what was learned is as good
        if len(model.kinds) >= MOST_KINDS:
            idle = next((name for name, other in model.kinds.items() if not other.slots), None)
            if idle is not None:
                del model.kinds[idle]
        model.kinds[key] = kind
        return kind

    def leave(self, slot: int) -> None:
        """A slot is gone; what it has shown stays known."""
        if self._joined.pop(slot, None) is None:
            return
        for model in self._models.values():
            kind, worker = model.slots.pop(slot, (None, ""))
            if kind is None:
                continue
            kind.slots[worker] -= 1
            if not kind.slots[worker]:
                del kind.slots[worker]
                kind.base.leave(worker)
                if len(kind.surfaces) > 1:
                    del kind.surfaces[worker]

    # ------------------------------------------------------------ what was seen

    def observe(
        self,
        slot: int | None,
        model: str,
        sizes: Sizes,
        busy_s: float,
        preparations: int = 0,
        requests: int = 1,
    ) -> None:
        """Learns from a finished batch of these sizes. Times that cannot be (negative, not a number) are ignored."""
        known = self._models.get(model)
        if known is None or not (isfinite(busy_s) and busy_s >= 0.0):
            return
        kind, worker = self._of(known, slot)
        surface = self._surface(known, kind, worker)
        rows, shape = (sizes[0], sizes[1:]) if known.profile.has_batch else (1, sizes)
        calls = surface.calls(rows, shape)
        kind.base.ran(calls, busy_s)
        if preparations > 0 and kind.base.measured:
            steady_s = surface.second(rows, shape) * kind.base.speed(worker)
            kind.prepared(elements_of(calls[0][1]), steady_s, busy_s, preparations)
        elif preparations > 0:
            number = sum([count for count, _ in calls])
            elements = sum([count * elements_of(call) for count, call in calls])
            kind.paid.observe(number, elements, busy_s, request_elements=elements / max(1, requests))
        else:
            kind.base.learn(calls, busy_s, worker, requests=requests)
        surface.met(calls)
        kind.batches += 1
        _count(known, busy_s, busy_s / max(1, requests))

    # ------------------------------------------------------------ what it will cost

    def surface(self, model: str, slot: int | None = None) -> Surface:
        """Of the slot's kind; of the model's most common kind without one. Raises KeyError for an unknown model."""
        known = self._models[model]
        return self._surface(known, *self._of(known, slot))

    def speed(self, model: str, slot: int) -> float:
        """Seconds on this slot / seconds of its surface; 1.0 as long as nothing is known."""
        known = self._models.get(model)
        if known is None or slot not in known.slots:
            return 1.0
        kind, worker = known.slots[slot]
        return kind.base.speed(worker)

    def batch_s(self, model: str, sizes: Sizes, slot: int | None = None) -> float | None:
        """Predicted seconds of a slot for a batch; None while nothing is measured."""
        known = self._models.get(model)
        if known is None:
            return None
        kind, worker = self._of(known, slot)
        if not kind.base.measured:
            return None
        rows, shape = (sizes[0], sizes[1:]) if known.profile.has_batch else (1, sizes)
        speed = 1.0 if slot is None else kind.base.speed(worker)
        surface = self._surface(known, kind, worker)
        return speed * min(surface.second(rows, shape), surface.most_s(rows, shape))

    def rough_s(self, model: str, sizes: Sizes) -> float | None:
        """What a request alone took lately, while nothing is measured; None where nothing ran.

        Where every batch has a new shape, what preparing takes cannot be told from the rest: no deadline is held against
        it, but it was a slot's time all the same.
        """
        known = self._models.get(model)
        paid = None if known is None else self._of(known, None)[0].paid
        if paid is None or not paid.measured:
            return None
        return min(paid.second(elements_of(sizes)), paid.longest_s)

    def request_s(self, model: str, shape: Sizes | None = None, rows: int = 1) -> float | None:
        """Seconds of one slot that such a request costs in good company: batched with as many of its like as pays.

        Without a shape, those of the requests that ran lately, in the mean. None while nothing is measured.
        """
        if shape is None:
            known = self._models.get(model)
            return None if known is None else known.request_s
        company = self.company_s(model, shape, rows)
        return None if company is None else company[0]

    def company_s(self, model: str, shape: Sizes, rows: int = 1) -> tuple[float, float] | None:
        """The same, and how long the call lasts that it then is in; None while nothing is measured."""
        known = self._models.get(model)
        if known is None:
            return None
        surface = self.surface(model)
        if not surface.measured:
            return None
        key = (surface.version, rows, shape)
        cost = known.usual.get(key)
        if cost is None:
            if len(known.usual) >= 4096:
                known.usual.clear()
            cost = known.usual[key] = _in_company(surface, known.profile, rows, shape)
        most_s = surface.most_s(rows, shape)
        return min(cost[0], most_s), min(cost[1], most_s)

    def call_s(self, model: str) -> float | None:
        """Seconds of the batches that ran lately, in the mean; None before the first."""
        known = self._models.get(model)
        return None if known is None else known.batch_s

    def measured(self, model: str) -> bool:
        """Whether predictions are seconds, by a table or by what ran."""
        known = self._models.get(model)
        return known is not None and self._of(known, None)[0].base.measured

    def shapes(self, model: str) -> int:
        """Distinct call shapes that ran lately, on the worker that knows most."""
        known = self._models.get(model)
        surfaces = (
            [] if known is None else [s for kind in known.kinds.values() for s in kind.surfaces.values()]
        )
        return max([len(surface.known) for surface in surfaces], default=0)

    def describe(self, model: str) -> list[dict[str, Any]]:
        """The kinds of slots that have the model, as plain data."""
        known = self._models.get(model)
        return [] if known is None else [
            {
                "key": key,
                "points": kind.points,
                "measured": kind.base.measured,
                "batches": kind.batches,
                "version": kind.base.version,
                "slots": dict(kind.slots),
                "speeds": {worker: kind.base.speed(worker) for worker in kind.base.workers},
            }
            for key, kind in known.kinds.items()
        ]  # fmt: skip

    def learned(self, saved_at: float) -> list[LearnedCosts]:
        """What traffic made of each table, for the next server; `saved_at` is the time, in seconds since the epoch.

        Where a table serves several models, as under two names, what most batches made of it.
        """
        found: dict[str, LearnedCosts] = {}
        for model in self._models.values():
            for kind in model.kinds.values():
                learned = kind.learned(model.profile, saved_at)
                if learned is not None and (
                    learned.table not in found or found[learned.table].batches < learned.batches
                ):
                    found[learned.table] = learned
        return list(found.values())

    # ------------------------------------------------------------ finding

    def _of(self, model: _Model, slot: int | None) -> tuple[Kind, str]:
        """The kind and the worker of a slot; else of the most common kind, the one that joined first."""
        if slot is not None and slot in model.slots:
            return model.slots[slot]
        kinds = model.kinds
        if not kinds:
            kinds[""] = new_kind(model.profile, None, self._versions)
        kind = (
            max(kinds.values(), key=lambda kind: kind.slots.total())
            if len(kinds) > 1
            else next(iter(kinds.values()))
        )
        return kind, next(iter(kind.surfaces), "")

    @staticmethod
    def _surface(model: _Model, kind: Kind, worker: str) -> Surface:
        surface = kind.surfaces.get(worker)
        if surface is None:
            surface = kind.surfaces[worker] = Surface(model.profile, kind.base, kind.new)
        return surface


def _in_company(surface: Surface, profile: ModelProfile, rows: int, shape: Sizes) -> tuple[float, float]:
    """Seconds per request where they are least, and of the smallest call that comes close to that.

    A request without elements has no company.
    """
    calls = [(1, surface.second(rows, shape))]
    together = 2
    while profile.has_batch and rows and 0 not in shape and together * rows <= profile.max_batch:
        calls.append((together, surface.second(together * rows, shape)))
        together *= 2
    least_s = min([seconds / together for together, seconds in calls])
    return least_s, next(seconds for together, seconds in calls if seconds / together <= CLOSE * least_s)


def _count(model: _Model, batch_s: float, request_s: float) -> None:
    """The running means: a change is followed within about ten batches."""
    model.batch_s = batch_s if model.batch_s is None else model.batch_s + WEIGHT * (batch_s - model.batch_s)
    last = model.request_s
    model.request_s = request_s if last is None else last + WEIGHT * (request_s - last)

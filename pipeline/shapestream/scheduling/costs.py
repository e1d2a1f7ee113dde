"""Costs of batches, by model and slot: tables that workers bring, kept true by every finished batch.

The scheduler asks; it decides nothing here. No clock: seconds come with the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from types import MappingProxyType

from shapestream.scheduling.call_costs import CallBytes, CallCosts
from shapestream.scheduling.cost_grid import Sizes, elements_of
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.size_steps import SizeSteps
from shapestream.scheduling.surface import Kind, Surface
from shapestream_engine.cost_table import CostTable, LearnedCosts

NOTHING_LEARNED: Mapping[str, LearnedCosts] = MappingProxyType({})
WEIGHT = 0.2
"""Weight of the newest batch in the running means: a change is followed within about ten batches."""
MOST_KINDS = 32
"""Kinds remembered per model; those without workers make room first."""


@dataclass(slots=True)
class _Model:
    profile: ModelProfile
    rounding: ShapeRounding | None = None
    """The sizes that call shapes are rounded up to, where the model has a cap on them."""
    steps: SizeSteps | None = None
    """The step that sizes of requests are rounded up to, where they may be."""
    bytes: CallBytes = field(init=False)
    kinds: dict[str, Kind] = field(default_factory=dict)
    """By the key of the table; "" where there is none."""
    slots: dict[int, Surface] = field(default_factory=dict)
    """By the slots that have the model."""
    call_costs: dict[Kind | Surface, CallCosts] = field(default_factory=dict)
    """Shared by all surfaces of a kind as long as nothing is known to cost extra because a device has not met it."""
    batch_s: float | None = None
    """Running mean of a batch's seconds."""
    request_s: float | None = None
    """Running mean of a request's share of them."""

    def parted(self, sizes: Sizes) -> tuple[int, Sizes]:
        """Part sizes into rows and shape."""
        return (sizes[0], sizes[1:]) if self.profile.has_batch else (1, sizes)


@dataclass(frozen=True, slots=True)
class _Joined:
    worker: str
    costs: Mapping[str, CostTable]
    models: frozenset[str]


class CostModel:
    """Surfaces by model and slot."""

    def __init__(self, known: Mapping[str, LearnedCosts] = NOTHING_LEARNED) -> None:
        """`known`: what an earlier server learned, by the digests of the tables that it corrects."""
        self._known = known
        self._models: dict[str, _Model] = {}
        self._joined: dict[int, _Joined] = {}
        self._versions = count(1)

    # ------------------------------------------------------------ slots

    def add_model(self, profile: ModelProfile) -> None:
        """Take in a model; slots that have it may have joined before."""
        model = self._models[profile.name] = _Model(profile)
        if profile.max_shapes is not None:
            model.rounding = ShapeRounding(
                profile, lambda rows, shapes: self._surface(model).seconds(rows, shapes)
            )
        model.bytes = CallBytes(profile, model.rounding)
        if SizeSteps.suits(profile):
            model.steps = SizeSteps(profile, lambda: self._surface(model))
        for slot, joined in self._joined.items():
            if profile.name in joined.models:
                self._connect(model, slot, joined)

    def join(self, slot: int, worker: str, costs: Mapping[str, CostTable], models: Iterable[str]) -> None:
        """Take in a slot; with worker "" it is a worker of its own."""
        joined = self._joined[slot] = _Joined(worker or f"slot {slot}", costs, frozenset(models))
        for name in joined.models:
            if name in self._models:
                self._connect(self._models[name], slot, joined)

    def _connect(self, model: _Model, slot: int, joined: _Joined) -> None:
        table = joined.costs.get(model.profile.name)
        if table is not None and table.dimensions != model.profile.dimensions:
            table = None  # of another model that was called the same
        model.slots[slot] = self._kind(model, table).join(joined.worker)
        model.call_costs.clear()

    def _kind(self, model: _Model, table: CostTable | None) -> Kind:
        key = "" if table is None else table.key
        known = model.kinds.get(key)
        if known is not None and (known.has_points or known.slots or table is None or not table.points):
            # One that workers learn in already without a table knows as much as a table says.
            return known
        model.kinds.pop(key, None)
        if len(model.kinds) >= MOST_KINDS:
            idle = next((name for name, other in model.kinds.items() if not other.slots), None)
            if idle is not None:
                del model.kinds[idle]
        learned = None if table is None else self._known.get(table.digest)
        kind = model.kinds[key] = Kind(model.profile, table, self._versions, learned)
        return kind

    def leave(self, slot: int) -> None:
        """Forget a slot; what it has shown stays known."""
        if self._joined.pop(slot, None) is not None:
            for model in self._models.values():
                surface = model.slots.pop(slot, None)
                if surface is not None:
                    surface.kind.leave(surface)
                    model.call_costs.clear()

    def _surface(self, model: _Model, slot: int | None = None) -> Surface:
        """The surface of a slot; without one, of the worker that joined first of the most common kind."""
        if slot is not None and slot in model.slots:
            return model.slots[slot]
        kinds = model.kinds
        if not kinds:
            kinds[""] = Kind(model.profile, None, self._versions)
        kind = (
            max(kinds.values(), key=lambda kind: kind.slots) if len(kinds) > 1 else next(iter(kinds.values()))
        )
        if not kind.surfaces:
            kind.surfaces[""] = Surface(model.profile, kind, "")
        return next(iter(kind.surfaces.values()))

    # ------------------------------------------------------------ observations

    def observe(
        self,
        slot: int | None,
        model: str,
        sizes: Sizes,
        busy_s: float,
        preparations: int = 0,
        requests: int = 1,
    ) -> None:
        """Learn from a finished batch of these sizes. Times that cannot be (negative, not a number) are ignored."""
        known = self._models.get(model)
        if known is None or not (isfinite(busy_s) and busy_s >= 0.0):
            return
        surface = self._surface(known, slot)
        rows, shape = known.parted(sizes)
        calls = surface.calls(rows, shape)
        steady_s = surface.second(rows, shape) * surface.speed if preparations else 0.0
        surface.kind.observe(surface, calls, busy_s, preparations, requests, steady_s)
        surface.met(calls)
        if known.steps is not None:
            known.steps.ran(sizes)
        request_s = busy_s / max(1, requests)
        known.batch_s = busy_s if known.batch_s is None else known.batch_s + WEIGHT * (busy_s - known.batch_s)
        last_s = known.request_s
        known.request_s = request_s if last_s is None else last_s + WEIGHT * (request_s - last_s)

    def learned(self, saved_at: float) -> list[LearnedCosts]:
        """Return what traffic made of each table, for the next server; `saved_at`: seconds since the epoch.

        Where a table serves several models, as under two names, what most batches made of it.
        """
        found: dict[str, LearnedCosts] = {}
        for kind in [kind for model in self._models.values() for kind in model.kinds.values()]:
            learned = kind.learned(saved_at)
            if learned is not None and (
                learned.table not in found or found[learned.table].batches < learned.batches
            ):
                found[learned.table] = learned
        return list(found.values())

    # ------------------------------------------------------------ predictions

    def surface(self, model: str, slot: int | None = None) -> Surface:
        """Return the slot's surface, or that of the most common kind. Raises KeyError for an unknown model."""
        return self._surface(self._models[model], slot)

    def call_costs(self, model: str, slot: int | None = None) -> CallCosts:
        """Return the costs of the calls that batches become, on `surface`. Raises KeyError for an unknown model."""
        known = self._models[model]
        surface = self._surface(known, slot)
        owner = surface if surface.prepares else surface.kind
        costs = known.call_costs.get(owner)
        if costs is None:
            costs = known.call_costs[owner] = CallCosts(surface, known.profile, known.rounding)
        costs.renew()
        return costs

    def call_bytes(self, model: str) -> CallBytes:
        """Return what calls of a model hold."""
        return self._models[model].bytes

    def rounding(self, model: str) -> ShapeRounding | None:
        """Return the sizes that call shapes of a model are rounded up to; None where any may be run."""
        return self._models[model].rounding

    def steps(self, model: str) -> SizeSteps | None:
        """Return the step that sizes of a model's requests are rounded up to; None where they stay as they come."""
        return self._models[model].steps

    def speed(self, model: str, slot: int) -> float:
        """Return the seconds on this slot / those that its surface predicts; 1.0 as long as nothing is known.

        It turns predictions of this slot's surface into seconds on this slot; `pace` compares slots of several kinds.
        """
        known = self._models.get(model)
        return 1.0 if known is None or slot not in known.slots else known.slots[slot].speed

    def pace(self, model: str, slot: int, sizes: Sizes) -> float | None:
        """Return the seconds of a batch on this slot / on the most common kind; None while nothing is measured.

        It compares slots, and turns predictions without a slot (`batch_s`, `company_s`) into seconds on this one.
        """
        known = self._models[model]
        surface, usual = self._surface(known, slot), self._surface(known)
        if surface.kind is usual.kind:
            return surface.speed if surface.measured else None
        here_s, usual_s = self.batch_s(model, sizes, slot), self.batch_s(model, sizes)
        return here_s / usual_s if here_s and usual_s else None

    def expect(self, requests: Iterable[tuple[str, Sizes]]) -> None:
        """Price requests, by model and sizes, in one prediction per model; `company_s` and `batch_s` then look it up.

        What are no sizes of the model is left out: a request with such fails by itself.
        """
        asked: dict[str, list[tuple[int, Sizes]]] = {}
        for name, sizes in requests:
            known = self._models.get(name)
            if (
                known is not None
                and len(sizes) == len(known.profile.dimensions)
                and min(sizes, default=0) >= 0
            ):
                asked.setdefault(name, []).append(known.parted(sizes))
        for name, own in asked.items():
            self._surface(self._models[name]).expect(own)

    def batch_s(self, model: str, sizes: Sizes, slot: int | None = None) -> float | None:
        """Return the predicted seconds of a batch; None while nothing is measured."""
        known = self._models.get(model)
        if known is None:
            return None
        surface = self._surface(known, slot)
        if not surface.measured:
            return None
        rows, shape = known.parted(sizes)
        speed = 1.0 if slot is None else surface.speed
        return speed * min(surface.second(rows, shape), surface.longest_s(rows, shape))

    def company_s(self, model: str, shape: Sizes, rows: int = 1) -> tuple[float, float] | None:
        """Return `Surface.company_s` of the most common kind; None while nothing is measured."""
        known = self._models.get(model)
        surface = None if known is None else self._surface(known)
        return None if surface is None or not surface.measured else surface.company_s(rows, shape)

    def request_s(self, model: str) -> float | None:
        """Return the seconds of one slot per request that ran lately, in the mean; None before the first."""
        known = self._models.get(model)
        return None if known is None else known.request_s

    def call_s(self, model: str) -> float | None:
        """Return the seconds of the batches that ran lately, in the mean; None before the first."""
        known = self._models.get(model)
        return None if known is None else known.batch_s

    def rough_s(self, model: str, sizes: Sizes) -> float | None:
        """Return what a request alone took lately, while nothing is measured; None where nothing ran.

        Where every batch has a new shape, what preparing takes cannot be told from the rest: no deadline is held against
        it, but it was a slot's time all the same.
        """
        known = self._models.get(model)
        paid = None if known is None else self._surface(known).kind.paid
        return (
            None
            if paid is None or not paid.measured
            else min(paid.second(elements_of(sizes)), paid.longest_s)
        )

    def shapes(self, model: str) -> int:
        """Return how many call shapes ran lately, on the worker that knows most."""
        known = self._models.get(model)
        kinds = [] if known is None else list(known.kinds.values())
        return max([len(surface.known) for kind in kinds for surface in kind.surfaces.values()], default=0)

"""Costs of batches, by model and slot: tables that workers bring, kept true by every finished batch.

The scheduler asks; it decides nothing here. No clock: seconds come with the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from math import isfinite
from types import MappingProxyType

from shapestream.scheduling.batch_costs import BatchCosts
from shapestream.scheduling.call_costs import CallBytes, CallCosts
from shapestream.scheduling.cost_grid import Sizes, elements_of
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.size_steps import SizeSteps
from shapestream.scheduling.worker_class import WorkerClass
from shapestream_engine.cost_table import CostTable, LearnedCosts

NOTHING_LEARNED: Mapping[str, LearnedCosts] = MappingProxyType({})
WEIGHT = 0.2
"""Weight of the newest batch in the running means: a change is followed within about ten batches."""
MOST_KINDS = 32
"""Kinds remembered per model; those without workers make room first."""


class ModelCosts:
    """One model's surfaces: by kind of worker, and by slot."""

    __slots__ = (
        "_call_costs",
        "_known",
        "_most_common",
        "_slots",
        "_versions",
        "call_bytes",
        "kinds",
        "mean_batch_s",
        "mean_request_s",
        "profile",
        "rounding",
        "steps",
    )

    def __init__(
        self, profile: ModelProfile, known: Mapping[str, LearnedCosts], versions: Iterator[int]
    ) -> None:
        """`known`: what an earlier server learned, by the digests of the tables that it corrects.

        `versions`: numbers never used before, see `WorkerClass`.
        """
        self.profile = profile
        self._known = known
        self._versions = versions
        self.kinds: dict[str, WorkerClass] = {}
        """By the key of the table; "" where there is none."""
        self._slots: dict[int, BatchCosts] = {}
        """By the slots that have the model."""
        self._most_common: BatchCosts | None = None
        """See `surface`; None where it must be looked for."""
        self._call_costs: dict[WorkerClass | BatchCosts, CallCosts] = {}
        """Shared by all surfaces of a kind as long as nothing is known to cost extra because a device has not met it."""
        self.rounding = (
            None
            if profile.max_shapes is None
            else ShapeRounding(profile, lambda rows, shapes: self.surface().seconds(rows, shapes))
        )
        """The sizes that call shapes are rounded up to, where the model has a cap on them."""
        self.steps = SizeSteps(profile, self.surface) if SizeSteps.suits(profile) else None
        """The step that sizes of requests are rounded up to, where they may be."""
        self.call_bytes = CallBytes(profile, self.rounding)
        """Bytes of the inputs of its calls, and their bound."""
        self.mean_batch_s: float | None = None
        """Seconds of a batch, in the mean of those that ran lately; None before the first."""
        self.mean_request_s: float | None = None
        """Seconds of one slot per request, likewise."""

    # ------------------------------------------------------------ slots

    def join(self, slot: int, worker: str, table: CostTable | None) -> None:
        """Take in a slot of a worker, which brings a table or none."""
        if table is not None and table.dimensions != self.profile.dimensions:
            table = None  # of another model that was called the same
        self._slots[slot] = self._kind(table).join(worker)
        self._slots_changed()

    def take_in(self, table: CostTable) -> None:
        """Take in a table before the slots that bring it."""
        if table.dimensions == self.profile.dimensions:
            self._kind(table)

    def leave(self, slot: int) -> None:
        """Forget a slot; what it has shown stays known."""
        surface = self._slots.pop(slot, None)
        if surface is not None:
            surface.kind.leave(surface)
            self._slots_changed()

    def _slots_changed(self) -> None:
        self._most_common = None
        self._call_costs.clear()

    def _kind(self, table: CostTable | None) -> WorkerClass:
        key = "" if table is None else table.key
        known = self.kinds.get(key)
        if known is not None and (known.has_points or known.slots or table is None or not table.points):
            # One that workers learn in already without a table knows as much as a table says.
            return known
        self.kinds.pop(key, None)
        if len(self.kinds) >= MOST_KINDS:
            idle = next((name for name, other in self.kinds.items() if not other.slots), None)
            if idle is not None:
                del self.kinds[idle]
        learned = None if table is None else self._known.get(table.digest)
        kind = self.kinds[key] = WorkerClass(self.profile, table, self._versions, learned)
        return kind

    def surface(self, slot: int | None = None) -> BatchCosts:
        """Return the slot's surface; without one, that of the worker that joined first of the most common kind."""
        found = self._most_common if slot is None else self._slots.get(slot)
        if found is None:
            found = self._most_common
        if found is None:
            found = self._most_common = self._first_of_most_common()
        return found

    def _first_of_most_common(self) -> BatchCosts:
        kinds = self.kinds
        if not kinds:
            kinds[""] = WorkerClass(self.profile, None, self._versions)
        kind = max(kinds.values(), key=lambda kind: kind.slots)
        if not kind.surfaces:
            kind.surfaces[""] = BatchCosts(self.profile, kind, "")
        return next(iter(kind.surfaces.values()))

    # ------------------------------------------------------------ observations

    def observe(
        self, slot: int, sizes: Sizes, busy_s: float, preparations: int = 0, requests: int = 1
    ) -> None:
        """Learn from a finished batch of these sizes. Times that cannot be (negative, not a number) are ignored."""
        if not (isfinite(busy_s) and busy_s >= 0.0):
            return
        surface = self.surface(slot)
        rows, shape = self._parted(sizes)
        calls = surface.calls(rows, shape)
        steady_s = surface.second(rows, shape) * surface.slowdown if preparations else 0.0
        surface.kind.observe(surface, calls, busy_s, preparations, requests, steady_s)
        surface.met(calls)
        if self.steps is not None:
            self.steps.ran(sizes)
        self.mean_batch_s = _moved(self.mean_batch_s, busy_s)
        self.mean_request_s = _moved(self.mean_request_s, busy_s / max(1, requests))

    # ------------------------------------------------------------ predictions

    def call_costs(self, slot: int | None = None) -> CallCosts:
        """Return the costs of the calls that batches become, on `surface`."""
        surface = self.surface(slot)
        owner = surface if surface.prepares else surface.kind
        costs = self._call_costs.get(owner)
        if costs is None:
            costs = self._call_costs[owner] = CallCosts(surface, self.profile, self.rounding)
        costs.renew()
        return costs

    def slowdown(self, slot: int) -> float:
        """Return the seconds on this slot / those that its surface predicts; 1.0 as long as nothing is known.

        It turns predictions of this slot's surface into seconds on this slot; `pace` compares slots of several kinds.
        """
        surface = self._slots.get(slot)
        return 1.0 if surface is None else surface.slowdown

    def pace(self, slot: int, sizes: Sizes) -> float | None:
        """Return the seconds of a batch on this slot / on the most common kind; None while nothing is measured.

        It compares slots, and turns predictions without a slot (`batch_s`, `company_s`) into seconds on this one.
        """
        surface = self.surface(slot)
        if surface.kind is self.surface().kind:
            return surface.slowdown if surface.measured else None
        here_s, usual_s = self.batch_s(sizes, slot), self.batch_s(sizes)
        return here_s / usual_s if here_s and usual_s else None

    def expect(self, requests: Iterable[Sizes]) -> None:
        """Price requests in one prediction; `company_s` and `batch_s` then look it up.

        What are no sizes of the model is left out: a request with such fails by itself.
        """
        number = len(self.profile.dimensions)
        self.surface().expect(
            [self._parted(sizes) for sizes in requests if len(sizes) == number and min(sizes, default=0) >= 0]
        )

    def batch_s(self, sizes: Sizes, slot: int | None = None) -> float | None:
        """Return the predicted seconds of a batch; None while nothing is measured."""
        surface = self.surface(slot)
        if not surface.measured:
            return None
        rows, shape = self._parted(sizes)
        slowdown = 1.0 if slot is None else surface.slowdown
        return slowdown * min(surface.second(rows, shape), surface.longest_s(rows, shape))

    def company_s(self, sizes: Sizes) -> tuple[float, float] | None:
        """Return `BatchCosts.company_s` of the most common kind; None while nothing is measured."""
        surface = self.surface()
        return surface.company_s(*self._parted(sizes)) if surface.measured else None

    def rough_s(self, sizes: Sizes) -> float | None:
        """Return what a request alone took lately, while nothing is measured; None where nothing ran.

        Where every batch has a new shape, what preparing takes cannot be told from the rest: no deadline is held against
        it, but it was a slot's time all the same.
        """
        paid = self.surface().kind.paid
        return min(paid.second(elements_of(sizes)), paid.longest_s) if paid.measured else None

    @property
    def shapes(self) -> int:
        """How many call shapes ran lately, on the worker that knows most."""
        return max(
            [len(surface.known) for kind in self.kinds.values() for surface in kind.surfaces.values()],
            default=0,
        )

    def _parted(self, sizes: Sizes) -> tuple[int, Sizes]:
        """Part sizes into rows and shape."""
        return (sizes[0], sizes[1:]) if self.profile.has_batch else (1, sizes)


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + WEIGHT * (newest - mean)


class CostModel(dict[str, ModelCosts]):
    """The costs of each model, by name."""

    def __init__(self, known: Mapping[str, LearnedCosts] = NOTHING_LEARNED) -> None:
        """`known`: what an earlier server learned, by the digests of the tables that it corrects."""
        super().__init__()
        self._known = known
        self._joined: dict[int, tuple[str, Mapping[str, CostTable], frozenset[str]]] = {}
        """By slot: its worker, the tables that it brought, and its models, which may be added later."""
        self._versions = count(1)

    def add_model(self, profile: ModelProfile) -> ModelCosts:
        """Take in a model; slots that have it may have joined before."""
        model = self[profile.name] = ModelCosts(profile, self._known, self._versions)
        for slot, (worker, costs, models) in self._joined.items():
            if profile.name in models:
                model.join(slot, worker, costs.get(profile.name))
        return model

    def take_in(self, model: str, table: CostTable) -> None:
        """Take in a table of a model, if it is known, before the slots that bring it."""
        if (costs := self.get(model)) is not None:
            costs.take_in(table)

    def join(self, slot: int, worker: str, costs: Mapping[str, CostTable], models: Iterable[str]) -> None:
        """Take in a slot; with worker "" it is a worker of its own."""
        worker, names = worker or f"slot {slot}", frozenset(models)
        self._joined[slot] = worker, costs, names
        for name in names & self.keys():
            self[name].join(slot, worker, costs.get(name))

    def leave(self, slot: int) -> None:
        """Forget a slot; what it has shown stays known."""
        if self._joined.pop(slot, None) is not None:
            for model in self.values():
                model.leave(slot)

    def learned(self, saved_at: float) -> list[LearnedCosts]:
        """Return what traffic made of each table, for the next server; `saved_at`: seconds since the epoch.

        Where a table serves several models, as under two names, what most batches made of it.
        """
        found: dict[str, LearnedCosts] = {}
        for kind in [kind for model in self.values() for kind in model.kinds.values()]:
            learned = kind.learned(saved_at)
            if learned is not None and (
                learned.table not in found or found[learned.table].batches < learned.batches
            ):
                found[learned.table] = learned
        return list(found.values())

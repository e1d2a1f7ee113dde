"""Costs of batches, by model and slot: tables that workers bring, kept true by every finished batch.

The scheduler asks; it decides nothing here. No clock: seconds come with the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from math import inf
from types import MappingProxyType

from shapestream.scheduling.call_bytes import CallBytes
from shapestream.scheduling.cost_grid import Floats, Integers, Sizes, elements_of
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.size_steps import SizeSteps
from shapestream.scheduling.worker_class import WorkerClass
from shapestream.scheduling.worker_costs import WorkerCosts
from shapestream_engine.cost_table import CostTable, LearnedCosts

NOTHING_LEARNED: Mapping[str, LearnedCosts] = MappingProxyType({})
WEIGHT = 0.2
"""Weight of the newest batch in the running means: a change is followed within about ten batches."""
MOST_CLASSES = 32
"""Worker classes remembered per model. When another one comes, one without workers is forgotten."""


class ModelCosts:
    """The costs of one model's batches, by slot and by worker class."""

    __slots__ = (
        "_known",
        "_slots",
        "_usual",
        "_versions",
        "_wide",
        "_workers",
        "call_bytes",
        "mean_batch_s",
        "mean_request_s",
        "profile",
        "rounding",
        "steps",
        "worker_classes",
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
        self.worker_classes: dict[str, WorkerClass] = {}
        """By the key of the table; "" where there is none."""
        self._slots: dict[int, WorkerCosts] = {}
        """By the slots that have the model."""
        self._workers: dict[tuple[WorkerClass, str], WorkerCosts] = {}
        """By the workers of these slots."""
        self._wide: set[str] = set()
        """The keys of the tables of wide slots: nothing is usual there."""
        self._usual: WorkerCosts | None = None
        """See `on`; None where it must be looked for."""
        self.rounding = (
            None
            if profile.max_shapes is None
            else ShapeRounding(profile, self._usual_seconds, self._sizes_changed)
        )
        """The sizes that call shapes are rounded up to, where the model has a cap on them."""
        self.steps = SizeSteps(profile, self.on) if SizeSteps.suits(profile) else None
        """The step that sizes of requests are rounded up to, where they may be."""
        self.call_bytes = CallBytes(profile, self.rounding)
        """Bytes of the inputs of its calls, and their bound."""
        self.mean_batch_s: float | None = None
        """Moving average of a batch's seconds; None before the first."""
        self.mean_request_s: float | None = None
        """Moving average of slot seconds per request; None before the first."""

    # ------------------------------------------------------------ slots

    def join(self, slot: int, worker: str, table: CostTable | None, *, wide: bool = False) -> None:
        """Add a slot of a worker; `table`: the costs that the worker measured, if any."""
        if table is not None and table.dimensions != self.profile.dimensions:
            table = None  # of another model that was called the same
        if wide:
            if table is None:
                return  # without prices it gets nothing
            self._wide.add(table.key)
        worker_class = self._class_of(table)
        worker_class.join(worker)
        name = worker_class, worker
        if name not in self._workers:
            self._workers[name] = WorkerCosts(worker_class, worker)
        self._slots[slot] = self._workers[name]
        self._usual = None

    def take_in(self, table: CostTable) -> None:
        """Add a worker's table before its slots join."""
        if table.dimensions == self.profile.dimensions:
            self._class_of(table)

    def leave(self, slot: int) -> None:
        """Remove a slot. What its batches taught stays known."""
        costs = self._slots.pop(slot, None)
        if costs is not None:
            costs.worker_class.leave(costs.worker)
            if not costs.worker_class.has(costs.worker):
                del self._workers[costs.worker_class, costs.worker]
            self._usual = None

    def _class_of(self, table: CostTable | None) -> WorkerClass:
        key = "" if table is None else table.key
        known = self.worker_classes.get(key)
        if known is not None and (known.has_points or known.slots or table is None or not table.points):
            # One that workers learn in already without a table knows as much as a table says.
            return known
        self.worker_classes.pop(key, None)
        if len(self.worker_classes) >= MOST_CLASSES:
            idle = next((name for name, other in self.worker_classes.items() if not other.slots), None)
            if idle is not None:
                del self.worker_classes[idle]
        learned = None if table is None else self._known.get(table.digest)
        worker_class = self.worker_classes[key] = self._new_class(table, learned)
        return worker_class

    def _new_class(self, table: CostTable | None, learned: LearnedCosts | None) -> WorkerClass:
        return WorkerClass(self.profile, table, self._versions, self.call_bytes, learned)

    def on(self, slot: int | None = None) -> WorkerCosts:
        """Return the costs on a slot; without a slot, on the first worker of the class with the most slots."""
        if slot is not None and (own := self._slots.get(slot)) is not None:
            return own
        if self._usual is None:
            worker_classes = self.worker_classes
            if not worker_classes:
                worker_classes[""] = self._new_class(None, None)
            usual = [each for key, each in worker_classes.items() if key not in self._wide]
            most_common = max(usual or worker_classes.values(), key=lambda each: each.slots)
            here = (costs for costs in self._workers.values() if costs.worker_class is most_common)
            self._usual = next(here, None) or WorkerCosts(most_common, "")
        return self._usual

    def _usual_seconds(self, rows: Integers, shapes: Integers) -> Floats:
        """Return `WorkerClass.seconds` of the most common worker class."""
        return self.on().worker_class.seconds(rows, shapes)

    def _sizes_changed(self) -> None:
        """Begin a new version of all prices: calls are rounded to other sizes than before."""
        for worker_class in self.worker_classes.values():
            worker_class.renew()

    # ------------------------------------------------------------ observations

    def observe(
        self, slot: int, sizes: Sizes, busy_s: float, preparations: int = 0, requests: int = 1
    ) -> None:
        """Learn from a finished batch of these sizes, which took `busy_s` seconds of its slot.

        Times that are negative or not finite are ignored. `preparations`: calls whose shapes were new to the device.
        """
        if not 0.0 <= busy_s < inf:
            return
        costs = self.on(slot)
        rows, shape = self._parted(sizes)
        costs.worker_class.observe(costs.worker, rows, shape, busy_s, preparations, requests)
        costs.met(rows, shape)
        if self.steps is not None:
            self.steps.ran(sizes)
        each_s = busy_s / (requests or 1)
        if self.mean_batch_s is None or self.mean_request_s is None:
            self.mean_batch_s, self.mean_request_s = busy_s, each_s
        else:
            self.mean_batch_s += WEIGHT * (busy_s - self.mean_batch_s)
            self.mean_request_s += WEIGHT * (each_s - self.mean_request_s)

    # ------------------------------------------------------------ predictions

    def pace(self, slot: int, sizes: Sizes) -> float | None:
        """Return the seconds of a batch on this slot / on the most common worker class; None while nothing is measured.

        It compares slots, and turns predictions without a slot (`batch_s`, `batched_share_s`) into seconds on this one.
        `WorkerCosts.slowdown` compares workers of one class alone.
        """
        usual = self._usual or self.on()
        own = self._slots.get(slot, usual)
        if own.worker_class is usual.worker_class:
            return own.worker_class.slowdown(own.worker) if own.worker_class.measured else None
        here_s, usual_s = self.batch_s(sizes, slot), self.batch_s(sizes)
        return here_s / usual_s if here_s and usual_s else None

    def expect(self, requests: Iterable[Sizes]) -> None:
        """Price the shapes of several requests at once, which takes less time; they are looked up later.

        Sizes that do not fit the model are left out: such a request fails by itself.
        """
        number, first = len(self.profile.dimensions), 1 if self.profile.has_batch else 0
        fitting = [sizes for sizes in requests if len(sizes) == number and min(sizes, default=0) >= 0]
        self.on().worker_class.price([sizes[first:] for sizes in fitting])

    def batch_s(self, sizes: Sizes, slot: int | None = None) -> float | None:
        """Return the predicted seconds of a batch; None while nothing is measured."""
        worker = self.on(slot)
        prices = worker.worker_class
        if not prices.measured:
            return None
        rows, shape = self._parted(sizes)
        slowdown = 1.0 if slot is None else worker.slowdown
        return slowdown * min(prices.second(rows, shape), prices.longest_s(rows, shape))

    @property
    def least_s(self) -> float:
        """Predicted seconds of a call of the smallest sizes; 0.0 while nothing is measured."""
        return self.batch_s((1,) * len(self.profile.dimensions)) or 0.0

    def batched_share_s(self, sizes: Sizes) -> tuple[float, float] | None:
        """Return `WorkerClass.batched_share_s` of the most common worker class; None while nothing is measured."""
        prices = self.on().worker_class
        return prices.batched_share_s(*self._parted(sizes)) if prices.measured else None

    def rough_s(self, sizes: Sizes) -> float | None:
        """Return the seconds that a lone request took lately, preparation included; None before any ran.

        It prices requests while nothing is measured. Where every batch has a new shape, the preparation cannot be told
        from the call. So this price is charged to clients, but no deadline is refused because of it.
        """
        paid = self.on().worker_class.paid
        return min(paid.second(elements_of(sizes)), paid.longest_s) if paid.measured else None

    @property
    def shapes(self) -> int:
        """The number of call shapes that ran lately, on the worker that knows most of them."""
        return max([len(costs.known) for costs in self._workers.values()], default=0)

    def _parted(self, sizes: Sizes) -> tuple[int, Sizes]:
        """Split sizes into rows and shape."""
        return (sizes[0], sizes[1:]) if self.profile.has_batch else (1, sizes)


class CostModel(dict[str, ModelCosts]):
    """The costs of each model, by name."""

    def __init__(self, known: Mapping[str, LearnedCosts] = NOTHING_LEARNED) -> None:
        """`known`: what an earlier server learned, by the digests of the tables that it corrects."""
        super().__init__()
        self._known = known
        self._joined: dict[int, tuple[str, Mapping[str, CostTable], frozenset[str], bool]] = {}
        """By slot: its worker, the tables that it brought, its models, which may be added later, and whether it is wide."""
        self._versions = count(1)

    def add_model(self, profile: ModelProfile, like: str | None = None) -> ModelCosts:
        """Add a model; slots that serve it may have joined before. Those of `like`, and what it has learned, are its own."""
        key, known = profile.key, self._known
        if like is not None and like in self:
            classes = self[like].worker_classes.values()
            learned = [found for one in classes if (found := one.learned(0.0)) is not None]
            known = {**known, **{one.table: one for one in learned}}
        model = self[key] = ModelCosts(profile, known, self._versions)
        for slot, (worker, costs, models, wide) in [*self._joined.items()]:
            if like in models:
                models |= {key}
                costs = {**costs, key: costs[like]} if like in costs else costs
                self._joined[slot] = worker, costs, models, wide
            if key in models:
                model.join(slot, worker, costs.get(key), wide=wide)
        return model

    def remove_model(self, key: str) -> None:
        """Forget a model, and which slots serve it."""
        del self[key]
        for slot, (worker, costs, models, wide) in [*self._joined.items()]:
            if key in models:
                left = {name: table for name, table in costs.items() if name != key}
                self._joined[slot] = worker, left, models - {key}, wide

    def take_in(self, model: str, table: CostTable) -> None:
        """Add a worker's table of a model before its slots join; unknown models are ignored."""
        if (costs := self.get(model)) is not None:
            costs.take_in(table)

    def join(
        self,
        slot: int,
        worker: str,
        costs: Mapping[str, CostTable],
        models: Iterable[str],
        *,
        wide: bool = False,
    ) -> None:
        """Add a slot; with worker "" it is a worker of its own."""
        worker, names = worker or f"slot {slot}", frozenset(models)
        self._joined[slot] = worker, costs, names, wide
        for name in names.intersection(self):
            self[name].join(slot, worker, costs.get(name), wide=wide)

    def leave(self, slot: int) -> None:
        """Remove a slot. What its batches taught stays known."""
        if self._joined.pop(slot, None) is not None:
            for model in self.values():
                model.leave(slot)

    def learned(self, saved_at: float) -> list[LearnedCosts]:
        """Return the corrections of each table, for the next server; `saved_at`: seconds since the epoch.

        Where a table serves several models, the corrections that more batches made are returned.
        """
        found: dict[str, LearnedCosts] = {}
        for worker_class in [
            worker_class for model in self.values() for worker_class in model.worker_classes.values()
        ]:
            learned = worker_class.learned(saved_at)
            if learned is not None and (
                learned.table not in found or found[learned.table].batches < learned.batches
            ):
                found[learned.table] = learned
        return list(found.values())

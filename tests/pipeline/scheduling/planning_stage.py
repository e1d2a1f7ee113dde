"""Queues, requests and costs for the planner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import inf, prod
from typing import Any

import numpy as np
import pytest

from shapestream.scheduling.call_bytes import CallBytes
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import Arrival, InputBytes, ModelProfile
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import Cut
from shapestream.scheduling.queueing import Request
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.worker_class import WorkerClass
from shapestream.scheduling.worker_costs import WorkerCosts

OWN_PRICES = pytest.mark.pure("gives the scheduler prices of a class of its own")


class FormulaPrices:
    """Prices by a formula of a call's rows and the elements of a row, and what new shapes cost extra."""

    def __init__(
        self,
        formula: Callable[[Any, Any], Any],
        *,
        measured: bool = True,
        new: Callable[[int, tuple[int, ...]], float] | None = None,
        exact: dict[tuple[int, ...], float] | None = None,
    ) -> None:
        self.formula = formula
        self.measured = measured
        self.new = new
        self.exact = exact or {}
        """Seconds of calls of just these sizes, rows first."""
        self.asked = 0
        """Calls that were priced."""

    def second(self, rows: int, shape: tuple[int, ...]) -> float:
        """Return the seconds of one call."""
        return self.exact.get((rows, *shape), float(self.formula(rows, prod(shape))))

    def costs(self, profile: ModelProfile, rounding: ShapeRounding | None = None) -> WorkerCosts:
        """Return a worker's costs of a model by these prices."""
        return _FormulaCosts(_FormulaClass(self, profile, rounding), "")


class _FormulaClass(WorkerClass):
    """Workers whose calls take what a formula says, and which learn nothing."""

    def __init__(self, prices: FormulaPrices, profile: ModelProfile, rounding: ShapeRounding | None) -> None:
        super().__init__(profile, None, count(1), CallBytes(profile, rounding))
        self.formula = prices
        self.measured = prices.measured
        self.new.measured = prices.new is not None
        self.longest_call_s = inf

    def seconds(self, rows: Any, shapes: Any) -> Any:
        """Return what the formula says."""
        prices = self.formula
        prices.asked += len(rows)
        seconds = np.asarray(prices.formula(rows, shapes.prod(axis=1)), dtype=np.float64)
        for (known_rows, *known), value in prices.exact.items():
            seconds[(rows == known_rows) & (shapes == known).all(axis=1)] = value
        return seconds


class _FormulaCosts(WorkerCosts):
    def preparation_s(self, rows: int, shape: tuple[int, ...]) -> float:
        """Return what `new` says."""
        new = self.worker_class.formula.new
        return 0.0 if new is None else new(rows, shape)

    def preparations_s(self, shape: tuple[int, ...]) -> list[float]:
        """Return it for each number of rows."""
        return [self.preparation_s(rows, shape) for rows in range(1, self.profile.max_batch + 1)]


def affine(fixed_s: float = 0.01, element_s: float = 0.001, **options: Any) -> FormulaPrices:
    """A fixed part per call, and so much per element."""
    return FormulaPrices(lambda rows, elements: fixed_s + element_s * rows * elements, **options)


def make_queue(padded: Sequence[bool] = (True,), **options: Any) -> ModelQueue:
    """A queue of a model with a batch axis."""
    options = {"max_batch": 8, "has_batch": True, **options}
    names = ("batch", "height", "width", "depth")
    dimensions = len(padded) + (1 if options["has_batch"] else 0)
    profile = ModelProfile(
        name="m",
        dimensions=names[: len(padded) + 1] if options["has_batch"] else names[1 : len(padded) + 1],
        paddable=(False, *padded) if options["has_batch"] else tuple(padded),
        inputs=(InputBytes(nbytes=1, axes=tuple(range(dimensions))),),
        **options,
    )
    return ModelQueue(profile, CostModel().add_model(profile), QueueRoom(1000, 10**9))


class Waiting:
    """The requests of one queue, numbered in the order of arrival."""

    def __init__(self, queue: ModelQueue) -> None:
        self.queue = queue
        self.count = 0
        self._costs: dict[FormulaPrices, WorkerCosts] = {}

    def costs(self, prices: FormulaPrices) -> WorkerCosts:
        """The costs of calls by such prices, the same ones each time."""
        if prices not in self._costs:
            self._costs[prices] = prices.costs(self.queue.profile)
        return self._costs[prices]

    def arrive(
        self,
        *sizes: tuple[int, ...],
        rank: float | None = None,
        nbytes: int = 1,
        deadline: float | None = None,
    ) -> list[Request]:
        """Requests of these sizes, rows first."""
        arrived = []
        for rows, *shape in sizes:
            order = self.count
            self.count += 1
            flow = self.queue.flow_of(0)
            sizes_of_it = (rows, *shape) if self.queue.has_batch else tuple(shape)
            arrival = Arrival(
                id=order, client=0, model="m", sizes=sizes_of_it, nbytes=nbytes, deadline=deadline
            )
            self.queue.shares.stamp(flow, arrival, 0.0)
            place = float(order) if rank is None else rank
            request = Request(arrival, flow, place, order, 0.0, has_batch=self.queue.has_batch)
            self.queue.add(request, request.rank)
            arrived.append(request)
        return arrived

    def first(self) -> Request:
        """Who goes next."""
        first = self.queue.turns.first()
        assert first is not None
        return first

    def start(self, cut: Cut) -> None:
        """Takes a batch out."""
        self.queue.take(cut.members[0], cut.members)


def ids(cut: Cut) -> set[int]:
    """The numbers of a batch's members."""
    return {request.id for request in cut.members}

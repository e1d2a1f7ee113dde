"""Queues, requests and costs for the planner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest

from shapestream.scheduling.call_costs import CallCosts
from shapestream.scheduling.cost_grid import LinearCost
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import Arrival, InputBytes, ModelProfile
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import Cut
from shapestream.scheduling.queueing import Request

OWN_PRICES = pytest.mark.pure("gives the scheduler prices of a class of its own")


class FormulaPrices:
    """Costs by a formula of a call's rows and the elements of a row, and what new shapes cost extra."""

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
        self.worker_class = self
        """What a `WorkerClass` says of itself is said here, too."""
        self.has_grid = True
        """They never change."""
        self.new = LinearCost()
        self.new.measured = new is not None
        self._new = new
        self.exact = exact or {}
        """Costs of calls of just these sizes, rows first."""
        self.version = 1
        self.max_batch = 8
        self.asked = 0

    def seconds(self, rows, shapes):
        """Of batches, as `BatchCosts.seconds`."""
        self.asked += len(rows)
        seconds = np.asarray(self.formula(rows, shapes.prod(axis=1)), dtype=np.float64)
        for (known_rows, *known), value in self.exact.items():
            seconds[(rows == known_rows) & (shapes == known).all(axis=1)] = value
        return seconds

    def second(self, rows: int, shape: tuple[int, ...]) -> float:
        """Of one batch."""
        return self.exact.get((rows, *shape), float(self.formula(rows, prod(shape))))

    def row_seconds(self, shapes):
        """Of batches of 0 to `max_batch` rows, as `BatchCosts.row_seconds`."""
        rows = np.arange(self.max_batch + 1)
        return [
            self.seconds(rows, np.broadcast_to(np.array(shape, np.intp), (len(rows), len(shape))))
            for shape in shapes
        ]

    def longest_s(self, rows: int, shape: tuple[int, ...]) -> float:
        """No bound."""
        return float("inf")

    def preparation_s(self, rows: int, shape: tuple[int, ...]) -> float:
        """What `new` says."""
        return 0.0 if self._new is None else self._new(rows, shape)

    def preparations_s(self, shape: tuple[int, ...]) -> list[float]:
        """Of 1 to `max_batch` rows, as `BatchCosts.preparations_s`."""
        return [self.preparation_s(rows, shape) for rows in range(1, self.max_batch + 1)]


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
    return ModelQueue(profile, CostModel().add_model(profile), QueueRoom(1000, 10**9, None))


class Waiting:
    """The requests of one queue, numbered in the order of arrival."""

    def __init__(self, queue: ModelQueue) -> None:
        self.queue = queue
        self.count = 0
        self._costs: dict[FormulaPrices, CallCosts] = {}

    def costs(self, prices: FormulaPrices) -> CallCosts:
        """The costs of calls by such prices, the same ones each time."""
        prices.max_batch = self.queue.profile.max_batch
        costs = self._costs.setdefault(prices, CallCosts(prices, self.queue.profile))
        costs.renew()
        return costs

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
            self.queue.shares.stamp(flow, 0.0, 0)
            sizes_of_it = (rows, *shape) if self.queue.has_batch else tuple(shape)
            arrival = Arrival(
                id=order, client=0, model="m", sizes=sizes_of_it, nbytes=nbytes, deadline=deadline
            )
            place = float(order) if rank is None else rank
            request = Request(arrival, self.queue, flow, place, order, 0.0)
            self.queue.add(request)
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

"""Who may come in: the bounds of the queue, and the reasons for which a request is turned away at once.

The queue is bounded in requests and in bytes, over all models. When it is full, new requests are refused
with `overloaded` and an estimate of when it will have drained; nothing that was admitted is ever dropped
to make room. Requests that wait to be run again were admitted before, and are never refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.events import Arrival
from shapestream.scheduling.model_queue import ModelQueue

MAX_RETRY_AFTER_S = 60.0
"""No caller is asked to wait longer than this, however slow the model."""


class Refusal(NamedTuple):
    """Why a request does not come in."""

    code: str
    message: str
    retry_after_s: float | None = None


class Admission:
    """The queue's bounds, and what fills them.

    `waiting` are the models with waiting requests, and `costs` what they cost: for the estimate alone.
    """

    __slots__ = (
        "costs",
        "draining",
        "max_queued_bytes",
        "max_queued_requests",
        "queued_bytes",
        "queued_requests",
        "waiting",
    )

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_bytes: int,
        waiting: Mapping[str, ModelQueue],
        costs: CostModel,
    ) -> None:
        if max_queued_requests < 1 or max_queued_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        self.max_queued_requests = max_queued_requests
        self.max_queued_bytes = max_queued_bytes
        self.waiting = waiting
        self.costs = costs
        self.queued_requests = 0
        self.queued_bytes = 0
        self.draining = False

    def refusal(self, arrival: Arrival, queue: ModelQueue | None, now: float) -> Refusal | None:
        """Why this request for the model of `queue` must not come in, or None if it may."""
        if self.draining:
            return Refusal("draining", "the server finishes what it has and takes nothing new")
        if queue is None:
            return Refusal("unavailable", f"no model {arrival.model!r} is served here")
        if arrival.deadline is not None and arrival.deadline <= now:
            return Refusal("deadline_exceeded", "the deadline had passed on arrival")
        nbytes = arrival.nbytes
        if self.queued_requests < self.max_queued_requests:
            if self.queued_bytes + nbytes <= self.max_queued_bytes:
                return None
            if nbytes > self.max_queued_bytes:
                message = f"the request holds {nbytes} bytes; the queue takes {self.max_queued_bytes} at most"
                return Refusal("too_large", message)
        message = (
            f"the queue is full: {self.queued_requests} of {self.max_queued_requests} requests, "
            f"{self.queued_bytes} of {self.max_queued_bytes} bytes"
        )
        return Refusal("overloaded", message, self.drain_s())

    def drain_s(self) -> float | None:
        """Seconds until what waits will have been started, as estimated; None while nothing is measured.

        Models are taken to share their slots, so their times add up: the estimate errs upwards.
        """
        total: float | None = None
        for queue in self.waiting.values():
            request_s = self.costs.request_s(queue.profile.name)
            if request_s is not None and queue.waiting:
                total = (total or 0.0) + queue.waiting * request_s / max(1, queue.slot_count)
        return None if total is None else min(total, MAX_RETRY_AFTER_S)

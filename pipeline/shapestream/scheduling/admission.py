"""Who may come in: the bounds of the queue, and the reasons for which a request is turned away at once.

The queue is bounded in requests and in bytes, over all models. When it is full new requests are refused
with `overloaded` and an estimate of when it will have drained; nothing that was admitted is ever dropped
to make room. Requests that wait to be run again were admitted before, and are never refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.lanes import ModelQueue

MAX_RETRY_AFTER_S = 60.0
"""No caller is asked to wait longer than this, however slow the model."""


class Refusal(NamedTuple):
    """Why a request does not come in."""

    code: str
    message: str
    retry_after_s: float | None = None


class Admission:
    """The queue's bounds and what fills them."""

    __slots__ = ("draining", "max_queued_bytes", "max_queued_requests", "queued_bytes", "queued_requests")

    def __init__(self, max_queued_requests: int, max_queued_bytes: int) -> None:
        if max_queued_requests < 1 or max_queued_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        self.max_queued_requests = max_queued_requests
        self.max_queued_bytes = max_queued_bytes
        self.queued_requests = 0
        self.queued_bytes = 0
        self.draining = False

    def has_room(self, nbytes: int) -> bool:
        """Whether one more request of so many bytes fits now."""
        return (
            self.queued_requests < self.max_queued_requests
            and self.queued_bytes + nbytes <= self.max_queued_bytes
        )

    def refusal(self, nbytes: int, queues: Iterable[ModelQueue], costs: CostModel) -> Refusal:
        """Why a request that found no room does not come in."""
        if nbytes > self.max_queued_bytes:
            message = f"the request holds {nbytes} bytes; the queue holds {self.max_queued_bytes} at most"
            return Refusal("too_large", message)
        message = (
            f"the queue is full: {self.queued_requests} of {self.max_queued_requests} requests, "
            f"{self.queued_bytes} of {self.max_queued_bytes} bytes"
        )
        return Refusal("overloaded", message, drain_s(queues, costs))


def drain_s(queues: Iterable[ModelQueue], costs: CostModel) -> float | None:
    """Seconds until what waits will have been started, as estimated; None while nothing has been measured.

    Models are taken to share their slots fully, so their times add up: the estimate errs upwards.
    """
    total = 0.0
    measured = False
    for queue in queues:
        request_s = costs.request_s(queue.profile.name)
        if request_s is not None and queue.waiting:
            measured = True
            total += queue.waiting * request_s / max(1, queue.slot_count)
    return min(total, MAX_RETRY_AFTER_S) if measured else None

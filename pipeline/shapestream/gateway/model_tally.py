"""The counts of a model at this gateway: its requests, and the times that the server told with their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shapestream.gateway.model_pages import VERSION
from shapestream.wire.messages import Timings


class ModelTally:
    """The requests of one model that this gateway has answered since its start."""

    __slots__ = (
        "batches",
        "failed",
        "failed_us",
        "last_ms",
        "queue_us",
        "rows",
        "run_us",
        "succeeded",
        "total_us",
    )

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed = 0
        self.rows = 0
        self.batches = 0.0
        """Inference calls. A request that shared one with others counts as its part of it."""
        self.total_us = 0
        self.failed_us = 0
        self.queue_us = 0
        self.run_us = 0
        self.last_ms = 0
        """The time of the last request, in milliseconds since 1970."""

    def succeed(self, rows: int, timings: Timings, now_s: float) -> None:
        """Count a request of so many rows that has a result; `now_s` is seconds since 1970."""
        self.succeeded += 1
        self.rows += rows
        self.batches += 1 / max(timings.batch_requests, 1)
        self.total_us += timings.total_us
        self.queue_us += timings.queue_us
        self.run_us += timings.run_us
        self.last_ms = int(now_s * 1000)

    def fail(self, seconds: float, now_s: float) -> None:
        """Count a request that failed after so many seconds."""
        self.failed += 1
        self.failed_us += round(seconds * 1e6)
        self.last_ms = int(now_s * 1000)

    def to_dict(self, name: str) -> dict[str, Any]:
        """Return the counts as the statistics extension has them. Times are in nanoseconds."""
        done = self.succeeded
        nothing = {"count": 0, "ns": 0}
        rest_us = max(self.total_us - self.queue_us - self.run_us, 0)
        return {
            "name": name,
            "version": VERSION,
            "last_inference": self.last_ms,
            "inference_count": self.rows,
            "execution_count": round(self.batches),
            "inference_stats": {
                "success": {"count": done, "ns": self.total_us * 1000},
                "fail": {"count": self.failed, "ns": self.failed_us * 1000},
                "queue": {"count": done, "ns": self.queue_us * 1000},
                # The server tells the rest of its time, before and after the call, in one.
                "compute_input": {"count": done, "ns": rest_us * 1000},
                "compute_infer": {"count": done, "ns": self.run_us * 1000},
                "compute_output": {"count": done, "ns": 0},
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [],
            "memory_usage": [],
            "response_stats": {},
        }


def statistics_of(tallies: Mapping[str, ModelTally], models: Iterable[str]) -> dict[str, Any]:
    """Return the counts of these models, also of those that nothing has been counted for."""
    nothing = ModelTally()
    return {"model_stats": [tallies.get(name, nothing).to_dict(name) for name in models]}

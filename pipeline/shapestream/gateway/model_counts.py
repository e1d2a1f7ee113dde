"""Counts of the requests that one gateway process answered, in the form of Triton's statistics."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from shapestream.gateway.infer_response import MODEL_VERSION
from shapestream.wire.messages import Timings


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, microseconds: float) -> None:
        self.count += 1
        self.ns += round(microseconds * 1000)

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class ModelCounts:
    """The counts of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last_ms = 0
        self._rows = 0
        self._calls = 0.0
        self._success, self._fail, self._queue, self._infer = (_Duration() for _ in range(4))

    def answered(self, rows: int, timings: Timings) -> None:
        """Count an answer. Times are those of the server."""
        self._last_ms = round(time.time() * 1000)
        self._rows += rows
        # Each member of a call counts its part of it.
        self._calls += 1 / max(1, timings.batch_requests)
        self._success.add(timings.total_us)
        self._queue.add(timings.queue_us)
        self._infer.add(timings.run_us)

    def failed(self, seconds: float) -> None:
        """Count a request without an answer, which took so long."""
        self._fail.add(seconds * 1e6)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. Copies of tensors into and out of a call count as its time; nothing is cached."""
        nothing = _Duration().to_dict()
        return {
            "name": self.name,
            "version": MODEL_VERSION,
            "last_inference": self._last_ms,
            "inference_count": self._rows,
            "execution_count": round(self._calls),
            "inference_stats": {
                "success": self._success.to_dict(),
                "fail": self._fail.to_dict(),
                "queue": self._queue.to_dict(),
                "compute_input": {"count": self._success.count, "ns": 0},
                "compute_infer": self._infer.to_dict(),
                "compute_output": {"count": self._success.count, "ns": 0},
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [],
        }


class AllCounts(defaultdict[str, ModelCounts]):
    """The counts by model. Only models that exist are looked up, so their number is bounded."""

    def __missing__(self, name: str) -> ModelCounts:
        counts = self[name] = ModelCounts(name)
        return counts

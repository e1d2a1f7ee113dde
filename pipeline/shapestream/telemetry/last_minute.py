"""The last minute of a server: its counters now, minus those of a minute ago.

The server's heartbeat takes a snapshot of the counters every few seconds; nothing is done per request. All times are
arguments, in seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from copy import copy
from typing import Any, NamedTuple

import msgpack

from shapestream.slices import Slices
from shapestream.telemetry.counters import ModelCounters, ServerStatistics

WINDOW_S = 60.0
SNAPSHOT_S = 5.0
"""Seconds between two snapshots. The window is longer than a minute by up to this time."""
MAX_BYTES = 256 * 1024
"""Bytes for models in a `StatisticsEntry`, which holds 1 MiB. The models with the fewest requests are left out first."""
_SCHEDULER_BYTES = 224
"""Bytes of a model's part of the scheduler's statistics: 10 numbers of 9 bytes, and their keys."""
MODELS_PER_SLICE = 4
"""Models that one turn of the event loop turns into plain data: each takes up to 0.4 ms."""
COPIES_PER_SLICE = 64
"""Models that one turn of the event loop copies for a snapshot: each takes up to 20 us."""
_NOTHING = ModelCounters()


class _Snapshot(NamedTuple):
    taken_at: float
    models: dict[str, ModelCounters]
    refused: Counter[str]


class LastMinute:
    """The changes of a server's counters within a minute.

    A snapshot takes about 6 KB for each model that was used since the one before. Unused models share its copy.
    """

    def __init__(self, counters: ServerStatistics, now: float) -> None:
        self._counters = counters
        self._snapshots = deque([_Snapshot(now, {}, Counter())])
        """The oldest first. After `take`, at most one of them is older than a minute."""

    def take(self, now: float) -> Slices[None]:
        """Take a snapshot, unless the last one is younger than `SNAPSHOT_S`. Take one at a time."""
        snapshots = self._snapshots
        last = snapshots[-1]
        if now < last.taken_at + SNAPSHOT_S:
            return
        models = {}
        for place, (name, model) in enumerate(list(self._counters.models.items())):
            if place % COPIES_PER_SLICE == 0:
                yield
            before = last.models.get(name, _NOTHING)
            models[name] = copy(model) if model.activity != before.activity else before
        snapshots.append(_Snapshot(now, models, self._counters.refused))
        while snapshots[1].taken_at <= now - WINDOW_S:
            snapshots.popleft()

    def to_dict(self, now: float, served: Iterable[str]) -> Slices[dict[str, Any]]:
        """Return the last minute as plain data, of the models that changed and of those that are `served`.

        `seconds` is the length of the window: shorter soon after the start, else longer than a minute by up to
        `SNAPSHOT_S` and a heartbeat.
        """
        begin = next(
            (one for one in reversed(self._snapshots) if one.taken_at <= now - WINDOW_S), self._snapshots[0]
        )
        models = dict.fromkeys(served, (_NOTHING, _NOTHING))
        for name, model in self._counters.models.items():
            before = begin.models.get(name, _NOTHING)
            if before.activity != model.activity:
                models[name] = model, before
        told: dict[str, Any] = {}
        room = MAX_BYTES
        for place, (name, (model, before)) in enumerate(sorted(models.items(), key=_busiest)):
            if place % MODELS_PER_SLICE == 0:
                yield
            row = (model - before).to_dict()
            room -= len(msgpack.packb(row)) + _SCHEDULER_BYTES + 2 * len(name.encode())
            if room < 0:
                break
            told[name] = row
        return {
            "seconds": round(now - begin.taken_at, 3),
            "models": told,
            "models_left_out": len(models) - len(told),
            "refused": dict(self._counters.refused - begin.refused),
        }


def _busiest(item: tuple[str, tuple[ModelCounters, ModelCounters]]) -> int:
    _, (model, before) = item
    return before.arrived - model.arrived

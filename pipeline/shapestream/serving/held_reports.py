"""Reports that wait for the next ones of their slots, so that one turn of the event loop takes them together.

To answer a batch takes a turn of the loop: a decision, messages to the client and to the slot, and mostly the client's next
request, which takes another turn. For calls of a millisecond, that costs as much as the call. So the report of a batch waits
while its slot has work: as long as more batches are left there than reports of it wait. Half of a bundle is answered
together while the other half runs. A slot that has one batch, and one behind it, has its reports taken at once.

A report waits for `HOLD_S` at most. One that failed, or has a deadline that comes before that, does not wait, and ends the
wait of the others.
"""

from __future__ import annotations

import math

from shapestream.scheduling.batches import Batch
from shapestream.scheduling.bundles import BUNDLE_S
from shapestream.serving.workers import SlotRecord
from shapestream_engine.batch import BatchReport

HOLD_S = BUNDLE_S
"""Seconds that a report waits at most: those of a bundle, since a slot is not late before."""


class HeldReports:
    """The reports that the scheduler has not been told, in the order in which they came."""

    __slots__ = ("_counts", "_reports", "until")

    def __init__(self) -> None:
        self._reports: list[tuple[BatchReport, Batch, float]] = []
        self._counts: dict[SlotRecord, int] = {}
        self.until = math.inf
        """When they have waited long enough, in seconds of the server's clock."""

    def add(self, report: BatchReport, batch: Batch, now: float) -> None:
        """Let a report wait that has just come; `until` tells for how long."""
        slot: SlotRecord = batch.slot.peer
        self._reports.append((report, batch, now))
        held = self._counts[slot] = self._counts.get(slot, 0) + 1
        ends_at = now + HOLD_S
        if (
            held >= len(slot.running)
            or report.code is not None
            or any(arrival.deadline is not None and arrival.deadline <= ends_at for arrival in batch.arrivals)
        ):
            ends_at = now
        if ends_at < self.until:
            self.until = ends_at

    def take(self) -> list[tuple[BatchReport, Batch, float]]:
        """Return them all, each with its batch and with the time by which that had ended; none waits any more."""
        taken = []
        latest: dict[SlotRecord, float] = {}
        for report, batch, came_at in reversed(self._reports):
            slot: SlotRecord = batch.slot.peer
            ended_at = min(came_at, latest.get(slot, came_at))
            latest[slot] = ended_at - report.busy_s  # the batch before it had ended when it began
            taken.append((report, batch, ended_at))
        self._reports.clear()
        self._counts.clear()
        self.until = math.inf
        return taken[::-1]

"""What a run has to show as a whole, beyond answers that are right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shapestream import Timings


def worker_of(slot: str) -> str:
    """The worker's name, from the `worker/slot` of statistics and timings."""
    return slot.rpartition("/")[0]


def workers_of(timings: Sequence[Timings]) -> list[str]:
    """The workers that took part."""
    return sorted({worker_of(each.worker) for each in timings})


def shortcomings(timings: Sequence[Timings], *, requests: int) -> list[str]:
    """What is missing: answers, a batch of several requests, a second worker."""
    found = []
    if len(timings) != requests:
        found.append(f"{len(timings)} answers to {requests} requests")
    if all(each.batch_requests < 2 for each in timings):
        found.append("no batch of several requests ran")
    workers = workers_of(timings)
    if len(workers) < 2:
        found.append(f"fewer than two workers took part: {', '.join(workers) or 'none'}")
    return found


def padded(timings: Sequence[Timings], lengths: Sequence[int]) -> bool:
    """Tell whether some batch held requests of several lengths; `lengths` are parallel to `timings`.

    Answers of one batch have its worker and its microseconds in common, and are as many as it had requests.
    """
    batches = defaultdict[tuple[str, int, int], list[int]](list)
    for each, length in zip(timings, lengths, strict=True):
        batches[each.worker, each.run_us, each.batch_requests].append(length)
    return any(
        len(members) == requests and len(set(members)) > 1 for (_, _, requests), members in batches.items()
    )

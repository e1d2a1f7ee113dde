"""Tries: now and then a batch is larger than its predicted seconds justify, so that every prediction is tested.

A prediction that sharing does not pay forbids the shared calls that would correct it. So while enough requests wait, the
batch former cuts a batch of twice the rows, at a power of two, where the grid has a node:

- at once, if such a call never ran, is doubted (cost_grid.py), or was short when it ran after a long time. The last try
  must have ended and taught something;
- else every `EVERY` batches, if no such call ran lately.

The second sort may cost at most `SHARE` of the seconds of all batches since the last try, by prediction, beyond what its
requests would cost apart. The first sort is not bounded by its price, only by its padding (`MOST_PADDED`). A try that pays
is followed by one of twice as many rows, because these never ran. There are no tries of fewer rows: small batches come by
themselves when few requests wait.

Deadlines and the limits of a batch hold for a try as for any other batch.
"""

from __future__ import annotations

from shapestream.scheduling.batch_costs import Calls
from shapestream.scheduling.worker_class import WorkerClass

EVERY = 24
"""Batches between two tries of calls that ran before. A change shall be found within 50 batches, and a device on which 16
rows begin to share a call well needs four tries in a row."""
SHARE = 0.01
"""Part of the slots' seconds that tries may cost."""

MOST_PADDED = 1.25
"""Largest ratio of the elements of a first try to those of its requests apart. A predicted price is no reason against a
call that never ran, but its padding is."""


def tried_rows(rows: int, max_rows: int) -> int:
    """Return the rows of a try beside a batch of `rows`: the largest power of two up to twice as many."""
    return min(max_rows, 1 << (2 * rows).bit_length() - 1)


def may_be_due(worker_class: WorkerClass, calls: Calls) -> bool:
    """Tell whether a batch of these calls should be tried if it costs nothing more."""
    if not worker_class.measured:
        return False
    if worker_class.batches_since_try >= EVERY:
        return not worker_class.met_lately(calls)
    return not worker_class.awaits_try and not worker_class.knows(calls)


def is_due(worker_class: WorkerClass, calls: Calls, excess_s: float, padded: float) -> bool:
    """Tell whether a batch of these calls should be tried.

    `excess_s`: what it is predicted to take more than its requests apart. `padded`: its elements / those of the calls apart.
    """
    if not may_be_due(worker_class, calls):
        return False
    return excess_s <= SHARE * worker_class.busy_s_since_try or (
        padded <= MOST_PADDED and not worker_class.knows(calls)
    )

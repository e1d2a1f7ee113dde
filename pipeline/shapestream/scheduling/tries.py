"""Tries: now and then a batch is larger than its predicted seconds justify, so that every prediction is tested.

A prediction that says that sharing does not pay is corrected by shared calls alone, and forbids them. So while enough
requests wait, the batch former cuts a batch of twice the rows, at a power of two, where costs have a node of their own:

- at once, if such a call never ran, or costs have changed since, or it was short after it had not run for long, and the
  last try has taught something;
- else every `EVERY` batches, if no such call ran lately.

What a try is predicted to cost more than its requests would cost apart is at most `SHARE` of the seconds that other
batches took since the last try. So the first try of a size may cost whatever it does, and all later ones together cost
1 % of the slots. A try that pays is followed by one of twice as many rows, since these never ran. There are no tries of
fewer rows: small batches come by themselves when few requests wait.

Deadlines and the limits of a batch hold for a try as for any other batch.
"""

from __future__ import annotations

from shapestream.scheduling.batch_costs import Calls
from shapestream.scheduling.worker_class import WorkerClass

EVERY = 24
"""Batches between two tries of calls that ran before. A change is to be found within 50 batches, and a model that lets 16
rows share a call from then on needs four tries in a row."""
SHARE = 0.01
"""Part of the slots' seconds that tries may cost."""

MOST_PADDED = 1.25
"""Elements of a first try / elements of its requests apart, at most. What is predicted of a call that never ran is no
reason against it, but its padding is."""


def tried_rows(rows: int, max_rows: int) -> int:
    """Return the rows of a try beside a batch of `rows`: the largest power of two up to twice as many."""
    return min(max_rows, 1 << (2 * rows).bit_length() - 1)


def may_be_due(kind: WorkerClass, calls: Calls) -> bool:
    """Tell whether a batch of these calls should be tried if it costs nothing more."""
    if not kind.measured:
        return False
    if kind.batches_since_try >= EVERY:
        return not kind.met_lately(calls)
    return not kind.awaits_try and not kind.knows(calls)


def is_due(kind: WorkerClass, calls: Calls, excess_s: float, padded: float) -> bool:
    """Tell whether a batch of these calls should be tried.

    `excess_s`: what it is predicted to take more than its requests apart. `padded`: its elements / those of the calls apart.
    """
    if not may_be_due(kind, calls):
        return False
    return excess_s <= SHARE * kind.busy_s_since_try or (padded <= MOST_PADDED and not kind.knows(calls))

"""Tries: every price is tested, and tested again when costs may have changed (`Tries`).

A prediction that sharing does not pay forbids the shared calls that would correct it. So while enough requests wait, the
batch former cuts a batch of twice the rows, at a power of two, where the grid has a node (`Tries.is_due`):

- at once, if such a call is not known, or was short when it ran after a long time. The last try must have ended and taught
  something;
- else every `EVERY` batches, if no such call ran lately.

The second sort may cost at most `TRIES_PART` of the seconds of all batches since the last try, by prediction, beyond what
its requests would cost apart. The first sort is not bounded by its price, only by its padding (`MOST_PADDED`). A try that
pays is followed by one of twice as many rows, because these never ran. There are no tries of fewer rows: small batches come
by themselves when few requests wait. Deadlines and the limits of a batch hold for a try as for any other batch.

**Known.** A node of the grid (cost_grid.py) is known if it was measured, or if a call ran there and costs have not changed
since. The first call at a node that is not known is believed: fully if it is shorter than expected, up to
`cost_grid.FIRST_CLIP` if it is longer.

**Doubt.** When costs change, nodes become unknown again. Two rules find a change:

- `LASTING` batches in a row on one worker are off by more than `CLIP`, all in one direction (`lasting_change`).
- Sizes that seldom run never make up such a row. So the differences of those in a row that were short are added up by
  themselves (`ran`). Without this, a device that from now on costs a fixed part only is not found within 50 batches
  (tests/workers/lab/test_tried_prices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

CLIP = log(1.5)
"""Largest logarithm of observed / expected seconds that one batch counts for: a machine that stalls says nothing about the
model."""
LASTING = 4
"""Batches in a row that are off by more than that, all of them longer or all shorter: then the costs have changed. With
lognormal noise of sigma 0.4, which is much, it happens by chance once in 1,900 batches, with 0.3 once in 6,700.

Calls that had not run lately are few. In a row of short ones their differences count, and must be as much together."""
LATELY = 16
"""A node was visited *lately* if one of the last so many calls ran there."""
EVERY = 24
"""Batches between two tries of calls that ran before. A change shall be found within 50 batches, and a device on which 16
rows begin to share a call well needs four tries in a row."""
TRIES_PART = 0.01
"""Part of the slots' seconds that tries may cost."""
MOST_PADDED = 1.25
"""Largest ratio of the elements of a first try to those of its requests apart. A predicted price is no reason against a
call that never ran, but its padding is."""
_NEVER = -1


def tried_rows(rows: int, max_rows: int) -> int:
    """Return the rows of a try beside a batch of `rows`: the largest power of two up to twice as many."""
    return min(max_rows, 1 << (2 * rows).bit_length() - 1)


class Tries:
    """What is tested of the prices of one worker class: the nodes of its grid by number, and the batches since a try."""

    __slots__ = (
        "_calls",
        "_is_new",
        "_known_since",
        "_rows",
        "_seen",
        "_short",
        "_short_by",
        "awaited",
        "batches",
        "busy_s",
    )

    def __init__(self, known: Sequence[bool] = ()) -> None:
        """`known`: for each node of the grid, whether it was measured; empty without a grid."""
        self._seen = [0 if is_known else _NEVER for is_known in known]
        """`_calls` when each node was visited last; 0 where it was measured."""
        self._calls = 0
        """Calls that were observed."""
        self._known_since = 0
        """Nodes visited last before this call are not known."""
        self._short: set[int] = set()
        """The nodes of calls that were short, in a row, at nodes not visited lately, as far as they were not believed."""
        self._short_by = 0.0
        """The sum of their differences."""
        self._rows: dict[str, list[float]] = {}
        """By worker, the differences of its last batches in a row that were off by more than `CLIP` in one direction."""
        self._is_new = False
        """Whether a call was believed since the other nodes were estimated last."""
        self.batches = 0
        """Batches that ended since the last try began."""
        self.busy_s = 0.0
        """Seconds that these took."""
        self.awaited = False
        """Whether nothing was learned from the last try yet."""

    # ------------------------------------------------------------ nodes

    def knows(self, node: int) -> bool:
        """Tell whether a node was measured, or visited since costs changed."""
        return self._seen[node] >= self._known_since

    def was_short(self, node: int) -> bool:
        """Tell whether the last call at a node was short, so that it is to be tried again."""
        return node in self._short

    def met_lately(self, node: int) -> bool:
        """Tell whether a call ran lately at a node."""
        return self._seen[node] >= self._calls - LATELY

    def bounding(self) -> NDArray[np.bool_]:
        """Return for each node whether it is known by a call that ran lately: these bound the others."""
        return np.array(self._seen) >= max(self._known_since, self._calls - LATELY)

    def estimating(self) -> NDArray[np.bool_] | None:
        """Return for each node whether it was measured, or a call ran there; None if none was believed since the last time.

        The other nodes are estimated from these.
        """
        if not self._is_new:
            return None
        self._is_new = False
        return np.array(self._seen) > _NEVER

    def recall(self, nodes: Sequence[int]) -> None:
        """Note that an earlier server knew these nodes."""
        for node in nodes:
            self._seen[node] = max(0, self._seen[node])

    def carry(self, places: Sequence[int | None]) -> None:
        """Go on with a larger grid. `places`: of each of its nodes, the number in the old one; None: it is new."""
        self._seen = [_NEVER if place is None else self._seen[place] for place in places]
        self._short.clear()
        self._short_by = 0.0

    # ------------------------------------------------------------ calls that ran

    def visit(self, node: int) -> None:
        """Note that a call ran at a node and corrected it; one that is to be tried again stays so."""
        self._calls += 1
        if self._seen[node] >= self._known_since and node not in self._short:
            self._seen[node] = self._calls

    def believe(self, node: int) -> None:
        """Note that a call at a node was believed."""
        self._calls += 1
        self._seen[node] = self._calls
        self._short.discard(node)
        self._is_new = True
        self.awaited = False

    def lasting_change(self, worker: str, off: float) -> float:
        """Return the smallest difference of the last `LASTING` batches if all were off in one direction, else 0.0.

        `off`: the newest difference on a worker. Differences are logarithms of observed / expected seconds.
        """
        row = self._rows.setdefault(worker, [])
        if row and (-CLIP <= off <= CLIP or off * row[0] < 0.0):
            row.clear()
        if -CLIP <= off <= CLIP:
            return 0.0
        row.append(off)
        if len(row) < LASTING:
            return 0.0
        change = min(row, key=abs)
        row.clear()
        return change

    def forget(self, worker: str) -> None:
        """Forget the batches of a worker, which is gone."""
        self._rows.pop(worker, None)

    def ran(self, node: int, off: float) -> None:
        """Take in the difference of a call at a node that had not run lately; several short ones in a row cast doubt."""
        if off >= -CLIP:
            self._short.clear()
            self._short_by = 0.0
            return
        self._short.add(node)
        self._short_by += off
        if self._short_by <= -LASTING * CLIP:
            self.doubt(LATELY)  # what else has not run lately may be out of date as well
        else:
            self.awaited = False

    def doubt(self, but: int = 0) -> None:
        """Make all nodes unknown that none of the last `but` calls visited."""
        self._known_since = max(self._known_since, self._calls - but + 1)
        self._short.clear()
        self._short_by = 0.0

    # ------------------------------------------------------------ tries

    def ended(self, busy_s: float) -> None:
        """Count a batch that took so long."""
        self.batches += 1
        self.busy_s += busy_s

    def began(self) -> None:
        """Note that a batch is a try."""
        self.batches, self.busy_s, self.awaited = 0, 0.0, True

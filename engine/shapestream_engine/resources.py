"""Division of a machine's CPUs among worker processes, and of a worker's among its slots: `slots: auto`."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["CPUS_PER_SLOT", "Count", "divide_cpus"]

Count: TypeAlias = "int | Literal['auto']"

CPUS_PER_SLOT = 2
"""With `auto`, one slot for so many CPUs.

One would leave a CPU idle whenever its slot gathers or splits; with many, small calls spend their time on handing
pieces to each other's threads. It is a starting point for measurements: both counts can be set.
"""


def divide_cpus(cpus: int, workers: int, slots: Count = "auto", threads: Count = "auto") -> tuple[int, int]:
    """The slots of each worker, and the inference threads that its slots have together.

    Each of `workers` equal processes gets `cpus // workers` CPUs, at least one. `threads` auto is that share, and at
    least one per slot; `slots` auto is one per `CPUS_PER_SLOT` threads, rounded up. Counts that are given are kept as
    they are, even where they ask for more than there is. So 2 CPUs and 2 workers make (1, 1), 16 CPUs and one (8, 16).

    Raises `ValueError` for counts below 1.
    """
    given = [count for count in (cpus, workers, slots, threads) if count != "auto"]
    if any(type(count) is not int or count < 1 for count in given):
        raise ValueError(
            f"CPUs, workers, slots and threads are counts from 1 (or auto): {cpus}, {workers}, {slots}, {threads}"
        )
    share = max(1, cpus // workers)
    own_threads = share if threads == "auto" else threads
    own_slots = -(-own_threads // CPUS_PER_SLOT) if slots == "auto" else slots
    return own_slots, max(own_threads, own_slots) if threads == "auto" else own_threads

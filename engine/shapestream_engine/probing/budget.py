"""The budget of a proof: seconds of computation, so that other load on the machine leaves the proof as thorough.

A proof's seconds are the CPU seconds of its process, divided by its threads. Engines on accelerators, and models that
sleep, use no CPU. So at least a quarter of the wall-clock time counts, and the whole proof ends within four times its
budget. Some cases run beyond the budget, as `ProbeOptions.budget_s` says, but none begins after that wall.
"""

from __future__ import annotations

from time import monotonic, process_time

from shapestream_engine.containers import available_cpus

WALL = 4.0
"""Seconds of wall-clock time per second of the budget."""


class Budget:
    """The seconds that a proof has spent; they begin with its construction."""

    def __init__(self, budget_s: float, threads: int | None) -> None:
        """`threads`: those of the model; None: one per CPU."""
        self.budget_s = budget_s
        self.threads = threads or available_cpus()
        self._cpu_began = process_time()
        self._wall_began = monotonic()

    def spent_s(self) -> float:
        """Return the seconds of the proof so far."""
        cpu_s = (process_time() - self._cpu_began) / self.threads
        return max(cpu_s, self.wall_s() / WALL)

    @property
    def is_over(self) -> bool:
        """Tell whether the wall-clock time is spent: then no case begins any more."""
        return self.wall_s() >= WALL * self.budget_s

    def wall_s(self) -> float:
        """Return the wall-clock seconds so far."""
        return monotonic() - self._wall_began

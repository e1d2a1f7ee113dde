"""Plays one ablation on virtual time."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.ablations.mechanisms import without
from benchmarks.ablations.scenarios import SCENARIOS, run


class Task(NamedTuple):
    """One simulation."""

    scenario: str
    off: tuple[str, ...]
    """Mechanisms that are off."""
    seed: int


class Played(NamedTuple):
    """Its figures, and how often each counter's mechanism was at work."""

    figures: dict[str, float]
    fired: dict[str, int]


def play(task: Task) -> Played:
    """Play one simulation."""
    with without(task.off) as patches:
        figures = run(SCENARIOS[task.scenario], task.seed, lambda: patches.spent_s)
        return Played(figures, dict(patches.fired))

"""What is known of each candidate so far, and the time that is left: the books of a tuning run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shapestream_engine.cost_table import CostTable
from shapestream_workers.lab.tune_candidates import Candidate
from shapestream_workers.lab.tune_choice import Objective, Scored
from shapestream_workers.lab.tune_replay import Round

__all__ = ["Budget", "Calibration", "Trial", "scored", "varied"]

WORTH_A_LOOK = 0.15
"""Relative: predictions are off by about so much, so who is predicted nearer than this to the best may be the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a child process measured of a candidate."""

    table: CostTable
    signature: dict[str, Any]
    """As `ModelSignature.from_dict` reads it: padding that was not proved is gone."""
    startup_s: float
    """Compiling and proving."""
    memory_bytes: int
    """By how much the process grew, engine included."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One candidate."""

    candidate: Candidate
    calibration: Calibration | None = None
    prediction: float | None = None
    """What the simulation came to, by the objective: results per second, or seconds."""
    correction: float = 1.0
    """By how much reality differed from predictions where this placement, or others, ran for real."""
    rounds: list[Round] = field(default_factory=list)
    memory_bytes: int = 0
    """Of the whole server and its workers after the last round."""
    startup_s: float = 0.0
    """Of the real server."""
    problem: str | None = None
    """Why it is out: a crash, a refusal, failed requests."""
    skipped: str | None = None
    """What was not done with it for lack of time."""

    def values(self, objective: Objective) -> tuple[float, ...]:
        """What was measured, by round."""
        return tuple(each.goodput_per_s if objective == "throughput" else each.p99_s for each in self.rounds)

    def middle(self, objective: Objective) -> float | None:
        """The median over its rounds; None where there were none."""
        values = self.values(objective)
        return float(median(values)) if values else None

    @property
    def predicted(self) -> float | None:
        """What the simulation came to, corrected."""
        return None if self.prediction is None else self.prediction * self.correction

    def rank(self, objective: Objective) -> tuple[float, int]:
        """By which the most promising come first; of equals the one with fewer settings."""
        value = self.predicted
        if value is None:
            return (float("inf"), 0)
        return (-value if objective == "throughput" else value, self.candidate.shapes.settings_count)


class Budget:
    """Seconds for the whole run."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()

    def spent(self) -> float:
        """So far."""
        return self._clock() - self._began

    def left(self) -> float:
        """Until the end; negative after it."""
        return self.seconds - self.spent()


def scored(trials: list[Trial], objective: Objective) -> list[Scored]:
    """Those that ran for real and answered everything, for the choice."""
    rounds = max((len(trial.rounds) for trial in trials), default=0)
    return [
        Scored(
            number=number,
            values=trial.values(objective),
            memory_bytes=trial.memory_bytes,
            settings=trial.candidate.shapes.settings_count,
            is_baseline=trial.candidate.is_baseline,
        )
        for number, trial in enumerate(trials)
        if trial.problem is None and trial.rounds and len(trial.rounds) == rounds
    ]


def varied(
    able: list[Trial], objective: Objective, *, beside: Trial, within: float = WORTH_A_LOOK
) -> list[Trial]:
    """The same, the most promising first, but what makes other calls, also than `beside`, before more of the same.

    Candidates that differ in a cap alone are predicted alike; one of them shows what the cap costs, and a place is left
    for another idea, unless that promises less than the best by more than `within`.
    """
    if not able:
        return []
    best = abs(able[0].rank(objective)[0])
    first: dict[object, Trial] = {}
    for trial in able:
        off = abs(abs(trial.rank(objective)[0]) - best)
        if off <= within * best and trial.candidate.calls_key != beside.candidate.calls_key:
            first.setdefault(trial.candidate.calls_key, trial)
    return [*first.values(), *(trial for trial in able if trial not in first.values())]

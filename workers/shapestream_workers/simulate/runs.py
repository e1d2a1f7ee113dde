"""The simulations that one command asks for, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, get_args

from shapestream.simulation.distributions import BadText
from shapestream.simulation.experiment import (
    PLANNED,
    POLICIES,
    Scenario,
    Swept,
    oracle_goodput,
    play,
    varied,
)
from shapestream.simulation.simulator import Simulated
from shapestream.simulation.summary import Summary, summarise

__all__ = ["Goal", "Run", "Sweep", "fewest_slots", "parse_sweep", "run_all"]

MAX_STEPS = 64
MAX_SLOTS = 100_000
_STEPS = 8
_WHOLE = frozenset({"slots", "in_flight", "max_batch"})


@dataclass(frozen=True, slots=True)
class Sweep:
    """One value of the scenario, and what it is set to in turn."""

    what: Swept
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    policy: str
    value: float | None
    """Of the sweep, where there is one."""
    summary: Summary
    oracle: float
    """Goodput if all requests were known beforehand."""
    simulated: Simulated | None
    """Only where it is to be drawn."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        value = {} if self.value is None else {"value": self.value}
        oracle = self.oracle if isfinite(self.oracle) else None
        return {"policy": self.policy, **value, "oracle_goodput": oracle, **self.summary.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is wanted of the service."""

    p99_s: float
    lost_ratio: float = 0.001
    """Requests that may be refused, or be late, at most."""

    def met_by(self, summary: Summary) -> bool:
        """Whether the figures reach it, without a queue that only grows."""
        return summary.p99_s <= self.p99_s and summary.lost_ratio <= self.lost_ratio


def run_all(
    scenario: Scenario,
    sweep: Sweep | None,
    *,
    compare: bool,
    keep: bool,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Run]:
    """Every policy at every value; `keep` what happened, for a plot of one scenario."""
    runs: list[Run] = []
    policies = POLICIES if compare else (PLANNED,)
    for value in sweep.values if sweep is not None else (None,):
        changed = scenario if sweep is None or value is None else varied(scenario, sweep.what, value)
        oracle = oracle_goodput(changed)
        for policy in policies:
            progress(policy if sweep is None else f"{sweep.what} {value:g}: {policy}")
            simulated = play(changed, policy)
            kept = simulated if keep and sweep is None else None
            runs.append(Run(policy, value, summarise(simulated), oracle, kept))
    return runs


def fewest_slots(runs: Sequence[Run], goal: Goal) -> Run | None:
    """Of a sweep over slots: the planned run with the fewest that reach the goal, as does every larger one."""
    best: Run | None = None
    planned = sorted((run for run in runs if run.policy == PLANNED), key=lambda run: -(run.value or 0))
    for run in planned:
        if not goal.met_by(run.summary):
            break
        best = run
    return best


def parse_sweep(text: str) -> Sweep:
    """`slots=1..16`, `slots=1,2,4`, `rate=50..400` (eight steps) or `rate=50..400:5`; raises `BadText`."""
    what, _, rest = text.partition("=")
    name = what.strip().replace("-", "_")
    try:
        if name not in get_args(Swept):
            raise ValueError(f"what can be swept: {', '.join(get_args(Swept))}")
        values = _values(rest, whole=name in _WHOLE)
        if not values or len(values) > MAX_STEPS or not all(0 < value < float("inf") for value in values):
            raise ValueError(f"1 to {MAX_STEPS} values above 0")
        if name == "slots" and max(values) > MAX_SLOTS:
            raise ValueError(f"at most {MAX_SLOTS:,} slots")
    except (ValueError, OverflowError) as error:
        message = f"--sweep {text}: {error} (expected such as slots=1..16, slots=1,2,4 or rate=50..400:8)"
        raise BadText([message]) from error
    return Sweep(name, values)  # type: ignore[arg-type]  # one of them, as was checked


def _values(text: str, *, whole: bool) -> tuple[float, ...]:
    bounds, colon, steps = text.partition(":")
    low, dots, high = bounds.partition("..")
    if not dots:
        return tuple(float(int(word)) if whole else float(word) for word in text.split(","))
    if whole and not colon:
        return tuple(float(number) for number in range(int(low), min(int(high), int(low) + MAX_STEPS) + 1))
    count = int(steps) if colon else _STEPS
    if not 2 <= count <= MAX_STEPS or float(low) >= float(high):
        raise ValueError(f"LOW..HIGH:STEPS needs LOW below HIGH, and 2 to {MAX_STEPS} steps")
    values = [float(low) + (float(high) - float(low)) * step / (count - 1) for step in range(count)]
    return tuple(dict.fromkeys(float(round(value)) if whole else value for value in values))

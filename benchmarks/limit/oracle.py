"""The strongest batching that one process can do offline: every length known, every shape seen before.

It is searched for on another slice of the trace: how OpenVINO uses its threads, who drives it, and how the sorted trace
is cut (by a token budget, or optimally over measured costs). Assembly with NumPy is part of its time, the search is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.limit.answers import no_answers
from benchmarks.limit.cuts import CallCosts, Lengths, by_budget, measure_costs, optimal
from benchmarks.limit.engine import Batch, EngineSettings, InProcess, Minilm, Setting
from benchmarks.limit.traces import Trace

BUDGETS = ((128, 16), (256, 16), (512, 32), (1024, 32), (2048, 64))
"""Tokens of a batch, padding counted, and rows, at most."""
ENGINES = (EngineSettings(streams=1, threads=2), EngineSettings(streams=2, threads=2))
ROUNDS = 2

Cutter = Callable[[Lengths], list[Batch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A way to run a whole trace in one process."""

    title: str
    model: InProcess
    cut: Cutter

    def __str__(self) -> str:
        return f"{self.title}; {self.model.setting}"


def fastest(plans: Sequence[Plan], trace: Trace, rounds: int = ROUNDS) -> Plan:
    """The plan that runs the trace in the least time: the best of so many interleaved rounds, after one to warm up."""
    if len(plans) == 1:
        return plans[0]
    answers = no_answers(trace)
    batches = [plan.cut(trace.lengths) for plan in plans]
    best = [float("inf")] * len(plans)
    for turn in range(1 + rounds):
        for number, plan in enumerate(plans):
            seconds = plan.model.run(batches[number], trace.ids, answers)
            if turn:
                best[number] = min(best[number], seconds)
    return plans[best.index(min(best))]


def search(minilm: Minilm, trace: Trace, *, thorough: bool) -> Plan:
    """The best plan found on this slice. Not thorough: the first sensible one."""
    if not thorough:
        model = InProcess(minilm, Setting(engine=ENGINES[1]))
        return Plan(title="budget of 512 tokens", model=model, cut=_budget(512, 32))
    plans: list[Plan] = []
    for engine in ENGINES:
        model = InProcess(minilm, Setting(engine=engine, requests=engine.streams))
        plans += [
            Plan(title=f"budget of {tokens} tokens", model=model, cut=_budget(tokens, rows))
            for tokens, rows in BUDGETS
        ]
        plans.append(Plan(title="optimal cuts", model=model, cut=_optimal(measure_costs(model, repeats=2))))
    best = fastest(plans, trace)
    engine = best.model.setting.engine
    drivers = [
        best,
        *(
            Plan(title=best.title, model=InProcess(minilm, setting), cut=best.cut)
            for setting in (
                Setting(engine=engine, requests=2 * engine.streams),
                Setting(engine=engine, requests=2 * engine.streams, driver="queue"),
            )
        ),
    ]
    return fastest(drivers, trace)


def _budget(tokens: int, rows: int) -> Cutter:
    return lambda lengths: by_budget(lengths, tokens, rows)


def _optimal(costs: CallCosts) -> Cutter:
    return lambda lengths: optimal(lengths, costs)

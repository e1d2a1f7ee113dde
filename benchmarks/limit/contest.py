"""The ways through one trace, in interleaved rounds; every answer is checked, outside of the time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.limit import arrival_order, by_length, oracle, single
from benchmarks.limit.answers import References, no_answers
from benchmarks.limit.engine import Minilm
from benchmarks.limit.oracle import Plan
from benchmarks.limit.pipeline_run import Run, Served
from benchmarks.limit.poisson import Answered, Arrivals, one_at_a_time, through_server
from benchmarks.limit.traces import Trace

ORACLE, SINGLE, BY_LENGTH, ARRIVAL_ORDER = "oracle", "one at a time", "sorted by length", "arrival order"
IN_FLIGHT = (64, 256)
LOADS = (0.6, 0.9)
"""Of the rate of one at a time, in the same round."""
ALONE = "max_batch: 1"
"""The server that serves one at a time through the same pipeline."""
ARRIVAL_SHARE = 4
"""Arrival order is slow, and says as much over a quarter of the trace."""
PASSES = 4
"""Over the practice slice, by which a server is warmed up: its device has met most of the shapes then, as it has in a
service that runs for months. The oracle has met all of its own."""
POISSON_SHARE = 2.0
"""Of the seconds of a run: a 99th percentile of a queue near its limit needs many arrivals."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one trace gave, in lists with an element per round."""

    trace: Trace
    settings: dict[str, str]
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    """CPU of all processes that took part, in microseconds per token."""
    runs: dict[str, list[Run]] = field(default_factory=dict)
    latency_s: dict[tuple[float, str], list[float]] = field(default_factory=dict)
    oracle_padding_ratio: float = 0.0
    checked: int = 0


class Contest:
    """All ways through one trace."""

    def __init__(
        self, minilm: Minilm, trace: Trace, practice: Trace, servers: Mapping[str, Served], *, thorough: bool
    ) -> None:
        """`practice` is another slice: settings are found, and servers warmed up, on it alone."""
        self._trace = trace
        self._practice = practice
        self._servers = servers
        self._thorough = thorough
        self._references = References(minilm, trace)
        self._practised = References(minilm, practice)
        self._oracle = oracle.search(minilm, practice, thorough=thorough)
        self._single = single.search(minilm, practice, thorough=thorough)
        self._by_length = by_length.plan(self._oracle)
        self._arrival_order = arrival_order.plan(self._oracle)
        self._cpu_s = 0.0
        """Of this process, when the latest run ended."""
        self.outcome = Outcome(
            trace=trace,
            settings={
                ORACLE: str(self._oracle),
                SINGLE: str(self._single),
                BY_LENGTH: str(self._by_length),
                ARRIVAL_ORDER: str(self._arrival_order),
                **{name: str(served.setting) for name, served in servers.items()},
            },
        )

    def warm_up(self) -> None:
        """Servers on the other slice, as they are measured; the ways of this process on the trace itself."""
        for name, served in self._servers.items():
            for in_flight in IN_FLIGHT * PASSES if self._thorough else IN_FLIGHT[:1]:
                run = served.stream(self._practice, in_flight)
                self._practised.check(run.answers, f"{name}, warming up")
        for plan in (self._oracle, self._single, self._by_length):
            self._run(plan, self._trace)

    def round(self, number: int, seconds: float) -> None:
        """Every way once, and the latencies unless `seconds` is 0."""
        self._measure(ORACLE, self._oracle, self._trace)
        single_rate = self._measure(SINGLE, self._single, self._trace) * len(self._trace) / self._trace.tokens
        self._measure(BY_LENGTH, self._by_length, self._trace)
        self._measure(
            ARRIVAL_ORDER, self._arrival_order, self._trace.cut(0, len(self._trace) // ARRIVAL_SHARE)
        )
        for name, served in self._servers.items():
            if name == ALONE:
                continue
            for in_flight in IN_FLIGHT:
                way = f"{name}, {in_flight}"
                run = served.stream(self._trace, in_flight)
                self._references.check(run.answers, way)
                self.outcome.runs.setdefault(way, []).append(run)
                self._note(way, self._trace, run.seconds, run.server_cpu_s + run.client_cpu_s)
        for load in LOADS if seconds else ():
            self._poisson(load, single_rate, POISSON_SHARE * seconds, seed=number)
        self.outcome.checked = self._references.checked

    def _measure(self, way: str, plan: Plan, trace: Trace) -> float:
        cpu_before = time.process_time()
        seconds = self._run(plan, trace)
        self._note(way, trace, seconds, self._cpu_s - cpu_before)
        return trace.tokens / seconds

    def _note(self, way: str, trace: Trace, seconds: float, cpu_s: float) -> None:
        self.outcome.tokens_per_s.setdefault(way, []).append(trace.tokens / seconds)
        self.outcome.cpu_us.setdefault(way, []).append(cpu_s / trace.tokens * 1e6)

    def _run(self, plan: Plan, trace: Trace) -> float:
        batches = plan.cut(trace.lengths)
        answers = no_answers(trace)
        seconds = plan.model.run(batches, trace.ids, answers)
        self._cpu_s = time.process_time()
        self._references.check(answers, str(plan), places=np.arange(len(trace)))
        if plan is self._oracle:
            computed = sum(len(batch.places) * batch.length for batch in batches)
            self.outcome.oracle_padding_ratio = 1.0 - trace.tokens / computed
        return seconds

    def _poisson(self, load: float, single_rate: float, seconds: float, seed: int) -> None:
        """The same arrivals for all."""
        arrivals = Arrivals.draw(self._trace, load * single_rate, seconds, seed)
        self._keep(load, SINGLE, arrivals, one_at_a_time(self._single.model, self._trace, arrivals))
        for name, served in self._servers.items():
            self._keep(load, name, arrivals, through_server(served, self._trace, arrivals))

    def _keep(self, load: float, way: str, arrivals: Arrivals, answered: Answered) -> None:
        self._references.check(answered.answers, f"{way} at {load:.0%}", places=arrivals.places)
        self.outcome.latency_s.setdefault((load, way), []).extend(answered.latency_s.tolist())

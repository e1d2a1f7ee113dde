"""The second stage: the best few are served for real, and the trace is replayed at each in turn.

All servers stand ready at the same time and only one works: rounds are interleaved, so that a slow minute of the
machine is everybody's. Each round replays the same requests at every candidate, another slice of the trace each time.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import trio

from shapestream.errors import RequestError
from shapestream.simulation.trace import TraceRequest
from shapestream_engine.signature import ModelSignature
from shapestream_workers.tune.bench_file import Subject
from shapestream_workers.tune.children import ChildEnded, family_bytes
from shapestream_workers.tune.choice import Objective
from shapestream_workers.tune.first_stage import Say
from shapestream_workers.tune.inputs import InputMaker
from shapestream_workers.tune.replay import Round, replay_closed, replay_open
from shapestream_workers.tune.servers import Served, serving
from shapestream_workers.tune.trials import Budget, Trial
from shapestream_workers.tune.workload import Workload

__all__ = ["Contest", "Plan", "plan_rounds"]

MOST_FINALISTS = 4
ROUNDS = (5, 3)
"""As many as time allows; a median of fewer than three says nothing about noise."""
LEAST_ROUND_S, MOST_ROUND_S = 0.7, 10.0
START_SLACK_S = 1.5
"""What starting a server takes beyond compiling its model."""
OVERRUN = 1.3
"""A round takes longer than planned where the real thing is slower than the warm-up let expect."""
PATIENCE = 8.0
"""A round that takes so many times as long as it should is given up."""
LEAST_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the time that is left is spent."""

    finalists: int
    rounds: int
    round_s: float


def plan_rounds(left_s: float, startups_s: list[float]) -> Plan | None:
    """The most candidates, then the most rounds, of a length that means something; None: no time for two of them.

    `startups_s` of the candidates in the order of their promise. One more round each goes to warming up.
    """
    for finalists in range(min(MOST_FINALISTS, len(startups_s)), min(2, len(startups_s)) - 1, -1):
        starting = sum(startups_s[:finalists]) + START_SLACK_S * finalists
        for rounds in ROUNDS:
            round_s = (left_s - starting) / (finalists * (rounds + 1) * OVERRUN)
            if round_s >= LEAST_ROUND_S and finalists:
                return Plan(finalists=finalists, rounds=rounds, round_s=min(MOST_ROUND_S, round_s))
    return None


class Contest:
    """Runs the finalists; what comes of them is written into their trials."""

    def __init__(
        self,
        subject: Subject,
        workload: Workload,
        signature: ModelSignature,
        budget: Budget,
        folder: Path,
        *,
        objective: Objective,
        in_flight: int,
        say: Say,
    ) -> None:
        self._subject = subject
        self._workload = workload
        self._budget = budget
        self._folder = folder
        self._objective: Objective = objective
        self._in_flight = in_flight
        self._say = say
        self._maker = InputMaker(subject.settings, signature)
        self._place = 0
        self._window = 0.0

    async def run(self, trials: list[Trial], plan: Plan) -> None:
        """Starts all of them, warms them up, and plays the rounds."""
        async with AsyncExitStack() as stack:
            running: list[tuple[Trial, Served]] = []
            for number, trial in enumerate(trials):
                served = await self._start(stack, number, trial)
                if served is not None:
                    running.append((trial, served))
            requests = await self._warm_up(running, plan)
            for number in range(plan.rounds):
                running = [(trial, served) for trial, served in running if trial.problem is None]
                if number and self._budget.left() < plan.round_s * len(running):
                    for trial, _ in running:
                        trial.skipped = f"{plan.rounds - number} of {plan.rounds} rounds left out: no time"
                    return
                self._say(f"round {number + 1} of {plan.rounds}: {len(running)} candidates")
                some = self._slice(requests, plan.round_s)
                # Each round begins with another one: whoever comes first may find the caches cold.
                turn = number % max(1, len(running))
                for trial, served in [*running[turn:], *running[:turn]]:
                    if (played := await self._play(trial, served, some, plan.round_s)) is not None:
                        trial.rounds.append(played)
                    trial.memory_bytes = family_bytes(served.child.pid)

    async def _start(self, stack: AsyncExitStack, number: int, trial: Trial) -> Served | None:
        folder = self._folder / f"s{number}"
        folder.mkdir()
        self._say(f"serving: {trial.candidate.label}")
        config = self._subject.write(trial.candidate, folder)
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * trial.startup_s)
        try:
            served = await stack.enter_async_context(
                serving(config, self._workload.model, trial.candidate.placement.all_slots, patience_s)
            )
        except ChildEnded as error:
            trial.problem = f"the server did not start: {error}"
            return None
        trial.startup_s = served.startup_s
        return served

    async def _warm_up(self, running: list[tuple[Trial, Served]], plan: Plan) -> int:
        """Plays one round that does not count; returns how many requests a closed round should have."""
        rates: list[float] = []
        for trial, served in running:
            expected = trial.prediction.goodput_per_s if trial.prediction else float(self._in_flight)
            some = self._slice(max(self._in_flight, round(expected * plan.round_s / 2)), plan.round_s)
            if (played := await self._play(trial, served, some, plan.round_s)) is not None:
                rates.append(played.goodput_per_s)
        return max(self._in_flight, round(median(rates or [1.0]) * plan.round_s))

    def _slice(self, requests: int, seconds: float) -> list[TraceRequest]:
        """The next part of the trace, from its beginning again after its end."""
        everything = self._workload.requests
        if self._objective == "throughput":
            place, self._place = self._place, (self._place + requests) % len(everything)
            doubled = (everything[(place + step) % len(everything)] for step in range(requests))
            return list(doubled)
        start = everything[0].at_s + self._window
        some = [each for each in everything if start <= each.at_s < start + seconds]
        self._window += seconds
        if not some or start + seconds >= everything[-1].at_s:
            self._window = 0.0
        return some or list(islice(everything, self._in_flight))

    async def _play(
        self, trial: Trial, served: Served, requests: list[TraceRequest], round_s: float
    ) -> Round | None:
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * round_s)
        name = self._workload.model
        with trio.move_on_after(patience_s):
            try:
                if self._objective == "throughput":
                    played = await replay_closed(served.client, name, requests, self._maker, self._in_flight)
                else:
                    played = await replay_open(served.client, name, requests, self._maker)
            except RequestError as error:
                trial.problem = f"{error}; {served.child.last_words()}"
                return None
            if played.failures:
                count = len(played.failures)
                trial.problem = f"{count} of {played.requests} requests failed: {played.failures[0]}"
                return None
            return played
        trial.problem = (
            f"{len(requests)} requests took more than {patience_s:.0f} s; {served.child.last_words()}"
        )
        return None

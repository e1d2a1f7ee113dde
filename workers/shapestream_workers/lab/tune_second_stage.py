"""The second stage: the best few are served for real, and the trace is replayed at each in turn.

All servers stand ready at the same time and only one works: rounds are interleaved, so that a slow minute of the
machine is everybody's. Each round replays the same requests at every candidate, another slice of the trace each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import trio

from shapestream.errors import RequestError
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.tune_bench_file import Subject
from shapestream_workers.lab.tune_children import ChildEnded, family_bytes
from shapestream_workers.lab.tune_choice import Objective
from shapestream_workers.lab.tune_first_stage import Say
from shapestream_workers.lab.tune_inputs import InputMaker
from shapestream_workers.lab.tune_replay import Round, replay_closed, replay_open
from shapestream_workers.lab.tune_servers import Served, serving
from shapestream_workers.lab.tune_trials import Budget, Trial
from shapestream_workers.lab.tune_workload import Workload

__all__ = ["Contest", "Plan", "has_room", "plan_rounds"]

MOST_FINALISTS = 4
ROUNDS = (5, 3)
"""As many as time allows; a median of fewer than three says nothing about noise."""
LEAST_ROUND_S, MOST_ROUND_S = 0.7, 10.0
OVERRUN = 1.3
"""A round takes longer than planned where the real thing is slower than the warm-up let expect."""
PATIENCE, LEAST_PATIENCE_S = 6.0, 10.0
"""A round that takes so many times as long as it should, and so many seconds, is given up, and its candidate with it."""
SLOW = 2.0
"""A round of a slow candidate ends early, after so many times its length; its rate is known by then."""
MOST_OF_A_ROUND = 1_000_000
LEAST_START_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the time that is left is spent on the servers that run."""

    rounds: int
    round_s: float


def plan_rounds(left_s: float, finalists: int) -> Plan:
    """The most rounds of a length that means something; the fewest and shortest where there is hardly any time left.

    One more round each goes to warming up.
    """
    for rounds in ROUNDS:
        round_s = left_s / (finalists * (rounds + 1) * OVERRUN)
        if round_s >= LEAST_ROUND_S:
            return Plan(rounds=rounds, round_s=min(MOST_ROUND_S, round_s))
    return Plan(rounds=ROUNDS[-1], round_s=LEAST_ROUND_S)


def has_room(left_s: float, startups_s: list[float]) -> bool:
    """Whether one more server can be started and played at, besides those that took so long to start."""
    if len(startups_s) < 2:
        return left_s > 0
    finalists = len(startups_s) + 1
    rounds_s = finalists * (ROUNDS[-1] + 1) * OVERRUN * LEAST_ROUND_S
    return finalists <= MOST_FINALISTS and left_s >= max(startups_s) + rounds_s


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
        self._reserve_s = 0.0
        self._started = 0
        self._place = 0
        self._passed_s = 0.0

    async def run(self, trials: list[Trial], *, until_left_s: float = 0.0) -> None:
        """Starts as many of them as there is time for, in this order, warms them up, and plays the rounds.

        What the budget holds beyond `until_left_s` is spent.
        """
        self._reserve_s = until_left_s
        async with AsyncExitStack() as stack:
            running: list[tuple[Trial, Served]] = []
            for trial in trials:
                if not has_room(self._left_s(), [served.startup_s for _, served in running]):
                    trial.skipped = "not served: others promised more"
                elif (served := await self._start(stack, trial)) is not None:
                    running.append((trial, served))
            if not running:
                return
            plan = plan_rounds(self._left_s(), len(running))
            requests = await self._warm_up(running, plan)
            for number in range(plan.rounds):
                running = [(trial, served) for trial, served in running if trial.problem is None]
                if number and self._left_s() < plan.round_s * len(running):
                    for trial, _ in running:
                        trial.skipped = f"{plan.rounds - number} of {plan.rounds} rounds left out: no time"
                    return
                self._say(f"round {number + 1} of {plan.rounds}: {len(running)} candidates")
                some = (
                    list(self._cycle(requests))
                    if self._objective == "throughput"
                    else self._window(plan.round_s)
                )
                # Each round begins with another one: whoever comes first may find the caches cold.
                turn = number % max(1, len(running))
                for trial, served in [*running[turn:], *running[:turn]]:
                    if (
                        played := await self._play(
                            trial, served, some, plan.round_s, most_s=SLOW * plan.round_s
                        )
                    ) is not None:
                        trial.rounds.append(played)
                    trial.memory_bytes = family_bytes(served.child.pid)

    def _left_s(self) -> float:
        return self._budget.left() - self._reserve_s

    async def _start(self, stack: AsyncExitStack, trial: Trial) -> Served | None:
        folder = self._folder / f"s{self._started}"
        self._started += 1
        folder.mkdir()
        self._say(f"serving: {trial.candidate.label}")
        config = self._subject.write(trial.candidate, folder)
        patience_s = max(LEAST_START_S, PATIENCE * trial.startup_s)
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
            closed = self._objective == "throughput"
            some = self._cycle(MOST_OF_A_ROUND) if closed else iter(self._window(plan.round_s))
            played = await self._play(trial, served, some, plan.round_s, most_s=plan.round_s)
            if played is not None:
                rates.append(played.goodput_per_s)
        return max(self._in_flight, round(median(rates or [1.0]) * plan.round_s))

    def _cycle(self, requests: int) -> Iterator[TraceRequest]:
        """So many from where the last ones ended, from the beginning again after the end."""
        everything = self._workload.requests
        place, self._place = self._place, (self._place + requests) % len(everything)
        return (everything[(place + step) % len(everything)] for step in range(requests))

    def _window(self, seconds: float) -> list[TraceRequest]:
        """Those of the next so many seconds of the trace, from its beginning again after its end."""
        everything = self._workload.requests
        start = everything[0].at_s + self._passed_s
        some = [each for each in everything if start <= each.at_s < start + seconds]
        self._passed_s += seconds
        if not some or start + seconds >= everything[-1].at_s:
            self._passed_s = 0.0
        return some or list(everything[: self._in_flight])

    async def _play(
        self,
        trial: Trial,
        served: Served,
        requests: Iterable[TraceRequest],
        round_s: float,
        *,
        most_s: float,
    ) -> Round | None:
        name = self._workload.model
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * round_s)
        with trio.move_on_after(patience_s):
            try:
                if self._objective == "throughput":
                    played = await replay_closed(
                        served.client, name, requests, self._maker, in_flight=self._in_flight, most_s=most_s
                    )
                else:
                    played = await replay_open(served.client, name, list(requests), self._maker)
            except RequestError as error:
                trial.problem = f"{error}; {served.child.last_words()}"
                return None
            if played.failures:
                count = len(played.failures)
                trial.problem = f"{count} of {played.requests} requests failed: {played.failures[0]}"
                return None
            return played
        trial.problem = f"a round of {round_s:.1f} s was not done within {patience_s:.0f} s"
        return None

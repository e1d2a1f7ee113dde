"""The race of `shapestream tune`: candidates are served for real, and the trace is replayed at them.

In a *heat* a candidate runs alone, for one round. The best of the heats and the file as it is meet in the *final*: their
servers run side by side and only one works at a time. Rounds are interleaved, so that a slow minute of the machine hits
all alike; each round replays the same requests at every candidate, and the next round the next slice of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import monotonic
from typing import TypeAlias

import trio

from shapestream.errors import RequestError
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.candidates import Candidate
from shapestream_workers.lab.options import Objective, TuneOptions
from shapestream_workers.lab.replay import InputMaker, Round, Workload, replay_closed, replay_open
from shapestream_workers.lab.serving import Served, ServerEnded, family_bytes, last_words, serving
from shapestream_workers.lab.subject import Subject

Say: TypeAlias = Callable[[str], None]
"""Function that takes a line about the progress, for a person."""

MOST_FINALISTS = 4
ROUNDS = (5, 3)
"""Rounds of the final, as many as time allows: a candidate has to win all of them, and fewer than three is luck."""
LEAST_GAIN = 0.02
"""Relative: a smaller gain is no reason to change a file."""
HEAT_SHARE = 0.01
"""Part of the budget for one round of a heat, as long as the warm-up before it."""
LEAST_ROUND_S, MOST_ROUND_S = 0.7, 10.0
OVERRUN = 1.3
"""Factor by which a round takes longer than planned where the server is slower than in the warm-up."""
PATIENCE, LEAST_PATIENCE_S = 6.0, 10.0
"""A round or start that takes this many times as long as expected is given up with its candidate; a round has at least
so many seconds."""
SLOW = 2.0
"""Multiple of its length after which a round of a slow candidate sends no more; its rate is known by then."""
MOST_OF_LEFT = 0.5
"""Most of the time left that the start of one candidate may take, unless the file as it is took as long."""
LEAST_START_S = 10.0
"""Time that a start in the final has at least: it has worked before."""
BASELINE_START_S = 60.0
"""Time for the start of the file as it is, whatever the budget: all others are compared with it."""
MOST_OF_A_ROUND = 1_000_000


@dataclass(slots=True, kw_only=True)
class Trial:
    """One candidate and its measurements."""

    candidate: Candidate
    alone: float | None = None
    """Score of its heat."""
    rounds: list[float] = field(default_factory=list)
    """Scores of its rounds in the final."""
    memory_bytes: int = 0
    """Memory of the server and its workers after the last round."""
    startup_s: float = 0.0
    problem: str | None = None
    """Reason why it is out: a crash, a refusal, failed requests."""
    skipped: str | None = None
    """Measurements that were left out for lack of time."""

    @property
    def standing(self) -> float:
        """Score of its heat; -1 where it failed, below all scores."""
        return -1.0 if self.alone is None or self.problem is not None else self.alone


def score_of(played: Round, objective: Objective) -> float:
    """Score of a round, higher for better: results per second, or 1 / p99."""
    return played.goodput_per_s if objective == "throughput" else 1.0 / played.p99_s


def finalists(trials: Sequence[Trial], left_s: float) -> list[Trial]:
    """The file as it is (the first trial) and the best of the others, as many as there is time for."""
    able = [trial for trial in trials if trial.standing >= 0]
    ranked = sorted(able, key=lambda trial: (trial is not trials[0], -trial.standing))
    chosen = ranked[:2]
    for trial in ranked[2:MOST_FINALISTS]:
        rounds_s = (len(chosen) + 1) * (ROUNDS[-1] + 1) * OVERRUN * LEAST_ROUND_S
        if sum(each.startup_s for each in [*chosen, trial]) + rounds_s > left_s:
            break
        chosen.append(trial)
    return chosen


def plan_rounds(left_s: float, count: int) -> tuple[int, float]:
    """Number of rounds and seconds of each: the most rounds of a useful length, at least the fewest and shortest.

    One more round each goes to warming up.
    """
    for rounds in ROUNDS:
        round_s = left_s / (count * (rounds + 1) * OVERRUN)
        if round_s >= LEAST_ROUND_S:
            return rounds, min(MOST_ROUND_S, round_s)
    return ROUNDS[-1], LEAST_ROUND_S


def choose(trials: Sequence[Trial]) -> Trial | None:
    """The best of the final; None where nothing was measured.

    The file as it is stays unless another is better in every round, of at least three, and by `LEAST_GAIN` in the
    median: rounds are paired, so that noise that all share decides nothing.
    """
    rounds = max((len(trial.rounds) for trial in trials), default=0)
    able = [
        trial for trial in trials if trial.problem is None and trial.rounds and len(trial.rounds) == rounds
    ]
    baseline = next((trial for trial in able if trial.candidate.is_baseline), None)
    if baseline is not None:
        least = median(baseline.rounds) * (1 + LEAST_GAIN)
        able = [
            trial
            for trial in able
            if rounds >= ROUNDS[-1]
            and all(mine > before for mine, before in zip(trial.rounds, baseline.rounds, strict=True))
            and median(trial.rounds) > least
        ]
    return max(able, key=lambda trial: median(trial.rounds), default=baseline)


@dataclass(slots=True)
class Race:
    """Serve candidates and replay the trace; results are written into their trials."""

    subject: Subject
    workload: Workload
    maker: InputMaker
    options: TuneOptions
    folder: Path
    say: Say
    _began: float = field(default_factory=monotonic, init=False)
    _usual_start_s: float = field(default=LEAST_ROUND_S, init=False)
    """Start-up of the file as it is."""
    _place: int = field(default=0, init=False)
    _passed_s: float = field(default=0.0, init=False)

    def spent_s(self) -> float:
        """Seconds since the race began."""
        return monotonic() - self._began

    def left_s(self) -> float:
        """Seconds until the end of the budget; negative after it."""
        return self.options.budget - self.spent_s()

    async def heat(self, trial: Trial, *, kept_share: float) -> None:
        """Run a candidate alone, if there is time for the usual start and both rounds.

        `kept_share` is the share of the budget that must be left afterwards.
        """
        budget_s = self.options.budget
        left_s = self.left_s() - kept_share * budget_s
        round_s = min(MOST_ROUND_S, max(LEAST_ROUND_S, HEAT_SHARE * budget_s))
        if trial.candidate.is_baseline:
            patience_s = max(MOST_OF_LEFT * left_s, BASELINE_START_S)
        elif left_s < self._usual_start_s + 2 * round_s:
            trial.skipped = "not measured: no time left"
            return
        else:
            patience_s = max(MOST_OF_LEFT * left_s, min(left_s, PATIENCE * self._usual_start_s))
        async with AsyncExitStack() as stack:
            served = await self._start(stack, trial, patience_s)
            if served is None:
                return
            if trial.candidate.is_baseline:
                self._usual_start_s = served.startup_s
            self._place, self._passed_s = 0, 0.0  # the same requests for all
            if await self._play(trial, served, self._slice(round_s), round_s) is not None:
                played = await self._play(trial, served, self._slice(round_s), round_s)
                trial.alone = None if played is None else score_of(played, self.options.objective)
            trial.memory_bytes = family_bytes(served.process.pid)

    async def final(self, trials: Sequence[Trial]) -> None:
        """Start all of them, warm them up, and play as many rounds as there is time for."""
        async with AsyncExitStack() as stack:
            running: list[tuple[Trial, Served]] = []
            for trial in trials:
                served = await self._start(stack, trial, max(LEAST_START_S, PATIENCE * trial.startup_s))
                if served is not None:
                    running.append((trial, served))
            if not running:
                return
            rounds, round_s = plan_rounds(self.left_s(), len(running))
            rates = []
            for trial, served in running:
                if (played := await self._play(trial, served, self._slice(round_s), round_s)) is not None:
                    rates.append(played.goodput_per_s)
            count = max(self.options.in_flight, round(median(rates or [1.0]) * round_s))
            for number in range(rounds):
                running = [(trial, served) for trial, served in running if trial.problem is None]
                if number and self.left_s() < round_s * len(running):
                    for trial, _ in running:
                        trial.skipped = f"{rounds - number} of {rounds} rounds left out: no time"
                    return
                self.say(f"round {number + 1} of {rounds}: {len(running)} candidates")
                some = list(self._slice(round_s, count))
                # Each round begins with another one: the first may find caches cold.
                turn = number % max(1, len(running))
                for trial, served in [*running[turn:], *running[:turn]]:
                    played = await self._play(trial, served, some, round_s, most_s=SLOW * round_s)
                    if played is not None:
                        trial.rounds.append(score_of(played, self.options.objective))
                    trial.memory_bytes = family_bytes(served.process.pid)

    async def _start(self, stack: AsyncExitStack, trial: Trial, patience_s: float) -> Served | None:
        folder = Path(mkdtemp(dir=self.folder))
        self.say(f"serving: {trial.candidate.label}")
        config = self.subject.write(trial.candidate, folder)
        slots = trial.candidate.placement.all_slots
        try:
            served = await stack.enter_async_context(serving(config, self.workload.model, slots, patience_s))
        except ServerEnded as error:
            trial.problem = f"the server did not start: {error}"
            return None
        trial.startup_s = served.startup_s
        return served

    def _slice(self, seconds: float, count: int = MOST_OF_A_ROUND) -> Iterator[TraceRequest]:
        """The next requests of the trace: `count`, or those of the next `seconds`; it starts again at its end."""
        everything = self.workload.requests
        if self.options.objective == "throughput":
            place, self._place = self._place, (self._place + count) % len(everything)
            return (everything[(place + step) % len(everything)] for step in range(count))
        start = everything[0].at_s + self._passed_s
        some = [each for each in everything if start <= each.at_s < start + seconds]
        self._passed_s += seconds
        if not some or start + seconds >= everything[-1].at_s:
            self._passed_s = 0.0
        return iter(some or everything[: self.options.in_flight])

    async def _play(
        self,
        trial: Trial,
        served: Served,
        requests: Iterable[TraceRequest],
        round_s: float,
        *,
        most_s: float | None = None,
    ) -> Round | None:
        """One round; None, with the reason in the trial's `problem`, where it failed."""
        name, maker = self.workload.model, self.maker
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * round_s)
        with trio.move_on_after(patience_s):
            try:
                if self.options.objective == "throughput":
                    played = await replay_closed(
                        served.client,
                        name,
                        requests,
                        maker,
                        in_flight=self.options.in_flight,
                        most_s=most_s or round_s,
                    )
                else:
                    played = await replay_open(served.client, name, list(requests), maker)
            except RequestError as error:
                trial.problem = f"{error}; {last_words(served.process, served.log)}"
                return None
            if not played.failures:
                return played
            count = len(played.failures)
            trial.problem = f"{count} of {played.requests} requests failed: {played.failures[0]}"
            return None
        trial.problem = f"a round of {round_s:.1f} s was not done within {patience_s:.0f} s"
        return None

"""The race of `shapestream tune`: candidates are served for real, and the trace is replayed at them.

In a *heat* a candidate runs alone, for one round. The best of the heats and the file as it is meet in the *final*: their
servers run side by side and only one works at a time. Rounds are interleaved, so that a slow minute of the machine hits
all alike; each round replays the same requests at every candidate, and the next round the next slice of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import monotonic

import trio

from shapestream.errors import RequestError
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.candidates import Candidate, Subject
from shapestream_workers.lab.options import TuneOptions
from shapestream_workers.lab.serving import (
    InputMaker,
    Served,
    ServerEnded,
    family_bytes,
    last_words,
    replay,
    serving,
)

MOST_FINALISTS = 4
ROUNDS = (5, 3)
"""Rounds of the final, as many as time allows: a candidate has to win all of them, and fewer than three is luck."""
LEAST_GAIN = 0.02
"""Relative: a smaller gain is no reason to change a file, nor to take more memory."""
HEAT_SHARE = 0.01
"""Part of the budget for one round of a heat, as long as the warm-up before it."""
LEAST_ROUND_S, MOST_ROUND_S = 0.7, 10.0
OVERRUN = 1.3
"""Factor by which a round takes longer than planned where the server is slower than in the warm-up."""
PATIENCE, LEAST_PATIENCE_S = 6.0, 10.0
"""Multiple of its expected time after which a round or a start is given up with its candidate, and the least time."""
SLOW = 2.0
"""Multiple of its length after which a round of a slow candidate sends no more; its rate is known by then."""
MOST_OF_LEFT = 0.5
"""Most of the time left that the start of one candidate may take, unless the file as it is took as long."""
BASELINE_START_S = 60.0
"""Time for the start of the file as it is, whatever the budget: all others are compared with it."""


@dataclass(slots=True, kw_only=True)
class CandidateRun:
    """One candidate and its measurements, in results per second."""

    candidate: Candidate
    alone: float | None = None
    """Rate of its heat."""
    rounds: list[float] = field(default_factory=list)
    """Rates of its rounds in the final."""
    memory_bytes: int = 0
    """Memory of the server and its workers after the last round."""
    startup_s: float = 0.0
    problem: str | None = None
    """Reason why it is out: a crash, a refusal, a failed request."""
    skipped: str | None = None
    """Measurements that were left out, and why."""
    lacks_time: bool = False
    """True if they were left out for lack of time."""

    @property
    def heat_rate(self) -> float:
        """Rate of its heat; -1 where it failed, below all rates."""
        return -1.0 if self.alone is None or self.problem is not None else self.alone

    @property
    def measured(self) -> float | None:
        """Median rate of the final; None where it had no round."""
        return median(self.rounds) if self.rounds else None


def finalists(trials: Sequence[CandidateRun], left_s: float) -> list[CandidateRun]:
    """Return the file as it is (the first trial) and the best of the others, as many as there is time for."""
    able = [trial for trial in trials if trial.heat_rate >= 0]
    ranked = sorted(able, key=lambda trial: (trial is not trials[0], -trial.heat_rate))
    chosen = ranked[:2]
    for trial in ranked[2:MOST_FINALISTS]:
        rounds_s = (len(chosen) + 1) * (ROUNDS[-1] + 1) * OVERRUN * LEAST_ROUND_S
        if sum(each.startup_s for each in [*chosen, trial]) + rounds_s > left_s:
            break
        chosen.append(trial)
    return chosen


def plan_rounds(left_s: float, count: int) -> tuple[int, float]:
    """Return the number of rounds and seconds of each: the most rounds of a useful length, at least the fewest and
    shortest.

    One more round each goes to warming up.
    """
    for rounds in ROUNDS:
        round_s = left_s / (count * (rounds + 1) * OVERRUN)
        if round_s >= LEAST_ROUND_S:
            return rounds, min(MOST_ROUND_S, round_s)
    return ROUNDS[-1], LEAST_ROUND_S


def choose(trials: Sequence[CandidateRun]) -> CandidateRun | None:
    """Return the best of the final; None where nothing was measured.

    The file as it is stays unless another is better in every round, of at least three, and by `LEAST_GAIN` in the
    median: rounds are paired, so that noise that all share decides nothing. Of several such, and of those within
    `LEAST_GAIN` of the best of them, it is the one that takes the least memory.
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
    best = max((median(trial.rounds) for trial in able), default=0.0)
    near = [trial for trial in able if median(trial.rounds) >= best * (1 - LEAST_GAIN)]
    return min(near, key=lambda trial: (trial.memory_bytes, -median(trial.rounds)), default=baseline)


@dataclass(slots=True)
class Race:
    """Serve candidates and replay the trace; results are written into their trials."""

    subject: Subject
    requests: Sequence[TraceRequest]
    maker: InputMaker
    options: TuneOptions
    folder: Path
    say: Callable[[str], None]
    """Function that takes a line about the progress, for a person."""
    trials: list[CandidateRun] = field(default_factory=list, init=False)
    """The file as it is, then the others."""
    notes: list[str] = field(default_factory=list, init=False)
    """Candidates that were left out, with the reasons."""
    _began: float = field(default_factory=monotonic, init=False)

    def spent_s(self) -> float:
        """Return the seconds since the race began."""
        return monotonic() - self._began

    def left_s(self) -> float:
        """Return the seconds until the end of the budget; negative after it."""
        return self.options.budget - self.spent_s()

    async def heat(self, candidate: Candidate, *, kept_share: float = 0.0) -> None:
        """Run a candidate alone, if there is time for the usual start and both rounds.

        `kept_share` is the share of the budget that must be left afterwards.
        """
        trial = CandidateRun(candidate=candidate)
        self.trials.append(trial)
        usual_s = self.trials[0].startup_s or LEAST_ROUND_S  # that of the file as it is
        left_s = self.left_s() - kept_share * self.options.budget
        round_s = min(MOST_ROUND_S, max(LEAST_ROUND_S, HEAT_SHARE * self.options.budget))
        if candidate.is_baseline:
            patience_s = max(MOST_OF_LEFT * left_s, BASELINE_START_S)
        elif left_s < usual_s + 2 * round_s:
            trial.skipped, trial.lacks_time = "not measured: no time left", True
            return
        else:
            patience_s = max(MOST_OF_LEFT * left_s, min(left_s, PATIENCE * usual_s))
        async with AsyncExitStack() as stack:
            served = await self._start(stack, trial, patience_s)
            if served is not None and await self._play(trial, served, 0, None, round_s) is not None:
                trial.alone = await self._play(trial, served, len(self.requests) // 2, None, round_s)

    async def final(self, trials: Sequence[CandidateRun]) -> None:
        """Start all of them, warm them up, and play as many rounds as there is time for."""
        async with AsyncExitStack() as stack:
            running: list[tuple[CandidateRun, Served]] = []
            for trial in trials:
                served = await self._start(stack, trial, max(LEAST_PATIENCE_S, PATIENCE * trial.startup_s))
                if served is not None:
                    running.append((trial, served))
            if not running:
                return
            rounds, round_s = plan_rounds(self.left_s(), len(running))
            rates = [await self._play(trial, served, 0, None, round_s) for trial, served in running]
            usual = median([rate for rate in rates if rate is not None] or [1.0])
            count = max(self.options.in_flight, round(usual * round_s))
            for number in range(rounds):
                running = [(trial, served) for trial, served in running if trial.problem is None]
                if number and self.left_s() < round_s * len(running):
                    for trial, _ in running:
                        trial.skipped = f"{rounds - number} of {rounds} rounds left out: no time"
                        trial.lacks_time = True
                    return
                self.say(f"round {number + 1} of {rounds}: {len(running)} candidates")
                # Each round begins with another one: the first may find caches cold.
                turn = number % max(1, len(running))
                for trial, served in [*running[turn:], *running[:turn]]:
                    rate = await self._play(trial, served, number * count, count, SLOW * round_s)
                    if rate is not None:
                        trial.rounds.append(rate)

    async def _start(self, stack: AsyncExitStack, trial: CandidateRun, patience_s: float) -> Served | None:
        """Serve a candidate until the stack ends; None, with the reason in its `problem`, where that failed."""
        folder = Path(mkdtemp(dir=self.folder))
        self.say(f"serving: {trial.candidate.label}")
        config = self.subject.write(trial.candidate, folder)
        slots = trial.candidate.placement.all_slots
        began = monotonic()
        try:
            served = await stack.enter_async_context(
                serving(config, self.subject.settings.name, slots, patience_s)
            )
        except ServerEnded as error:
            trial.problem = f"the server did not start: {error}"
            return None
        trial.startup_s = monotonic() - began
        return served

    async def _play(
        self, trial: CandidateRun, served: Served, first: int, count: int | None, most_s: float
    ) -> float | None:
        """Return the rate of one round; None, with the reason in the trial's `problem`, where it failed.

        A round has `count` requests from number `first` on, None for no end, of the trace, which starts again at its
        end. None is sent after `most_s` seconds.
        """
        last = None if count is None else first + count
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * most_s)
        with trio.move_on_after(patience_s):
            try:
                rate = await replay(
                    served.client,
                    self.subject.settings.name,
                    islice(cycle(self.requests), first, last),
                    self.maker,
                    in_flight=self.options.in_flight,
                    most_s=most_s,
                )
            except RequestError as error:
                trial.problem = f"{error}; {last_words(served.process, served.log)}"
                return None
            trial.memory_bytes = family_bytes(served.process.pid)
            return rate
        trial.problem = f"a round of {most_s:.1f} s was not done within {patience_s:.0f} s"
        return None

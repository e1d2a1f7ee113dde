"""A tuning run from its beginning to its end, within its budget.

1. Placements (slots, threads, processes) are calibrated with the shapes of the user's file, and predicted; the file as
   it is and the best of them run for real, which also shows how far predictions are off.
2. Choices of shapes are calibrated at the best placement, and predicted.
3. The file as it is and the best few are served, and the trace replayed at them in turn.
4. The best by what was measured there is chosen.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import median
from time import monotonic

import trio

from shapestream.errors import ShapestreamError
from shapestream.serving.models import ServedModel
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.tune_bench_file import Subject
from shapestream_workers.lab.tune_candidates import Candidate, Placement, placements
from shapestream_workers.lab.tune_choice import Objective, choose, noise_of
from shapestream_workers.lab.tune_first_stage import Calibrator, Say
from shapestream_workers.lab.tune_proposals import propose
from shapestream_workers.lab.tune_second_stage import Contest
from shapestream_workers.lab.tune_trials import Budget, Trial, scored, varied
from shapestream_workers.lab.tune_workload import Workload
from shapestream_workers.serve import model_options

__all__ = ["Options", "Outcome", "TuningFailed", "run_tuning"]

PLACEMENTS_UNTIL, RACE_UNTIL, SHAPES_UNTIL = 0.8, 0.6, 0.4
"""What must be left of the budget after each part: predictions choose who runs, but only runs decide."""
LEAST_FOR_RACE_S = 60.0
"""With a smaller budget placements are judged by predictions alone until the end."""


class TuningFailed(ShapestreamError):
    """Nothing could be measured; the message says what happened to each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to tune."""

    objective: Objective = "throughput"
    budget_s: float = 120.0
    in_flight: int = 64
    """Requests under way at a time, where throughput is measured."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was found."""

    subject: Subject
    workload: Workload
    options: Options
    trials: list[Trial]
    chosen: Trial
    noise: float
    """Relative: smaller differences decided nothing."""
    seconds: float
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @property
    def baseline(self) -> Trial:
        """The user's file as it is."""
        return self.trials[0]


def run_tuning(
    subject: Subject, workload: Workload, signature: ModelSignature, options: Options, say: Say
) -> Outcome:
    """Raises `TuningFailed`, and KeyboardInterrupt for SIGINT and SIGTERM; no process is left behind."""
    # Short, since the path of a socket is: not below the user's TMPDIR.
    folder = Path(tempfile.mkdtemp(prefix="shapestream-tune-", dir="/tmp"))
    try:
        run = _Run(subject, workload, signature, options, folder, say)
        return trio.run(run.to_the_end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Run:
    def __init__(
        self,
        subject: Subject,
        workload: Workload,
        signature: ModelSignature,
        options: Options,
        folder: Path,
        say: Say,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._subject = subject
        self._workload = workload
        self._signature = signature
        self._options = options
        self._budget = Budget(options.budget_s, clock)
        self._notes: list[str] = []
        self._trials: list[Trial] = []
        self._corrections: dict[Placement, float] = {}
        of_model = model_options(subject.loaded.settings)[signature.name]
        self._max_batch = ServedModel(0, signature.name, signature, of_model).profile.max_batch
        self._calibrator = Calibrator(
            subject,
            workload,
            signature,
            self._budget,
            folder,
            objective=options.objective,
            in_flight=options.in_flight,
            say=say,
        )
        self._contest = Contest(
            subject,
            workload,
            signature,
            self._budget,
            folder,
            objective=options.objective,
            in_flight=options.in_flight,
            say=say,
        )

    async def to_the_end(self) -> Outcome:
        """All stages, unless somebody ends the process before."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_obey_sigterm)
            await self._first_stage()
            await self._second_stage()
            nursery.cancel_scope.cancel()
        return self._outcome()

    async def _first_stage(self) -> None:
        await self._try_placements()
        if len(self._trials) > 1 and self._races:
            await self._race_placements()
        await self._try_shapes()

    @property
    def _races(self) -> bool:
        return self._budget.seconds >= LEAST_FOR_RACE_S

    async def _try_placements(self) -> None:
        baseline = self._subject.baseline()
        # The user's file is measured whatever it takes: all others are compared with it.
        self._trials.append(await self._calibrator.calibrate(baseline, until_left_s=0.0))
        for place in self._placements():
            candidate = Candidate(placement=place, shapes=baseline.shapes)
            if place != baseline.placement:
                until_left_s = self._share(PLACEMENTS_UNTIL if self._races else RACE_UNTIL)
                self._trials.append(await self._calibrator.calibrate(candidate, until_left_s=until_left_s))

    async def _race_placements(self) -> None:
        """Runs the file as it is and the best placements for real; what is predicted from now on is corrected by it."""
        objective = self._options.objective
        able = sorted(
            (trial for trial in self._trials[1:] if trial.prediction is not None and trial.problem is None),
            key=lambda trial: trial.rank(objective),
        )
        # Placements that make the same calls differ little: first one of each kind, whatever is predicted of it.
        entrants = [self._trials[0], *varied(able, objective, beside=self._trials[0], within=inf)]
        await self._contest.run(entrants, until_left_s=self._share(RACE_UNTIL))
        corrections = {
            trial.candidate.placement: middle / predicted
            for trial in self._trials
            if (middle := trial.middle(objective)) and (predicted := trial.predicted)
        }
        for trial in self._trials:
            trial.rounds, trial.skipped = [], None
            trial.memory_bytes = 0 if trial.calibration is None else trial.calibration.memory_bytes
        self._corrections = {
            place: correction for place, correction in corrections.items() if isfinite(correction)
        }
        for trial in self._trials:
            self._correct(trial)

    def _correct(self, trial: Trial) -> None:
        """By what was seen of its placement; of the others, where it did not run."""
        if self._corrections:
            usual = median(self._corrections.values())
            trial.correction = self._corrections.get(trial.candidate.placement, usual)

    async def _try_shapes(self) -> None:
        """All choices of shapes at the placement that is best so far."""
        baseline = self._trials[0].candidate
        best = min(self._trials, key=lambda trial: trial.rank(self._options.objective))
        proposals = propose(self._workload, self._signature, baseline.shapes, max_batch=self._max_batch)
        self._notes += [f"not tried: {what}" for what in proposals.left_out]
        for shapes in proposals.choices:
            candidate = best.candidate.with_shapes(shapes)
            trial = await self._calibrator.calibrate(candidate, until_left_s=self._share(SHAPES_UNTIL))
            self._correct(trial)
            self._trials.append(trial)

    def _share(self, share: float) -> float:
        return share * self._budget.seconds

    def _placements(self) -> list[Placement]:
        subject = self._subject
        if not subject.is_alone:
            self._notes.append("slots and threads are kept: other models or workers share the CPUs")
            return []
        if subject.settings.device != "CPU":
            self._notes.append(f"slots and threads are kept: the device is {subject.settings.device}")
            return []
        return placements(subject.cpus, workers=not subject.in_process)

    async def _second_stage(self) -> None:
        objective = self._options.objective
        baseline, *others = self._trials
        able = sorted(
            (trial for trial in others if trial.prediction is not None and trial.problem is None),
            key=lambda trial: trial.rank(objective),
        )
        entrants = [
            trial for trial in (baseline, *varied(able, objective, beside=baseline)) if trial.problem is None
        ]
        if entrants and self._budget.left() <= 0:
            self._notes.append("there is no time left to serve them (give more by --budget)")
            return
        await self._contest.run(entrants)

    def _outcome(self) -> Outcome:
        """What was measured decides; without any real run, nothing does, and the file stays as it is."""
        objective = self._options.objective
        entries = scored(self._trials, objective)
        if not entries:
            said = [f"{trial.candidate.label}: {trial.problem}" for trial in self._trials if trial.problem]
            raise TuningFailed("\n".join(["nothing could be served", *said, *self._notes]))
        chosen = choose(entries, objective)
        return Outcome(
            subject=self._subject,
            workload=self._workload,
            options=self._options,
            trials=self._trials,
            chosen=self._trials[chosen.number],
            noise=noise_of(entries),
            seconds=self._budget.spent(),
            notes=self._notes,
        )


async def _obey_sigterm() -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise KeyboardInterrupt

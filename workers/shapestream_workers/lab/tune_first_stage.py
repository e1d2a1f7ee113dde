"""The first stage: every candidate is measured call by call in a process of its own, and what it should reach predicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from shapestream.errors import ConfigurationError
from shapestream_engine.batching.native import Native
from shapestream_engine.cost_table import CostTable
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.tune_bench_file import Subject
from shapestream_workers.lab.tune_candidates import Candidate
from shapestream_workers.lab.tune_children import ChildEnded, running
from shapestream_workers.lab.tune_choice import Objective
from shapestream_workers.lab.tune_measuring import Wishes
from shapestream_workers.lab.tune_prediction import predict
from shapestream_workers.lab.tune_trials import Budget, Calibration, Trial
from shapestream_workers.lab.tune_workload import Workload
from shapestream_workers.serve import model_options

__all__ = ["Calibrator", "Say", "planned_signature"]

Say: TypeAlias = Callable[[str], None]
"""Takes a line about the progress, for a person."""

CALLS_SHARE = 0.03
"""Of the budget, for the calls of one candidate: some ten of them take their turn."""
LEAST_CALLS_S = 0.5
LEAST_S = 1.5
"""Less does not even start Python and an engine."""
MOST_OF_LEFT, ENOUGH_S = 0.5, 10.0
"""A candidate may take half of the time that is left for all, or so long: others want to be measured, too."""


class Calibrator:
    """Calibrates candidates; those that make the same calls on as many slots and threads share what was measured."""

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
        self._signature = signature
        self._budget = budget
        self._folder = folder
        self._objective: Objective = objective
        self._in_flight = in_flight
        self._say = say
        self._known: dict[tuple[object, ...], Calibration | str] = {}

    async def calibrate(self, candidate: Candidate, *, until_left_s: float) -> Trial:
        """Measures and predicts, as long as the budget does not fall below `until_left_s`."""
        trial = Trial(candidate=candidate)
        key = candidate.calls_key
        if key not in self._known:
            left = self._budget.left() - until_left_s
            if left <= LEAST_S:
                trial.skipped = "not measured: no time left"
                return trial
            self._known[key] = await self._measured(candidate, left)
        match self._known[key]:
            case str() as problem:
                trial.problem = problem
            case calibration:
                trial.calibration = calibration
                trial.memory_bytes = calibration.memory_bytes
                trial.startup_s = calibration.startup_s
                self._predict(trial, calibration)
        return trial

    async def _measured(self, candidate: Candidate, left_s: float) -> Calibration | str:
        folder = self._folder / f"c{len(self._known)}"
        folder.mkdir()
        config = self._subject.write(candidate, folder)
        wishes = Wishes(
            slots=candidate.placement.all_slots,
            threads=candidate.placement.all_threads,
            budget_s=max(LEAST_CALLS_S, CALLS_SHARE * self._budget.seconds),
        )
        self._say(f"measuring calls: {candidate.label}")
        arguments = ["shapestream_workers.lab.tune_measuring", str(config), wishes.to_json()]
        try:
            with running(arguments, folder / "child.log") as child:
                said = await child.output(max(left_s * MOST_OF_LEFT, min(left_s, ENOUGH_S)))
                plain = _parsed(said)
                if plain is None:
                    return child.last_words()
        except ChildEnded as error:
            return str(error)
        if "error" in plain:
            return "; ".join(plain["error"]).replace(f"{config}:", "")
        return Calibration(
            table=CostTable.from_dict(plain["table"]),
            signature=plain["signature"],
            startup_s=plain["startup_s"],
            memory_bytes=plain["resident_bytes"],
        )

    def _predict(self, trial: Trial, calibration: Calibration) -> None:
        options = model_options(self._subject.loaded.settings)[self._signature.name]
        signature = planned_signature(calibration.signature, trial.candidate)
        try:
            trial.prediction = predict(
                signature,
                options,
                calibration.table,
                self._workload.requests,
                slots=trial.candidate.placement.all_slots,
                in_flight=self._in_flight,
                objective=self._objective,
            )
        except ConfigurationError as error:
            trial.problem = str(error)


def planned_signature(measured: Mapping[str, Any], candidate: Candidate) -> ModelSignature:
    """The signature of what was measured, with the candidate's own cap on shapes.

    A cap changes which calls are planned, not what they cost, so candidates that differ in it alone share a measurement.
    """
    signature = ModelSignature.from_dict(measured)
    strategy = signature.strategy
    if not isinstance(strategy, Native):
        return signature
    cap = candidate.shapes.max_prepared
    fill_rows = cap is not None and not strategy.alone
    most_rows = None if fill_rows else strategy.most_rows  # calls are filled up to the bound
    strategy = replace(strategy, max_prepared=cap, fill_rows=fill_rows, most_rows=most_rows)
    return replace(signature, strategy=strategy)


def _parsed(said: bytes) -> dict[str, Any] | None:
    try:
        plain = json.loads(said)
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else None

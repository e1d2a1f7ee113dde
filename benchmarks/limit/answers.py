"""Every answer is compared with the model's own on that sentence alone, as closely as a proof demands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.limit.engine import Minilm, OneStream
from benchmarks.limit.traces import Trace
from shapestream_engine.probing.tolerances import TOLERANCES, OutputTolerance

Answers = npt.NDArray[np.float32]
WIDTH = 384


def no_answers(trace: Trace) -> Answers:
    """Room for them; what is not answered stays NaN, and is wrong."""
    return np.full((len(trace), WIDTH), np.nan, np.float32)


class References:
    """The model run alone on each sentence of a trace."""

    def __init__(self, model: Minilm, trace: Trace) -> None:
        alone = OneStream(model)
        self._rows = np.stack([alone.run(ids) for ids in trace.ids]).astype(np.float64)
        tolerance = OutputTolerance.of(TOLERANCES["f32"], [row[None] for row in self._rows])
        self._allowed = np.stack([np.asarray(tolerance.allowed(row[None]))[0] for row in self._rows])
        self.checked = 0

    def check(self, answers: Answers, who: str, *, places: npt.NDArray[np.intp] | None = None) -> None:
        """Raises AssertionError unless each row is right; `places` are those of the rows in the trace."""
        rows, allowed = self._rows, self._allowed
        if places is not None:
            rows, allowed = rows[places], allowed[places]
        if rows.shape != answers.shape:
            raise AssertionError(f"{who}: {len(answers)} answers to {len(rows)} requests")
        wrong = ~(np.abs(answers - rows) <= allowed).all(axis=1)  # NaN is wrong
        if wrong.any():
            worst = float(np.nanmax(np.abs(answers - rows)))
            raise AssertionError(
                f"{who}: {wrong.sum()} of {len(rows)} answers are wrong, by up to {worst:.2g}"
            )
        self.checked += len(rows)

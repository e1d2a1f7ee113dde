"""Compares compilations of one model on this machine: the speed of their calls, and the distance of their answers.

1. *Speed.* Each `Variant` makes the same calls in turns, so that a disturbance hits all alike. Its slots run at the same
   time, as under load. `compare_speed` returns the seconds of each call shape that all variants ran.
2. *Answers.* `compare_answers` runs the same requests on two variants, and measures the distance of their results;
   `differing_output` tells whether it is within the tolerances of the model's proof.

The inputs are those of calibration: realistic values, at few shapes of its grid. Nothing is proved: the figures tell what
is worth trying, for calls of up to an eighth of the budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import geometric_mean
from time import monotonic

import numpy as np

from shapestream_engine.arrays import arrays_of
from shapestream_engine.calibration import CalibrationBench
from shapestream_engine.calibration_shapes import stages
from shapestream_engine.compiled_model import CompiledModel, RequestPool
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.machine import thread_times
from shapestream_engine.probing.inputs import Values, complete_values, make_request
from shapestream_engine.probing.tolerances import (
    TOLERANCES,
    Difference,
    OutputTolerance,
    distances,
    spread_of,
    worst_difference,
)
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner, run_batch
from shapestream_engine.tensor import Array

MOST_SHAPES = 8
"""Call shapes that are compared, spread over the coarse grid of calibration."""
ENOUGH_PASSES = 3
"""Passes over the shapes; the budget usually ends before."""
MOST_REQUESTS = 64
"""Requests whose answers `differing_output` compares."""
MOST_VALUES = 1 << 20
"""Values that are compared; their spread takes memory."""

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled model, and the calls that it runs at the same time."""

    model: CompiledModel
    at_once: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The result of `compare_speed`."""

    seconds: list[dict[Sizes, float]]
    """Seconds of a call by its shape, for each variant; all have the same shapes."""
    waited: float
    """Part of their time that the threads waited for a CPU, which others had."""


def compare_speed(
    variants: Sequence[Variant], *, values: Mapping[str, Values], max_batch: int | None, budget_s: float
) -> Speeds:
    """Measure the seconds of calls on each variant.

    It takes `budget_s` seconds and the calls of one shape. Empty if a variant could not run, or if the smallest call is too
    long.
    """
    signature = variants[0].model.signature
    coarse, _ = stages(signature, max_batch)
    shapes = coarse[:: -(-len(coarse) // MOST_SHAPES)] if coarse else []
    benches = [CalibrationBench(each.model, each.at_once, values, budget_s) for each in variants]
    end = monotonic() + budget_s
    ran_before, waited_before = thread_times()
    try:
        for shape in shapes * ENOUGH_PASSES:
            if monotonic() > end:
                break
            for bench in benches:
                bench.measure([shape], math.inf)
        ran, waited = thread_times()
    finally:
        for bench in benches:
            bench.close()
    seconds = [{point.sizes: point.seconds for point in bench.points()} for bench in benches]
    common = set.intersection(*(set(own) for own in seconds))
    ran, waited = ran - ran_before, waited - waited_before
    return Speeds(
        seconds=[{sizes: own[sizes] for sizes in sorted(common)} for own in seconds],
        waited=waited / max(1, ran + waited),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times as fast one variant's calls are, over the call shapes that were measured."""

    mean: float
    """Geometric mean: every call shape counts alike."""
    least: float
    most: float

    @classmethod
    def of(cls, before: Mapping[Sizes, float], after: Mapping[Sizes, float], at_once: float = 1.0) -> Gain:
        """Return the gain of `after`, in seconds per call by shape, which runs `at_once` times as many calls at a time."""
        ratios = [at_once * seconds / after[sizes] for sizes, seconds in before.items()]
        return cls(mean=geometric_mean(ratios), least=min(ratios), most=max(ratios))

    def __str__(self) -> str:
        return f"{self.mean:.2f} x"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDistance:
    """The distance of two models' answers to the same requests."""

    of_spread: float | None = 0.0
    """Largest distance of two float values / the standard deviation of their output; None if one alone is not finite, or
    if the output never changes."""
    vectors: int = 0
    """Vectors along the last axis of float outputs, if it is longer than 1."""
    same_argmax: int = 0
    """Those of them whose largest value stands at the same place."""
    exact: int = 0
    """Values of outputs of other types."""
    same_exact: int = 0
    answers: int = 0
    other_shapes: int = 0
    """Answers with an output of another shape; that output is not compared."""

    def words(self) -> str:
        """Return the distance in a few words."""
        said = ["some answers are not finite, or all are equal in one of the two only"]
        if self.of_spread is not None:
            said = [f"answers differ by at most {100 * self.of_spread:.2g} % of their spread"]
        if self.vectors:
            said.append(f"argmax equal in {self.same_argmax:,} of {self.vectors:,}")
        if self.exact:
            said.append(f"whole numbers and strings equal in {self.same_exact:,} of {self.exact:,}")
        if self.other_shapes:
            said.append(f"outputs of another shape in {self.other_shapes:,} of {self.answers:,} answers")
        return ", ".join(said)


def compare_answers(
    models: tuple[CompiledModel, CompiledModel],
    shapes: Sequence[Sizes],
    *,
    values: Mapping[str, Values],
    budget_s: float,
) -> AnswerDistance:
    """Run the same requests on both models, for `budget_s` seconds or until `MOST_VALUES` values are compared.

    Requests take these shapes in turn; each shape occurs at least once. The spread is that of the first model's answers.
    Raises `EngineError` if a model refuses a request.
    """
    signature = models[0].signature
    made = complete_values(signature, values)
    runners = [Runner("comparison", {signature.name: RequestPool(model, 1)}) for model in models]
    account = _Differences()
    end = monotonic() + budget_s
    for number, sizes in enumerate(cycle(shapes)):
        if number >= len(shapes) and (monotonic() > end or account.values >= MOST_VALUES):
            break
        request = make_request(signature, made, sizes, number=number)
        account.add(*(_answer(runner, signature, request) for runner in runners))
    return account.distance()


def differing_output(
    models: tuple[CompiledModel, CompiledModel],
    shapes: Sequence[Sizes],
    *,
    values: Mapping[str, Values],
    budget_s: float,
) -> tuple[str, Difference] | None:
    """Run the same requests on both models, each alone. Return the output that differs most, if by more than it may.

    Requests take these shapes in turn, until `budget_s` seconds are over; each shape occurs at least once. The tolerances
    are those of the first model's proof, and for other outputs the defaults of their element types, by the spread of these
    answers. Raises `EngineError` if a model refuses a request.
    """
    signature = models[0].signature
    made = complete_values(signature, values)
    runners = [Runner("comparison", {signature.name: RequestPool(model, 1)}) for model in models]
    answers: list[tuple[Tensors, Tensors]] = []
    end = monotonic() + budget_s
    for number, sizes in enumerate(cycle(shapes)):
        if number >= len(shapes) and (monotonic() > end or number >= MOST_REQUESTS):
            break
        request = make_request(signature, made, sizes, number=number)
        first, second = [_answer_of(runner, signature, request) for runner in runners]
        answers.append((first, second))
    tolerances = {name: OutputTolerance.from_dict(known) for name, known in models[0].tolerances.items()}
    references = [arrays_of(first) for first, _ in answers]
    for number, port in enumerate(signature.outputs):
        if port.name not in tolerances:
            default = TOLERANCES.get(port.element_type)
            tolerances[port.name] = OutputTolerance.of(default, [own[number] for own in references])
    names = [port.name for port in signature.outputs]
    found = [worst_difference(names, tolerances, first, second) for first, second in answers]
    worst = max(found, key=lambda each: each[1].excess, default=None)
    return None if worst is None or worst[1].within else worst


class _Differences:
    """The answers so far, compared."""

    def __init__(self) -> None:
        self.values = 0
        self._floats: dict[int, list[tuple[Array, Array]]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, before: Sequence[Array], after: Sequence[Array]) -> None:
        """Compare the outputs of one answer."""
        counts = self._counts
        counts["answers"] += 1
        counts["other_shapes"] += any(
            one.shape != other.shape for one, other in zip(before, after, strict=True)
        )
        for output, (one, other) in enumerate(zip(before, after, strict=True)):
            if one.shape != other.shape:
                continue
            self.values += one.size
            if one.dtype.kind in "biuO":
                counts["exact"] += one.size
                counts["same_exact"] += int((one == other).sum())
                continue
            self._floats.setdefault(output, []).append((one.reshape(-1), distances(one, other).reshape(-1)))
            if one.ndim and one.size and one.shape[-1] > 1:
                counts["vectors"] += one.size // one.shape[-1]
                counts["same_argmax"] += int((one.argmax(-1) == other.argmax(-1)).sum())

    def distance(self) -> AnswerDistance:
        """Return the distance of all answers."""
        of_spread = max(map(_of_spread, self._floats.values()), default=0.0)
        return AnswerDistance(of_spread=of_spread if math.isfinite(of_spread) else None, **self._counts)


def _of_spread(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the largest distance in an output / its spread."""
    largest = max((float(off.max()) for _, off in pairs if off.size), default=0.0)
    if largest == 0.0:
        return 0.0
    spread = spread_of(np.concatenate([values for values, _ in pairs]))
    return largest / spread if spread else math.inf


def _answer(runner: Runner, signature: ModelSignature, request: Tensors) -> list[Array]:
    """Return the outputs of one request that runs alone; raises `EngineError` if it fails."""
    return arrays_of(_answer_of(runner, signature, request))


def _answer_of(runner: Runner, signature: ModelSignature, request: Tensors) -> Tensors:
    report = run_batch(runner, signature, [request], [signature.resolve(request.layout)])
    if report.outputs is None:
        raise EngineError(report.message)
    (answer,) = report.outputs
    assert answer is not None  # without a deadline no request is left out
    return answer

"""What every engine does after a call that nobody wants any more, and after one that failed: the next answer is right.

A dynamic model remembers the shapes of its last call. So calls of one shape stand before and after that call: what it
left half done shows then. A permutation's powers are exact, so any other number is wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conformance.engines import Engine
from tests.engine.conformance.models import POWERS_MODEL, Array, powers

from shapestream_engine import (
    BatchInputs,
    BatchReport,
    InferenceError,
    RequestPool,
    Runner,
    Tensors,
    compile_model,
)
from shapestream_engine.infer_request import InferRequest

FAILED = 30


def permutation(size: int, seed: int) -> Array:
    """The rows of a unit matrix, in another order."""
    order = np.random.default_rng(seed).permutation(size)
    return np.eye(size, dtype=np.float32)[order]


class Slot:
    """One slot of one model; its batches are numbered in turn."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        model = compile_model(engine.spec(POWERS_MODEL, folder), slots=1, threads=1)
        self.signature = model.signature
        self.runner = Runner("s", {"powers": RequestPool(model, 1)})
        self.last = 0

    def run(self, array: Array) -> BatchReport:
        """The next batch, of one request."""
        self.last += 1
        layout = ((0, "f32", array.shape),)
        shape = self.signature.resolve(layout)
        member = Tensors(layout=layout, buffers=(array.tobytes(),))
        report = self.runner.run(
            BatchInputs(
                batch=self.last, model="powers", sizes=shape.sizes, members=(member,), shapes=(shape,)
            )
        )
        assert report is not None  # nothing takes it back before it begins
        return report

    def wrong(self, array: Array) -> str | None:
        """What is wrong with the answer to a permutation; None if nothing is."""
        report = self.run(array)
        if report.code is not None or report.outputs is None or report.outputs[0] is None:
            return f"{report.code}: {report.message}"
        (output,) = report.outputs[0].buffers
        found = np.frombuffer(output, np.float32)
        return None if np.array_equal(powers(array).ravel(), found) else f"wrong values, {found.size} of them"


@pytest.mark.seeds("S003-40")
@pytest.mark.parametrize("withdrawn", [500, pytest.param(2000, marks=pytest.mark.thorough)])
def test_a_batch_withdrawn_while_it_runs_harms_no_other(
    engine: Engine, tmp_path: Path, withdrawn: int
) -> None:
    """Many calls, each withdrawn at another point of its run: the batches around them get right answers."""
    slot = Slot(engine, tmp_path)
    small = [permutation(size, size) for size in (2, 5, 8)]
    large = [permutation(size, size) for size in (64, 96)]
    wanted: list[int] = []  # the batch that is to be withdrawn; -1: no more
    in_its_run = 0

    def withdraw() -> None:
        nonlocal in_its_run
        done = 0
        while True:
            if len(wanted) == done:
                os.sched_yield()
                continue
            if (batch := wanted[done]) < 0:
                return
            done += 1
            while slot.runner.begun is None and len(wanted) == done:
                os.sched_yield()
            for _ in range(batch * 7919 % 40_000):  # up to the length of the call
                pass
            in_its_run += slot.runner.begun == batch
            slot.runner.cancel(batch)

    thread = threading.Thread(target=withdraw)
    thread.start()
    found = []
    try:
        for number in range(withdrawn):
            found.append(slot.wrong(small[number % 3]))
            wanted.append(slot.last + 1)
            slot.run(large[number % 2])
            found.append(slot.wrong(small[number % 3]))
    finally:
        wanted.append(-1)
        thread.join()
    assert [] == [words for words in found if words is not None]
    assert in_its_run > 0, "no batch was withdrawn while it ran"


def answer(request: InferRequest, array: Array) -> list[int] | str:
    """How a call ends: the order in which it leaves the rows of a unit matrix, or words that say why it is none."""
    tensor = request.input_tensor(0)
    tensor.shape = array.shape
    tensor.data[...] = array
    try:
        request.infer()
    except InferenceError:
        return "failed"
    (output,) = request.outputs()
    order = output.argmax(axis=1)
    if output.shape != array.shape or not np.array_equal(np.eye(len(array), dtype=np.float32)[order], output):
        return f"no permutation of {len(array)} rows, but {list(output.shape)} numbers"
    return [int(place) for place in order]


@pytest.mark.seeds("S003-40")
def test_a_call_that_fails_harms_no_other(request_of: Callable[..., InferRequest]) -> None:
    """Inputs that the model does not take fail their own call; one of the shape before it gets the same answer again."""
    request = request_of(POWERS_MODEL, slots=1, threads=1)
    right = [int(place) for place in powers(permutation(8, 8)).argmax(axis=1)]
    for rows in range(3, 3 + FAILED):
        assert right == answer(request, permutation(8, 8))
        assert "failed" == answer(request, np.ones((rows, rows + 1), np.float32))
        assert right == answer(request, permutation(8, 8))


def test_a_call_that_fails_harms_no_other_request_of_its_model(engine: Engine, tmp_path: Path) -> None:
    """One request's calls fail, another's between them are right."""
    model = compile_model(engine.spec(POWERS_MODEL, tmp_path), slots=2, threads=2)
    failing, asking = model.create_infer_request(), model.create_infer_request()
    right = [int(place) for place in powers(permutation(8, 8)).argmax(axis=1)]
    for rows in range(3, 3 + FAILED):
        assert right == answer(asking, permutation(8, 8))
        assert "failed" == answer(failing, np.ones((rows, rows + 1), np.float32))
        assert right == answer(asking, permutation(8, 8))
        assert right == answer(failing, permutation(8, 8))

"""A worker that lies: `python -m tests.e2e.chaos.liar CONFIG FIRST`. It dials in, works, and falsifies every few reports.

Each lie is one that a server can see through; a worker that returns wrong numbers in the right shape is believed, which
is why docs/security.md calls workers half-trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle
from typing import Any, TypeAlias

import numpy as np
from tests.e2e.chaos.witness import Witness
from tests.entries import BatchDone, BatchFailedEntry

from shapestream.serving import slot_threads
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Tensors
from shapestream_workers import cli

_Array: TypeAlias = "np.ndarray[Any, Any]"
TYPES = {"i64": np.int64, "f32": np.float32, "f64": np.float64}
EVERY = 4
"""So many reports, and one of them is false."""


def one_too_few(done: BatchDone) -> BatchDone:
    """A member has no output."""
    return _with_outputs(done, *done.report.outputs[:-1])


def one_too_many(done: BatchDone) -> BatchDone:
    """There is an output that nobody asked for."""
    return _with_outputs(done, *done.report.outputs, done.report.outputs[-1])


def longer(done: BatchDone) -> BatchDone:
    """An output has one column more than its request."""
    return _with_first(done, lambda x: np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, 1)]))


def more_rows(done: BatchDone) -> BatchDone:
    """An output has one row more than its request."""
    return _with_first(done, lambda x: np.pad(x, [(0, 1), *[(0, 0)] * (x.ndim - 1)]))


def other_type(done: BatchDone) -> BatchDone:
    """An output has another element type than the signature says."""
    return _with_first(done, lambda x: x.astype(np.float64))


def none_at_all(done: BatchDone) -> BatchDone:
    """Nobody gets anything."""
    return _with_outputs(done)


def another_batch(done: BatchDone) -> BatchDone:
    """It names a batch that it was never sent."""
    return replace(done, report=replace(done.report, batch=done.batch + 1_000_000))


LIES = (one_too_few, longer, one_too_many, more_rows, other_type, none_at_all, another_batch)


def _with_outputs(done: BatchDone, *outputs: Tensors | None) -> BatchDone:
    return replace(done, report=replace(done.report, outputs=outputs))


def _with_first(done: BatchDone, change: Callable[[_Array], _Array]) -> BatchDone:
    """The first output changed, as an array of its own shape."""
    first = done.report.outputs[0]
    assert first is not None
    ((port, kind, shape),) = first.layout
    x = change(np.frombuffer(first.buffers[0], TYPES[kind]).reshape(shape))
    kind = next(name for name, dtype in TYPES.items() if dtype == x.dtype)
    changed = Tensors(layout=((port, kind, x.shape),), buffers=(x.tobytes(),))
    return _with_outputs(done, changed, *done.report.outputs[1:])


def lie_now_and_then(witness: Witness, first: int) -> None:
    """From now on this process's reports are not to be trusted."""
    honest = slot_threads.entry_of_report
    turns, lies = count(1), cycle(LIES)
    for _ in range(first % len(LIES)):
        next(lies)

    def answer(report: BatchReport, *, session: int) -> BatchDone | BatchFailedEntry:
        done = honest(report, session=session)
        if isinstance(done, BatchFailedEntry) or None in done.report.outputs or next(turns) % EVERY:
            return done
        lie = next(lies)
        witness.tell("lie", what=lie.__name__)
        return lie(done)

    slot_threads.entry_of_report = answer


if __name__ == "__main__":
    lie_now_and_then(Witness(), int(sys.argv[2]))
    sys.argv = ["shapestream", "worker", sys.argv[1], "--name", "liar"]
    cli.main()

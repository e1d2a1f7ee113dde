"""Slots of this process: what their threads report arrives in the event loop, once per batch, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest
import trio
from tests.pipeline.serving.batches import batch_of
from tests.pipeline.serving.clocks import REAL_PATIENCE_S, real_time

from shapestream.serving.local_executor import LocalExecutor
from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.layout import Tensors
from shapestream_engine.model import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model

LONG_S = 600.0


def doubling(before: Callable[[], object] = lambda: None) -> CompiledModel:
    """y = 2 x; refuses 13. `before` is called first."""

    def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        before()
        if 13 in x:
            raise ValueError("no thirteens")
        doubled: np.ndarray[Any, Any] = x * 2
        return doubled

    return compile_model(
        ModelSpec(
            name="double",
            model=double,
            inputs={"x": InputSpec(shape="batch:1..8", element_type="i64")},
            outputs={"y": OutputSpec(shape="batch", element_type="i64")},
        ),
        slots=2,
    )


def doubled_batch(
    model: CompiledModel, number: int, *values: int, slot: int = 0, within_s: float | None = None
) -> Batch:
    """A batch of one request per value, of which the first may have a deadline."""
    members = [Tensors(layout=((0, "i64", (1,)),), buffers=(np.int64(value).tobytes(),)) for value in values]
    start_before = None if within_s is None else (trio.current_time() + within_s, *[None] * (len(values) - 1))
    sizes = (len(values),)
    return batch_of(
        model.signature, *members, batch=number, slot=slot, sizes=sizes, start_before=start_before
    )


class Bench:
    """An executor, what is given to it, and what it reports."""

    def __init__(self, model: CompiledModel, slots: int) -> None:
        self.executor = LocalExecutor({"double": model}, slots, self._take)
        self.reports: dict[int, BatchReport] = {}
        self._model = model
        self._arrival = trio.Event()

    def start(self, number: int, *values: int, slot: int = 0, within_s: float | None = None) -> None:
        """One batch."""
        self.executor.start_nowait(doubled_batch(self._model, number, *values, slot=slot, within_s=within_s))

    def _take(self, reports: Sequence[BatchReport]) -> None:
        for report in reports:
            assert report.batch not in self.reports
            self.reports[report.batch] = report
        self._arrival.set()
        self._arrival = trio.Event()

    async def wait_for(self, *batches: int) -> None:
        """Until all of them have been reported."""
        while not self.reports.keys() >= set(batches):
            await self._arrival.wait()

    def values(self, batch: int) -> list[int | None]:
        """The one number of each result."""
        outputs = self.reports[batch].outputs
        assert outputs is not None
        return [
            None if output is None else int(np.frombuffer(output.buffers[0], np.int64)[0])
            for output in outputs
        ]


@asynccontextmanager
async def bench(
    slots: int = 1, *, before: Callable[[], object] = lambda: None, release: threading.Event | None = None
) -> AsyncIterator[Bench]:
    """An executor for the time of the block; batches wait for `release` where one is given."""

    def enter() -> None:
        before()
        if release is not None:
            release.wait(REAL_PATIENCE_S)

    opened = Bench(doubling(enter), slots)
    try:
        yield opened
    finally:
        if release is not None:
            release.set()
        await opened.executor.aclose()


@real_time
async def test_every_slot_reports_each_of_its_batches_once() -> None:
    """Two slots, several batches each, a failing one among them; the slot that failed goes on."""
    async with bench(slots=2) as slots:
        slots.start(1, 1, 2, 3)
        slots.start(2, 4, 13, slot=1)
        await slots.wait_for(1, 2)
        slots.start(3, 5, slot=1)
        await slots.wait_for(3)
    assert [2, 4, 6] == slots.values(1)
    assert ("model_error", None) == (slots.reports[2].code, slots.reports[2].outputs)
    assert "no thirteens" in slots.reports[2].message
    assert [10] == slots.values(3)


@real_time
async def test_a_member_whose_time_has_passed_is_left_out_of_the_call() -> None:
    """By the slot's own clock, and only that member."""
    async with bench() as slot:
        slot.start(1, 1, 2, within_s=-1.0)
        await slot.wait_for(1)
        slot.start(2, 1, 2, within_s=LONG_S)
        await slot.wait_for(2)
    assert [None, 4] == slot.values(1)
    assert [2, 4] == slot.values(2)


@real_time
async def test_a_slot_that_cannot_start_reports_that_too() -> None:
    """Nothing is raised at the dispatcher, and nobody waits for ever; the batches that are there are not disturbed."""
    release = threading.Event()
    async with bench(release=release) as slot:
        for number in (1, 2, 3):
            slot.start(number, number)
        await slot.wait_for(3)
        assert "unavailable" == slot.reports[3].code
        release.set()
        await slot.wait_for(1, 2)
        assert ([2], [4]) == (slot.values(1), slot.values(2))


@real_time
async def test_a_batch_that_waits_is_taken_up_without_the_event_loop() -> None:
    """The slot runs the second one to its end while the loop does not turn at all."""
    entered = [threading.Event(), threading.Event()]
    seen: list[int] = []

    def enter() -> None:
        entered[len(seen)].set()
        seen.append(len(seen))

    async with bench(before=enter) as slot:
        slot.start(1, 1)
        slot.start(2, 2)
        assert entered[1].wait(REAL_PATIENCE_S), "it needed the event loop"
        assert {} == slot.reports
        await slot.wait_for(1, 2)
    assert [1, 2] == list(slot.reports), "reported in another order than they ran"
    assert ([2], [4]) == (slot.values(1), slot.values(2))
    assert all(report.busy_s >= report.run_s > 0 for report in slot.reports.values())


@pytest.mark.parametrize("wanted", ["recalled", "cancelled"])
@real_time
async def test_a_batch_that_waits_is_taken_back(wanted: str) -> None:
    """Its report comes in the next turn, while the one before it still runs; one that runs is not recalled."""
    release, entered = threading.Event(), threading.Event()
    async with bench(before=entered.set, release=release) as slot:
        executor = slot.executor
        take_back = executor.recall_nowait if wanted == "recalled" else executor.cancel_nowait
        slot.start(1, 1)
        slot.start(2, 2)
        assert await trio.to_thread.run_sync(entered.wait, REAL_PATIENCE_S)
        executor.recall_nowait(1)
        take_back(2)
        take_back(7)
        assert {} == slot.reports, "reported in the middle of a decision"
        await slot.wait_for(2)
        assert (wanted, None) == (slot.reports[2].code, slot.reports[2].outputs)
        assert {2} == set(slot.reports)
        slot.start(3, 3)
        release.set()
        await slot.wait_for(1, 3)
        take_back(3)
    assert ([2], [6]) == (slot.values(1), slot.values(3))


@real_time
async def test_a_member_whose_time_passes_behind_another_batch_is_left_out() -> None:
    """Its seconds count from when the batch was handed over, not from when it begins."""
    release = threading.Event()
    async with bench(release=release) as slot:
        slot.start(1, 1)
        slot.start(2, 2, 3, within_s=0.001)
        late = monotonic() + 0.002
        while monotonic() < late:
            pass
        release.set()
        await slot.wait_for(1, 2)
    assert [None, 6] == slot.values(2)


def test_a_report_after_the_event_loop_has_ended_is_dropped() -> None:
    """A slot's thread may outlive the loop; it must not die of that."""
    model = doubling()
    executor: LocalExecutor | None = None

    async def main() -> None:
        nonlocal executor
        executor = LocalExecutor({"double": model}, 1, lambda reports: None)

    trio.run(main)
    assert executor is not None
    executor.start_nowait(doubled_batch(model, 1, 1))
    executor.close()

"""Slots of this process: what their threads report arrives in the event loop, once per batch, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import real_time

from shapestream.serving.batches import Batch, BatchReport
from shapestream.serving.local_executor import LocalExecutor
from shapestream_engine.layout import Tensors
from shapestream_engine.model import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model


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


def batch_of(
    model: CompiledModel, number: int, slot: int, *values: int, within_s: float | None = None
) -> Batch:
    """A batch of one request per value."""
    layout = ((0, "i64", (1,)),)
    members = tuple(Tensors(layout=layout, buffers=(np.int64(value).tobytes(),)) for value in values)
    return Batch(
        batch=number,
        slot=slot,
        model="double",
        sizes=(len(values),),
        members=members,
        shapes=tuple(model.signature.resolve(layout) for _ in values),
        start_before=None
        if within_s is None
        else (trio.current_time() + within_s, *[None] * (len(values) - 1)),
    )


class Desk:
    """Collects reports, and waits for them."""

    def __init__(self) -> None:
        self.reports: dict[int, BatchReport] = {}
        self._arrival = trio.Event()

    def take(self, reports: Sequence[BatchReport]) -> None:
        """As the dispatcher would."""
        for report in reports:
            assert report.batch not in self.reports
            self.reports[report.batch] = report
        self._arrival.set()
        self._arrival = trio.Event()

    async def wait_for(self, *batches: int) -> None:
        """Until all of them have been reported."""
        with trio.fail_after(20):
            while not self.reports.keys() >= set(batches):
                await self._arrival.wait()


def values_of(report: BatchReport) -> list[int | None]:
    """The one number of each result."""
    assert report.outputs is not None
    return [
        None if output is None else int(np.frombuffer(output.buffers[0], np.int64)[0])
        for output in report.outputs
    ]


@real_time
async def test_every_slot_reports_each_of_its_batches_once() -> None:
    """Two slots, several batches each, a failing one among them; the slot that failed goes on."""
    model, desk = doubling(), Desk()
    executor = LocalExecutor({"double": model}, 2, desk.take)
    try:
        executor.start_nowait(batch_of(model, 1, 0, 1, 2, 3))
        executor.start_nowait(batch_of(model, 2, 1, 4, 13))
        await desk.wait_for(1, 2)
        executor.start_nowait(batch_of(model, 3, 1, 5))
        await desk.wait_for(3)
    finally:
        await executor.aclose()
    assert [2, 4, 6] == values_of(desk.reports[1])
    assert ("model_error", None) == (desk.reports[2].code, desk.reports[2].outputs)
    assert "no thirteens" in desk.reports[2].message
    assert [10] == values_of(desk.reports[3])


@real_time
async def test_a_member_whose_time_has_passed_is_left_out_of_the_call() -> None:
    """By the slot's own clock, and only that member."""
    model, desk = doubling(), Desk()
    executor = LocalExecutor({"double": model}, 1, desk.take)
    try:
        executor.start_nowait(batch_of(model, 1, 0, 1, 2, within_s=-1.0))
        await desk.wait_for(1)
        executor.start_nowait(batch_of(model, 2, 0, 1, 2, within_s=60.0))
        await desk.wait_for(2)
    finally:
        await executor.aclose()
    assert [None, 4] == values_of(desk.reports[1])
    assert [2, 4] == values_of(desk.reports[2])


@real_time
async def test_a_slot_that_cannot_start_reports_that_too() -> None:
    """Nothing is raised at the dispatcher, and nobody waits for ever; the batches that are there are not disturbed."""
    release = threading.Event()
    model, desk = doubling(before=lambda: release.wait(20)), Desk()
    executor = LocalExecutor({"double": model}, 1, desk.take)
    try:
        executor.start_nowait(batch_of(model, 1, 0, 1))
        executor.start_nowait(batch_of(model, 2, 0, 2))
        executor.start_nowait(batch_of(model, 3, 0, 3))
        await desk.wait_for(3)
        assert "unavailable" == desk.reports[3].code
        release.set()
        await desk.wait_for(1, 2)
        assert ([2], [4]) == (values_of(desk.reports[1]), values_of(desk.reports[2]))
    finally:
        release.set()
        await executor.aclose()


@real_time
async def test_a_batch_that_waits_is_taken_up_without_the_event_loop() -> None:
    """The slot runs the second one to its end while the loop does not turn at all."""
    entered = [threading.Event(), threading.Event()]
    seen: list[int] = []

    def enter() -> None:
        entered[len(seen)].set()
        seen.append(len(seen))

    model, desk = doubling(before=enter), Desk()
    executor = LocalExecutor({"double": model}, 1, desk.take)
    try:
        executor.start_nowait(batch_of(model, 1, 0, 1))
        executor.start_nowait(batch_of(model, 2, 0, 2))
        assert entered[1].wait(20), "it needed the event loop"
        assert {} == desk.reports
        await desk.wait_for(1, 2)
    finally:
        await executor.aclose()
    assert [1, 2] == list(desk.reports), "reported in another order than they ran"
    assert ([2], [4]) == (values_of(desk.reports[1]), values_of(desk.reports[2]))
    assert all(report.busy_s >= report.run_s > 0 for report in desk.reports.values())


@pytest.mark.parametrize("wanted", ["recalled", "cancelled"])
@real_time
async def test_a_batch_that_waits_is_taken_back(wanted: str) -> None:
    """Its report comes in the next turn, while the one before it still runs; one that runs is not recalled."""
    release = threading.Event()
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        release.wait(20)

    model, desk = doubling(before=wait), Desk()
    executor = LocalExecutor({"double": model}, 1, desk.take)
    take_back = executor.recall_nowait if wanted == "recalled" else executor.cancel_nowait
    try:
        executor.start_nowait(batch_of(model, 1, 0, 1))
        executor.start_nowait(batch_of(model, 2, 0, 2))
        assert await trio.to_thread.run_sync(entered.wait, 20)
        executor.recall_nowait(1)
        take_back(2)
        take_back(7)
        assert {} == desk.reports, "reported in the middle of a decision"
        await desk.wait_for(2)
        assert (wanted, None) == (desk.reports[2].code, desk.reports[2].outputs)
        assert {2} == set(desk.reports)
        executor.start_nowait(batch_of(model, 3, 0, 3))
        release.set()
        await desk.wait_for(1, 3)
        take_back(3)
    finally:
        release.set()
        await executor.aclose()
    assert ([2], [6]) == (values_of(desk.reports[1]), values_of(desk.reports[3]))


@real_time
async def test_a_member_whose_time_passes_behind_another_batch_is_left_out() -> None:
    """Its seconds count from when the batch was handed over, not from when it begins."""
    release = threading.Event()
    model, desk = doubling(before=lambda: release.wait(20)), Desk()
    executor = LocalExecutor({"double": model}, 1, desk.take)
    try:
        executor.start_nowait(batch_of(model, 1, 0, 1))
        executor.start_nowait(batch_of(model, 2, 0, 2, 3, within_s=0.001))
        late = monotonic() + 0.002
        while monotonic() < late:
            pass
        release.set()
        await desk.wait_for(1, 2)
    finally:
        release.set()
        await executor.aclose()
    assert [None, 6] == values_of(desk.reports[2])


def test_a_report_after_the_event_loop_has_ended_is_dropped() -> None:
    """A slot's thread may outlive the loop; it must not die of that."""
    model = doubling()
    executor: LocalExecutor | None = None

    async def main() -> None:
        nonlocal executor
        executor = LocalExecutor({"double": model}, 1, lambda reports: None)

    trio.run(main)
    assert executor is not None
    executor.start_nowait(batch_of(model, 1, 0, 1))
    executor.close()

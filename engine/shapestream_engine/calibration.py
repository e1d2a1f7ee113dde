"""Calibration: what calls of a model cost on this machine, measured before the first request comes.

Every point is measured as it will be paid for: requests of one row are gathered into a call, run and divided again by
the slots themselves, with all slots of the process busy with the same at the same time, since they get in each other's
way when they serve, too. See docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread
from time import monotonic

from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.calibration_cache import CostCache
from shapestream_engine.calibration_shapes import stages
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.machine import resident_bytes
from shapestream_engine.probing.inputs import Values, complete_values, make_request
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.slot import Runner

PASSES = (0.6, 0.8, 0.95, 1.0)
"""End of each pass, as a share of the budget: the coarse grid, the same again, the finer points, all of them again.
A disturbance of a machine lasts longer than a call, so repeats at another time tell more than those at once."""
MOST_ROUNDS = 5
"""Repeats of one point in one pass, at most."""
LEAST_ROUNDS = 2
POINT_SHARE = 1 / 50
"""Share of the budget after which a point gets no more repeats than `LEAST_ROUNDS`."""
CALL_SHARE = 1 / 8
"""Share of the budget: no call is measured that is expected to take longer, and none larger."""
DIFFERENT = 2
"""Requests with inputs of their own; a call's rows take turns with them. Making inputs takes time as well."""
MOST_FAILURES = 8
"""Shapes that a model refuses before nothing more is tried."""
MOST_GROWTH_NBYTES = 256 << 20
"""Resident memory of the process. When it has grown by so much, larger calls are not measured: engines keep what the
largest call took, and such a call may never come."""
HANG_S = 30.0
"""A call that takes longer hangs, and ends the calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of one calibration: a table, and its circumstances."""

    table: CostTable
    findings: tuple[str, ...] = ()
    """Reasons why points could not be measured, for people."""
    seconds: float = 0.0
    """Seconds that the calibration took."""
    from_cache: bool = False


def calibrate(
    model: CompiledModel,
    *,
    slots: int,
    max_batch: int | None,
    budget_s: float,
    values: Mapping[str, Values],
    key: str,
    cache: CostCache | None = None,
) -> Calibration:
    """Measures for `budget_s` seconds at most, but for the call that runs then; or reads what was measured before.

    `slots` calls run at the same time. `values` say what realistic inputs are; defaults by element type are taken for
    other inputs. `key` names model, device, settings and versions. First times, preparation included, mean something
    in a fresh process only, which has not met these shapes. With a budget of 0 the table is empty.
    """
    empty = CostTable(key=key, dimensions=model.signature.dimensions)
    if budget_s <= 0.0:
        return Calibration(table=empty)

    def measured() -> Calibration:
        began = monotonic()
        bench = CalibrationBench(model, slots, values, budget_s)
        try:
            coarse, fine = stages(model.signature, max_batch)
            for shapes, share in zip((coarse, coarse, fine, [*coarse, *fine]), PASSES, strict=True):
                bench.measure(shapes, share * budget_s)
        finally:
            bench.close()
        table = replace(empty, points=bench.points())
        return Calibration(table=table, findings=tuple(bench.findings), seconds=monotonic() - began)

    if cache is None:
        return measured()
    with cache.entry(key) as entry:
        known = entry.read()
        if known is not None and known.key == key and known.dimensions == empty.dimensions:
            return Calibration(table=known, from_cache=True)
        if not entry.begin():
            return Calibration(table=empty, findings=("the process ended each time that it was measured",))
        try:
            found = measured()
        finally:
            entry.end()
        if found.table.points:
            entry.write(found.table)
        return found


class CalibrationBench:
    """All slots of a process, and what they have shown so far."""

    def __init__(
        self, model: CompiledModel, slots: int, values: Mapping[str, Values], budget_s: float
    ) -> None:
        self.findings: list[str] = []
        self._signature = model.signature
        self._values = complete_values(model.signature, values)
        self._budget_s = budget_s
        self._began = monotonic()
        self._times: dict[tuple[int, ...], list[float]] = {}
        self._first_s: dict[tuple[int, ...], float | None] = {}
        """Seconds of the first call of each shape; `_times` has those of later ones."""
        self._refused: set[tuple[int, ...]] = set()
        self._resident = resident_nbytes()
        self._reports: SimpleQueue[BatchReport] = SimpleQueue()
        pools = {model.signature.name: RequestPool(model, slots)}
        self._slots = [
            _start_slot(Runner(f"calibration/{number}", pools), self._reports) for number in range(slots)
        ]
        self._failures = 0
        self._hangs = False
        self._warm = False
        self._smallest: tuple[int, float] | None = None
        self._largest: tuple[int, float] = (0, 0.0)
        """Elements and seconds, of what was measured so far."""

    def close(self) -> None:
        """End the slots. One that hangs is left behind, and so are the others then."""
        for _, given in self._slots:
            given.put(None)
        if not self._hangs:
            for thread, _ in self._slots:
                thread.join()

    def points(self) -> tuple[CostPoint, ...]:
        """Points measured so far. Of a shape's times the lower quartile counts: disturbances only make them longer."""
        return tuple(
            CostPoint(
                sizes=sizes,
                seconds=sorted(times)[len(times) // 4],
                first_seconds=self._first_s[sizes],
            )
            for sizes, times in self._times.items()
        )

    def measure(self, shapes: Sequence[tuple[int, ...]], until_s: float) -> None:
        """Measures these calls, in order, once more, as long as there is time: `until_s` seconds from the beginning."""
        for sizes in shapes:
            if sizes in self._refused:
                continue
            left_s = until_s - (monotonic() - self._began)
            expected_s = self._expected_s(prod(sizes))
            if left_s <= 0.0 or self._hangs or self._failures >= MOST_FAILURES:
                return
            if prod(sizes) > self._largest[0] and resident_nbytes() - self._resident > MOST_GROWTH_NBYTES:
                self.findings.append(f"calls from {sizes} up are not measured: they take much memory")
                return
            # All slots at a time: a round takes as long as a call.
            if expected_s > self._budget_s * CALL_SHARE or (1 + LEAST_ROUNDS) * expected_s > left_s:
                continue
            try:
                self._measure(sizes)
            except _CallFailed as failure:
                self._failures += 1
                self._refused.add(sizes)
                self.findings.append(f"a call of {sizes} is not measured: {failure}")

    def _expected_s(self, elements: int) -> float:
        """Seconds of a call, on the line through the smallest and the largest so far; above it rather more."""
        if self._smallest is None:
            return 0.0
        (few, least_s), (most, most_s) = self._smallest, self._largest
        # One point says nothing about the slope: most of a small call's time is its fixed part.
        slope = max(0.0, most_s - least_s) / (most - few) if most > few else least_s / max(1, 16 * few)
        return max(least_s, most_s + (1.5 if elements > most else 1.0) * slope * (elements - most))

    def _measure(self, sizes: tuple[int, ...]) -> None:
        work = self._work(sizes)
        if not self._times:
            self._round(work)  # what the very first call of a process takes is no shape's doing
        began = monotonic()
        first = None if sizes in self._times else self._round(work)
        times: list[float] = []
        for done in range(MOST_ROUNDS):
            if done >= LEAST_ROUNDS and monotonic() - began > self._budget_s * POINT_SHARE:
                break
            reports = self._round(work)
            times += [report.busy_s for report in reports]
        calls = reports[0].calls or ((1, sizes),)
        if len(calls) != 1 or calls[0][0] != 1:
            raise _CallFailed(f"it takes more calls than one: {calls}")
        self._keep(calls[0][1], times, first)

    def _keep(self, ran: tuple[int, ...], times: list[float], first: list[BatchReport] | None) -> None:
        own = self._times.get(ran)
        if own is None:
            met = not self._times  # it was the first of all, and has run before
            own = self._times[ran] = []
            known = met or first is None
            self._first_s[ran] = None if known else median([report.busy_s for report in first or ()])
        own += times
        seconds = median(own)
        self._smallest = self._smallest or (prod(ran), seconds)
        self._largest = max(self._largest, (prod(ran), seconds))

    def _round(self, work: BatchInputs) -> list[BatchReport]:
        """Run the same batch on all slots at the same time."""
        for _, given in self._slots:
            given.put(work)
        reports = []
        for _ in self._slots:
            try:
                reports.append(self._reports.get(timeout=HANG_S))
            except Empty:
                self._hangs = True
                raise _CallFailed(f"it takes more than {HANG_S:g} s") from None
        failed = next((report for report in reports if report.outputs is None), None)
        if failed is not None:
            raise _CallFailed(failed.message)
        return reports

    def _work(self, sizes: tuple[int, ...]) -> BatchInputs:
        """A batch of that size, of requests with one row each if the model takes such."""
        signature = self._signature
        alone = not signature.has_batch or signature.strategy.alone or signature.bounds[0].minimum > 1
        own = sizes if alone else (1, *sizes[1:])
        try:
            different = [
                make_request(signature, self._values, own, number=number)
                for number in range(1 if alone else min(sizes[0], DIFFERENT))
            ]
            members: list[Tensors] = (
                different if alone else [different[row % len(different)] for row in range(sizes[0])]
            )
            shapes = tuple([signature.resolve(member.layout) for member in members])
        except EngineError as error:
            raise _CallFailed(str(error)) from error
        return BatchInputs(batch=0, model=signature.name, sizes=sizes, members=tuple(members), shapes=shapes)


def _start_slot(
    runner: Runner, reports: SimpleQueue[BatchReport]
) -> tuple[Thread, SimpleQueue[BatchInputs | None]]:
    """Start a thread that runs what is put into the queue beside it, until that is None."""
    given: SimpleQueue[BatchInputs | None] = SimpleQueue()

    def run() -> None:
        while (batch := given.get()) is not None:
            report = runner.run(batch)
            assert report is not None  # nothing withdraws it
            reports.put(report)

    thread = Thread(target=run, name=f"slot {runner.name}", daemon=True)
    thread.start()
    return thread, given


def resident_nbytes() -> int:
    """Memory of this process in RAM; 0 where the system does not tell."""
    try:
        return resident_bytes()
    except OSError:
        return 0


class _CallFailed(EngineError):
    """A shape that the model did not run."""

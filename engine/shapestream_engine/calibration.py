"""Calibration measures the seconds of a model's calls on this machine, before the first request comes.

1. *Shapes.* `calibration_shapes.stages` chooses a coarse grid of call shapes and finer points between them.
2. *Passes.* The grid is measured twice, then the finer points, then all points again, each pass within its share of
the budget. Repeats at different times show more than repeats at once, because a disturbance lasts longer than a call.
3. *A point.* All slots of the process run the same batch at the same time, as under load: slots slow each other down
in service as well. A batch of one-row requests is gathered, run and divided by the slots themselves.
4. *Result.* The lower quartile of a shape's times counts, because disturbances only make times longer. The first call
of a shape is kept apart: it may include preparation.

A point is skipped if its expected time exceeds its share of the budget, or if the process has grown too much. A shape that
the model refuses is recorded as a finding. A calibration that was cut short, as by other programs that took the processor,
serves until the process ends, and is not kept: the next start measures again. A calibration promises no accuracy: traffic
corrects its costs later (docs/scheduling.md).

Cost tables are kept on disk: a restart measures again only if something has changed. Each combination of model, settings,
versions and machine has one file. `KeptFiles` describes the folder and the variable `SHAPESTREAM_COST_CACHE`. Processes that
need the same table at the same time wait for the first, which holds a lock on the entry; measuring in parallel would slow
both down. A second file per table has the corrections that traffic made. It is replaced as a whole without a lock, so the
last writer wins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread
from time import monotonic

from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.calibration_shapes import stages
from shapestream_engine.compiled_model import CompiledModel, RequestPool
from shapestream_engine.cost_table import CostPoint, CostTable, LearnedCosts
from shapestream_engine.errors import EngineError
from shapestream_engine.files import KeptFiles, read_plain, read_regular, write_plain
from shapestream_engine.layout import Tensors
from shapestream_engine.machine import resident_bytes_of
from shapestream_engine.model import ModelSpec
from shapestream_engine.probing.cache import key_of
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.probing.inputs import Values, complete_values, make_request
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner

PASSES = (0.6, 0.8, 0.95, 1.0)
"""End of each pass, as a share of the budget: grid, grid again, finer points, all points again."""
MOST_ROUNDS = 5
"""Largest number of repeats of a point per pass."""
LEAST_ROUNDS = 2
POINT_SHARE = 1 / 50
"""Share of the budget after which a point gets only `LEAST_ROUNDS` repeats."""
CALL_SHARE = 1 / 8
"""Largest expected time of a call, as a share of the budget; longer and larger calls are not measured."""
DIFFERENT = 2
"""Number of different requests, which take turns as rows of a call: making inputs takes time."""
MOST_FAILURES = 8
"""Number of refused shapes that ends the calibration."""
MOST_GROWTH_NBYTES = 256 << 20
"""Growth of the process's resident memory, in bytes, beyond which no larger calls are measured. Engines keep the
memory of their largest call, and such a call may never come."""
TESTED_S = 0.05
"""Most seconds of a call by which a predecessor's costs are tested: the process starts beside load."""
ALIKE = 2.0
"""Factor between the factors of calls that are alike: beside load, two measurements of one model differ by a sigma of 0.3,
so four calls by 1.8. Of models of four kinds (docs/experiments.md), none is taken for one of another."""
HANG_S = 30.0
"""Seconds after which a call counts as hanging and ends the calibration."""


class CostSource(StrEnum):
    """The origin of a table."""

    MEASURED = "measured"
    KEPT = "cache"
    """An earlier measurement of the same."""
    PREDECESSOR = "predecessor"
    """The costs of the process that this one replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of one calibration: a cost table and how it was made."""

    table: CostTable
    findings: tuple[str, ...] = ()
    """Reasons why some points were not measured, as text."""
    seconds: float = 0.0
    """Duration of the calibration in seconds."""
    source: CostSource = CostSource.MEASURED
    is_complete: bool = True
    """False: time ran out before the coarse grid was measured. Such a table is not kept."""

    @property
    def from_cache(self) -> bool:
        """True if an earlier start has measured the table."""
        return self.source is CostSource.KEPT


def calibrate(
    model: CompiledModel,
    *,
    slots: int,
    max_batch: int | None,
    budget_s: float,
    values: Mapping[str, Values],
    key: str,
    cache: CostCache | None = None,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    predecessor: CostTable | None = None,
    patience: float = 1.0,
) -> Calibration:
    """Measure the costs of a model for up to `budget_s` seconds plus the last call, or read them from the cache.

    `slots` calls run at the same time. `values` describe realistic inputs; other inputs get defaults by element type.
    `key` identifies model, device, settings and versions. First times are meaningful only in a fresh process, in which no
    shape has run. With a budget of 0 the table is empty. `alone` is entered to measure, not to read. `predecessor`: costs to
    begin with, if a few calls are alike; they are not kept, so a start without them measures. `patience`: times the budget
    that may pass until the coarse grid is measured, where nobody waits for a start.
    """
    empty = CostTable(key=key, dimensions=model.signature.dimensions)
    if budget_s <= 0.0:
        return Calibration(table=empty)
    measured = partial(_measured, model, empty, slots, max_batch, budget_s, values, predecessor, patience)
    if cache is None:
        with alone():
            return measured()
    with cache.entry(key) as entry:
        known = entry.read()
        if known is not None and known.key == key and known.dimensions == empty.dimensions:
            return Calibration(table=known, source=CostSource.KEPT)
        if not entry.begin():
            return Calibration(table=empty, findings=("the process ended each time that it was measured",))
        try:
            with alone():
                found = measured()
        finally:
            entry.end()
        if found.table.points and found.is_complete:
            entry.write(found.table)
        return found


def _measured(
    model: CompiledModel,
    empty: CostTable,
    slots: int,
    max_batch: int | None,
    budget_s: float,
    values: Mapping[str, Values],
    predecessor: CostTable | None,
    patience: float,
) -> Calibration:
    """Measure first a coarse grid of shapes, then a fine one; `empty` is the table without points.

    A predecessor's points are taken over if a few calls take as long, or each of them so many times as long.
    """
    began = monotonic()
    bench = CalibrationBench(model, slots, values, budget_s)
    try:
        if predecessor is not None:
            bench.measure(corners_of(predecessor), CALL_SHARE * budget_s)
            if are_alike(predecessor.points, bench.points()):
                return Calibration(
                    table=replace(empty, points=predecessor.points),
                    seconds=monotonic() - began,
                    source=CostSource.PREDECESSOR,
                    is_complete=False,
                )
        coarse, fine = stages(model.signature, max_batch)
        for shapes, share in zip((coarse, coarse, fine, [*coarse, *fine]), PASSES, strict=True):
            bench.measure(shapes, share * budget_s)
        bench.complete(coarse, patience * budget_s)
    finally:
        bench.close()
    if bench.grown_at is not None:
        bench.findings.append(f"calls from {bench.grown_at} up are not measured: they take much memory")
    table = replace(empty, points=bench.points())
    seconds = monotonic() - began
    is_complete = bench.has_measured(coarse)
    if not is_complete:
        bench.findings.append(
            f"cut short: the calls of {len(table.points)} shapes were measured in {seconds:.1f} s, so the next start "
            "measures again (other programs took the processor, or calls are slow: raise calibration_s)"
        )
    return Calibration(table=table, findings=tuple(bench.findings), seconds=seconds, is_complete=is_complete)


def corners_of(table: CostTable) -> list[tuple[int, ...]]:
    """Return the calls by which a predecessor's costs are tested, small ones first: the corners of the short calls."""
    short = [point.sizes for point in table.points if point.seconds <= TESTED_S]
    corners = {max(short, key=prod), min(short, key=prod)} if short else set()
    for axis in range(len(table.dimensions) if short else 0):
        largest = max([sizes[axis] for sizes in short])
        corners.add(min([sizes for sizes in short if sizes[axis] == largest], key=prod))
    return sorted(corners, key=prod)


def are_alike(before: Sequence[CostPoint], now: Sequence[CostPoint]) -> bool:
    """Tell whether calls take so many times as long as before, by one factor for all of them.

    How the seconds grow with rows and sizes decides which requests share a call; one factor for all decides nothing.
    """
    known = {point.sizes: point.seconds for point in before}
    factors = [point.seconds / known[point.sizes] for point in now if known.get(point.sizes)]
    return bool(factors) and max(factors) <= ALIKE * min(factors)


class CalibrationBench:
    """The slots of a process during a calibration, and their times so far."""

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
        """Seconds of the first call of each shape; later calls are in `_times`."""
        self._refused: set[tuple[int, ...]] = set()
        self._seen: set[tuple[int, ...]] = set()
        """The shapes that were measured, as they were asked for."""
        self._too_dear: set[tuple[int, ...]] = set()
        """The shapes that were skipped for their time or memory."""
        self.grown_at: tuple[int, ...] | None = None
        """The smallest shape that was skipped for memory; larger ones are skipped, too."""
        self._resident = resident_bytes_of(os.getpid())
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
        """Elements and seconds of the smallest and the largest measured call."""

    def close(self) -> None:
        """End the slots; if one hangs, all are left behind."""
        for _, given in self._slots:
            given.put(None)
        if not self._hangs:
            for thread, _ in self._slots:
                thread.join()

    def points(self) -> tuple[CostPoint, ...]:
        """Return the measured points, each with the lower quartile of its times."""
        return tuple(
            CostPoint(
                sizes=sizes,
                seconds=sorted(times)[len(times) // 4],
                first_seconds=self._first_s[sizes],
            )
            for sizes, times in self._times.items()
        )

    def has_measured(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Tell whether each of these shapes was measured, was refused, or is too dear by more than one measured point.

        One point alone tells nothing of the others: its time may be that of a disturbance. Failures that ended the
        calibration would end it again.
        """
        if self._hangs or self._failures >= MOST_FAILURES:
            return True
        missing = set(shapes) - self._seen - self._refused
        return not missing or (missing <= self._too_dear and len(self._times) > 1)

    def measure(self, shapes: Sequence[tuple[int, ...]], until_s: float) -> None:
        """Measure these calls once more, in order, until `until_s` seconds after the beginning."""
        for sizes in shapes:
            if sizes in self._refused:
                continue
            left_s = until_s - (monotonic() - self._began)
            expected_s = self._expected_s(prod(sizes))
            if left_s <= 0.0 or self._hangs or self._failures >= MOST_FAILURES:
                return
            if (
                not self._is_too_large(sizes)
                and prod(sizes) > self._largest[0]
                and resident_bytes_of(os.getpid()) - self._resident > MOST_GROWTH_NBYTES
            ):
                self.grown_at = sizes
            # All slots run at once, so a round takes one call's time.
            if self._is_too_large(sizes) or expected_s > self._budget_s * CALL_SHARE:
                self._too_dear.add(sizes)
                continue
            if (1 + LEAST_ROUNDS) * expected_s > left_s:
                continue
            try:
                self._measure(sizes)
                self._seen.add(sizes)
            except _CallFailed as failure:
                self._failures += 1
                self._refused.add(sizes)
                self.findings.append(f"a call of {sizes} is not measured: {failure}")

    def complete(self, shapes: Sequence[tuple[int, ...]], until_s: float) -> None:
        """Measure those of these calls that were not, with twice the budget each time, while that ends before `until_s`."""
        while not self.has_measured(shapes) and 2 * self._budget_s <= until_s:
            self._budget_s *= 2
            self._too_dear.clear()
            self.measure([sizes for sizes in shapes if sizes not in self._seen], self._budget_s)

    def _is_too_large(self, sizes: tuple[int, ...]) -> bool:
        """Tell whether a call is at least as large as the one before which the process had grown too much."""
        return self.grown_at is not None and prod(sizes) >= prod(self.grown_at)

    def _expected_s(self, elements: int) -> float:
        """Return the expected seconds of a call: linear between the smallest and the largest measured call, steeper
        above."""
        if self._smallest is None:
            return 0.0
        (few, least_s), (most, most_s) = self._smallest, self._largest
        # One point shows no slope: most of a small call's time is fixed.
        slope = max(0.0, most_s - least_s) / (most - few) if most > few else least_s / max(1, 16 * few)
        return max(least_s, most_s + (1.5 if elements > most else 1.0) * slope * (elements - most))

    def _measure(self, sizes: tuple[int, ...]) -> None:
        work = self._work(sizes)
        if not self._times:
            self._round(work)  # the first call of a process includes one-time costs
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
            met = not self._times  # the first of all shapes has run before
            own = self._times[ran] = []
            known = met or first is None
            self._first_s[ran] = None if known else median([report.busy_s for report in first or ()])
        own += times
        seconds = median(own)
        self._smallest = self._smallest or (prod(ran), seconds)
        self._largest = max(self._largest, (prod(ran), seconds))

    def _round(self, work: BatchInputs) -> list[BatchReport]:
        """Run the same batch on all slots at the same time, and return their reports."""
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
        """Make a batch of this size, of one-row requests if the model takes them."""
        signature = self._signature
        alone = not signature.has_batch or signature.strategy.alone or signature.bounds[0].minimum > 1
        own = sizes if alone else (1, *sizes[1:])
        try:
            different = [
                make_request(signature, self._values, own, number=number, exact=True)
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
    """Start a thread that runs batches from a queue until it gets None; return the thread and the queue."""
    given: SimpleQueue[BatchInputs | None] = SimpleQueue()

    def run() -> None:
        while (batch := given.get()) is not None:
            report = runner.run(batch)
            assert report is not None  # nothing withdraws it
            reports.put(report)

    thread = Thread(target=run, name=f"slot {runner.name}", daemon=True)
    thread.start()
    return thread, given


class _CallFailed(EngineError):
    """Raised when the model did not run a shape."""


# ---------------------------------------------------------------- tables on disk

ENVIRONMENT = "SHAPESTREAM_COST_CACHE"
MOST_TRIES = 2
LATELY_S = 3600.0
_MOST_TRIES_BYTES = 4096
"""Largest size of a file of attempt times; a longer file is ignored."""
MOST_LEARNED = 256
"""Number of tables whose corrections are kept; the oldest go first. Most take a few KB, the largest about 200 KB."""
_FORMAT = 2
"""Version of the entries and of the measurement; it is raised when either changes, so that old tables become void."""


@dataclass(frozen=True, slots=True)
class CostEntry:
    """The place of one table; with the path None, nothing is kept.

    A failed write (full or read-only disk) only costs time at the next start.
    """

    path: Path | None

    def begin(self) -> bool:
        """Record that measuring begins; False if it began `MOST_TRIES` times within `LATELY_S` seconds and never ended.

        A model may crash on inputs that no client sends. Its process restarts, and must not repeat the crash for ever.
        """
        if self.path is None:
            return True
        tries = self.path.with_suffix(".tries")
        try:
            before = read_regular(tries, _MOST_TRIES_BYTES).decode().split() if tries.exists() else []
            since = time.time() - LATELY_S
            lately = [entry for entry in before if entry.isdigit() and int(entry) >= since]
            if len(lately) >= MOST_TRIES:
                return False
            tries.write_text(" ".join([*lately, str(int(time.time()))]), encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
        return True

    def end(self) -> None:
        """Record that measuring ended."""
        if self.path is not None:
            with suppress(OSError):
                self.path.with_suffix(".tries").unlink(missing_ok=True)

    def read(self) -> CostTable | None:
        """Return the kept table; None if there is no readable one."""
        plain = read_plain(self.path)
        try:
            return None if plain is None else CostTable.from_dict(plain)
        except EngineError:
            return None  # the table is measured again

    def write(self, table: CostTable) -> None:
        """Keep a table."""
        write_plain(self.path, table.to_dict())


class CostCache(KeptFiles):
    """A folder of tables and their corrections; with the folder None, nothing is kept."""

    VARIABLE = ENVIRONMENT
    NAME = "costs"

    @contextmanager
    def entry(self, key: str) -> Iterator[CostEntry]:
        """Yield the entry of a table, locked against other processes inside the block."""
        with self.locked(key) as path:
            yield CostEntry(path)

    def learned(self, table: CostTable) -> LearnedCosts | None:
        """Read the corrections of this table; None if none are kept."""
        return None if self.folder is None else _read_learned(self._learned_path(self.folder, table.digest))

    def all_learned(self) -> dict[str, LearnedCosts]:
        """Read the corrections of all tables, by digest of the table."""
        if self.folder is None:
            return {}
        found = (_read_learned(path) for path in self.folder.glob("*.learned.json"))
        return {learned.table: learned for learned in found if learned is not None}

    def keep_learned(self, learned: LearnedCosts) -> None:
        """Replace the corrections of the table; a failed write is ignored."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_plain(self._learned_path(self.folder, learned.table), learned.to_dict())
            # This includes partial files of killed processes.
            kept = sorted(self.folder.glob("*.learned.*"), key=_written_at, reverse=True)
            for old in kept[MOST_LEARNED:]:
                old.unlink(missing_ok=True)

    @staticmethod
    def _learned_path(folder: Path, digest: str) -> Path:
        return folder / f"{digest}.learned.json"


def _read_learned(path: Path) -> LearnedCosts | None:
    plain = read_plain(path)
    try:
        learned = None if plain is None else LearnedCosts.from_dict(plain)
    except EngineError:
        return None  # the corrections are learned again
    return learned if learned is not None and path.name.startswith(f"{learned.table}.") else None


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # the file is gone


def cost_key(
    spec: ModelSpec,
    signature: ModelSignature,
    options: ProbeOptions,
    *,
    slots: int,
    threads: int | None,
    budget_s: float,
) -> str:
    """Return the key of a table: it changes with everything known to influence costs, and with the budget.

    The machine counts by its CPU model and the number of usable CPUs, so equal machines share a key.
    """
    return key_of(_FORMAT, (spec, options, slots, threads, budget_s), spec, signature)

"""The report of `models --costs`, and `shapestream prepare`: what the configured processes measure, or have measured.

How costs are measured: `shapestream.loading.measured_costs`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shapestream.loading.measured_costs import measure_costs
from shapestream.loading.models import compile_models, processes_of, slots_and_threads, wishes_of
from shapestream.loading.trials import WITH_NOBODY, Measuring
from shapestream.loading.wide_forms import Wish, wide_forms
from shapestream.settings import LoadedSettings, ModelSettings
from shapestream_engine.calibration import Calibration, CostCache
from shapestream_engine.cost_table import LearnedCosts
from shapestream_engine.probing.cache import ProofCache
from shapestream_workers.printing import table_of

PATIENCE = 64.0
"""Times `calibration_s` that a measurement of `prepare` may take: what it keeps, no start measures again, and an image is
built on machines that do much besides."""
DEFAULT_S = 5.0
"""Seconds to measure a model with `calibration_s: 0`, for `models --costs`."""


def costs_of(loaded: LoadedSettings) -> list[CostReport]:
    """Return the costs of each model, as its first worker process measures or reads them.

    Raises `ConfigurationError` for models that cannot be served.
    """
    return [
        report
        for model in loaded.settings.first_served()
        for report in _costs_of(
            loaded,
            model.model_copy(update={"calibration_s": model.calibration_s or DEFAULT_S}),
            *slots_and_threads(loaded.settings, model.name),
        )
    ]


def prepare(loaded: LoadedSettings, folder: Path) -> list[CostReport]:
    """Prove and measure the models as each of the configured processes does, and keep the results in a folder.

    A server whose `XDG_CACHE_HOME` is this folder finds them there, and starts in the time that it takes to load the models.
    It must have the same models, settings, versions and kind of processor. Raises `ConfigurationError` for models that
    cannot be served.
    """
    for kept in (ProofCache, CostCache):
        os.environ[kept.VARIABLE] = str(folder.absolute() / kept.BELOW / kept.NAME)
    return [
        report
        for model in loaded.settings.first_served()
        for slots, threads in processes_of(loaded.settings, model.name)
        for report in _costs_of(
            loaded,
            model,
            slots,
            threads,
            wishes_of(loaded.settings, model.name),
            Measuring(None, patience=PATIENCE),
        )
    ]


def _costs_of(
    loaded: LoadedSettings,
    model: ModelSettings,
    slots: int,
    threads: int,
    wishes: Iterable[Wish] = (),
    measuring: Measuring = WITH_NOBODY,
) -> list[CostReport]:
    """Return the costs of a model in a process with so many slots and threads; none where it is not measured.

    `wishes`: the wide forms that are tried and measured, too.
    """
    cache = CostCache.of_environment()
    compiled = compile_models(loaded, [model], slots=slots, threads=threads)
    try:
        found = measure_costs([model], compiled, slots=slots, threads=threads, measuring=measuring)
        tables = {name: calibration.table for name, calibration in found.items()}
        for wish in wishes:
            wide = wide_forms(
                [model],
                compiled,
                tables,
                wish=wish,
                slots=slots,
                threads=threads,
                memory_limit=None,
                measuring=measuring,
            )
            for form in () if wide is None else wide.models.values():
                form.close()
    finally:
        for unused in compiled.values():
            unused.close()
    return [
        CostReport(
            model=name,
            slots=slots,
            threads=threads,
            calibration=calibration,
            learned=cache.learned(calibration.table),
        )
        for name, calibration in found.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """The costs of one model in one worker process."""

    model: str
    slots: int
    threads: int
    calibration: Calibration
    learned: LearnedCosts | None
    """Corrections that traffic has made to the table, if there are any."""

    def to_dict(self) -> dict[str, Any]:
        """Return the cost table as plain data, with its origin and the corrections."""
        learned = self.learned
        return {
            "model": self.model,
            "slots": self.slots,
            "threads": self.threads,
            "from_cache": self.calibration.from_cache,
            "seconds": round(self.calibration.seconds, 3),
            "findings": list(self.calibration.findings),
            **self.calibration.table.to_dict(),
            "corrected": None
            if learned is None
            else {**learned.to_dict(), "age_s": round(_age_s(learned), 3)},
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for people: each measured call shape with its cost and its correction."""
        calibration, table = self.calibration, self.calibration.table
        source = "kept from an earlier start" if calibration.from_cache else f"in {calibration.seconds:.1f} s"
        yield (
            f"costs of {self.model}: {len(table.points)} call shapes measured, {source}, "
            f"{_counted(self.slots, 'call')} at a time on {_counted(self.threads, 'thread')}"
        )
        yield from (f"  not measured: {finding}" for finding in calibration.findings)
        if not table.points:
            return
        corrected = {} if self.learned is None else dict(self.learned.seconds)
        if self.learned is not None:
            unmeasured = len(corrected.keys() - {point.sizes for point in table.points})
            yield from _corrections(self.learned, unmeasured)
        rows = []
        for point in sorted(table.points, key=lambda point: point.sizes):
            row = dict(zip(table.dimensions, map(str, point.sizes), strict=True))
            row["ms"] = f"{point.seconds * 1e3:.3f}"
            row["us/element"] = f"{point.seconds * 1e6 / max(1, prod(point.sizes)):.3f}"
            row["first ms"] = "" if point.first_seconds is None else f"{point.first_seconds * 1e3:.3f}"
            if self.learned is not None:
                row["corrected"] = f"{corrected[point.sizes] * 1e3:.3f}" if point.sizes in corrected else ""
            rows.append(row)
        yield from (f"  {line}" for line in table_of(rows, words=()).splitlines())


def _corrections(learned: LearnedCosts, unmeasured: int) -> Iterator[str]:
    """Yield the origin of the corrections, and those of call shapes that the table does not have."""
    yield f"  corrected by {_counted(learned.batches, 'batch')}, written down {_age(_age_s(learned))} ago"
    if unmeasured:
        yield f"  corrected, too: {_counted(unmeasured, 'call shape')} between or beyond what was measured (--json)"
    if learned.preparation:
        ends = [f"{extra_s * 1e3:.3f} ms at {at:g} elements" for at, extra_s in learned.preparation.items()]
        yield f"  a new call shape takes longer by {' and '.join(ends)}"


def _age_s(learned: LearnedCosts) -> float:
    return max(0.0, time.time() - learned.saved_at)


def _age(seconds: float) -> str:
    """Return the age in the largest unit of which there are at least two."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return _counted(int(seconds / length), unit)
    return _counted(int(seconds), "second")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"

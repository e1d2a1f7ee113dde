"""Calibration: what calls of a model cost on this machine, measured before the first request comes.

Every point is measured as it will be paid for: requests of one row are gathered into a call, run and divided again by
the slots themselves, with all slots of the process busy with the same at the same time, since they get in each other's
way when they serve, too. See docs/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from shapestream_engine.calibration_bench import CalibrationBench
from shapestream_engine.calibration_shapes import stages
from shapestream_engine.cost_table import CostTable
from shapestream_engine.model import CompiledModel
from shapestream_engine.probing.inputs import Values

if TYPE_CHECKING:
    from shapestream_engine.calibration_cache import CostCache

__all__ = ["Calibration", "calibrate"]

PASSES = (0.6, 0.8, 0.95, 1.0)
"""When each pass ends, as a share of the budget: the coarse grid, the same again, the finer points, and all of them
again. What disturbs a machine lasts longer than a call, so repeats at another time tell more than those at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and how that went."""

    table: CostTable
    findings: tuple[str, ...] = ()
    """What could not be measured, in words."""
    seconds: float = 0.0
    """That it took."""
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
    if budget_s <= 0.0:
        return Calibration(table=CostTable(key=key, dimensions=model.signature.dimensions))
    if cache is None:
        return _measured(model, slots, max_batch, budget_s, values, key)
    with cache.entry(key) as entry:
        known = entry.read()
        if known is not None and known.key == key and known.dimensions == model.signature.dimensions:
            return Calibration(table=known, from_cache=True)
        if not entry.begin():
            empty = CostTable(key=key, dimensions=model.signature.dimensions)
            return Calibration(table=empty, findings=("the process ended each time that it was measured",))
        try:
            measured = _measured(model, slots, max_batch, budget_s, values, key)
        finally:
            entry.end()
        if measured.table.points:
            entry.write(measured.table)
        return measured


def _measured(
    model: CompiledModel,
    slots: int,
    max_batch: int | None,
    budget_s: float,
    values: Mapping[str, Values],
    key: str,
) -> Calibration:
    began = monotonic()
    bench = CalibrationBench(model, slots, values, budget_s)
    try:
        coarse, fine = stages(model.signature, max_batch)
        for shapes, share in zip((coarse, coarse, fine, [*coarse, *fine]), PASSES, strict=True):
            bench.measure(shapes, share * budget_s)
    finally:
        bench.close()
    table = CostTable(key=key, dimensions=model.signature.dimensions, points=bench.points())
    return Calibration(table=table, findings=tuple(bench.findings), seconds=monotonic() - began)

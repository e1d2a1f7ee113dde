"""What a worker's calls cost: measured, or read from what was measured before.

A process measures after it has compiled its models and before it takes requests, with as many calls at a time as it has
slots. docs/costs.md says how, and what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from shapestream.serving.allocator import give_back_freed_memory
from shapestream.settings import ModelSettings
from shapestream_engine.calibration import Calibration, calibrate
from shapestream_engine.calibration_cache import CostCache, cost_key
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.model import CompiledModel
from shapestream_engine.probing.examination import values_of
from shapestream_workers.models import model_spec
from shapestream_workers.proof import probe_options

__all__ = ["measure_costs", "tables"]

log = structlog.get_logger()


def tables(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    *,
    slots: int,
    threads: int | None,
) -> dict[str, CostTable]:
    """The cost table of each model that has one, for whoever plans its calls."""
    measured = measure_costs(models, compiled, slots=slots, threads=threads)
    return {name: calibration.table for name, calibration in measured.items() if calibration.table.points}


def measure_costs(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    *,
    slots: int,
    threads: int | None,
) -> dict[str, Calibration]:
    """Measures these models, or recalls what was measured, with a line in the log for each. None with `calibration_s` 0."""
    cache = CostCache.of_environment()
    found: dict[str, Calibration] = {}
    for model in models:
        if model.calibration_s == 0.0:
            continue
        try:
            found[model.name] = own = _measure(
                model, compiled[model.name], cache, slots=slots, threads=threads
            )
        except EngineError as error:
            log.warning("costs not measured", model=model.name, why=str(error))
            continue
        log.info(
            "costs measured",
            model=model.name,
            points=len(own.table.points),
            seconds=round(own.seconds, 3),
            source="cache" if own.from_cache else "measured",
            findings=list(own.findings),
        )
    if any(not own.from_cache for own in found.values()):
        # The largest calls may have been larger than any that comes.
        give_back_freed_memory()
    return found


def _measure(
    model: ModelSettings, compiled: CompiledModel, cache: CostCache, *, slots: int, threads: int | None
) -> Calibration:
    options = probe_options(model)
    key = cost_key(
        model_spec(model),
        compiled.signature,
        options,
        slots=slots,
        threads=threads,
        budget_s=model.calibration_s,
    )
    return calibrate(
        compiled,
        slots=slots,
        max_batch=model.batching.max_batch,
        budget_s=model.calibration_s,
        values=values_of(compiled.signature, options),
        key=key,
        cache=cache,
    )

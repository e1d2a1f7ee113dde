"""Costs of the calls of a process, for its scheduler: measured, read from an earlier measurement, or its predecessor's.

A process measures after it has compiled its models and before it takes requests. It runs as many calls at a time as it has
slots. docs/scheduling.md describes the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shapestream.known_costs import known_table
from shapestream.loading.models import model_spec
from shapestream.loading.proof import probe_options
from shapestream.loading.trials import WITH_NOBODY, Measuring
from shapestream.serving.allocator import give_back_freed_memory
from shapestream.settings import ModelSettings
from shapestream.telemetry.logging import get_logger
from shapestream_engine.calibration import Calibration, CostCache, CostSource, calibrate, cost_key
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.probing.examination import values_of

log = get_logger()


def cost_tables(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    *,
    slots: int,
    threads: int | None,
    measuring: Measuring = WITH_NOBODY,
) -> dict[str, CostTable]:
    """Return the cost tables of the models that have measured points, for the scheduler."""
    measured = measure_costs(models, compiled, slots=slots, threads=threads, measuring=measuring)
    return {name: calibration.table for name, calibration in measured.items() if calibration.table.points}


def measure_costs(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    *,
    slots: int,
    threads: int | None,
    measuring: Measuring = WITH_NOBODY,
) -> dict[str, Calibration]:
    """Measure these models one after the other, or take over what is known; those with `calibration_s: 0` are left out.

    `measuring` keeps the workers of a server from proving and measuring meanwhile.
    """
    cache = CostCache.of_environment()
    found: dict[str, Calibration] = {}
    for model in models:
        if model.calibration_s == 0.0:
            continue
        try:
            found[model.name] = own = _measure(
                model, compiled[model.name], cache, measuring, slots=slots, threads=threads
            )
        except EngineError as error:
            log.warning("costs not measured", model=model.name, why=str(error))
            continue
        log.info(
            "costs measured",
            model=model.name,
            points=len(own.table.points),
            seconds=round(own.seconds, 3),
            source=own.source.value,
            findings=list(own.findings),
        )
    if any(own.source is CostSource.MEASURED for own in found.values()):
        # The largest measured calls may be larger than any call of a request.
        give_back_freed_memory()
    return found


def _measure(
    model: ModelSettings,
    compiled: CompiledModel,
    cache: CostCache,
    measuring: Measuring,
    *,
    slots: int,
    threads: int | None,
) -> Calibration:
    options, budget_s = probe_options(model), model.calibration_s
    return calibrate(
        compiled,
        slots=slots,
        max_batch=model.batching.max_batch,
        budget_s=budget_s,
        values=values_of(compiled.signature, options),
        key=cost_key(
            replace(model_spec(model), engine=compiled.engine),
            compiled.signature,
            options,
            slots=slots,
            threads=threads,
            budget_s=budget_s,
        ),
        cache=cache,
        alone=measuring.alone,
        predecessor=known_table(measuring.known(), compiled.signature),
        patience=measuring.patience,
    )

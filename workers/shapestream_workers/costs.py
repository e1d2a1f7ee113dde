"""Costs of a worker's calls: measured, or read from an earlier measurement; and the report of `models --costs`.

A process measures after it has compiled its models and before it takes requests, with as many calls at a time as it has
slots. docs/scheduling.md has the method.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import structlog

from shapestream.serving.allocator import give_back_freed_memory
from shapestream.settings import LoadedSettings, ModelSettings
from shapestream_engine.calibration import Calibration, calibrate
from shapestream_engine.calibration_cache import CostCache, cost_key
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.cost_table import CostTable, LearnedCosts
from shapestream_engine.errors import EngineError
from shapestream_engine.probing.examination import values_of
from shapestream_workers.models import compile_models, model_spec, slots_and_threads
from shapestream_workers.proof import probe_options

log = structlog.get_logger()

DEFAULT_S = 5.0
"""Budget of a model whose configuration asks for no calibration, while this command does."""


def tables(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    *,
    slots: int,
    threads: int | None,
) -> dict[str, CostTable]:
    """Return the cost table of each model that has one, for the scheduler."""
    measured = measure_costs(models, compiled, slots=slots, threads=threads)
    return {name: calibration.table for name, calibration in measured.items() if calibration.table.points}


def measure_costs(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    *,
    slots: int,
    threads: int | None,
) -> dict[str, Calibration]:
    """Measure these models, or read earlier measurements, with a log line for each; not those with `calibration_s` 0."""
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


def costs_of(loaded: LoadedSettings, *, as_json: bool) -> list[str]:
    """Return the costs of each model in lines, as its first worker process measures or reads them.

    Raises `ConfigurationError` for models that cannot be served.
    """
    cache = CostCache.of_environment()
    plain: list[dict[str, Any]] = []
    lines: list[str] = []
    for model in loaded.settings.models:
        slots, threads = slots_and_threads(loaded.settings, model.name)
        compiled = compile_models(loaded, [model], slots=slots, threads=threads)
        wanted = model.model_copy(update={"calibration_s": model.calibration_s or DEFAULT_S})
        try:
            found = measure_costs([wanted], compiled, slots=slots, threads=threads)
        finally:
            for unused in compiled.values():
                unused.close()
        for name, calibration in found.items():
            learned = cache.learned(calibration.table)
            plain.append(_to_dict(name, slots, threads, calibration, learned))
            lines += _describe(name, slots, threads, calibration, learned)
    return [json.dumps(plain, indent=2)] if as_json else lines


def _to_dict(
    name: str, slots: int, threads: int, calibration: Calibration, learned: LearnedCosts | None
) -> dict[str, Any]:
    """Return plain data, for scripts; `corrected` as `LearnedCosts.to_dict`."""
    return {
        "model": name,
        "slots": slots,
        "threads": threads,
        "from_cache": calibration.from_cache,
        "seconds": round(calibration.seconds, 3),
        "findings": list(calibration.findings),
        **calibration.table.to_dict(),
        "corrected": None if learned is None else {**learned.to_dict(), "age_s": round(_age_s(learned), 3)},
    }


def _age_s(learned: LearnedCosts) -> float:
    return max(0.0, time.time() - learned.saved_at)


def _age(seconds: float) -> str:
    """Return the age in words, in the largest unit of which there are two."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return _counted(int(seconds / length), unit)
    return _counted(int(seconds), "second")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _describe(
    name: str, slots: int, threads: int, calibration: Calibration, learned: LearnedCosts | None
) -> Iterator[str]:
    """Yield the lines for people: each measured call shape with its cost, and its correction."""
    table = calibration.table
    source = "kept from an earlier start" if calibration.from_cache else f"in {calibration.seconds:.1f} s"
    yield (
        f"costs of {name}: {len(table.points)} call shapes measured, {source}, "
        f"{_counted(slots, 'call')} at a time on {_counted(threads, 'thread')}"
    )
    yield from (f"  not measured: {finding}" for finding in calibration.findings)
    if not table.points:
        return
    corrected = {} if learned is None else dict(learned.seconds)
    if learned is not None:
        yield from _about(learned, unmeasured=len(corrected.keys() - {point.sizes for point in table.points}))
    widths = [max(6, len(dimension)) for dimension in table.dimensions]
    head = "".join(
        f"  {dimension:>{width}}" for dimension, width in zip(table.dimensions, widths, strict=True)
    )
    now = f"  {'corrected':>10}" if learned is not None else ""
    yield f"{head}  {'ms':>10}  {'us/element':>10}  {'first ms':>10}{now}"
    for point in sorted(table.points, key=lambda point: point.sizes):
        sizes = "".join(f"  {size:>{width}}" for size, width in zip(point.sizes, widths, strict=True))
        first = "" if point.first_seconds is None else f"{point.first_seconds * 1e3:.3f}"
        each = point.seconds * 1e6 / max(1, prod(point.sizes))
        now = f"{corrected[point.sizes] * 1e3:.3f}" if point.sizes in corrected else ""
        yield f"{sizes}  {point.seconds * 1e3:>10.3f}  {each:>10.3f}  {first:>10}  {now:>10}".rstrip()


def _about(learned: LearnedCosts, unmeasured: int) -> Iterator[str]:
    """Yield the origin of the corrections, and those that no line of the table shows."""
    age = _age(_age_s(learned))
    yield f"  corrected by {_counted(learned.batches, 'batch')}, written down {age} ago"
    if unmeasured:
        yield f"  corrected, too: {_counted(unmeasured, 'call shape')} between or beyond what was measured (--json)"
    if learned.preparation:
        ends = [f"{extra_s * 1e3:.3f} ms at {at:g} elements" for at, extra_s in learned.preparation.items()]
        yield f"  a new call shape takes longer by {' and '.join(ends)}"

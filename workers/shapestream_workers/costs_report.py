"""`shapestream models --costs`: what the calls of a configuration's models cost here, for people and for scripts.

As measured, and as servers' traffic has corrected it since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from math import prod
from typing import Any

from shapestream.settings import LoadedSettings, Settings
from shapestream_engine.calibration import Calibration
from shapestream_engine.calibration_cache import CostCache
from shapestream_engine.cost_table import LearnedCosts
from shapestream_engine.resources import divide_cpus
from shapestream_workers.costs import measure_costs
from shapestream_workers.models import available_cpus, compile_models

__all__ = ["costs_of", "slots_and_threads"]

DEFAULT_S = 5.0
"""For a model whose configuration says that nothing is to be measured: here somebody asks for it."""


def costs_of(loaded: LoadedSettings, *, as_json: bool) -> list[str]:
    """Lines about each model, as its first worker process would measure it; read from what is kept, where it is.

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


def slots_and_threads(settings: Settings, model: str) -> tuple[int, int]:
    """Those of the process that serves this model, as configured: the first one, where several groups do."""
    groups = settings.worker_groups
    processes = max(1, sum(group.count for group in groups))
    for group in groups:
        if group.models is None or model in group.models:
            return divide_cpus(available_cpus(), processes, group.slots, group.threads)
    own = settings.in_process
    if own is None:
        return divide_cpus(available_cpus(), 1)
    return divide_cpus(available_cpus(), 1, own.slots, own.threads)


def _to_dict(
    name: str, slots: int, threads: int, calibration: Calibration, learned: LearnedCosts | None
) -> dict[str, Any]:
    """Plain data, for scripts; `corrected` as `LearnedCosts.to_dict`."""
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
    """In the largest unit of which there are two."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return _counted(int(seconds / length), unit)
    return _counted(int(seconds), "second")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _describe(
    name: str, slots: int, threads: int, calibration: Calibration, learned: LearnedCosts | None
) -> Iterator[str]:
    """Lines for people: each call shape that was measured, and what a call of it costs, then and by now."""
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
    """What the corrections rest on, and what no line of the table shows."""
    age = _age(_age_s(learned))
    yield f"  corrected by {_counted(learned.batches, 'batch')}, written down {age} ago"
    if unmeasured:
        yield f"  corrected, too: {_counted(unmeasured, 'call shape')} between or beyond what was measured (--json)"
    if learned.preparation:
        ends = [f"{extra_s * 1e3:.3f} ms at {at:g} elements" for at, extra_s in learned.preparation.items()]
        yield f"  a new call shape takes longer by {' and '.join(ends)}"

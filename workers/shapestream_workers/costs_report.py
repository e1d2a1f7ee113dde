"""`shapestream models --costs`: what the calls of a configuration's models cost here, for people and for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

from shapestream.settings import Settings
from shapestream.settings_loader import LoadedSettings
from shapestream_engine.calibration import Calibration
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
            plain.append(_to_dict(name, slots, threads, calibration))
            lines += _describe(name, slots, threads, calibration)
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


def _to_dict(name: str, slots: int, threads: int, calibration: Calibration) -> dict[str, Any]:
    """Plain data, for scripts."""
    return {
        "model": name,
        "slots": slots,
        "threads": threads,
        "from_cache": calibration.from_cache,
        "seconds": round(calibration.seconds, 3),
        "findings": list(calibration.findings),
        **calibration.table.to_dict(),
    }


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _describe(name: str, slots: int, threads: int, calibration: Calibration) -> Iterator[str]:
    """Lines for people: each call shape that was measured, and what a call of it costs."""
    table = calibration.table
    source = "kept from an earlier start" if calibration.from_cache else f"in {calibration.seconds:.1f} s"
    yield (
        f"costs of {name}: {len(table.points)} call shapes measured, {source}, "
        f"{_counted(slots, 'call')} at a time on {_counted(threads, 'thread')}"
    )
    yield from (f"  not measured: {finding}" for finding in calibration.findings)
    if not table.points:
        return
    widths = [max(6, len(dimension)) for dimension in table.dimensions]
    head = "".join(
        f"  {dimension:>{width}}" for dimension, width in zip(table.dimensions, widths, strict=True)
    )
    yield f"{head}  {'ms':>10}  {'us/element':>10}  {'first ms':>10}"
    for point in sorted(table.points, key=lambda point: point.sizes):
        sizes = "".join(f"  {size:>{width}}" for size, width in zip(point.sizes, widths, strict=True))
        first = "" if point.first_seconds is None else f"{point.first_seconds * 1e3:.3f}"
        each = point.seconds * 1e6 / max(1, prod(point.sizes))
        yield f"{sizes}  {point.seconds * 1e3:>10.3f}  {each:>10.3f}  {first:>10}".rstrip()

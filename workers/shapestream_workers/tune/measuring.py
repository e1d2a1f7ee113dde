"""Measures one candidate, in a process of its own: seconds of calls, memory, and what the start took.

`python -m shapestream_workers.tune.measuring CONFIG WISHES` compiles the model of CONFIG as a worker would, proof
included, runs the calls that WISHES (JSON) asks for on all slots at a time, and prints one line of JSON. A crash ends
this process and no other; so does the end of the parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import Any

from shapestream.errors import ShapestreamError
from shapestream.serving.allocator import keep_freed_memory
from shapestream.settings_loader import load_settings
from shapestream.telemetry.logging import configure
from shapestream_engine.batching.plan import merge_sizes
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.model import CompiledModel
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Report, Slot
from shapestream_engine.work import Work
from shapestream_workers.memory import resident_bytes
from shapestream_workers.models import compile_models
from shapestream_workers.parent_watch import end_with_parent
from shapestream_workers.tune.inputs import InputMaker
from shapestream_workers.worker_process import claim_stdout

__all__ = ["CallFailed", "Wishes", "measure_calls"]

REPEATS = 3
"""Runs of each call after its first; the median counts. Noise of single calls averages out over the grid."""
MAX_CALL_S = 60.0
"""A call that takes longer is stuck."""


class CallFailed(EngineError):
    """A call of the grid did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is to be measured."""

    slots: int
    threads: int
    calls: tuple[tuple[int, ...], ...]
    """Sizes of the calls, the most interesting first."""
    budget_s: float
    """For the calls; those that no longer fit are left out."""

    @classmethod
    def from_json(cls, text: str) -> Wishes:
        """What the parent asked for."""
        plain = json.loads(text)
        return cls(**{**plain, "calls": tuple(map(tuple, plain["calls"]))})

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(
            {
                "slots": self.slots,
                "threads": self.threads,
                "calls": self.calls,
                "budget_s": self.budget_s,
            }
        )


def measure_calls(compiled: CompiledModel, maker: InputMaker, wishes: Wishes) -> CostTable:
    """Seconds of each call with all slots busy with the same one. Raises `CallFailed`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    name = compiled.signature.name
    pool = RequestPool(compiled, wishes.slots)
    slots = [Slot(f"tune{number}", {name: pool}, reports.put) for number in range(wishes.slots)]
    points: dict[tuple[int, ...], CostPoint] = {}
    stop_at = monotonic() + wishes.budget_s
    try:
        for sizes in _as_planned(compiled.signature, wishes.calls):
            if points and monotonic() + _expected_s(points.values(), sizes) > stop_at:
                continue
            if sizes not in points:
                points[sizes] = _measured(compiled.signature, slots, reports, maker, sizes)
    finally:
        for slot in slots:
            slot.close()
    return CostTable(
        key=f"tune:{name}", dimensions=compiled.signature.dimensions, points=tuple(points.values())
    )


def _expected_s(points: Iterable[CostPoint], sizes: tuple[int, ...]) -> float:
    """What measuring a call may take, by the dearest element so far: too much rather than too little."""
    return (REPEATS + 1) * max(point.seconds / _volume(point.sizes) for point in points) * _volume(sizes)


def _volume(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= max(1, size)
    return product


def _as_planned(signature: ModelSignature, calls: Iterable[tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
    """The calls as the strategy runs them: rounded up, divided; each once."""
    planner = signature.strategy.bind(signature.table)
    for sizes in calls:
        if planner is None:
            yield sizes
        else:
            yield from dict.fromkeys(call.sizes for call in planner.plan(planner.round_up(sizes)))


def _measured(
    signature: ModelSignature,
    slots: Sequence[Slot],
    reports: queue.SimpleQueue[Report],
    maker: InputMaker,
    sizes: tuple[int, ...],
) -> CostPoint:
    """First and later seconds of one call. A batch is made of requests of one row each, as most are."""
    rows = sizes[0] if signature.has_batch else 1
    one = (1, *sizes[1:]) if signature.has_batch else sizes
    members = (maker.tensors(one),) * max(1, rows)
    shapes = tuple(signature.resolve(member.layout) for member in members)
    work = Work(
        batch=0,
        model=signature.name,
        sizes=merge_sizes(signature, [shape.sizes for shape in shapes]),
        members=members,
        shapes=shapes,
    )
    rounds = [_round(slots, reports, work) for _ in range(1 + REPEATS)]
    first, *later = rounds
    return CostPoint(sizes=sizes, seconds=median(median(each) for each in later), first_seconds=max(first))


def _round(slots: Sequence[Slot], reports: queue.SimpleQueue[Report], work: Work) -> list[float]:
    """The same call on every slot at once; each one's seconds."""
    for slot in slots:
        slot.start(work)
    seconds: list[float] = []
    for _ in slots:
        try:
            report = reports.get(timeout=MAX_CALL_S)
        except queue.Empty:
            # The slot's thread is lost in the engine: only the end of the process ends it.
            raise CallFailed(f"no answer within {MAX_CALL_S:g} s for a call of {list(work.sizes)}") from None
        if report.error_code is not None:
            raise CallFailed(f"a call of {list(work.sizes)} failed: {report.message}")
        seconds.append(report.busy_s or report.gather_s + report.run_s)
    return seconds


def main(config: str, wished: str) -> dict[str, Any]:
    """What the parent reads; raises what it is to be told."""
    wishes = Wishes.from_json(wished)
    loaded = load_settings(config)
    (settings,) = loaded.settings.models
    configure("warning", "json")
    began, before = monotonic(), resident_bytes()
    compiled = compile_models(loaded, [settings], slots=wishes.slots, threads=wishes.threads)[settings.name]
    ready, afterwards = monotonic(), resident_bytes()
    table = measure_calls(compiled, InputMaker(settings, compiled.signature), wishes)
    return {
        "table": table.to_dict(),
        "signature": compiled.signature.to_dict(),
        "startup_s": ready - began,
        "compiled_bytes": afterwards - before,
        "resident_bytes": resident_bytes() - before,
        "seconds": monotonic() - ready,
    }


if __name__ == "__main__":
    end_with_parent()
    channel = claim_stdout()
    keep_freed_memory()
    try:
        said = main(*sys.argv[1:])
    except (ShapestreamError, EngineError) as error:
        said = {"error": [str(each) for each in getattr(error, "problems", [error])]}
    os.write(channel, json.dumps(said).encode() + b"\n")
    # A slot that is stuck in its engine cannot be joined.
    os._exit(0)

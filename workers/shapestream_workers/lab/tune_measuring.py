"""Measures one candidate, in a process of its own: seconds of calls, memory, and what the start took.

`python -m shapestream_workers.lab.tune_measuring CONFIG WISHES` compiles the model of CONFIG as a worker would, proof
included, calibrates it with as many slots as WISHES (JSON) says, and prints one line of JSON. A crash ends this process
and no other; so does the end of the parent.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from shapestream.errors import ShapestreamError
from shapestream.serving.allocator import keep_freed_memory
from shapestream.settings import load_settings
from shapestream.telemetry.logging import configure
from shapestream_engine.calibration import calibrate
from shapestream_engine.errors import EngineError
from shapestream_engine.probing.examination import values_of
from shapestream_workers.memory import resident_bytes
from shapestream_workers.models import compile_models
from shapestream_workers.parent_watch import end_with_parent
from shapestream_workers.proof import probe_options
from shapestream_workers.worker_process import claim_stdout

__all__ = ["Wishes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How a candidate is to be measured."""

    slots: int
    """Calls at a time."""
    threads: int
    budget_s: float
    """For the calls; compiling and proving come before."""

    @classmethod
    def from_json(cls, text: str) -> Wishes:
        """What the parent asked for."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))


def main(config: str, wished: str) -> dict[str, Any]:
    """What the parent reads; raises what it is to be told."""
    wishes = Wishes.from_json(wished)
    loaded = load_settings(config)
    (settings,) = loaded.settings.models
    configure("warning", "json")
    began, before = monotonic(), resident_bytes()
    compiled = compile_models(loaded, [settings], slots=wishes.slots, threads=wishes.threads)[settings.name]
    ready = monotonic()
    calibration = calibrate(
        compiled,
        slots=wishes.slots,
        max_batch=settings.batching.max_batch,
        budget_s=wishes.budget_s,
        values=values_of(compiled.signature, probe_options(settings)),
        key=f"tune:{settings.name}",
    )
    if not calibration.table.points:
        raise EngineError("; ".join(calibration.findings) or "no call could be measured")
    return {
        "table": calibration.table.to_dict(),
        "signature": compiled.signature.to_dict(),
        "startup_s": ready - began,
        "resident_bytes": resident_bytes() - before,
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

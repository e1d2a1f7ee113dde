"""One sentence at a time, as fast as OpenVINO can: an AsyncInferQueue on the best of its settings."""

from __future__ import annotations

from benchmarks.limit.cuts import alone
from benchmarks.limit.engine import EngineSettings, InProcess, Minilm, Setting
from benchmarks.limit.oracle import Plan, fastest
from benchmarks.limit.traces import Trace

ENGINES = (
    EngineSettings(streams=1, threads=2),
    EngineSettings(streams=2, threads=2),
    EngineSettings(hint="LATENCY"),
    EngineSettings(hint="THROUGHPUT"),
)


def search(minilm: Minilm, trace: Trace, *, thorough: bool) -> Plan:
    """The best setting found on this slice; requests enough that no stream waits for the next."""
    plans = [
        Plan(
            title="one at a time",
            model=InProcess(minilm, Setting(engine=engine, requests=4, driver="queue")),
            cut=alone,
        )
        for engine in (ENGINES if thorough else ENGINES[1:2])
    ]
    return fastest(plans, trace)

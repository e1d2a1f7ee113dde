"""What a candidate should reach: the server's own scheduler over the trace, on virtual time, at measured costs.

It leaves out what costs about the same with every candidate (sockets, the client) and what only the first minutes pay
(preparing for new shapes), so it ranks candidates and rules out hopeless ones; the best are run for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.models import ModelOptions, ServedModel
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.cost_table import CostTable
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.simulator import (
    DONE,
    Simulated,
    SimulationError,
    SlotPlan,
    Truth,
    Workload,
    simulate,
)
from shapestream_workers.lab.true_cost import TableCost
from shapestream_workers.lab.tune_choice import Objective

__all__ = ["predict"]

MOST_REQUESTS = 2000
"""Of the trace, simulated per candidate: about a second each, and 1 in 100 is still 20 requests."""
_ENDLESS = 1 << 60


def predict(
    signature: ModelSignature,
    options: ModelOptions,
    table: CostTable,
    requests: Sequence[TraceRequest],
    *,
    slots: int,
    in_flight: int,
    objective: Objective,
) -> float:
    """Results per second with a constant number in flight, or the p99 in seconds at the trace's own times.

    Over the first requests of the trace; the p99 is of all of them, infinite where more than one in a hundred failed.
    Raises `ConfigurationError` where the scheduler cannot go on.
    """
    served = ServedModel(0, signature.name, signature, options)
    some = [request._replace(model=0) for request in requests[:MOST_REQUESTS]]
    try:
        if objective == "latency":
            return _p99_s(_run(served, table, slots, Workload(requests=some)))
        # Deadlines say how long a user waits, not how much can be done.
        endless = [request._replace(deadline_s=None) for request in some]
        closed = _run(served, table, slots, Workload(requests=endless, in_flight=in_flight))
    except SimulationError as error:
        raise ConfigurationError([f"cannot be simulated: {error}"]) from error
    span_s = closed.ended_s - closed.began_s
    return len(closed.requests) / span_s if span_s > 0 else 0.0


def _run(served: ServedModel, table: CostTable, slots: int, workload: Workload) -> Simulated:
    profile = served.profile
    steady = replace(
        table, points=tuple(replace(point, first_seconds=point.seconds) for point in table.points)
    )
    return simulate(
        Scheduler(max_queued_requests=_ENDLESS, max_queued_bytes=_ENDLESS),
        [profile],
        [SlotPlan(worker="tuned")] * slots,
        Truth(costs={profile.name: TableCost(steady, has_batch=profile.has_batch)}),
        workload,
        calibration={profile.name: steady},
        round_up={profile.name: served.signature.round_up},
    )


def _p99_s(simulated: Simulated) -> float:
    requests = simulated.requests
    waited = requests.column(requests.ended) - requests.column(requests.arrived)
    waited[requests.outcomes() != DONE] = inf
    return float(np.quantile(waited, 0.99, method="inverted_cdf")) if len(waited) else inf

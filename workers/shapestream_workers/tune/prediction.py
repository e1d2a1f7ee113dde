"""What a candidate should reach: the server's own scheduler over the trace, on virtual time, at measured costs.

It leaves out what costs about the same with every candidate (sockets, the client) and what only the first minutes pay
(preparing for new shapes), so it ranks candidates and rules out hopeless ones; the best are run for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.models import ModelOptions, ServedModel
from shapestream.simulation.records import DONE
from shapestream.simulation.simulated_slots import SlotPlan, Truth
from shapestream.simulation.simulator import Simulated, SimulationError, Workload, simulate
from shapestream.simulation.trace import TraceRequest
from shapestream.simulation.true_cost import TableCost
from shapestream_engine.cost_table import CostTable
from shapestream_engine.signature import ModelSignature

__all__ = ["Prediction", "predict"]

MOST_REQUESTS = 3000
"""Of the trace, simulated per candidate: a second or less each, and 1 in 100 is still 30 requests."""
_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulation came to."""

    goodput_per_s: float
    """With a constant number of requests in flight."""
    p99_s: float
    """At the trace's own times; of all requests, infinite where more than one in a hundred failed."""


def predict(
    signature: ModelSignature,
    options: ModelOptions,
    table: CostTable,
    requests: Sequence[TraceRequest],
    *,
    slots: int,
    in_flight: int,
) -> Prediction:
    """Both, over the first requests of the trace. Raises `ConfigurationError` where the scheduler cannot go on."""
    served = ServedModel(0, signature.name, signature, options)
    # Its deadlines say how long a user waits, not how much can be done.
    some = [request._replace(model=0) for request in requests[:MOST_REQUESTS]]
    endless = [request._replace(deadline_s=None) for request in some]
    try:
        closed = _run(served, table, slots, Workload(requests=endless, in_flight=in_flight))
        opened = _run(served, table, slots, Workload(requests=some))
    except SimulationError as error:
        raise ConfigurationError([f"cannot be simulated: {error}"]) from error
    span = closed.ended_s - closed.began_s
    return Prediction(goodput_per_s=len(closed.requests) / span if span > 0 else 0.0, p99_s=_p99_s(opened))


def _run(served: ServedModel, table: CostTable, slots: int, workload: Workload) -> Simulated:
    profile = served.profile
    steady = replace(
        table, points=tuple(replace(point, first_seconds=point.seconds) for point in table.points)
    )
    planner = served.signature.strategy.bind(served.signature.table)
    return simulate(
        Scheduler(max_queued_requests=_ENDLESS, max_queued_bytes=_ENDLESS),
        [profile],
        [SlotPlan(worker="tuned")] * slots,
        Truth(costs={profile.name: TableCost(steady, has_batch=profile.has_batch)}),
        workload,
        calibration={profile.name: steady},
        round_up={} if planner is None else {profile.name: planner.round_up},
    )


def _p99_s(simulated: Simulated) -> float:
    requests = simulated.requests
    waited = requests.column(requests.ended) - requests.column(requests.arrived)
    waited[requests.outcomes() != DONE] = inf
    return float(np.quantile(waited, 0.99, method="inverted_cdf")) if len(waited) else inf

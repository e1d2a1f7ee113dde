"""`python -m benchmarks.arrival_order serve CONFIG`: the product's server, with batches in arrival order.

Nothing but the cut of a batch differs: the first requests that wait share a call as long as the longest of them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import Cut, Plan, batch_of
from shapestream.scheduling.queueing import Request
from shapestream.scheduling.worker_costs import WorkerCosts
from shapestream_workers.__main__ import main


def _in_arrival_order(
    anchor: Request, queue: ModelQueue, costs: WorkerCosts, plan: Plan, **limits: Any
) -> Cut:
    """The batch of an anchor and of those that have waited longest; stands for `planner.plan_batch`."""
    flows = queue.turns.flows()
    waiting = sorted(
        [request for flow in flows for request in flow.requests.living()], key=lambda request: request.order
    )
    others = [request for request in waiting if request is not anchor]
    return batch_of([anchor, *others[: queue.profile.max_batch - 1]], costs)


if __name__ == "__main__":
    with patch("shapestream.scheduling.scheduler.plan_batch", _in_arrival_order):
        main()

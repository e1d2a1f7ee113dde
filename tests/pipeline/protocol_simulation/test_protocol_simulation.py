"""The whole protocol on virtual time: hypothesis looks for a world in which a promise is not kept.

`SIMULATION_EXAMPLES=5000 python -m pytest tests/pipeline/protocol_simulation --hypothesis-seed=1` looks longer.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, note, settings
from tests.pipeline.protocol_simulation.plan import Plan, calm_plans, plans
from tests.pipeline.protocol_simulation.world import play

EXAMPLES = int(os.environ.get("SIMULATION_EXAMPLES", "100"))

thorough = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def kept(plan: Plan) -> None:
    """Plays it; what was promised must have come true."""
    journal = play(plan)
    if journal.broken:
        note("\n".join(journal.story))
    assert [] == journal.broken


@thorough
@given(calm_plans)
def test_where_nothing_goes_wrong(plan: Plan) -> None:
    """Every request ends once, with its own answer, having run once, and not after its deadline."""
    kept(plan)


@thorough
@given(plans)
def test_whatever_goes_wrong(plan: Plan) -> None:
    """The same, with as many runs as faults excuse; and after the last fault everything ends within bounded time."""
    kept(plan)

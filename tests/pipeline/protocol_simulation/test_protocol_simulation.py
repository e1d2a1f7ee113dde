"""The whole protocol on virtual time: hypothesis looks for a world in which a promise is not kept.

Here it plays the same worlds each time, and does not make smaller what it finds, which may take minutes. To look for
others, as long as wanted: `SIMULATION_EXAMPLES=5000 python -m pytest tests/pipeline/protocol_simulation`.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from tests.pipeline.protocol_simulation.defects import DEFECTS, PLAN
from tests.pipeline.protocol_simulation.plan import Kind, Plan, calm_plans, harmful_plans, plans
from tests.pipeline.protocol_simulation.world import play

from shapestream.serving import client_port, grants, server, sessions

LOOKING = "SIMULATION_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("SIMULATION_EXAMPLES", "80"))

thorough = settings(
    max_examples=EXAMPLES,
    derandomize=not LOOKING,
    phases=list(Phase) if LOOKING else [Phase.explicit, Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
half_as_many = settings(thorough, max_examples=max(1, EXAMPLES // 2))
a_quarter = settings(thorough, max_examples=max(1, EXAMPLES // 4))
a_few = settings(thorough, max_examples=5)


def kept(plan: Plan) -> None:
    """Plays it; what was promised must have come true."""
    journal = play(plan)
    if journal.broken:
        note("\n".join(journal.story))
    assert [] == journal.broken


@half_as_many
@given(calm_plans)
def test_where_nothing_goes_wrong(plan: Plan) -> None:
    """Every request ends once, with its own answer, having run once, and not after its deadline."""
    kept(plan)


@thorough
@given(plans)
def test_whatever_goes_wrong(plan: Plan) -> None:
    """The same, with as many runs as faults excuse; and after the last fault everything ends within bounded time."""
    kept(plan)


@a_quarter
@given(plans)
def test_whatever_goes_wrong_where_there_is_little_memory(plan: Plan) -> None:
    """Requests of more than 64 bytes are asked for, and two of the largest fit into the server's memory."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (grants, sessions, client_port):
            patch.setattr(module, "UNASKED_BYTES", 64)
        patch.setattr(server, "memory_bytes", lambda: 1200 * grants.MEMORY_PARTS)
        kept(plan)


@half_as_many
@given(harmful_plans)
def test_no_innocent_pays_for_requests_that_do_harm(plan: Plan) -> None:
    """Processes die and hang, of requests alone: all others get results, unless they were late, or too many."""
    journal = play(plan)
    for question in journal.questions.values():
        if question.ask.kind is Kind.GOOD and question.withdrawn is None:
            late = ["deadline_exceeded", "overloaded"] if question.deadline is not None else []
            many = ["overloaded"] if plan.max_queued_requests < len(journal.questions) else []
            if question.ends[:1] not in [["result"], *[[code] for code in late + many]]:
                journal.accuse(f"request {question.uid} is innocent, and ended as {question.ends}")
    if journal.broken:
        note("\n".join(journal.story))
    assert [] == journal.broken


@a_few
@given(plans)
def test_the_same_plan_is_the_same_story(plan: Plan) -> None:
    """Or what hypothesis finds could not be made smaller, nor be found again."""
    assert play(plan).told == play(plan).told


def test_the_product_without_a_defect_keeps_its_promises() -> None:
    """In the plan by which the defects are found."""
    assert [] == play(PLAN).broken


@pytest.mark.parametrize("accusation", DEFECTS)
def test_a_defect_is_seen(accusation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each promise is broken once, on purpose."""
    DEFECTS[accusation](monkeypatch)
    broken = play(PLAN).broken
    assert any(accusation in text for text in broken), broken

"""A short chaos run, and whether its checks can fail at all. `make chaos` has the long one."""

from __future__ import annotations

import pytest
from tests.e2e.chaos.defective_server import DEFECTS
from tests.e2e.chaos.performance import perform, perform_defective

pytestmark = pytest.mark.e2e

SEED = 5


def test_nothing_is_lost_doubled_wrong_or_late_whatever_is_killed() -> None:
    """Each kind of fault once, each hits work in flight, and the ledger's four counts are 0."""
    outcome = perform(SEED, 0.0, say=print)
    assert [] == outcome.problems, "\n".join(outcome.lines())


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_zero_becomes_a_number_when_the_server_has_that_defect(defect: str) -> None:
    """A server that drops, swaps, repeats or delays: the ledger sees it."""
    _, zero = DEFECTS[defect]
    outcome = perform_defective(SEED, defect, 3.0)
    assert outcome.zeros[zero] > 0, "\n".join(outcome.lines())

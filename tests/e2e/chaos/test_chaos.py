"""A short chaos run, and whether its checks can fail at all. `make chaos` has the long one."""

from __future__ import annotations

import pytest
from tests.e2e.chaos.defective_server import DEFECTS
from tests.e2e.chaos.performance import perform, perform_defective

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

SEED = 5


def test_nothing_is_lost_doubled_wrong_or_late_whatever_is_killed() -> None:
    """Each kind of fault once, each hits work in flight, and the ledger's four counts are 0."""
    outcome = perform(SEED, 0.0, clients=2, say=print)
    assert [] == outcome.problems, "\n".join(outcome.lines())


def test_each_zero_becomes_a_number_when_the_server_has_that_defect() -> None:
    """A server that repeats, swaps, delays or drops: the ledger sees it, and nothing while there is no defect."""
    risen = perform_defective(SEED, 1.0)
    assert {"two_ends": 0, "wrong_answers": 0, "started_late": 0} == risen["none"]
    assert {} == {
        defect: counts for defect, counts in risen.items() if defect != "none" and not counts[DEFECTS[defect]]
    }

"""Any legal model: the scheduler works out everything, and its books agree after each event."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.any_server import AnyServer, profiles


@settings(max_examples=60, deadline=None)
@given(models=st.tuples(profiles("m")) | st.tuples(profiles("m"), profiles("n")), seed=st.integers(0, 2**32))
def test_no_legal_model_leads_to_a_fault(models, seed):
    """No call is filled up beyond its bytes, no fault is reported, and each request ends once."""
    server = AnyServer(list(models), seed)
    for _ in range(40):
        server.step()
        server.scheduler.check_invariants()
    server.finish()
    assert [] == server.faults

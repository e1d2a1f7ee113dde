"""The compiled scheduler decides as the pure one does."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling import forms
from tests.pipeline.scheduling.any_server import profiles


def test_the_form_is_the_one_that_was_asked_for():
    """`make test-compiled` sets COMPILED=1; nothing else is ever compiled."""
    assert (os.environ.get("COMPILED") == "1") == forms.COMPILED


@pytest.fixture(scope="module")
def pure():
    """A process of the pure form."""
    if not forms.COMPILED:
        pytest.skip("the scheduler is not compiled: make test-compiled")
    with forms.pure_process() as process:
        yield process


@settings(max_examples=100, deadline=None)
@given(models=st.tuples(profiles("m")) | st.tuples(profiles("m"), profiles("n")), seed=st.integers(0, 2**32))
def test_both_forms_decide_alike(pure, models, seed):
    """The same random events lead to the same actions, facts, messages and wakeups, to the last bit."""
    assert pure.decisions(models, seed) == forms.decisions(models, seed)

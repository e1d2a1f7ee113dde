"""The ablations name functions and constants of today's scheduler, so that docs/decisions.md can be made again."""

from __future__ import annotations

import pytest
from benchmarks.ablations.mechanisms import MECHANISMS, without
from benchmarks.ablations.play import Task, play
from benchmarks.ablations.scenarios import SCENARIOS

from shapestream.scheduling import planner

pytestmark = pytest.mark.pure("replaces functions of the scheduler")

SMALL = "one point of 1 s, 16"


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_can_be_turned_off(name):
    """A renamed function is a KeyError here."""
    with without([name]):
        pass
    assert set() == set(MECHANISMS[name].scenarios) - SCENARIOS.keys()


def test_what_was_turned_off_is_put_back():
    """Later simulations of the same process have the whole scheduler."""
    before = vars(planner).copy()
    with without(["programme: nearest sizes join", "division between slots"]):
        assert before != vars(planner)
    assert before == vars(planner)


def test_figures_depend_on_the_seed_alone():
    """They are simulated, with the time of dynamic programmes modelled."""
    assert play(Task(SMALL, (), 1)) == play(Task(SMALL, (), 1))


def test_a_mechanism_that_is_off_is_not_at_work():
    """Slots that never wait after answers are seen to wait only with it."""
    played = [play(Task(SMALL, off, 0)) for off in ((), ("waits after answers",))]
    assert [True, False] == [each.fired["waits after answers"] > 0 for each in played]
    assert played[0].figures["goodput"] > 1.2 * played[1].figures["goodput"]

"""The transition tables: the pages draw them, and a change that they do not list is refused."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from shapestream.scheduling.batches import BATCH_TABLE
from shapestream.scheduling.queueing import REQUEST_TABLE, RequestState
from shapestream.scheduling.slots import SLOT_TABLE, WORKER_TABLE, SlotState, SlotTable
from shapestream.serving.workers import CONNECTED_WORKER_TABLE, WorkerState

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", ["scheduling.md", "reliability.md"])
def test_the_page_shows_the_tables(name):
    """`python docs/states.py` writes the diagrams; whoever changes a table runs it."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == runpy.run_path(str(DOCS / "states.py"))["updated"](name, page)


@pytest.mark.parametrize(
    "table", [REQUEST_TABLE, BATCH_TABLE, SLOT_TABLE, WORKER_TABLE, CONNECTED_WORKER_TABLE]
)
def test_every_state_is_reached_from_the_first(table):
    """No state is left that nothing leads to."""
    (kind,) = {type(state) for row in table.values() for state in row}
    reached = {next(iter(kind))}
    for _ in kind:
        reached |= {after for row in table.values() for before, after in row.items() if before in reached}
    assert set(kind) == reached


def test_a_request_that_ended_stays_ended():
    """Its one ending is the last that happens to it."""
    assert not any(RequestState.DONE in row for row in REQUEST_TABLE.values())


def test_a_connected_worker_that_is_gone_stays_gone():
    """Its session ends once, from every other state; only one that greets begins to serve."""
    assert not any(WorkerState.GONE in row for row in CONNECTED_WORKER_TABLE.values())
    assert set(WorkerState) - {WorkerState.GONE} == set(CONNECTED_WORKER_TABLE["end"])
    assert {WorkerState.GREETING} == set(CONNECTED_WORKER_TABLE["serve"])


def test_a_change_that_the_table_does_not_list_is_refused():
    """A slot that rests cannot be let rest again."""
    slots = SlotTable()
    slots.join(0, frozenset())
    slots.rest(slots.slots[0], 1.0)
    with pytest.raises(KeyError):
        slots.rest(slots.slots[0], 2.0)
    assert SlotState.RESTING is slots.slots[0].state

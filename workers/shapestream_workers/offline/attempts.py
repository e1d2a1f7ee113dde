"""PURE: the rows that earlier attempts of a run have begun, and what follows for the next attempt.

A run may be killed at any moment, also by a row: a model that crashes ends the process. The journal has a line for each
event, written before a row is sent and after its answer is here:

    attempt           a process begins
    begun ROW         a row is sent to the model
    done ROW          its answer has come, be it a failure
    left              the process ends by itself: what it leaves unfinished has not killed it

Rows that were begun and not done when an attempt was killed have one *death* each. What is in a part (`parts.py`) is out of
the question. For the others:

    deaths 0     the row runs with others
    deaths 1     it may have killed the process: the next attempt runs it alone, with all rows before it
    deaths 2     it becomes a failed row

The rows of a model with `idempotent: false` must not run twice. Those that were begun and are in no part are lost at once,
whether their answers had come or not.

A kill by a user counts like one by a row: nobody can tell them apart. It makes some rows run alone, and costs a row its
answer only if the same row was under way alone at the second kill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shapestream.deaths import MOST_DEATHS
from shapestream.errors import Poisoned, RequestError, WorkerLost

ATTEMPT, BEGUN, DONE, LEFT = "attempt", "begun", "done", "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What earlier attempts mean for the next one."""

    deaths: dict[int, int] = field(default_factory=dict)
    """Attempts that were killed while this row was under way; by row, those that are in no part."""
    lost: dict[int, RequestError] = field(default_factory=dict)
    """Rows that are not run, with the error that they get."""
    alone_before: int = 0
    """Rows below this one run one at a time."""


def outlook(journal: Iterable[str], *, first: int, idempotent: bool) -> Outlook:
    """Return what follows from the lines of the journal. `first`: the first row that is in no part.

    A line that was cut off, as by a full disk, says nothing.
    """
    deaths: Counter[int] = Counter()
    begun: set[int] = set()
    under_way: set[int] = set()
    for line in journal:
        match line.split():
            case ["attempt"]:
                deaths.update(under_way)
                under_way.clear()
            case ["left"]:
                under_way.clear()
            case ["begun", number] if number.isdecimal():
                under_way.add(int(number))
                begun.add(int(number))
            case ["done", number] if number.isdecimal():
                under_way.discard(int(number))
    deaths.update(under_way)  # by the last attempt, which has said no `left`
    open_deaths = {row: count for row, count in deaths.items() if row >= first}
    if not idempotent:
        error: RequestError = WorkerLost(
            "an earlier attempt began this row, which must not run twice (idempotent: false)"
        )
        return Outlook(deaths=open_deaths, lost={row: error for row in begun if row >= first})
    error = Poisoned("the process ended twice while this row was under way")
    lost: dict[int, RequestError] = {row: error for row, count in open_deaths.items() if count >= MOST_DEATHS}
    suspects = open_deaths.keys() - lost.keys()
    return Outlook(deaths=open_deaths, lost=lost, alone_before=max(suspects, default=-1) + 1)

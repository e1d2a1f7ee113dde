"""Requests that crash workers or never end, among innocent ones, in real processes with several slots each."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.e2e.importable.poisonous import CRASH, EXIT, HANG
from tests.e2e.poison import ENDS, GRACE_S, poisonous

from shapestream.client.opened_models import Failed

pytestmark = pytest.mark.e2e


def _row(value: float) -> dict[str, Any]:
    return {"x": np.full((1, 3), value, np.float32)}


def _ends(client: Any, values: list[int]) -> dict[int, object]:
    """How each request ended: its first number, or the code of its error."""
    ends: dict[int, object] = {}
    with client.stream("poisonous", [_row(value) for value in values], on_error="yield") as results:
        for value, result in zip(values, results, strict=True):
            failed = isinstance(result, Failed)
            ends[value] = result.error.code if failed else float(result["y"][0, 0])
    return ends


def _deaths(served: Any) -> list[int]:
    return [event["status"] for event in served.events("worker ended")]


# Whoever only crashes is not to be taken for hanging on a machine that stands still for a moment.
@pytest.mark.parametrize(
    ("poison", "hang_after_s"),
    [
        pytest.param(CRASH, "off", marks=pytest.mark.thorough),
        pytest.param(EXIT, "off", marks=pytest.mark.thorough),
        (HANG, "3"),
    ],
)
def test_a_poison_among_many_ends_two_workers_and_nobody_else(
    workplace: Any, poison: int, hang_after_s: str
) -> None:
    """It crashes, exits or hangs: it alone is `poisoned`, all others are answered; its like is refused at once."""
    served = workplace.serve(poisonous(slots=2, hang_after_s=hang_after_s), hang_grace_s=GRACE_S)
    served.wait_for("workers ready")
    _ends_two_workers(served, poison)


@pytest.mark.parametrize(
    ("poison", "hang_after_s"),
    [(CRASH, "off"), pytest.param(HANG, "3", marks=pytest.mark.thorough)],
)
def test_a_poison_after_a_reload_ends_two_workers_and_nobody_else(
    workplace: Any, poison: int, hang_after_s: str
) -> None:
    """Processes that took the place of others on SIGHUP are known as the first ones were."""
    served = workplace.serve(poisonous(slots=2, hang_after_s=hang_after_s), hang_grace_s=GRACE_S)
    served.wait_for("workers ready")
    served.send(signal.SIGHUP)
    served.wait_for("worker ended", 2)
    _ends_two_workers(served, poison, before=[0, 0])


def _ends_two_workers(served: Any, poison: int, before: Sequence[int] = ()) -> None:
    """Send a poison among innocents to two workers, after processes ended with the statuses `before`."""
    status = ENDS[poison]
    values = [*range(20), poison, *range(20, 40)]
    with served.client() as client:
        ends = _ends(client, values)
        assert {value: 2.0 * value for value in range(40)} | {poison: "poisoned"} == ends
        served.wait_for("worker ended", 2 + len(before))
        assert [*before, status, status] == _deaths(served)
        assert {poison: "poisoned"} == _ends(client, [poison])
        assert [*before, status, status] == _deaths(served)
        statistics = client.statistics()
        assert (2, 1) == (statistics["failures"]["poisoned"], statistics["quarantined"])
    poisoned = [(event["sequence"], event["model"]) for event in served.events("request poisoned")]
    assert [(21, "poisonous")] == poisoned

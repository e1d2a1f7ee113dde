"""What is told of a server's configured workers: present, missing, and how the last process ended."""

from __future__ import annotations

import pytest

from shapestream.telemetry.presence import Presence, WorkerPresence, WorkerPresences, spell_status


def test_a_worker_is_missing_from_the_end_of_its_process_until_another_serves() -> None:
    """The end stays known after that, with the reason that was given for it."""
    workers = WorkerPresences(["w0", "w1"])
    for name, pid in (("w0", 10), ("w1", 11)):
        workers.started(name, 0.0)
        workers.serves(name, pid, 1.0)
    workers.reason("w1", "it hung")
    workers.ended("w1", 11, -9, 5.0)
    assert WorkerPresence(Presence.MISSING, 5.0, 0, "SIGKILL", "it hung", 5.0) == workers.by_worker["w1"]
    workers.started("w1", 6.0)
    workers.serves("w1", 12, 8.0)
    assert WorkerPresence(Presence.SERVING, 8.0, 1, "SIGKILL", "it hung", 5.0) == workers.by_worker["w1"]
    workers.ended("w1", 12, 1, 9.0)
    assert WorkerPresence(Presence.MISSING, 9.0, 1, "status 1", "", 9.0) == workers.by_worker["w1"]
    assert WorkerPresence(Presence.SERVING, 1.0) == workers.by_worker["w0"]


def test_a_worker_that_is_replaced_is_never_missing() -> None:
    """Its successor serves before it ends; that counts as a restart."""
    workers = WorkerPresences(["w0"])
    workers.started("w0", 0.0)
    workers.serves("w0", 10, 1.0)
    workers.started("w0", 3.0)
    workers.serves("w0", 11, 4.0)
    workers.serves("w0", 11, 5.0)
    workers.ended("w0", 10, 0, 6.0)
    assert WorkerPresence(Presence.SERVING, 1.0, 1, "status 0", "", 6.0) == workers.by_worker["w0"]


def test_a_worker_that_never_served_is_missing_from_the_start() -> None:
    """When it is given up, and when it is tried again after all, too."""
    workers = WorkerPresences(["w0"])
    assert WorkerPresence(Presence.STARTING) == workers.by_worker["w0"]
    workers.started("w0", 2.0)
    assert WorkerPresence(Presence.STARTING, 2.0) == workers.by_worker["w0"]
    workers.ended("w0", 10, 3, 4.0)
    workers.given_up("w0", "its configuration cannot be used")
    given_up = WorkerPresence(Presence.GIVEN_UP, 2.0, 0, "status 3", "its configuration cannot be used", 4.0)
    assert given_up == workers.by_worker["w0"]
    workers.started("w0", 7.0)
    again = workers.by_worker["w0"]
    assert (Presence.MISSING, 1, 2.0) == (again.presence, again.restarts, again.since)


@pytest.mark.parametrize(("status", "words"), [(0, "status 0"), (-15, "SIGTERM"), (-200, "signal 200")])
def test_statuses_are_spelled(status: int, words: str) -> None:
    """Signals by name, where they have one."""
    assert words == spell_status(status)

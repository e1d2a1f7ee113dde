"""Workers that grow are replaced, and workers that are told to end do, under load: no client notices."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import psutil
import pytest
from tests.e2e.conftest import until
from tests.e2e.hoarder import (
    HOARDER,
    PATIENT,
    PATIENT_DIAL_IN,
    Load,
    fewest_workers,
    nobody_noticed,
    statuses,
)

pytestmark = pytest.mark.e2e

ROOM_MIB = 60


@pytest.fixture(scope="module")
def limit(module_workplace: Any) -> int:
    """What a fresh worker takes, and some room, in bytes."""
    fresh = module_workplace.serve(HOARDER + "    workers: [{count: 1, slots: 1, threads: 1}]\n")
    (pid,) = (event["pid"] for event in fresh.wait_for("worker joined"))
    limit = psutil.Process(pid).memory_info().rss + (ROOM_MIB << 20)
    fresh.send(signal.SIGTERM)
    fresh.wait()
    return limit


def test_workers_that_pass_their_memory_limit_are_replaced_one_after_the_other(
    workplace: Any, limit: int
) -> None:
    """Each is replaced, by one that was ready before it left; the memory is given back; every answer is right."""
    workers = f"    workers: [{{count: 2, slots: 1, threads: 1, memory_limit: {limit}}}]\n"
    served = workplace.serve(PATIENT + HOARDER + workers)
    served.wait_for("workers ready")
    first = set(served.workers().values())
    with served.client() as client:
        with Load(client) as load:
            until("the end of the first processes", lambda: not first & set(served.workers().values()))
            answered = load.answered
            until("answers of the new ones", lambda: load.answered > answered + 50)
        nobody_noticed(client, load)
    assert first < load.pids, "a replacement served nothing"
    assert 2 <= fewest_workers(served)
    assert 2 <= len(served.events("worker drained"))
    assert [0, 0] == statuses(served, first)
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def test_a_limit_that_no_worker_can_keep_is_refused_with_the_size_that_one_takes(workplace: Any) -> None:
    """At the start, as a mistake in the configuration; nothing is replaced for ever."""
    served = workplace.try_serve(HOARDER + "    workers:\n      - {slots: 1, memory_limit: 64 MiB}\n")
    assert 3 == served.wait()
    text = served.log.read_text()
    assert "workers[0].memory_limit: 64 MiB is less than the" in text
    assert "that a worker takes with its compiled models" in text


def test_a_worker_that_was_started_by_hand_drains_and_ends_at_its_limit(workplace: Any) -> None:
    """With status 0, for whoever started it to start it again; a second one serves on."""
    config = workplace.write(
        PATIENT_DIAL_IN + HOARDER + "    workers: [{count: 1, slots: 1, threads: 1, memory_limit: 250 MiB}]\n"
    )
    alone = workplace.write(
        PATIENT_DIAL_IN + HOARDER + "    workers: []\n",
        "server2.yaml",
    )
    served = workplace.serve(alone)
    by_hand = workplace.start("worker", str(config), "--name", "hand")
    served.wait_for("worker joined")
    with served.client() as client:
        with Load(client) as load:
            assert 0 == by_hand.wait()
            again = workplace.start("worker", str(config), "--name", "again")
            served.wait_for("worker joined", 2)
            answered = load.answered
            until("answers of the new one", lambda: load.answered > answered + 20)
        nobody_noticed(client, load)
    assert by_hand.events("memory limit passed")
    again.send(signal.SIGTERM)
    assert 0 == again.wait()


def test_a_server_that_runs_models_itself_warns_once_above_the_limit(workplace: Any) -> None:
    """It serves on: nothing can replace it."""
    served = workplace.serve(HOARDER + "    in_process: {slots: 1, threads: 1, memory_limit: 250 MiB}\n")
    row = {"x": np.ones((8, 3), np.float32)}
    with served.client() as client:

        def warned() -> bool:
            client.infer("hoarder", row)
            return bool(served.events("memory limit passed"))

        until("the warning", warned)
        assert 2.0 == client.infer("hoarder", row)["y"][0, 0]
    assert 1 == len(served.events("memory limit passed"))

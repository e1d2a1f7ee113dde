"""Workers that grow are replaced, and workers that are told to end do, under load: no client notices."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import psutil
import pytest
from tests.e2e.conftest import PATIENCE_S, Served, until

from shapestream import blocking

pytestmark = pytest.mark.e2e

HOARDER = """\
    models:
      - name: hoarder
        function: hoarding:hoard
        trust: true
        calibration_s: 0   # measuring would hoard
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs:
          y: {shape: "batch, n", element_type: f32}
          pid: {shape: "batch", element_type: i64}
"""
# No worker is taken for lost on a machine that stands still for a moment.
PATIENT = "    server: {listen: [ipc://s.sock], worker_silence_s: 60}\n"
PATIENT_DIAL_IN = PATIENT.replace("worker_silence", "worker_listen: ipc://w.sock, worker_silence")
ROOM_MIB = 60


class Load:
    """Requests without a pause, several at a time, each answer checked, until told to stop."""

    def __init__(self, client: blocking.Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.wrong: list[int] = []
        self.error: BaseException | None = None
        self.pids: set[int] = set()

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def _requests(self) -> Any:
        number = 0
        while not self._stop.is_set():
            number += 1
            yield number, {"x": np.full((1, 1 + number % 16), number, np.float32)}
            self._stop.wait(0.04)

    def _run(self) -> None:
        try:
            with self._client.stream("hoarder", self._requests(), max_in_flight=16) as results:
                for result in results:
                    self.answered += 1
                    self.pids.add(int(result["pid"][0]))
                    expected = np.full((1, 1 + result.key % 16), 2 * result.key, np.float32)
                    if not np.array_equal(expected, result["y"]):
                        self.wrong.append(result.key)
        except BaseException as error:  # noqa: BLE001 - raised again by the test's thread
            self.error = error


def nobody_noticed(client: blocking.Client, load: Load) -> None:
    """Every answer came, and was right, at the first attempt."""
    statistics = client.statistics()
    assert [] == load.wrong
    assert (load.answered, {}, 0, {}) == (
        statistics["results"],
        statistics["failures"],
        statistics["batches_failed"],
        statistics["peers_lost"],
    )


def fewest_workers(served: Served, since: int = 0) -> int:
    """How many of two could be given work at the worst moment since both had joined, or since that line of the log."""
    lines = served.log.read_text().splitlines()
    order = [event for line in lines[since:] if line.startswith("{") and (event := _kind(line)) is not None]
    counts = [2]
    for event in order if since else order[2:]:
        counts.append(counts[-1] + (1 if event == "worker joined" else -1))
    return min(counts)


def statuses(served: Served, pids: set[int]) -> list[int]:
    """With which these workers' processes ended, once all have."""

    def ended() -> list[int]:
        return [event["status"] for event in served.events("worker ended") if event["pid"] in pids]

    until(f"the end of {pids}", lambda: len(ended()) == len(pids))
    return ended()


def _kind(line: str) -> str | None:
    return next(
        (kind for kind in ("worker joined", "worker drained", "worker left") if f'"{kind}"' in line), None
    )


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
    assert "that a worker takes with its models compiled" in text


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

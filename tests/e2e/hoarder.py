"""A model that keeps memory at each request, load on it, and what became of its workers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from tests.e2e.conftest import PATIENCE_S, Served, until

from shapestream import blocking

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

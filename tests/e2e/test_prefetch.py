"""Batches that wait in a worker behind the one that it runs, when something happens to the worker."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.conftest import PATIENCE_S, until
from tests.e2e.gate import GATED, rows

import shapestream
from shapestream import blocking

pytestmark = pytest.mark.e2e

MODEL = GATED.replace("double_when_open", "noted_when_open").replace("max_batch: 8", "max_batch: 1")
ONE_WORKER = MODEL + "    workers: [{count: 1, slots: 1, threads: 1}]\n"
DIAL_IN = (
    "    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock, heartbeat_s: 0.2, worker_silence_s: 20}\n"
    + MODEL
    + "    workers: []\n"
)
IN_PROCESS = MODEL + "    in_process: {slots: 1, threads: 1}\n"


class Scene:
    """A server that has learned how long a batch takes, and then runs one at a closed gate, with one behind it."""

    def __init__(self, workplace: Any, client: blocking.Client) -> None:
        self.workplace = workplace
        self.client = client
        self.threads = ThreadPoolExecutor(4)
        workplace.open_gate()
        for value in range(20):
            assert [[2.0 * value] * 3] == client.infer("gated", rows(value), deadline=60)["y"].tolist()
        (workplace.folder / "open").unlink()
        for path in workplace.folder.glob("entered-*"):
            path.unlink()
        (workplace.folder / "begun").unlink()
        self.running = self.ask(100)
        workplace.wait_entered()
        before = self.sent_ahead()
        self.waiting = self.ask(200)
        until("the second batch is sent ahead", lambda: self.sent_ahead() > before)

    def ask(self, value: float) -> Future[shapestream.Result]:
        """One request, in a thread of its own."""
        return self.threads.submit(self.client.infer, "gated", rows(value))

    def sent_ahead(self) -> int:
        """Batches that went to a busy slot, less those that were called back."""
        statistics = self.client.statistics()
        return int(statistics["batches_prefetched"] - statistics["batches_recalled"])

    def begun(self) -> Counter[str]:
        """How often each request began to run."""
        return Counter((self.workplace.folder / "begun").read_text().split())

    def check_answers(self) -> None:
        """Both are right."""
        assert [[200.0] * 3] == self.running.result(PATIENCE_S)["y"].tolist()
        assert [[400.0] * 3] == self.waiting.result(PATIENCE_S)["y"].tolist()
        self.threads.shutdown()


def test_a_worker_killed_with_a_batch_behind_another_loses_neither(workplace: Any) -> None:
    """Both run on its successor. The one that had not begun began once in all."""
    served = workplace.serve(ONE_WORKER)
    served.wait_for("workers ready")
    with served.client() as client:
        scene = Scene(workplace, client)
        (victim,) = served.workers().values()
        os.kill(victim, signal.SIGKILL)
        workplace.open_gate()
        scene.check_answers()
        assert {"100": 2, "200": 1} == scene.begun()
        assert {} == client.statistics()["failures"]
    (left,) = served.events("worker left")
    assert 2 == len(left["batches"])


def test_a_worker_that_drains_gives_back_what_waits_in_it(workplace: Any) -> None:
    """SIGTERM in the middle of a batch: that one is answered here, the one behind it by the next worker; each runs once."""
    config = workplace.write(DIAL_IN)
    served = workplace.serve(config)
    worker = workplace.start("worker", str(config), "--name", "left")
    with served.client() as client:
        scene = Scene(workplace, client)
        worker.send(signal.SIGTERM)
        worker.wait_for("worker drains")
        workplace.start("worker", str(config), "--name", "next")
        workplace.wait_entered(2)
        workplace.open_gate()
        scene.check_answers()
        assert {"100": 1, "200": 1} == scene.begun()
        assert scene.running.result().timings.worker.startswith("left-")
        assert scene.waiting.result().timings.worker.startswith("next-")
        assert 1 == client.statistics()["batches_recalled"]
    assert 0 == worker.wait()
    served.wait_for("worker drained")
    assert [] == served.events("worker left")


@pytest.mark.parametrize("config", [ONE_WORKER, IN_PROCESS], ids=["worker", "in process"])
def test_sigterm_finishes_what_waits_behind_a_batch(workplace: Any, config: str) -> None:
    """A server that drains has admitted both; status 0, and nobody is left."""
    served = workplace.serve(config)
    with served.client() as client:
        scene = Scene(workplace, client)
        served.send(signal.SIGTERM)
        served.wait_for("server drains")
        workplace.open_gate()
        scene.check_answers()
        assert {"100": 1, "200": 1} == scene.begun()
    assert 0 == served.wait()
    assert served.family_is_gone()


def test_a_server_that_is_killed_finds_its_worker_busy_with_two(workplace: Any) -> None:
    """The worker's batches are orphans for the next server: never answered to it, and gone before the worker joins it."""
    config = workplace.write(DIAL_IN)
    served = workplace.serve(config)
    kept = workplace.start("worker", str(config), "--name", "kept")
    with served.client() as client:
        scene = Scene(workplace, client)
        served.send(signal.SIGKILL)
        served.wait()
        again = workplace.serve(config)
        until(
            "the worker is told, unless the server was silent for too long before that",
            lambda: (
                [one for one in again.events("stranger") if one["port"] == "workers"]
                or kept.events("disconnected")
            ),
        )
        # It does not join while its slot is held by what nobody waits for: that would look like a batch that hangs.
        assert [] == again.events("worker joined")
        workplace.open_gate()
        again.wait_for("worker joined")
        scene.check_answers()
        # The first could not be interrupted; the second was taken back, unless the gate was faster, and ran for the new
        # server.
        begun = scene.begun()
        assert 2 == begun["100"]
        assert begun["200"] in (1, 2)
        statistics = client.statistics()
        assert (2, 0, {}) == (statistics["results"], statistics["batches_failed"], statistics["failures"])


def test_sigterm_takes_what_waits_behind_a_hanging_batch_to_another_worker(workplace: Any) -> None:
    """A worker's only slot hangs in a call that cannot be interrupted, while the server drains: its worker is killed, and
    the batch behind is answered by the other worker, within the grace. Nothing began twice but the one that hangs."""
    held = MODEL.replace("noted_when_open", "held").replace("hang_after_s: off", "hang_after_s: 4")
    served = workplace.serve(
        "    server: {listen: [ipc://s.sock], grace_s: 60}\n"
        + held
        + "    workers: [{count: 2, slots: 1, threads: 1}]\n",
        hang_grace_s=0.5,
    )
    served.wait_for("workers ready")
    with served.client() as client, ThreadPoolExecutor(4) as threads:

        def ask(value: float) -> Future[shapestream.Result]:
            return threads.submit(client.infer, "gated", rows(value))

        def begun() -> list[str]:
            path = workplace.folder / "begun"
            return path.read_text().split() if path.exists() else []

        for value in range(20):
            assert [[2.0 * value] * 3] == client.infer("gated", rows(value), deadline=60)["y"].tolist()
        hanging, long = ask(100), ask(101)
        until("both workers are busy", lambda: len(begun()) == 2)
        before = client.statistics()["batches_prefetched"]
        behind = [ask(200), ask(201)]
        until("one waits behind each", lambda: client.statistics()["batches_prefetched"] == before + 2)
        served.send(signal.SIGTERM)
        served.wait_for("server drains")
        for value, answer in zip((101, 200, 201), (long, *behind), strict=True):
            assert [[2.0 * value] * 3] == answer.result(PATIENCE_S)["y"].tolist()
        with pytest.raises(shapestream.RequestError):
            hanging.result(PATIENCE_S)
        counts = Counter(begun())
        assert {"101": 1, "200": 1, "201": 1} == {value: counts[value] for value in ("101", "200", "201")}
    served.wait_for("worker killed")
    assert 0 == served.wait()
    assert served.family_is_gone()

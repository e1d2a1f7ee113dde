"""Who is alive, and what follows when somebody is not: real processes that are killed, stopped, replaced and given up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from typing import Any

import psutil
import pytest
from tests.e2e.conftest import COMMAND, PATIENCE_S, PYTHONPATH, until
from tests.e2e.gate import GATED, Asking, answer, rows
from tests.e2e.hoarder import HOARDER, PATIENT, Load, fewest_workers, nobody_noticed, statuses

import shapestream

pytestmark = pytest.mark.e2e

# So patient that nothing but the end of a process itself can tell that it has ended.
DEAF = (
    "    server: {listen: [ipc://s.sock], heartbeat_s: 300, worker_silence_s: 3600, client_silence_s: 3600}\n"
)
# Silence counts soon, and ten of them soon after.
HASTY = "    server: {listen: [ipc://s.sock], heartbeat_s: 0.1, worker_silence_s: 0.5}\n"
TWO_WORKERS = "    workers: [{count: 2, slots: 1, threads: 1}]\n"


def test_the_end_of_a_workers_process_is_seen_without_waiting_for_silence(workplace: Any) -> None:
    """With heartbeats every five minutes its batch is answered by the other worker all the same, and it is replaced."""
    served = workplace.serve(DEAF + GATED + TWO_WORKERS)
    served.wait_for("workers ready")
    with served.client() as client:
        asking = Asking(client, "gated")
        future = asking.ask(4)
        (victim,) = workplace.wait_entered()
        os.kill(victim, signal.SIGKILL)
        workplace.open_gate()
        assert [[8.0] * 3] == answer(future)
        (left,) = served.wait_for("worker left")
        assert (victim, "its process died") == (left["pid"], left["why"])
        served.wait_for("worker joined", 3)
        assert victim not in served.workers().values()
        statistics = client.statistics()
        assert (1, {}) == (statistics["results"], statistics["failures"])
        asking.close()


def test_a_process_of_the_server_that_stays_silent_is_replaced(workplace: Any) -> None:
    """Stopped, it is lost after one silence, and killed after ten; its batch was run elsewhere long before."""
    served = workplace.serve(HASTY + GATED + TWO_WORKERS)
    served.wait_for("workers ready")
    with served.client() as client:
        asking = Asking(client, "gated")
        future = asking.ask(5)
        (victim,) = workplace.wait_entered()
        os.kill(victim, signal.SIGSTOP)
        workplace.open_gate()
        assert [[10.0] * 3] == answer(future)
        assert victim in served.workers().values()
        until("the end of the silent process", lambda: victim not in served.workers().values())
        served.wait_for("worker joined", 3)
        asking.close()
    (killed,) = served.events("worker killed")
    assert victim == killed["pid"]
    assert "silent" in killed["why"]


def test_a_server_that_stood_still_goes_on_where_it_was(workplace: Any) -> None:
    """Stopped for longer than any silence: afterwards requests are answered, by the worker process that was there."""
    served = workplace.serve(HASTY + GATED + "    workers: [{count: 1, slots: 1, threads: 1}]\n")
    workplace.open_gate()
    served.wait_for("workers ready")
    before = served.workers()
    with served.client() as client:
        client.infer("gated", rows(1))
        asking = Asking(client, "gated")
        served.send(signal.SIGSTOP)
        future = asking.ask(2)
        threading.Event().wait(4.0)
        served.send(signal.SIGCONT)
        assert [[4.0] * 3] == answer(future)
        assert [[6.0] * 3] == client.infer("gated", rows(3), deadline=PATIENCE_S)["y"].tolist()
        asking.close()
    assert before == served.workers()
    served.wait_for("the server stood still")


def test_sigterm_to_a_worker_and_sighup_to_its_server_replace_workers_under_load_and_nobody_notices(
    workplace: Any,
) -> None:
    """A worker drains, with both slots busy, and comes back. Then all are replaced, one after the other, each by one that
    was ready before it left; no answer is missing, wrong or late for it."""
    served = workplace.serve(PATIENT + HOARDER + "    workers: [{count: 2, slots: 2, threads: 1}]\n")
    served.wait_for("workers ready")
    with served.client() as client:
        with Load(client) as load:
            until("answers", lambda: load.answered > 40)
            victim = served.workers()["w0"]
            os.kill(victim, signal.SIGTERM)
            until("the end of it", lambda: victim not in served.workers().values())
            served.wait_for("worker joined", 3)
            assert 1 == len(served.events("worker drained"))
            first = set(served.workers().values())
            replacing = len(served.log.read_text().splitlines())
            served.send(signal.SIGHUP)
            until("the end of the first processes", lambda: not first & set(served.workers().values()))
            answered = load.answered
            until("answers of the new ones", lambda: load.answered > answered + 50)
        nobody_noticed(client, load)
    assert 2 <= fewest_workers(served, since=replacing)
    assert [0, 0] == statuses(served, first)
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def test_a_closed_terminal_stops_the_server_in_order(workplace: Any) -> None:
    """SIGHUP then is no wish for new workers: it drains, and nothing stays behind."""
    config = workplace.write(GATED + "    workers: [{count: 1, slots: 1, threads: 1}]\n")
    terminal, side = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, "serve", str(config)],
        stdin=side,
        stdout=side,
        stderr=side,
        # Buffered streams, as by default: what stderr does not take must not become the status at the end.
        env={
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "E2E_FOLDER": str(workplace.folder),
            "PYTHONUNBUFFERED": "",
        },
        start_new_session=True,
    )
    try:
        os.close(side)
        seen = b""
        while b"workers ready" not in seen:
            seen += os.read(terminal, 4096)
        workers = psutil.Process(process.pid).children()
        assert 1 == len(workers)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert 0 == process.wait(PATIENCE_S)
        assert [] == [worker for worker in workers if worker.is_running()]
    finally:
        process.kill()
        process.wait(PATIENCE_S)


APART = """\
    server: {listen: [ipc://s.sock]}
    models:
      - name: sound
        function: gated:double
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
      - name: gone
        function: gated:double
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
    workers:
      - {models: [sound], slots: 1, threads: 1}
      - {models: [gone], slots: 1, threads: 1}
"""


def test_a_model_whose_workers_were_given_up_is_unavailable_and_the_others_are_served(workplace: Any) -> None:
    """Its worker dies and cannot use its configuration any more: requests are answered at once, `models` says so, and a
    restart brings it back."""
    served = workplace.serve(APART)
    served.wait_for("workers ready")
    with served.client() as client:
        client.infer("gone", rows(1))
        served.config.write_text(served.config.read_text().replace("name: gone", "name: lost"))
        os.kill(served.workers()["w1"], signal.SIGKILL)
        served.wait_for("model is unavailable")
        with pytest.raises(shapestream.Unavailable, match="its workers were given up"):
            client.infer("gone", rows(1))
        assert [[4.0] * 3] == client.infer("sound", rows(2))["y"].tolist()
    listed = json.loads(workplace.invoke("models", served.address, "--json").stdout)
    assert ["sound", "gone"] == [model["name"] for model in listed]
    assert "its workers were given up" in listed[1]["unavailable"]
    assert "'gone' is unavailable" in workplace.invoke("models", served.address).stdout
    served.config.write_text(served.config.read_text().replace("name: lost", "name: gone"))
    served.send(signal.SIGHUP)
    served.wait_for("worker joined", 3)
    with served.client() as client:
        assert [[6.0] * 3] == client.infer("gone", rows(3))["y"].tolist()

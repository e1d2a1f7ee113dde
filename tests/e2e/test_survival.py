"""What clients notice when processes die, drain or come back: nothing, or a coded error."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.e2e.conftest import PATIENCE_S, until
from tests.e2e.gate import GATED, Asking, answer, rows

import shapestream
from shapestream import blocking

pytestmark = pytest.mark.e2e

TWO_WORKERS = GATED + "    workers: [{count: 2, slots: 1, threads: 1}]\n"
ONE_WORKER = GATED + "    workers: [{count: 1, slots: 1, threads: 1}]\n"


def test_sigterm_finishes_what_was_accepted_and_refuses_what_is_new(workplace: Any) -> None:
    """Running and queued requests get their answers, later ones wait for a next server; status 0, nothing is left."""
    served = workplace.serve(ONE_WORKER)
    with served.client() as client, served.client() as late, Asking(client, "gated") as asking:
        late.signature("gated")
        running = asking.ask(1)
        workplace.wait_entered()
        queued = [asking.ask(value) for value in (2, 3)]
        until_queued(client, 3)
        served.send(signal.SIGTERM)
        served.wait_for("server drains")
        until("late is told why", lambda: "takes nothing new, and no other" in said_in_half_a_second(late))
        workplace.open_gate()
        assert [[[2.0] * 3], [[4.0] * 3], [[6.0] * 3]] == [answer(future) for future in (running, *queued)]
    assert 0 == served.wait()
    assert served.family_is_gone()
    assert not (served.folder / "s.sock").exists()


HASTY_SHELL = """\
import signal, sys, structlog
from shapestream.settings import load_settings
from shapestream_workers.serve import run_server

def at_once(logger, name, event):
    if event["event"] == "server ready":
        signal.raise_signal(signal.SIGTERM)
    return event

structlog.configure(processors=[at_once, structlog.processors.JSONRenderer()])
sys.exit(run_server(load_settings(sys.argv[1])))
"""


def test_sigterm_that_comes_with_the_news_that_the_server_is_ready_is_obeyed(workplace: Any) -> None:
    """Whoever waits for that line and then stops it, in the same instant even, sees it drain and end with status 0."""
    config = workplace.write(
        GATED.replace("gated:double_when_open", "numpy:nan_to_num") + "    in_process: true\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", HASTY_SHELL, str(config)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert 0 == ran.returncode, ran.stderr
    assert '"server stopped"' in ran.stdout


def said_in_half_a_second(client: blocking.Client) -> str:
    """What a client is told whose request is not answered in time."""
    with pytest.raises(shapestream.DeadlineExceeded) as caught:
        client.infer("gated", rows(4), deadline=0.5)
    return str(caught.value)


def until_queued(client: blocking.Client, requests: int) -> None:
    """Waits until the server has admitted so many requests."""
    until(f"{requests} admitted requests", lambda: client.statistics()["requests"] >= requests)


def test_a_drain_that_takes_too_long_hands_the_rest_back_and_the_next_server_gets_it(workplace: Any) -> None:
    """After the grace the server ends; its unfinished requests are answered by the one that comes after it."""
    text = "    server: {listen: [ipc://s.sock], grace_s: 0.3}\n" + ONE_WORKER
    served = workplace.serve(text)
    with served.client() as client, Asking(client, "gated") as asking:
        stuck = asking.ask(1)
        workplace.wait_entered()
        served.send(signal.SIGTERM)
        assert 0 == served.wait()
        assert served.family_is_gone()
        workplace.open_gate()
        workplace.serve(text)
        assert [[2.0] * 3] == answer(stuck)


@pytest.mark.parametrize(
    "text", [ONE_WORKER, GATED + "    in_process: {slots: 1}\n"], ids=["worker", "in_process"]
)
def test_the_second_sigterm_ends_everything_at_once(workplace: Any, text: str) -> None:
    """A batch that would run for ever holds neither the server nor its worker back."""
    served = workplace.serve("    server: {listen: [ipc://s.sock], grace_s: 600}\n" + text)
    with served.client() as client, Asking(client, "gated") as asking:
        asking.ask(1)
        workplace.wait_entered()
        served.send(signal.SIGTERM)
        served.wait_for("stopping")
        served.send(signal.SIGTERM)
        assert 1 == served.wait()
    until("the end of its worker", served.family_is_gone)


def test_no_worker_outlives_a_server_that_was_killed(workplace: Any) -> None:
    """SIGKILL leaves the server no time to tell anybody; the busy worker and the idle one end all the same."""
    served = workplace.serve(TWO_WORKERS)
    served.wait_for("workers ready")
    assert 2 == len(served.workers())
    with served.client() as client, Asking(client, "gated") as asking:
        asking.ask(1)
        workplace.wait_entered()
        served.send(signal.SIGKILL)
        assert -signal.SIGKILL == served.wait()
        until("the end of its workers", served.family_is_gone)


def test_a_client_waits_for_a_server_that_is_restarted(workplace: Any) -> None:
    """The request that was under way is sent again, under the same number, and answered."""
    served = workplace.serve(ONE_WORKER)
    with served.client() as client, Asking(client, "gated") as asking:
        future = asking.ask(5)
        workplace.wait_entered()
        served.send(signal.SIGKILL)
        served.wait()
        workplace.open_gate()
        workplace.serve(served.config)
        assert [[10.0, 10.0, 10.0]] == answer(future)


def test_work_of_a_client_that_disappears_is_dropped(workplace: Any) -> None:
    """Its queued requests never run; everybody else goes on."""
    text = "    server: {listen: [ipc://s.sock], heartbeat_s: 0.2, client_silence_s: 1.5}\n" + ONE_WORKER
    served = workplace.serve(text)
    script = (
        "import sys, numpy as np\n"
        "from shapestream import blocking\n"
        "client = blocking.connect(sys.argv[1], connect_timeout=60)\n"
        "items = [{'x': np.full((8, 3), i, np.float32)} for i in range(20)]\n"
        "with client.stream('gated', items) as results:\n"
        "    list(results)\n"
    )
    doomed = subprocess.Popen([sys.executable, "-c", script, served.address])
    try:
        workplace.wait_entered()
        with served.client() as client:
            until_queued(client, 20)
            doomed.kill()
            doomed.wait(PATIENCE_S)
            until("its leaving", lambda: client.statistics()["clients"] == 1)
            workplace.open_gate()
            assert [[2.0, 2.0, 2.0]] == client.infer("gated", rows(1), deadline=PATIENCE_S)["y"].tolist()
            # The batch that ran when the client died, and ours.
            assert (2, 1) == (client.statistics()["batches"], client.statistics()["results"])
    finally:
        doomed.kill()
        doomed.wait(PATIENCE_S)


DIAL_IN = """\
    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock, heartbeat_s: 0.2, worker_silence_s: 20}
"""
DIAL_IN += GATED + "    workers: []\n"


def test_a_worker_by_itself_finds_its_server_before_and_after_a_restart(workplace: Any) -> None:
    """The order of starting does not matter, and a new server gets the old worker."""
    config = workplace.write(DIAL_IN)
    worker = workplace.start("worker", str(config))
    worker.wait_for("worker starts")
    workplace.open_gate()
    first = workplace.serve(config)
    with first.client() as client:
        assert [[2.0] * 3] == client.infer("gated", rows(1), deadline=PATIENCE_S)["y"].tolist()
        first.send(signal.SIGKILL)
        first.wait()
        second = workplace.serve(config)
        assert [[4.0] * 3] == client.infer("gated", rows(2), deadline=PATIENCE_S)["y"].tolist()
    # Who greets just as its patience ends greets again: joined, left, joined.
    left = second.events("worker left")
    worker.send(signal.SIGTERM)
    assert 0 == worker.wait()
    second.wait_for("worker drained")
    assert left == second.events("worker left")


def test_a_worker_by_itself_finishes_its_batch_before_it_leaves(workplace: Any) -> None:
    """SIGTERM in the middle of a batch: the answer still comes from this worker, and the status is 0."""
    config = workplace.write(DIAL_IN)
    served = workplace.serve(config)
    worker = workplace.start("worker", str(config), "--name", "left")
    with served.client() as client, Asking(client, "gated") as asking:
        future = asking.ask(4)
        workplace.wait_entered()
        worker.send(signal.SIGTERM)
        worker.wait_for("worker drains")
        workplace.open_gate()
        assert [[8.0] * 3] == answer(future)
        assert future.result().timings.worker.startswith("left-")
    assert 0 == worker.wait()


def test_a_worker_that_is_stopped_is_taken_for_lost_and_welcomed_back(workplace: Any) -> None:
    """SIGSTOP is silence: its batch runs elsewhere. After SIGCONT it joins again, and its late answer harms nobody."""
    config = workplace.write(DIAL_IN.replace("worker_silence_s: 20", "worker_silence_s: 1"))
    served = workplace.serve(config)
    frozen = workplace.start("worker", str(config), "--name", "frozen")
    with served.client() as client, Asking(client, "gated") as asking:
        future = asking.ask(6)
        workplace.wait_entered()
        frozen.send(signal.SIGSTOP)
        served.wait_for("worker left")
        workplace.start("worker", str(config), "--name", "sound")
        workplace.wait_entered(2)
        workplace.open_gate()
        assert [[12.0] * 3] == answer(future)
        assert future.result().timings.worker.startswith("sound-")
        frozen.send(signal.SIGCONT)
        served.wait_for("worker joined", 3)
        for value in range(10):
            assert [[2.0 * value] * 3] == client.infer("gated", rows(value), deadline=PATIENCE_S)[
                "y"
            ].tolist()

"""Requests that come again, over real sockets: answered from what is kept, and not run twice where they may not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from tests.e2e.conftest import PATIENCE_S
from tests.entries import Failure, Goodbye, OpenModel, RequestEntry, ResultEntry, request_of
from tests.pipeline.serving.raw_peer import RawPeer

import shapestream
from shapestream.transport.zeromq import DealerSocket
from shapestream_engine.layout import Tensors

pytestmark = pytest.mark.e2e

NOTED = """\
    models:
      - name: noted
        function: gated:noted_when_open
        inputs: {x: {shape: "batch:1..8, n:1..4096", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        batching: {hang_after_s: off}   # at the gate it is waited as long as it takes
        trust: true   # a proof would wait there,
        calibration_s: 0   # and so would measuring
"""
ONE_WORKER = NOTED + "    workers: [{count: 1, slots: 1, threads: 1}]\n"
TWO_WORKERS = NOTED.replace("trust", "idempotent: false\n        trust") + (
    "    workers: [{count: 2, slots: 1, threads: 1}]\n"
)


def begun(workplace: Any) -> list[str]:
    """The numbers that the model was given, in the order in which it began."""
    path = workplace.folder / "begun"
    found: list[str] = path.read_text().split() if path.exists() else []
    return found


def row(value: float, n: int = 3) -> dict[str, Any]:
    """One row."""
    return {"x": np.full((1, n), value, np.float32)}


@asynccontextmanager
async def raw_session(address: str, client: bytes = b"c" * 16) -> AsyncIterator[RawPeer]:
    """A session of this client, on a connection of its own."""
    socket = DealerSocket()
    socket.connect(address)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(socket.run)
            peer = RawPeer(socket)
            await peer.open_session(client, "noted")
            yield peer
            nursery.cancel_scope.cancel()
    finally:
        socket.close()


def noted(sequence: int, value: float, rows: int = 1) -> RequestEntry:
    """A request whose tensors, and those of its result, are too large to travel inline."""
    x = np.full((rows, 4000), value, np.float32)
    tensors = Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),))
    return request_of(sequence, tensors)


def test_a_kept_reply_is_given_on_any_connection_and_the_model_ran_once(workplace: Any) -> None:
    """The frames that came from the worker are sent a second and a third time; another shape gets none of them."""
    served = workplace.serve(ONE_WORKER)
    workplace.open_gate()

    async def main() -> None:
        results = []
        for _ in range(3):
            async with raw_session(served.address) as peer:
                peer.say(noted(1, 21))
                results.append(await peer.hear(ResultEntry))
                peer.say(noted(1, 22, rows=2))
                assert "conflict" == (await peer.hear(Failure)).code
        expected = np.full((1, 4000), 42, np.float32).tobytes()
        assert [expected] * 3 == [bytes(result.tensors.buffers[0]) for result in results]
        assert results[0].timings == results[1].timings == results[2].timings

    with_deadline(main)
    assert ["21"] == begun(workplace)


def test_a_goodbye_is_heard_though_its_answers_find_the_connection_gone(workplace: Any) -> None:
    """The server stands still until all is said and the connection has ended; what was queued never runs."""
    served = workplace.serve(ONE_WORKER)

    async def main() -> None:
        async with raw_session(served.address) as peer:
            peer.say(noted(1, 21))
            workplace.wait_entered()
            peer.say(noted(2, 22))
            while (await peer.statistics())["unfinished"] < 2:
                pass
            served.send(signal.SIGSTOP)
            peer.say(*[OpenModel(name="noted")] * 200)
            peer.say(Goodbye())

    with_deadline(main)
    time.sleep(0.5)  # libzmq's thread sends all that, and ends the connection
    served.send(signal.SIGCONT)
    (left,) = served.wait_for("client left")  # else the second request could begin before the goodbye is read
    assert "goodbye" == left["why"]
    workplace.open_gate()

    async def later() -> None:
        async with raw_session(served.address, b"l" * 16) as peer:
            peer.say(noted(1, 23))
            await peer.hear(ResultEntry)

    with_deadline(later)
    assert ["21", "23"] == begun(workplace)


def with_deadline(main: Any) -> None:
    """Runs it; what never comes is an error, not a hang."""

    async def in_time() -> None:
        with trio.fail_after(PATIENCE_S):
            await main()

    trio.run(in_time)


def test_what_may_not_run_twice_is_lost_with_its_worker_and_with_its_server(workplace: Any) -> None:
    """A sound worker stands by, and does not get it; nor does the server that comes after. The next request is served."""
    served = workplace.serve(TWO_WORKERS)
    served.wait_for("workers ready")
    with served.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.infer, "noted", row(6))
        (victim,) = workplace.wait_entered()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(shapestream.WorkerLost, match="may not be run twice"):
            asked.result(PATIENCE_S)
        asked = pool.submit(client.infer, "noted", row(7))
        workplace.wait_entered(2)
        served.send(signal.SIGKILL)
        served.wait()
        workplace.serve(TWO_WORKERS)
        with pytest.raises(shapestream.WorkerLost, match="the server was replaced"):
            asked.result(PATIENCE_S)
        workplace.open_gate()
        assert 16.0 == client.infer("noted", row(8))["y"][0, 0]
    assert ["6", "7", "8"] == begun(workplace)


def test_what_the_file_of_a_worker_that_dials_in_forbids_does_not_run_twice(workplace: Any) -> None:
    """The server's own file says nothing of it."""
    listens = "    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock}\n"
    once = workplace.write(listens + TWO_WORKERS, "worker.yaml")
    served = workplace.serve(listens + NOTED + "    workers: []\n")
    for _ in range(2):
        workplace.start("worker", str(once)).wait_for("worker ready")
    with served.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.infer, "noted", row(7))
        (victim,) = workplace.wait_entered()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(shapestream.WorkerLost, match="may not be run twice"):
            asked.result(PATIENCE_S)
        workplace.open_gate()
        assert 16.0 == client.infer("noted", row(8))["y"][0, 0]
    assert ["7", "8"] == begun(workplace)

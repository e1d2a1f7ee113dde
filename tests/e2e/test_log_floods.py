"""Peers that come and go by the thousand: the log tells of some, and how many lines it left out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from tests.e2e.conftest import until
from tests.entries import WORKER_PROTOCOL

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock, worker_silence_s: 60, client_silence_s: 60}
    models:
      - name: sort
        function: numpy:sort
        trust: true
        calibration_s: 0
        inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
    workers: []
"""
TIMES = 2000
SIGNATURE = {
    "name": "sort",
    "inputs": [{"name": "a", "element_type": "f32", "shape": "batch:1..8, n:0..64"}],
    "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, n", "rule": {"rule": "rows"}}],
}


def clients() -> Iterator[bytes]:
    """Greetings of clients, each under another id."""
    while True:
        yield msgpack.packb([1, [[10, 0, os.urandom(16), "flood"]]])


def workers() -> Iterator[bytes]:
    """The greeting of a worker, again and again."""
    while True:
        yield msgpack.packb([1, [[40, 0, "again", 1, 1, {"sort": SIGNATURE}, {}, {}, WORKER_PROTOCOL]]])


@pytest.mark.parametrize(
    ("socket", "greetings", "events"),
    [
        ("s.sock", clients(), ("client joined", "client left")),
        ("w.sock", workers(), ("worker joined", "worker left")),
    ],
    ids=["clients", "workers"],
)
def test_a_flood_of_greetings_does_not_flood_the_log(
    workplace: Any, socket: str, greetings: Iterator[bytes], events: tuple[str, str]
) -> None:
    """Each ends what the one before it began. Most events of clients are only counted; of workers that greet again before
    they are let in, only the last greeting counts."""
    served = workplace.serve(SERVED)

    def told() -> tuple[int, int]:
        lines = [line for name in events for line in served.events(name)]
        return len(lines), sum(line.get("lines_left_out", 0) for line in lines)

    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        peer.connect(f"ipc://{workplace.folder}/{socket}")
        for greeting in itertools.islice(greetings, TIMES):
            peer.send(greeting)
            if peer.poll(0):
                peer.recv_multipart()

        def counted() -> bool:
            """Once the flood is over there is room for a line of each event again, and it counts the others."""
            peer.send(next(greetings))
            while peer.poll(100):
                peer.recv_multipart()
            written, left_out = told()
            return left_out > written or (socket == "w.sock" and served.events(events[1]) != [])

        until(
            "lines that count more left out than written, or a worker that left since it greeted again",
            counted,
        )
    assert told()[0] < TIMES / 2, "a quarter of two events each, at most"

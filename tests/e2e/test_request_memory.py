"""A server's memory has room for a few large requests: many clients send one at once, and none of its processes grows.

The memory is a constant of the server here, since not every machine lets a test limit it. What the processes have at most
is measured.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from typing import TypeVar

import numpy as np
import psutil
import pytest
import zmq
from tests.e2e.conftest import PATIENCE_S, Served, Workplace
from tests.entries import (
    Entry,
    GrantBounds,
    Hello,
    ModelOpened,
    OpenModel,
    ResultEntry,
    Role,
    Welcome,
    request_of,
)

from shapestream.wire.codec import decode, encode
from shapestream_engine.layout import Tensors

E = TypeVar("E", bound=Entry)
pytestmark = pytest.mark.e2e

MIB = 1 << 20
MEMORY = 480 * MIB
"""Of the server and its worker: 60 MiB of it for requests that were granted, 15 for others."""
CLIENTS = 32
LARGE = 16 * MIB
"""Bytes of a request of each: 512 MiB of all."""
SETTINGS = """\
    server:
      listen: [ipc://s.sock]
      client_silence_s: 3600
    models:
      - name: m
        function: totals:of_rows
        inputs: {x: {shape: "batch:1..16, n:1..100000000", element_type: f32}}
        outputs: {y: {shape: "batch, 1", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 1, slots: 1, threads: 1}]
"""


class Peak:
    """The most resident memory of a server and its workers together, for the time of the block."""

    def __init__(self, served: Served) -> None:
        self.nbytes = 0
        self._processes = [psutil.Process(pid) for pid in (served.pid, *served.workers().values())]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.01):
            with suppress(psutil.NoSuchProcess):
                resident = sum(process.memory_info().rss for process in self._processes)
                self.nbytes = max(self.nbytes, resident)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class OldClient:
    """A bare DEALER that speaks the protocol as it was before grants: it asks for none."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.connect(address)
        self.heard: list[Entry] = []
        self.say(Hello(client=os.urandom(16), software="old"), OpenModel(name="m"))
        self.window_bytes = self.hear(Welcome).window_bytes
        self.model = self.hear(ModelOpened).number

    def say(self, *entries: Entry) -> None:
        """One message."""
        self.socket.send_multipart(encode(entries))

    def hear(self, kind: type[E]) -> E:
        """The next entry of this kind; the others are kept in `heard`."""
        while True:
            for entry in self.heard:
                if isinstance(entry, kind):
                    self.heard.remove(entry)
                    return entry
            self.heard += decode(self.socket.recv_multipart(), role=Role.CLIENT).entries


def test_many_clients_with_a_large_request_each_end_no_process(workplace: Workplace) -> None:
    """All are answered, one after the other; an old client beside them, too; and the memory was never used up."""
    served = workplace.serve(SETTINGS, memory_bytes=MEMORY)
    served.wait_for("workers ready")
    x = np.ones((1, LARGE // 4), np.float32)
    answers: Counter[float] = Counter()
    ready = threading.Barrier(CLIENTS)

    def send_one() -> None:
        with served.client() as client:
            ready.wait(PATIENCE_S)
            (y,) = client.infer("m", {"x": x})["y"].reshape(-1).tolist()
            answers[y] += 1

    old = OldClient(served.address)
    assert MEMORY // 32 == old.window_bytes
    threads = [threading.Thread(target=send_one) for _ in range(CLIENTS)]
    with Peak(served) as peak:
        for thread in threads:
            thread.start()
        sequence = 0
        while any(thread.is_alive() for thread in threads) or not sequence:
            sequence += 1
            tensors = Tensors(layout=((0, "f32", (1, MIB)),), buffers=(bytes(4 * MIB),))
            old.say(request_of(sequence, tensors, model=old.model))
            assert sequence == old.hear(ResultEntry).sequence
        for thread in threads:
            thread.join()
    old.socket.close()
    assert {2.0: CLIENTS} == answers
    assert not any(isinstance(entry, GrantBounds) for entry in old.heard)
    assert [] == served.events("worker ended")
    assert served.process.poll() is None
    assert peak.nbytes < MEMORY, f"{peak.nbytes // MIB} MiB"

"""SIGKILL of server, workers and gateways at each step of a reload, while clients go on.

Each request ends once, `idempotent: false` ones run at most once, and what is there afterwards serves the file as it is.
The steps are held by the model's functions (`importable/staged.py`), so that each kill meets the step that it means.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.admin import get, port_of
from tests.e2e.conftest import PATIENCE_S, until
from tests.e2e.http_calls import ask as ask_over_http
from tests.e2e.http_calls import port_of as http_port_of

import shapestream

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e

FIRST = {"twice": 100_000, "once": 2_000_000}
"""The first number that is asked of each model: what runs is told apart by its number."""
HELD = 4_000_000
"""The number of the request that is held while it runs, at the model `once`."""


def yaml(function: str, *, http: bool, proved: bool = False) -> str:
    """A server with a model that may run twice and one that may not, in one worker, and perhaps a gateway."""
    ports = 'inputs: {x: {shape: "batch:1..8, n:1..8", element_type: f32}},'
    ports += (
        ' outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}, batching: {hang_after_s: "off"}'
    )
    trust = "" if proved else "trust: true, "
    gateway = ", http: 127.0.0.1:0" if http else ""
    return (
        f"    server: {{listen: [ipc://s.sock], admin: 127.0.0.1:0{gateway}}}\n    models:\n"
        f"      - {{name: twice, function: '{function}', {trust}calibration_s: 0, {ports}}}\n"
        f"      - {{name: once, function: '{function}', trust: true, idempotent: false, calibration_s: 0, {ports}}}\n"
        "    workers: [{count: 1, slots: 1, threads: 1}]\n"
    )


class Asking:
    """Clients that ask both models without a pause, each request another number, until the block ends."""

    def __init__(self, served: Any, folder: Path) -> None:
        self._client = served.client
        self._folder = folder
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name, first)) for name, first in FIRST.items()
        ]
        self._outcomes: dict[int, object] = {}

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        until("answers", lambda: len(self._outcomes) > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def hold_one(self) -> None:
        """Let a request begin that is held in its worker."""
        thread = threading.Thread(target=self._ask_one)
        self._threads.append(thread)
        thread.start()
        until("a held call", lambda: at(self._folder, "running"))

    def _ask_one(self) -> None:
        with self._client() as client:
            self._outcomes[HELD] = outcome_of(client, "once", HELD)

    def _run(self, name: str, number: int) -> None:
        with self._client() as client:
            while not self._over.is_set():
                self._outcomes[number] = outcome_of(client, name, number)
                number += 1

    def check(self) -> None:
        """Each request ended as it may, and none that may run only once ran twice, or was answered without running."""
        runs = Counter(int(line) for line in (self._folder / "runs").read_text().split())
        for number, outcome in self._outcomes.items():
            may_repeat = number < FIRST["once"]
            assert outcome in ({2.0, 3.0} if may_repeat else {2.0, 3.0, "worker_lost"}), (number, outcome)
            assert runs[number] >= (outcome != "worker_lost")
        assert [] == [number for number, count in runs.items() if number >= FIRST["once"] and count > 1]


def outcome_of(client: Any, name: str, number: int) -> object:
    """The factor by which a request was answered, or the code of its error."""
    try:
        answer = client.infer(name, {"x": np.full((1, 2), number, np.float32)}, deadline=PATIENCE_S)
    except shapestream.ShapestreamError as error:
        return error.code
    return answer["y"][0, 0].item() / number


def at(folder: Path, step: str) -> list[int]:
    """The pids of the processes that have come to a step."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"at-{step}-*")]


class Reloading:
    """A server in the middle of a reload, by which a model's answers change from twice to three times the input."""

    def __init__(self, workplace: Any, step: str, *, http: bool) -> None:
        self.folder: Path = workplace.folder
        self._http = http
        self._workplace = workplace
        self._step = step
        self.served = workplace.serve(yaml("staged:double", http=http))
        self.served.wait_for("workers ready")
        self.old: int = self.served.workers()["w0"]

    def begin(self, asking: Asking) -> None:
        """Ask for the reload, and wait until it has come to the step."""
        path = self.served.config
        if self._step == "finishing":
            asking.hold_one()
        if self._step == "reading":  # the server waits for a writer
            path.unlink()
            os.mkfifo(path)
        else:
            self._write()
        asked = {"Content-Type": "application/json"}
        what = b'{"what": "all"}'
        assert 200 == get(port_of(self.served), "/reload", "PUT", what, **asked)[0]
        if self._step == "reading":
            until("a reader of the YAML", lambda: is_read(path))
        elif self._step == "gateway":
            self.served.wait_for("gateway started", 2)
        elif self._step in ("importing", "proving"):
            until("a new worker", lambda: at(self.folder, self._step))
        elif self._step == "finishing":
            self.served.wait_for("worker joined", 2)
        else:
            self.served.wait_for("reload ended")

    def _write(self) -> None:
        function = {"importing": "staged_import:triple", "proving": "staged:triple_in_steps"}
        chosen = function.get(self._step, "staged:triple")
        self._workplace.write(yaml(chosen, http=self._http, proved=self._step == "proving"))

    def kill(self, victim: str) -> None:
        """Kill a process, let all steps go on, and start the server again if it was that."""
        served = self.served
        started = [event["pid"] for event in served.events("worker started")]
        gateways = [event["pid"] for event in served.events("gateway started")]
        served.family.update(gateways, *[at(self.folder, step) for step in ("importing", "proving")])
        pids = {"server": [served.pid], "old": [self.old], "new": started, "gateway": gateways}
        os.kill(pids[victim][-1], signal.SIGKILL)
        if victim == "server":
            served.wait()
        for step in ("importing", "proving", "running"):
            (self.folder / f"go-{step}").touch()
        if victim != "server":
            return
        until("the end of its processes", served.family_is_gone)
        if self._step == "reading":
            served.config.unlink()
            self._write()
        self.served = self._workplace.serve(served.config)


def is_read(path: Path) -> bool:
    """Whether a process reads this FIFO. It goes on reading, since the writer stays."""
    try:
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        pytest.param("reading", "server", marks=pytest.mark.thorough),
        pytest.param("gateway", "server", marks=pytest.mark.thorough),
        ("gateway", "gateway"),
        pytest.param("gateway", "old", marks=pytest.mark.thorough),
        pytest.param("importing", "server", marks=pytest.mark.thorough),
        ("importing", "new"),
        pytest.param("importing", "old", marks=pytest.mark.thorough),
        pytest.param("importing", "gateway", marks=pytest.mark.thorough),
        pytest.param("proving", "server", marks=pytest.mark.thorough),
        pytest.param("proving", "new", marks=pytest.mark.thorough),
        ("proving", "old"),
        ("finishing", "server"),
        pytest.param("finishing", "new", marks=pytest.mark.thorough),
        pytest.param("finishing", "old", marks=pytest.mark.thorough),
        pytest.param("finishing", "gateway", marks=pytest.mark.thorough),
        pytest.param("after", "server", marks=pytest.mark.thorough),
        ("after", "new"),
        pytest.param("after", "gateway", marks=pytest.mark.thorough),
    ],
)
def test_each_request_ends_once_and_the_file_is_served(
    workplace: Any, step: str, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is killed, and when: clients are answered, and soon all by the YAML as it is, over HTTP, too."""
    monkeypatch.setenv("SHAPESTREAM_PROBE_CACHE", str(workplace.folder))  # no proof is known
    http = "gateway" in (step, victim)
    reloading = Reloading(workplace, step, http=http)
    with Asking(reloading.served, workplace.folder) as asking:
        reloading.begin(asking)
        reloading.kill(victim)
        if victim != "server":
            until(
                "the end of the reload",
                lambda: get(port_of(reloading.served), "/reload")[1].get("ended"),
            )
        with reloading.served.client() as client:
            until("answers by the new file", lambda: outcome_of(client, "twice", 1) == 3.0)
            assert 3.0 == outcome_of(client, "once", 1)
        if http:
            until("an answer over HTTP", lambda: answered_over_http(reloading.served) == 3.0)
    asking.check()


def answered_over_http(served: Any) -> float | None:
    """The factor of an answer; None while no gateway answers."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]}
    try:
        status, answer = ask_over_http(
            http_port_of(served), "POST", "/v2/models/twice/infer", {"inputs": [tensor]}
        )
    except OSError:
        return None
    return None if status != 200 else float(answer["outputs"][0]["data"][0])

"""A model's files are replaced while it is served: no two versions at once, until somebody says so."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import until
from tests.onnx_files import write_scaling

from shapestream_engine.model_files import digest_of_model

pytestmark = pytest.mark.e2e

SCALING = """\
    models:
      - name: scaling
        path: scaling.onnx
        engine: onnxruntime
        trust: true
        calibration_s: 0
"""
TWO_WORKERS = "    workers: [{count: 2, slots: 1, threads: 1}]\n"
ROW = {"x": np.ones((1, 64), np.float32)}


def answers(client: Any, count: int) -> set[tuple[float, str | None]]:
    """What so many requests are answered, and the digests of the files that ran."""
    with client.stream("scaling", [ROW] * count, deadline=100.0) as results:
        return {(float(result["y"][0, 0]), result.timings.digest) for result in results}


def model_in(workplace: Any, factor: float) -> tuple[Path, str]:
    """The model's file, and its digest."""
    path = workplace.folder / "scaling.onnx"
    write_scaling(path, factor)
    return path, digest_of_model(path)


def test_a_worker_that_has_read_replaced_files_is_refused_until_sighup(workplace: Any) -> None:
    """All answers are of the old files, which the other worker has; after SIGHUP all are of the new ones."""
    _, old = model_in(workplace, 2.0)
    served = workplace.serve(SCALING + TWO_WORKERS)
    served.wait_for("workers ready")
    with served.client() as client:
        assert {(2.0, old)} == answers(client, 40)
        _, new = model_in(workplace, 3.0)
        assert old != new
        os.kill(served.workers()["w0"], signal.SIGKILL)
        refused = served.wait_for("worker refused", 2)  # the server's line, and the worker's
        at_server = next(event for event in refused if "serves" in event)
        assert ("scaling", old, new) == (at_server["model"], at_server["serves"], at_server["offers"])
        assert "SIGHUP" in at_server["advice"]
        at_worker = next(event for event in refused if "serves" not in event)
        assert all(words in at_worker["why"] for words in (old, new, "SIGHUP"))
        (given_up,) = served.wait_for("worker given up")
        assert "w0" == given_up["worker"]
        assert {(2.0, old)} == answers(client, 400)
        assert {"scaling": old} == client.statistics()["digests"]
        assert [-9, 4] == [event["status"] for event in served.events("worker ended")]

        served.send(signal.SIGHUP)
        served.wait_for("workers ready", 2)
        # Both roles are filled again; the old process of the second one may still have to leave.
        until("the end of the old worker", lambda: len(served.events("worker ended")) == 3)
        assert {(3.0, new)} == answers(client, 400)
        assert {"scaling": new} == client.statistics()["digests"]
        (changed,) = served.events("model has other files")
        assert ("scaling", old, new) == (changed["model"], changed["before"], changed["digest"])
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def test_the_last_worker_is_not_replaced_by_one_of_other_files_either(workplace: Any) -> None:
    """With no worker left the server ends, as when its workers were given up; started again, it serves the new files."""
    model_in(workplace, 2.0)
    one_worker = TWO_WORKERS.replace("count: 2", "count: 1")
    served = workplace.serve(SCALING + one_worker)
    served.wait_for("workers ready")
    _, new = model_in(workplace, 3.0)
    os.kill(served.workers()["w0"], signal.SIGKILL)
    assert 1 == served.wait()
    (stops,) = served.events("server stops")
    assert "files were replaced" in stops["why"]
    again = workplace.serve(SCALING + one_worker)
    with again.client() as client:
        assert {(3.0, new)} == answers(client, 40)


def test_a_worker_that_dials_in_with_other_files_ends(workplace: Any) -> None:
    """It says why, with both digests, and ends with a status of its own; the right one is welcome."""
    path, old = model_in(workplace, 2.0)
    listens = "    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock}\n"
    served = workplace.serve(listens + SCALING)
    served.wait_for("workers ready")
    kept = [(file, file.read_bytes()) for file in (path, path.with_suffix(".weights"))]
    _, new = model_in(workplace, 3.0)
    worker = workplace.start("worker", str(served.config))
    assert 4 == worker.wait()
    (refused,) = worker.events("worker refused")
    assert all(words in refused["why"] for words in (old, new))
    for file, content in kept:
        file.write_bytes(content)
    workplace.start("worker", str(served.config)).wait_for("worker ready")
    with served.client() as client:
        assert {(2.0, old)} == answers(client, 40)


def test_models_of_the_servers_own_process_are_read_anew_by_sighup(workplace: Any) -> None:
    """Not before; what is served, and by which files, can be asked for."""
    _, old = model_in(workplace, 2.0)
    served = workplace.serve(SCALING + "    in_process: {slots: 1, threads: 1}\n")
    with served.client() as client:
        assert {(2.0, old)} == answers(client, 10)
        _, new = model_in(workplace, 3.0)
        assert {(2.0, old)} == answers(client, 10)
        served.send(signal.SIGHUP)
        until("the new files", lambda: {(3.0, new)} == answers(client, 10))
    listed = json.loads(workplace.invoke("models", served.address, "--json").stdout)
    assert [("scaling", new)] == [(model["name"], model["digest"]) for model in listed]
    assert f"sha256 {new}" in workplace.invoke("models", served.address).stdout
    answered = workplace.invoke("infer", served.address, "scaling", f"x={json.dumps([[1.0] * 64])}", "--json")
    assert new == json.loads(answered.stdout)["timings"]["digest"]


def test_workers_that_dial_in_serve_on_until_one_with_the_new_files_has_come(workplace: Any) -> None:
    """Nobody is refused meanwhile. Then the old one is told why, and ends with status 4."""
    _, old = model_in(workplace, 2.0)
    config = workplace.write(
        "    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock}\n" + SCALING + "    workers: []\n"
    )
    served = workplace.serve(config)
    first = workplace.start("worker", str(config))
    with served.client() as client:
        assert {(2.0, old)} == answers(client, 10)
        _, new = model_in(workplace, 3.0)
        served.send(signal.SIGHUP)
        served.wait_for("reload ended")
        assert {(2.0, old)} == answers(client, 10)
        second = workplace.start("worker", str(config))
        second.wait_for("worker ready")
        assert answers(client, 200) <= {(2.0, old), (3.0, new)}
        assert 4 == first.wait()
        (why,) = first.events("worker refused")
        assert "it has read other bytes of the model's files" in why["why"]
        assert {(3.0, new)} == answers(client, 40)


def test_after_a_failed_reload_the_old_files_are_served_until_their_last_worker_dies(workplace: Any) -> None:
    """It comes back with what is on the disk by then, which is neither the old file nor the one that failed."""
    path, old = model_in(workplace, 2.0)
    served = workplace.serve(SCALING + "    workers: [{count: 1, slots: 1, threads: 1}]\n")
    served.wait_for("workers ready")
    with served.client() as client:
        path.write_bytes(bytes(100))
        served.send(signal.SIGHUP)
        (ended,) = served.wait_for("reload ended")
        assert ("incomplete", ["w0"]) == (ended["result"], [*ended["kept"]])
        assert {(2.0, old)} == answers(client, 40)
        _, new = model_in(workplace, 3.0)
        os.kill(served.workers()["w0"], signal.SIGKILL)
        assert {(3.0, new)} == answers(client, 40)

"""Models that raise what is no `Exception`, and slots whose thread ends: every request has an end all the same."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
from tests.e2e.admin import port_of
from tests.e2e.conftest import until
from tests.e2e.importable.raising import END_THREAD, RAISED

from shapestream.client.opened_models import Failed
from shapestream.errors import RequestError, Unavailable

pytestmark = pytest.mark.e2e

RAISING = """\
    models:
      - name: raising
        function: raising:raising
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        batching: {max_batch: 8, hang_after_s: "off"}
        trust: true
        calibration_s: 0
"""
WORKERS = "    workers: [{count: 1, slots: 2, threads: 2}]\n"
IN_PROCESS = "    in_process: {slots: 1, threads: 1}\n"


def _row(value: float) -> dict[str, Any]:
    return {"x": np.full((1, 3), value, np.float32)}


@pytest.mark.parametrize("where", [WORKERS, IN_PROCESS], ids=["worker", "in process"])
def test_what_a_model_raises_is_its_error_whatever_it_is(workplace: Any, where: str) -> None:
    """Each such request is answered `model_error`; the others are answered, and no process and no slot has ended."""
    served = workplace.serve(RAISING + where)
    values = [value for pair in zip(range(len(RAISED)), RAISED, strict=True) for value in pair]
    with served.client() as client:
        for _ in range(2):
            rows = [_row(value) for value in values]
            with client.stream("raising", rows, on_error="yield", deadline=60.0) as results:
                ends = {
                    value: result.error.code if isinstance(result, Failed) else float(result["y"][0, 0])
                    for value, result in zip(values, results, strict=True)
                }
            expected = {value: "model_error" if value in RAISED else 2.0 * value for value in values}
            assert expected == ends
        for value, words in ((101, "PanicException: index out of bounds"), (109, "ValueError: no such row")):
            with pytest.raises(RequestError, match=words):
                client.infer("raising", _row(value))
    assert [] == served.events("worker ended")
    assert [] == served.events("slot ended")


def test_a_worker_whose_slot_has_ended_is_replaced(workplace: Any) -> None:
    """The batch that finds the thread gone runs elsewhere; the worker says so, ends, and another one serves."""
    served = workplace.serve(RAISING + WORKERS)
    served.wait_for("workers ready")
    with served.client() as client:
        assert 2.0 * END_THREAD == client.infer("raising", _row(END_THREAD))["y"][0, 0]
        time.sleep(1.0)  # the model's timer ends the thread meanwhile
        for value in range(8):
            assert 2.0 * value == client.infer("raising", _row(value), deadline=100.0)["y"][0, 0]
        (event,) = served.wait_for("slot ended")
        assert "error" == event["level"]
        served.wait_for("worker ended")
        served.wait_for("workers ready", 2)
        assert 2.0 == client.infer("raising", _row(1), deadline=100.0)["y"][0, 0]
    assert [1] == [event["status"] for event in served.events("worker ended")]
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def test_a_server_whose_own_slot_has_ended_says_so(workplace: Any) -> None:
    """Its only slot is gone: requests end as `unavailable`, with what to do, instead of waiting for ever."""
    served = workplace.serve(RAISING + IN_PROCESS)
    with served.client() as client:
        assert 2.0 * END_THREAD == client.infer("raising", _row(END_THREAD))["y"][0, 0]
        time.sleep(1.0)  # the model's timer ends the thread meanwhile
        for value in range(2):
            with pytest.raises(RequestError, match="reload or restart the server") as caught:
                client.infer("raising", _row(value), deadline=60.0)
            assert "unavailable" == caught.value.code
    (event,) = served.events("slot ended")
    assert "local/0" == event["slot"]


def test_a_reload_brings_an_own_slot_back_that_has_ended(workplace: Any) -> None:
    """Nothing has changed but that: the slots are replaced, and the model is served again."""
    pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
    served = workplace.serve(
        "    server: {listen: [ipc://s.sock], admin: 127.0.0.1:0}\n" + RAISING + IN_PROCESS
    )
    with served.client() as client:
        client.infer("raising", _row(END_THREAD))
        until("the end of the thread", lambda: _is_unavailable(client))
        for lines in ("workers replaced: local", "workers left alone: local"):
            ran = workplace.invoke("reload", f"127.0.0.1:{port_of(served)}")
            assert ["no model changed", lines] == ran.stdout.splitlines()[:2], ran.stderr
            assert 2.0 == client.infer("raising", _row(1), deadline=60.0)["y"][0, 0]


def _is_unavailable(client: Any) -> bool:
    try:
        client.infer("raising", _row(1), deadline=60.0)
    except Unavailable:
        return True
    return False


def test_a_check_says_that_a_model_panics(workplace: Any) -> None:
    """In the proof's process and in its own slot the panic is the model's error, and no traceback."""
    text = RAISING.replace("raising:raising", "raising:panicking").replace("        trust: true\n", "")
    done = workplace.run("check", str(workplace.write(text)))
    assert 3 == done.returncode
    assert "batching (strategy native) changes the results: the call fails" in done.stderr
    assert "PanicException: one row at a time" in done.stderr
    assert "Traceback" not in done.stderr

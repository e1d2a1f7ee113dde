"""Audits in a real server: proved at its start by its workers, found out in service, stopped over a restart."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import until
from tests.e2e.importable.mixing import DEADLY, RARE

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock]}
    models:
      - name: mixing
        function: mixing:FUNCTION
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        probe: {x: {uniform: [0, 1]}}
        audit: 1.0
        calibration_s: 0.5
    workers: [{count: 1, slots: 1, threads: 1}]
"""


def _ask(client: Any, values: list[float]) -> list[float]:
    """What each row of one number is answered."""
    inputs = [{"x": np.full((1, 3), value, np.float32)} for value in values]
    with client.stream("mixing", inputs) as results:
        return [float(result["y"][0, 0]) for result in results]


def _state(client: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.statistics()["audit"]["mixing"]
    return found


def test_a_model_that_the_proof_let_pass_is_stopped_until_that_is_acknowledged(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling all, a stream of thirty with a rare value is enough; the stop outlives the server."""
    monkeypatch.setenv("SHAPESTREAM_COST_CACHE", str(workplace.folder / "costs"))
    config = workplace.write(SERVED.replace("FUNCTION", "double"))
    served = workplace.serve(config)
    with served.client() as client:
        _ask(client, [0.5] * 30)
        until("the audits of what is right", lambda: _state(client)["audited"] >= 10)
        assert 0 == _state(client)["mismatches"]
        while not _state(client)["stopped"]:
            assert _state(client)["sampled"] < 3000
            _ask(client, [0.5, 0.25, RARE] * 10)
            until("the audits", lambda: _state(client)["waiting"] == 0)
        assert [2 * RARE, 1.0, 2 * RARE, 1.0] == _ask(client, [RARE, 0.5] * 2)
    (line,) = served.wait_for("batching stopped")
    assert ("mixing", "y", [1, 3]) == (line["model"], line["output"], line["sizes"])
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    served = workplace.serve(config)
    served.wait_for("workers ready")
    listed = workplace.invoke("audit", "--connect", served.address)
    assert "mixing: every request runs alone" in listed.output
    told = json.loads(
        workplace.invoke("audit", "--connect", served.address, "--acknowledge", "mixing", "--json").output
    )
    assert not told["mixing"]["stopped"]
    assert [] == list((workplace.folder / "costs").glob("*.audit.json"))
    unknown = workplace.invoke("audit", "--connect", served.address, "--acknowledge", "other")
    assert 1 == unknown.exit_code


def test_a_product_of_large_numbers_is_not_stopped_for_its_rounding(workplace: Any) -> None:
    """The proof tried numbers around 1. Those of 1e6, of either sign, differ by more than that allows."""
    config = SERVED.replace("FUNCTION", "product").replace("n:1..64", "256").replace("batch, n", "batch, 64")
    served = workplace.serve(workplace.write(config.replace("        probe: {x: {uniform: [0, 1]}}\n", "")))
    random = np.random.default_rng(3)
    with served.client() as client:
        for _ in range(5):
            inputs = [{"x": random.normal(size=(1, 256), scale=1e6).astype(np.float32)} for _ in range(30)]
            with client.stream("mixing", inputs) as results:
                assert 30 == len(list(results))
            until("the audits", lambda: _state(client)["waiting"] == 0)
        state = _state(client)
    assert (0, False, False) == (state["mismatches"], state["varies"], state["stopped"])
    assert state["audited"] > 0 < state["unjudged"], state


@pytest.mark.parametrize("cap", [8, 64])
def test_a_stopped_model_runs_at_its_requests_own_sizes_whatever_the_cap_on_shapes(
    workplace: Any, cap: int
) -> None:
    """Lone requests are rounded up to known shapes, so they are audited as well, at their own sizes."""
    config = SERVED.replace("FUNCTION", "long_sum").replace("batch, n", "batch")
    config = config.replace(
        "element_type: f32}}\n        outputs", "element_type: f32, pad: {n: 0}}}\n        outputs"
    )
    config = config.replace("audit: 1.0", f"audit: 1.0\n        shapes: {{max_prepared: {cap}}}")
    served = workplace.serve(workplace.write(config))
    rows = [
        np.full((1, length), 0.5, np.float32) for length in np.random.default_rng(1).permutation(64)[:30] + 1
    ]
    for row in rows:
        row[0, 0] = RARE
    expected = [float(row.sum()) + row.shape[1] for row in rows]
    with served.client() as client:
        for _ in range(10):
            for row in rows:
                client.infer("mixing", {"x": row})
            until("the audits", lambda: _state(client)["waiting"] == 0)
            if _state(client)["stopped"]:
                break
        assert _state(client)["stopped"], _state(client)
        assert expected == [float(client.infer("mixing", {"x": row})["y"][0]) for row in rows]
        with client.stream("mixing", [{"x": row} for row in rows]) as results:
            assert expected == [float(result["y"][0]) for result in results]


def test_a_worker_that_dies_of_an_audit_blames_nobody(workplace: Any) -> None:
    """Its requests were answered before; those that come meanwhile are answered by the next one."""
    served = workplace.serve(SERVED.replace("FUNCTION", "deadly"))
    served.wait_for("workers ready")
    with served.client() as client:
        rows = [np.array([[DEADLY, number, 0.0]], np.float32) for number in range(20)]
        with client.stream("mixing", [{"x": row} for row in rows]) as results:
            assert [2 * number for number in range(20)] == [int(result["y"][0, 1]) for result in results]
        served.wait_for("worker ended")
        assert [1.0] * 20 == _ask(client, [0.5] * 20)
        statistics = client.statistics()
    assert (0, 0, {}) == (statistics["suspects"], statistics["quarantined"], statistics["failures"])
    assert [] == served.events("request poisoned")

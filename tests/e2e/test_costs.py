"""Measured costs, from a worker's start to its server's predictions, and to those of the server after it."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapestream_engine.calibration import ENVIRONMENT, CostCache
from shapestream_engine.cost_table import CostTable, LearnedCosts

pytestmark = pytest.mark.e2e

CONFIG = """\
    models:
      - name: cleaned
        function: numpy:nan_to_num
        trust: true
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32, pad: {n: 0}}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
    workers: [{count: 2, slots: 1, threads: 1}]
"""


def test_of_two_workers_one_measures_and_both_serve(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first and reads what it found; requests are answered as ever."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    served = workplace.serve(CONFIG)
    measured = served.wait_for("costs measured", 2)
    assert ["cache", "measured"] == sorted(event["source"] for event in measured)
    assert 1 == len({event["points"] for event in measured})
    assert measured[0]["points"] > 5
    served.wait_for("worker joined", 2)
    with served.client() as client:
        for n in (1, 7, 64):
            rows = np.full((2, n), 3.0, np.float32)
            assert np.array_equal(rows, client.infer("cleaned", {"x": rows})["y"])


LATE = """\
    models:
      - name: late
        function: late:same
        trust: true
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
      - name: cleaned
        function: numpy:nan_to_num
        trust: true
        calibration_s: 0.01
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
    workers:
      - {count: 1, slots: 1, threads: 1, models: [late]}
      - {count: 1, slots: 1, threads: 1, models: [cleaned]}
"""


def test_no_worker_measures_while_another_tries_models(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose models are ready waits until those of the others are, because trials slow its calls down."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    served = workplace.serve(LATE)
    served.wait_for("model compiled")  # of the other worker, which could measure in a moment
    with served.client() as client:
        for _ in range(200):
            client.statistics()
    workplace.open_gate()
    served.wait_for("costs measured", 2)
    lines = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    told = [line["event"] for line in lines if line["event"] in ("model compiled", "costs measured")]
    assert ["model compiled", "model compiled", "costs measured", "costs measured"] == told


PACED = """\
    models:
      - name: paced
        function: paced:same
        trust: true
        inputs: {x: {shape: "batch:1..2, 4", element_type: f32}}
        outputs: {y: {shape: "batch, 4", element_type: f32}}
    workers: [{count: 1, slots: 1, threads: 1}]
"""
CALIBRATED_S, SLOW_S = 0.001, 0.05


class Paced:
    """One model, whose calls take as long as is said, over several lives of its server."""

    def __init__(self, workplace: Any, cache: CostCache) -> None:
        self._workplace = workplace
        self._cache = cache
        self._pace = workplace.folder / "pace"
        self._pace.write_text(str(CALIBRATED_S))

    def served(self, requests: int, *, pace_s: float) -> LearnedCosts:
        """What is kept after a server that served so many requests, one after the other, and was told to end."""
        served = self._workplace.serve(PACED)
        served.wait_for("worker joined")
        self._pace.write_text(str(pace_s))
        with served.client() as client:
            for _ in range(requests):
                client.infer("paced", {"x": np.zeros((1, 4), np.float32)})
        served.send(signal.SIGTERM)
        assert 0 == served.wait()
        (learned,) = self._cache.all_learned().values()
        return learned

    def shown(self) -> dict[str, Any]:
        """What `shapestream models --costs --json` prints of it."""
        done = self._workplace.run("models", "--costs", "--json", str(self._workplace.folder / "server.yaml"))
        assert 0 == done.returncode, done.stderr
        (model,) = json.loads(done.stdout)
        return dict(model)


def test_a_server_begins_with_what_the_last_one_learned(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls became slower: the next server knows, people see it, and when they are quick again it is unlearned."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    paced = Paced(workplace, CostCache(tmp_path / "costs"))
    one_row = (1,)

    first = paced.served(50, pace_s=SLOW_S)
    shown = paced.shown()
    measured = CostTable.from_dict(shown)
    assert (True, 50, first.table) == (shown["from_cache"], first.batches, measured.digest)
    assert first.to_dict().items() <= shown["corrected"].items()
    (measured_s,) = [point.seconds for point in measured.points if point.sizes == one_row]
    assert first.seconds[one_row] > 2 * measured_s

    second = paced.served(60, pace_s=CALIBRATED_S)
    assert 110 == second.batches  # it began where the first one had ended
    assert second.seconds.get(one_row, measured_s) < 0.7 * first.seconds[one_row]


def test_a_reload_measures_nothing_beside_load(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before is read; with other threads, a process begins with its predecessor's costs."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    (workplace.folder / "pace").write_text("0.02")  # what four calls take on a busy machine is alike
    served = workplace.serve(PACED)
    served.wait_for("workers ready")
    sources = []
    for text in (
        PACED,
        PACED.replace("threads: 1", "threads: 2"),
        PACED.replace("trust", "calibration_s: 4, trust"),
    ):
        workplace.write(text.replace("calibration_s: 4, ", "calibration_s: 4\n        "))
        served.send(signal.SIGHUP)
        reloads = len(sources) + 1
        assert "ok" == served.wait_for("reload ended", reloads)[-1]["result"]
        sources.append(served.wait_for("costs measured", 1 + reloads)[-1]["source"])
    assert ["cache", "predecessor", "predecessor"] == sources
    assert 1 == len({line["points"] for line in served.events("costs measured")})
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    again = workplace.serve(workplace.folder / "server.yaml")
    assert ["measured"] == [line["source"] for line in again.wait_for("costs measured")]


HEAVY = """\
    models:
      - name: paced
        function: paced:same
        trust: true
        calibration_s: 1
        inputs: {x: {shape: "batch:1..16, 4", element_type: f32}}
        outputs: {y: {shape: "batch, 4", element_type: f32}}
    workers: [{count: 1, slots: 1, threads: 1}]
"""


def test_a_model_of_which_one_call_was_measured_shares_its_calls(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of 0.2 s are too long to measure more of them in 1 s; of 16 requests at a time half share one soon."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    (workplace.folder / "pace").write_text("0.2")
    served = workplace.serve(HEAVY)
    (measured,) = served.wait_for("costs measured", 1)
    assert 1 == measured["points"]
    served.wait_for("worker joined")
    row = {"x": np.zeros((1, 4), np.float32)}
    with served.client() as client, ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda _: client.infer("paced", row), range(160)))
    rows = [result.timings.batch_rows for result in results]
    assert max(rows[:64]) >= 8
    assert sum([1 / each for each in rows]) <= 40  # calls; 160 of one request each, without tries


def test_requests_in_flight_do_not_part_into_two_waves(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of 0.3 s have room for more than the 16 in flight: from the first calls on all of them share one."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    (workplace.folder / "pace").write_text("0.3")
    served = workplace.serve(HEAVY.replace("batch:1..16", "batch:1..64"))
    served.wait_for("worker joined")
    row = {"x": np.zeros((1, 4), np.float32)}
    with served.client() as client, ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda _: client.infer("paced", row), range(320)))
    rows = [result.timings.batch_rows for result in results]
    assert sum([1 / each for each in rows]) <= 30  # calls: 20 at best, 40 in two waves

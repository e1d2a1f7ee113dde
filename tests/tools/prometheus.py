"""A real Prometheus, and its promtool, beside a real server: `make test-tools`, with Debian's package `prometheus`."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import PATIENCE_S, _workplace, until
from tests.e2e.test_admin_port import METERED, port_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The admin port of a server that has answered seven requests."""
    for place in _workplace(tmp_path_factory):
        served = place.serve(METERED)
        with served.client() as client:
            for rows in range(1, 8):
                client.infer("other", {"x": np.ones((rows, 2), np.float32)})
        yield port_of(served)


def test_promtool_finds_nothing_wrong_with_the_metrics(port: int) -> None:
    """Names, types, units and help, as it lints them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        ran = subprocess.run(
            ["promtool", "check", "metrics"], input=answer.read(), capture_output=True, check=False
        )
    assert (0, b"") == (ran.returncode, ran.stdout + ran.stderr)


def test_promtool_accepts_the_configuration_and_its_alerts() -> None:
    """Both files, as they are deployed."""
    ran = subprocess.run(
        ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    assert "rules found" in ran.stdout


def test_a_real_prometheus_scrapes_and_answers(port: int, tmp_path: Path) -> None:
    """The deployed configuration, with another port and a shorter interval: three queries, and no alert fires."""
    text = (DEPLOY / "prometheus.yml").read_text()
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("127.0.0.1:9090", f"127.0.0.1:{port}").replace("15s", "1s"))
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["prometheus", *arguments, "--web.listen-address=127.0.0.1:0"], stdout=file, stderr=file
        )
    try:
        address = until("its address", lambda: _listens_at(log))

        def query(expression: str) -> list[dict[str, Any]]:
            url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found

        (up,) = until("a scrape", lambda: [each for each in query("up") if each["value"][1] == "1"])
        assert f"127.0.0.1:{port}" == up["metric"]["instance"]
        (results,) = query('sum by (model) (shapestream_requests_total{outcome="ok", model="other"})')
        assert ("other", "7") == (results["metric"]["model"], results["value"][1])
        (p99,) = query(
            'histogram_quantile(0.99, sum by (model, le) (shapestream_request_seconds_bucket{model="other"}))'
        )
        assert float(p99["value"][1]) > 0
        assert [] == query("ALERTS")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _listens_at(log: Path) -> str | None:
    """The address that Prometheus has chosen, once it is ready."""
    lines = log.read_text().splitlines()
    if not any("Server is ready to receive web requests" in line for line in lines):
        return None
    (line,) = [line for line in lines if "Listening on" in line]
    return line.rpartition("address=")[2].strip()

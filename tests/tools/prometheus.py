"""A real Prometheus, and its promtool, beside a real server: `make test-tools`, with Debian's package `prometheus`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import yaml
from tests.e2e.admin import METERED, port_of
from tests.e2e.conftest import PATIENCE_S, temporary_workplace, until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"

Query: TypeAlias = Callable[[str], list[dict[str, Any]]]
"""Answers a PromQL expression with the vector that Prometheus finds."""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The admin port of a server with one worker process that has answered seven requests."""
    for place in temporary_workplace(tmp_path_factory):
        served = place.serve(METERED.replace("in_process: true", "workers: [{count: 1}]"))
        served.wait_for("workers ready")
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


def test_every_alert_fires_where_it_should_and_nowhere_else() -> None:
    """At two servers, of which one has everything that an alert is about, and the other nearly so."""
    tests = str(Path(__file__).with_name("alerts.yml"))
    ran = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    assert "SUCCESS" in ran.stdout


@pytest.fixture
def query(port: int, tmp_path: Path) -> Iterator[Query]:
    """Asks a Prometheus with the deployed configuration, but for the port and a shorter interval."""
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

        def ask(expression: str) -> list[dict[str, Any]]:
            url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found

        until("a scrape", lambda: [each for each in ask("up") if each["value"][1] == "1"])
        yield ask
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_a_real_prometheus_scrapes_and_answers(port: int, query: Query) -> None:
    """The target, two queries of docs/metrics.md, and no alert."""
    (up,) = query("up")
    assert f"127.0.0.1:{port}" == up["metric"]["instance"]
    (results,) = query('sum by (model) (shapestream_requests_total{outcome="ok", model="other"})')
    assert ("other", "7") == (results["metric"]["model"], results["value"][1])
    (p99,) = query(
        'histogram_quantile(0.99, sum by (model, le) (shapestream_request_seconds_bucket{model="other"}))'
    )
    assert float(p99["value"][1]) > 0
    assert [] == query("ALERTS")


def test_the_alerts_are_about_series_that_a_real_server_has(query: Query) -> None:
    """Each metric that an alert names is there; none of the expressions is true of a server that is well."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    expressions = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    names = set(re.findall(r"shapestream_[a-z_]+", " ".join(expressions.values())))
    assert len(names) > 20
    assert [] == [name for name in sorted(names) if not query(name)]
    assert [] == [alert for alert, expression in expressions.items() if query(expression)]


def test_the_metrics_to_scale_on_answer_the_documented_queries(query: Query) -> None:
    """As docs/metrics.md and deploy/kubernetes have them, of an idle server: nothing waits, and slots are hardly used."""
    pages = [ROOT / "docs" / "metrics.md", *sorted((ROOT / "deploy" / "kubernetes").glob("*/operators.yaml"))]
    assert 3 == len(pages)
    for page in pages:
        documented = re.findall(r"        query: (.*)\n", page.read_text())
        assert 2 == len(documented)
        until("two scrapes", lambda asked=documented[1]: query(asked))
        queued, busy = [query(one.replace('model="embeddings"', 'model="other"')) for one in documented]
        assert [0.0] == [float(one["value"][1]) for one in queued]
        assert [True] == [0.0 <= float(one["value"][1]) < 0.5 for one in busy]


def test_every_panel_of_the_dashboard_asks_what_prometheus_understands(query: Query) -> None:
    """A wrong expression is an HTTP error; those of the first row have an answer."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "shapestream.json").read_text())
    until("two scrapes", lambda: query("rate(shapestream_slots_busy_seconds_total[1m])"))
    unanswered = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = re.sub(r"\$(instance|model)", ".*", target["expr"]).replace("$__rate_interval", "1m")
            if not query(expression) and panel["type"] == "stat":
                unanswered.append(panel["title"])
    assert [] == unanswered


def _listens_at(log: Path) -> str | None:
    """The address that Prometheus has chosen, once it is ready."""
    lines = log.read_text().splitlines()
    if not any("Server is ready to receive web requests" in line for line in lines):
        return None
    (line,) = [line for line in lines if "Listening on" in line]
    return line.rpartition("address=")[2].strip()

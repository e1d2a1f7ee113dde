"""The table of metrics: its names, its histograms, its page, and the dashboard and alerts that use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shapestream.slices import at_once
from shapestream.telemetry.counters import Histogram
from shapestream.telemetry.metrics import METRICS, MetricType, table

ROOT = Path(__file__).resolve().parents[3]
NAMES = {metric.name for metric in METRICS}
SERIES = NAMES | {
    metric.name + suffix
    for metric in METRICS
    if metric.type is MetricType.HISTOGRAM
    for suffix in ("_bucket", "_count", "_sum")
}
OF_THE_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}


def test_the_page_has_the_table() -> None:
    """As the code has it (docs/metrics.md; `table()` makes it)."""
    assert table() in (ROOT / "docs" / "metrics.md").read_text()


def test_names_follow_the_conventions() -> None:
    """One prefix, base units, `_total` for counters and for nothing else, no name twice."""
    assert len(METRICS) == len(NAMES)
    for metric in METRICS:
        assert re.fullmatch(r"shapestream_[a-z]+(_[a-z]+)*", metric.name)
        assert (metric.type is MetricType.COUNTER) == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|us|milliseconds|percent|kib|count|sum|bucket)$", metric.name)
        assert metric.help.endswith(".")


@given(st.lists(st.integers(0, 2**30)), st.lists(st.integers(0, 30), unique=True).map(sorted))
def test_buckets_hold_what_is_below_their_bounds(numbers: list[int], exponents: list[int]) -> None:
    """Exactly, for bounds that are powers of two; also of two histograms together."""
    halves = [Histogram(), Histogram()]
    for position, number in enumerate(numbers):
        halves[position % 2].record(number)
    whole = at_once(Histogram.of_all(halves))
    assert [sum(number < 2**exponent for number in numbers) for exponent in exponents] == whole.up_to(
        exponents
    )
    assert (len(numbers), sum(numbers)) == (whole.count, whole.total)


def expressions() -> dict[str, str]:
    """The PromQL of dashboard, alerts and page, by where it stands."""
    found: dict[str, str] = {}
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "shapestream.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):  # a row has none
            found[f"panel {panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard["templating"]["list"]:
        found[f"variable {variable['name']}"] = variable["query"]
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]:
        found |= {f"alert {rule['alert']}": rule["expr"] for rule in group["rules"]}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if "rate(" in line or "over_time(" in line:
            found[f"page {line[:40]}"] = line
    return found


def test_every_panel_of_the_dashboard_says_what_it_shows() -> None:
    """And lies in a row; the variables are those that its expressions use."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "shapestream.json").read_text())
    first, *_ = panels = dashboard["panels"]
    assert "row" == first["type"]
    assert [] == [panel["title"] for panel in panels if panel["type"] != "row" and not panel["description"]]
    assert len(panels) == len({panel["id"] for panel in panels})
    used = set(re.findall(r"\$\{?([a-z]+)", json.dumps(panels)))
    assert used == {variable["name"] for variable in dashboard["templating"]["list"]}


def test_every_alert_is_tried_with_series_that_exist() -> None:
    """tests/tools/alerts.yml, which `make test-tools` runs, expects each alert; its input series have real names."""
    (tried,) = yaml.safe_load((ROOT / "tests" / "tools" / "alerts.yml").read_text())["tests"]
    expected = [sample["labels"] for sample in tried["promql_expr_test"][0]["exp_samples"]]
    alerts = sorted(where.removeprefix("alert ") for where in expressions() if where.startswith("alert "))
    assert alerts == sorted(re.findall(r'alertname="(\w+)"', " ".join(expected)))
    series = {re.split(r"[{]", one["series"])[0] for one in tried["input_series"]}
    assert {"up"} == series - SERIES


@pytest.mark.parametrize("where", expressions())
def test_every_metric_that_is_asked_for_exists(where: str) -> None:
    """With its labels, in the dashboard, the alerts and the page."""
    expression = expressions()[where]
    used = set(re.findall(r"\b(?:shapestream|process)_[a-z_]+", expression))
    assert used or where.startswith(("variable source", "alert ShapestreamDown"))
    assert set() == used - SERIES - OF_THE_PROCESS
    labels = {"instance", "job", "le"} | {
        label
        for metric in METRICS
        if any(name.startswith(metric.name) for name in used)
        for label in metric.labels
    }
    asked = set(re.findall(r"(\w+)=~?\"", expression))
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        asked |= {label.strip() for label in grouped.split(",")}
    assert set() == asked - labels

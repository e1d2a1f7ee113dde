"""The setting `tracing`, and what it does without its libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, load_settings
from shapestream_workers.serve import open_tracer


def load(folder: Path, tracing: str) -> LoadedSettings:
    """Settings with this collector; model files need not exist."""
    path = folder / "x.yaml"
    path.write_text(f"server: {{tracing: {tracing}}}\nmodels: [{{name: m, path: m.xml}}]\n")
    return load_settings(path, files_must_exist=False)


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:4318", "https://collector.example", "'http://[::1]:4318/'", "http://h:1/otlp", "null"],
)
def test_addresses_of_collectors(tmp_path: Path, address: str) -> None:
    """HTTP or HTTPS, perhaps below a path."""
    assert load(tmp_path, address).settings.models


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:4318",
        "grpc://h:4317",
        "http://",
        "'http://:4318'",
        "true",
        "{endpoint: x}",
        "'http://a b'",
        "'http://user:word@host'",
        "http://h:port",
        "'http://h/?x=1'",
    ],
)
def test_what_is_no_address(tmp_path: Path, address: str) -> None:
    """The line names the place, and shows an address that would do."""
    with pytest.raises(ConfigurationError) as raised:
        load(tmp_path, address)
    (problem,) = raised.value.problems
    assert problem.startswith(f"{tmp_path}/x.yaml:1:")
    assert "server.tracing: expected http://HOST:PORT, got" in problem
    assert problem.endswith("(write http://127.0.0.1:4318)")


def test_without_the_extra_there_are_no_spans_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the extra; the server serves."""
    monkeypatch.delitem(sys.modules, "shapestream.serving.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with capture_logs() as lines:
        assert open_tracer(load(tmp_path, "http://127.0.0.1:4318")) is None
        assert open_tracer(load(tmp_path, "null")) is None
    assert [("no tracing", "pip install 'shapestream[otel]'")] == [
        (line["event"], line["advice"]) for line in lines
    ]


def test_a_variable_that_cannot_be_used_is_a_problem_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any port is open."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(ConfigurationError, match=r"server\.tracing: a variable OTEL_"):
        open_tracer(load(tmp_path, "http://127.0.0.1:4318"))

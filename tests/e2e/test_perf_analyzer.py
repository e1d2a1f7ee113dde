"""NVIDIA's perf_analyzer, unchanged, asks for a version, over HTTP and gRPC: `make test-clients`.

Its wheel needs glibc 2.38. Elsewhere the environment's PERF_ANALYZER names a program that runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.http_calls import ask, port_of

pytestmark = pytest.mark.e2e

PROGRAM = os.environ.get("PERF_ANALYZER") or str(
    ROOT / ".venv-client-perf_analyzer" / "bin" / "perf_analyzer"
)
REQUESTS = 50
TIMEOUT_S = 240.0


def answered(port: int, version: str) -> int:
    """Requests that a version has answered, by the server's statistics."""
    _, told = ask(port, "GET", f"/v2/models/m/versions/{version}/stats")
    (row,) = told["model_stats"]
    return int(row["inference_count"])


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="needs `make test-clients`, and glibc 2.38")
def test_perf_analyzer_measures_a_version(workplace: Any, tmp_path: Path) -> None:
    """Each request goes to the version that it names, though another one has most of the traffic."""
    from tests.e2e import test_versions  # needs ONNX Runtime

    text = test_versions.TWO.replace('http: "127.0.0.1:0"', 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"')
    served = test_versions.serve(workplace, text)
    addresses = {kind: str(served.wait_for(f"{kind} ready")[0]["address"]) for kind in ("http", "grpc")}
    port = port_of(served)
    now = 0
    for kind, address in addresses.items():
        command = [PROGRAM, "-m", "m", "-x", "4", "-i", kind, "-u", address, "--request-count", str(REQUESTS)]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path
        )
        assert 0 == ran.returncode, ran.stdout + ran.stderr
        before, now = now, answered(port, "4")
        assert before + REQUESTS == now
    assert 0 == answered(port, "3")

"""A rolling restart whose new servers have new addresses: by haproxy over HTTP and gRPC, by a name for the SDK."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.conftest import PATIENCE_S, ROOT
from tests.e2e.network.rollout import STEP

pytestmark = pytest.mark.e2e

OF_THE_SDK = {"SDK", "SDK, a stream"}
BEHIND_HAPROXY = {"HTTP, kept", "HTTP, fresh", "gRPC"}


@pytest.mark.thorough
def test_no_request_fails_while_all_servers_move(tmp_path: Path) -> None:
    """Every kind of caller is answered throughout, and in the end the SDK knows the new addresses alone.

    HTTP and gRPC need haproxy, Debian's package, and are left out without it; `make test-tools` demands it.
    """
    pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
    if any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip", "mount")):
        pytest.skip("needs unshare, nsenter, ip and mount")
    if subprocess.run(["unshare", "-n", "-m", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make namespaces")
    ran = subprocess.run(
        ["unshare", "-n", "-m", sys.executable, "-m", "tests.e2e.network.rollout", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
        check=False,
        cwd=ROOT,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    print(told)
    assert [] == told["failures"]
    kinds = OF_THE_SDK | (BEHIND_HAPROXY if told["haproxy"] else set())
    assert kinds == told["answered"].keys()
    assert all(count >= 5 * STEP for count in told["answered"].values())
    assert ["tcp://10.77.0.13:5555", "tcp://10.77.0.14:5555"] == told["known"]

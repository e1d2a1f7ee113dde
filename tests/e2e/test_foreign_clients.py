"""Clients that know no shapestream, unchanged, at a real server. Those of others need `make test-clients`."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import string_models
from tests.e2e.client_programs import needs, python_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clients"
CALLS = Path(__file__).parent / "clients"
TIMEOUT_S = 120.0
SORTED = [[1.0, 2.0, 3.5], [-1.0, 0.25, 7.0]]


@pytest.fixture
def server(workplace: Any) -> str:
    """The HOST:PORT of a server with the configuration of the examples, at a free port."""
    text = (ROOT / "configs" / "http.yaml").read_text()
    served = workplace.serve(workplace.write(text.replace("127.0.0.1:8000", "127.0.0.1:0")))
    served.wait_for("gateways ready")
    (line,) = served.events("http ready")
    return str(line["address"])


@pytest.fixture
def grpc_server(workplace: Any) -> str:
    """The HOST:PORT of such a server over gRPC."""
    text = (ROOT / "configs" / "grpc.yaml").read_text()
    served = workplace.serve(workplace.write(text.replace("127.0.0.1:8001", "127.0.0.1:0")))
    served.wait_for("gateways ready")
    (line,) = served.events("grpc ready")
    return str(line["address"])


def output_of(client: str, example: Path, server: str) -> str:
    """What a program prints, run by the Python of that client's environment."""
    command = [str(python_of(client)), "-P", str(example), server]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_sorts(server: str) -> None:
    """The example's own words."""
    command = [str(EXAMPLES / "curl.sh"), server]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
    answer = json.loads(found)
    (output,) = answer["outputs"]
    assert {"name": "sorted", "datatype": "FP32", "shape": [2, 3]} == {
        key: output[key] for key in ("name", "datatype", "shape")
    }
    assert [*chain(*SORTED)] == output["data"]
    assert "sort" == answer["model_name"]
    assert "id" not in answer


def by(client: str, *values: Any) -> Any:
    """A case of this client, which needs its environment."""
    return pytest.param(client, *values, marks=needs(client))


@pytest.mark.parametrize(
    ("client", "example", "words"),
    [
        by("triton", "triton_http.py", ["ready: True True", "[[ 1.    2.    3.5 ]", "[[1 2]\n [3 4]]"]),
        by("kserve", "kserve_rest.py", ["ready: True True", "[[ 1.    2.    3.5 ]"]),
        by("pytriton", "pytriton_http.py", ["[[ 1.    2.    3.5 ]", "[1.  2.  3.5]", "[[1 2]\n [3 4]]"]),
    ],
)
def test_an_example_runs(server: str, client: str, example: str, words: list[str]) -> None:
    """With the client's own package, as a user installs it."""
    found = output_of(client, EXAMPLES / example, server)
    assert [] == [word for word in words if word not in found], found


@pytest.mark.parametrize(
    ("client", "program", "words"),
    [
        by(
            "triton",
            EXAMPLES / "triton_grpc.py",
            [
                "ready: True True",
                "[[ 1.    2.    3.5 ]",
                "[[1 2]\n [3 4]]",
                "stream: (1, 4)",
                "stream: no model",
            ],
        ),
        by("kserve", EXAMPLES / "kserve_grpc.py", ["ready: True True", "[[ 1.    2.    3.5 ]"]),
        by("triton", CALLS / "triton_grpc_calls.py", ["all right"]),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_a_program_runs_over_grpc(grpc_server: str, client: str, program: Path, words: list[str]) -> None:
    """Examples, and all that tritonclient can do: calls, futures, streams, asyncio, compression, errors."""
    found = output_of(client, program, grpc_server)
    assert [] == [word for word in words if word not in found], found


@needs("triton")
def test_tritonclient_sends_strings(workplace: Any) -> None:
    """BYTES over HTTP and gRPC, to functions of text and of bytes."""
    text = string_models.SERVED.replace('http: "127.0.0.1:0"', 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"')
    served = workplace.serve(text + f"    {string_models.PLACES['worker']}\n")
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    addresses = [str(served.wait_for(event)[0]["address"]) for event in ("http ready", "grpc ready")]
    found = output_of("triton", CALLS / "triton_strings.py", ",".join(addresses))
    assert "all right" in found


@pytest.mark.parametrize(
    ("client", "program"), [by("triton", "triton_versions.py"), by("kserve", "kserve_versions.py")]
)
def test_clients_of_others_ask_for_versions(workplace: Any, client: str, program: str) -> None:
    """Over HTTP and gRPC; the answers are compared by version."""
    from tests.e2e import test_versions  # needs ONNX Runtime

    text = test_versions.TWO.replace('http: "127.0.0.1:0"', 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"')
    served = test_versions.serve(workplace, text)
    addresses = [str(served.wait_for(event)[0]["address"]) for event in ("http ready", "grpc ready")]
    assert "all right" in output_of(client, CALLS / program, ",".join(addresses))

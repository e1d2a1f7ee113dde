"""Clients that know no shapestream, unchanged, at a real server. Those of others need `make test-clients`."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.e2e import string_models
from tests.e2e.text_chain import SERVED, TEXTS, expected, tokens, words

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


@pytest.fixture
def text_server(workplace: Any) -> str:
    """The HOST:PORT of a server of a chain that embeds texts."""
    served = workplace.serve(SERVED)
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    (line,) = served.events("http ready")
    return str(line["address"])


def output_of(client: str, example: Path, server: str, given: Any = None) -> str:
    """What a program prints, run by the Python of that client's environment, with this JSON to read."""
    python = ROOT / f".venv-client-{client}" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs `make test-clients`")
    command = [str(python), "-P", str(example), server]
    return subprocess.run(
        command,
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout


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


@pytest.mark.parametrize(
    ("client", "example", "words"),
    [
        ("triton", "triton_http.py", ["ready: True True", "[[ 1.    2.    3.5 ]", "[[1 2]\n [3 4]]"]),
        ("kserve", "kserve_rest.py", ["ready: True True", "[[ 1.    2.    3.5 ]"]),
        ("pytriton", "pytriton_http.py", ["[[ 1.    2.    3.5 ]", "[1.  2.  3.5]", "[[1 2]\n [3 4]]"]),
    ],
)
def test_an_example_runs(server: str, client: str, example: str, words: list[str]) -> None:
    """With the client's own package, as a user installs it."""
    found = output_of(client, EXAMPLES / example, server)
    assert [] == [word for word in words if word not in found], found


@pytest.mark.parametrize(
    ("client", "program", "words"),
    [
        (
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
        ("kserve", EXAMPLES / "kserve_grpc.py", ["ready: True True", "[[ 1.    2.    3.5 ]"]),
        ("triton", CALLS / "triton_grpc_calls.py", ["all right"]),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_a_program_runs_over_grpc(grpc_server: str, client: str, program: Path, words: list[str]) -> None:
    """Examples, and all that tritonclient can do: calls, futures, streams, asyncio, compression, errors."""
    found = output_of(client, program, grpc_server)
    assert [] == [word for word in words if word not in found], found


# ---------------------------------------------------------------- texts


def normal(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """These vectors with length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def assert_vectors(wanted: npt.NDArray[Any], found: list[list[float]]) -> None:
    """Hold vectors against those that the functions give, up to the last bit of f32."""
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def test_openais_client_embeds_texts(text_server: str) -> None:
    """In base64, which it asks for unasked, and numbers; sync and async; cut; by tokens; with its own errors."""
    found = json.loads(output_of("openai", CALLS / "openai_embeddings.py", text_server, TEXTS))
    vectors = expected(TEXTS)
    assert (["sentences"], "sentences") == (found["models"], found["model"])
    for form in ("base64", "float", "tokens"):
        assert_vectors(vectors, found[form]["vectors"])
        assert [*range(len(TEXTS))] == found[form]["indices"]
        assert [tokens(TEXTS)] * 2 == found[form]["tokens"]
        assert "sentences" == found[form]["model"]
    for form in ("one", "one_of_tokens"):
        assert_vectors(vectors[:1], found[form]["vectors"])
        assert [tokens(TEXTS[:1])] * 2 == found[form]["tokens"]
    assert_vectors(normal(vectors[:, :3]), found["cut"]["vectors"])
    assert_vectors(vectors, found["many"])
    wrong = ["BadRequestError", 400, "invalid_request_error"]
    assert ["NotFoundError", 404, "invalid_request_error", "model", "model_not_found"] == found["unknown"]
    assert [*wrong, "input", "invalid"] == found["empty"] == found["too_many_texts"]
    assert [*wrong, "dimensions", "invalid"] == found["too_many_dimensions"]


def test_huggingfaces_client_extracts_features(text_server: str) -> None:
    """From the server's root, and from the page; of length 1 unless that is not wanted."""
    found = json.loads(output_of("huggingface", CALLS / "huggingface_features.py", text_server, TEXTS))
    vectors = expected(TEXTS)
    for form in ("root", "page"):
        assert_vectors(normal(vectors), found[form])
    assert_vectors(normal(vectors[:1]), found["one"])
    assert_vectors(vectors, found["as_they_are"])
    assert_vectors(normal(vectors[:, :3]), found["cut"])
    status, error = found["refused"]
    assert (422, "Validation") == (status, error["error_type"])
    assert found["healthy"]
    assert ("sentences", "float32", words.MOST_TOKENS) == tuple(
        found["info"][key] for key in ("model_id", "model_dtype", "max_input_length")
    )


def test_langchains_client_embeds_documents(text_server: str) -> None:
    """Texts, and by default the tokens of its own encoding."""
    found = json.loads(output_of("langchain", CALLS / "langchain_embeddings.py", text_server, TEXTS))
    vectors = expected(TEXTS)
    for form in ("documents", "in_chunks", "awaited"):
        assert_vectors(vectors, found[form])
    assert_vectors(vectors[:1], [found["query"]])
    of_bytes = [
        words.encode(np.frombuffer(text.encode(), np.uint8)[np.newaxis].astype(np.int64))[0]
        for text in TEXTS
        if text
    ]
    assert_vectors(np.stack(of_bytes), found["tokens"])


def test_tritonclient_sends_strings(workplace: Any) -> None:
    """BYTES over HTTP and gRPC, to functions of text and of bytes."""
    text = string_models.SERVED.replace('http: "127.0.0.1:0"', 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"')
    served = workplace.serve(text + f"    {string_models.PLACES['worker']}\n")
    served.wait_for("gateways ready")
    addresses = [str(served.wait_for(event)[0]["address"]) for event in ("http ready", "grpc ready")]
    found = output_of("triton", CALLS / "triton_strings.py", ",".join(addresses))
    assert "all right" in found

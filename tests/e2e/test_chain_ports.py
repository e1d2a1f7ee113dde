"""A chain through the HTTP port, by JSON and binary tensor data, and through gRPC: each answer equals its stages run alone.

Requests have 0 to 200 rows. `CHAIN_REQUESTS=10000` tries as many by hand, and a tenth of that through gRPC; `CHAIN_SEED=1`
tries others.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.reading_chain import MODELS, PLACES, Array, expected, picture

pytestmark = pytest.mark.e2e

REQUESTS = int(os.environ.get("CHAIN_REQUESTS", "160"))
SEED = int(os.environ.get("CHAIN_SEED", "0"))
AT_ONCE = 12
TYPES = {"INT64": np.int64, "FP32": np.float32}
HAS_GRPC = find_spec("grpc") is not None


@pytest.fixture(scope="module")
def served(module_workplace: Any) -> Iterator[Any]:
    """The server with both ports, and two workers."""
    models = MODELS.replace("at_most: 150", "at_most: 200")
    if HAS_GRPC:
        models = models.replace('http: "127.0.0.1:0"', 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"')
    server = module_workplace.serve(models + f"    {PLACES['workers']}\n")
    server.wait_for("gateways ready")
    yield server
    server.send(signal.SIGTERM)
    assert 0 == server.wait()
    assert [] == server.events("scheduler fault")


def rows_of(number: int) -> int:
    """None, few, or up to the limit."""
    chance = random.Random(number)
    return chance.choice((0, chance.randint(1, 10), chance.randint(0, 200), 200 if number % 16 == 0 else 3))


def ask_all(count: int, ask: Callable[[int, Array], tuple[str, dict[str, Array]]]) -> Counter[str]:
    """Ask for so many pictures, some at once; count the ways in which the answers came, of which each is right."""

    def one(number: int) -> str:
        image = picture(number, rows_of(number))
        way, outputs = ask(number, image)
        boxes, text = expected(image)
        assert {"boxes", "text"} == outputs.keys()
        for value, output in ((boxes, outputs["boxes"]), (text, outputs["text"])):
            assert (value.dtype, value.shape) == (output.dtype, output.shape)
            np.testing.assert_array_equal(value, output)
        return f"{way}, {'some rows' if len(boxes) else 'no rows'}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(one, range(SEED << 32, (SEED << 32) + count)))


def assert_each_has_some(ways: list[str], told: Counter[str], count: int) -> None:
    """Every way was gone, with rows and without."""
    assert count == told.total()
    assert {f"{way}, {rows}" for way in ways for rows in ("some rows", "no rows")} == told.keys()


def test_each_answer_over_http_equals_its_stages_run_alone(served: Any) -> None:
    """The picture as JSON or as binary data, and so the answer."""
    (ready,) = served.events("http ready")
    port = int(ready["address"].rpartition(":")[2])
    free = SimpleQueue[HTTPConnection]()

    def ask(number: int, image: Array) -> tuple[str, dict[str, Array]]:
        binary_in, binary_out = bool(number & 1), bool(number & 2)
        entry: dict[str, Any] = {"name": "image", "datatype": "UINT8", "shape": image.shape}
        data = image.tobytes() if binary_in else b""
        entry |= (
            {"parameters": {"binary_data_size": len(data)}} if binary_in else {"data": image.ravel().tolist()}
        )
        body = {"inputs": [entry], "parameters": {"binary_data_output": binary_out}}
        text = json.dumps(body).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))} if binary_in else {}
        connection = free.get()
        connection.request("POST", "/v2/models/reading/infer", text + data, headers)
        answer = connection.getresponse()
        content = answer.read()
        free.put(connection)
        assert 200 == answer.status, content
        length = answer.headers["Inference-Header-Content-Length"]
        return ("binary" if binary_out else "JSON"), outputs_of(content, length and int(length))

    with ExitStack() as connections:
        for _ in range(AT_ONCE):
            connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            free.put(connections.enter_context(closing(connection)))
        assert_each_has_some(["binary", "JSON"], ask_all(REQUESTS, ask), REQUESTS)


def outputs_of(content: bytes, length: int | None) -> dict[str, Array]:
    """The arrays of an answer, whose JSON ends there; what follows is the binary data of the outputs, in their order."""
    found, at = {}, length or len(content)
    for output in json.loads(content[:length])["outputs"]:
        type_, shape = TYPES[output["datatype"]], output["shape"]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            found[output["name"]] = np.array(output["data"], type_).reshape(shape)
        else:
            found[output["name"]] = np.frombuffer(content[at : at + size], type_).reshape(shape)
            at += size
    assert len(content) == at
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_GRPC, reason="the extra [grpc] is not installed")
def test_each_answer_over_grpc_equals_its_stages_run_alone(served: Any) -> None:
    """Raw contents both ways, by one channel."""
    from tests.e2e.grpc_calls import Caller, protocol

    (ready,) = served.events("grpc ready")
    with Caller(ready["address"].removeprefix("grpc://")) as caller:

        def ask(number: int, image: Array) -> tuple[str, dict[str, Array]]:
            entry = protocol.ModelInferRequest.InferInputTensor(
                name="image", datatype="UINT8", shape=image.shape
            )
            request = protocol.ModelInferRequest(
                model_name="reading", inputs=[entry], raw_input_contents=[image.tobytes()]
            )
            answer = protocol.ModelInferResponse.FromString(caller.call("ModelInfer", request))
            return "gRPC", {
                output.name: np.frombuffer(raw, TYPES[output.datatype]).reshape(tuple(output.shape))
                for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
            }

        count = max(40, REQUESTS // 10)
        assert_each_has_some(["gRPC"], ask_all(count, ask), count)

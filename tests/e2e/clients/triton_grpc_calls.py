"""Everything that tritonclient does over gRPC, at the models of configs/grpc.yaml: triton_grpc_calls.py HOST:PORT.

Run by the Python of that client's environment; the last line says that all of it was right.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

ROWS = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
SORTED = np.sort(ROWS)


def tensor(kind, array):
    """An input with the bytes of an array."""
    given = kind("a", array.shape, "FP32")
    given.set_data_from_numpy(array)
    return given


def right(result, expected=SORTED):
    """Assert that the answer is the array."""
    assert np.array_equal(expected, result.as_numpy("sorted")), result.get_response()


def pages(client):
    """All calls besides inference."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("sort")
    assert "shapestream" == client.get_server_metadata().name
    assert [-1, -1] == client.get_model_metadata("sort").inputs[0].shape
    assert ["-1"] == client.get_model_config("sort", as_json=True)["config"]["input"][0]["dims"]
    assert 0 < client.get_inference_statistics("sort").model_stats[0].inference_count
    assert {"nonzero", "sort"} == {row.name for row in client.get_model_repository_index().models}


def calls(client):
    """Calls one by one, with everything that they may be given."""
    for compression in (None, "gzip", "deflate"):
        right(client.infer("sort", [tensor(triton.InferInput, ROWS)], compression_algorithm=compression))
    result = client.infer(
        "sort",
        [tensor(triton.InferInput, ROWS)],
        model_version="1",
        outputs=[triton.InferRequestedOutput("sorted")],
        request_id="mine",
        priority=1,
        timeout=60_000_000,
        client_timeout=60,
        parameters={"own": "ignored"},
    )
    right(result)
    assert "mine" == result.get_response().id
    status = None
    try:
        client.infer("none", [tensor(triton.InferInput, ROWS)])
    except InferenceServerException as error:
        status = error.status()
    assert "StatusCode.NOT_FOUND" == status, status
    answers = queue.Queue()
    for _ in range(20):
        client.async_infer(
            "sort",
            [tensor(triton.InferInput, ROWS)],
            callback=lambda result, error: answers.put((result, error)),
        )
    for _ in range(20):
        result, error = answers.get(timeout=60)
        assert error is None, error
        right(result)


def stream(client):
    """A stream with a failure in it, twice on one client."""
    for _ in range(2):
        answers = queue.Queue()
        client.start_stream(lambda result, error, answers=answers: answers.put((result, error)))
        for n in range(50):
            array = np.arange(n % 7 + 1, 0, -1, dtype=np.float32)[None]
            model = "none" if n == 25 else "sort"
            client.async_stream_infer(
                model, [tensor(triton.InferInput, array)], request_id=str(n), enable_empty_final_response=True
            )
        for n in range(50):
            result, error = answers.get(timeout=60)
            if n == 25:
                assert "no model" in error.message(), error
                continue
            assert error is None, error
            assert str(n) == result.get_response().id
            assert result.get_response().parameters["triton_final_response"].bool_param
            right(result, np.arange(1, n % 7 + 2, dtype=np.float32)[None])
        client.stop_stream()
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("sort", [tensor(triton.InferInput, ROWS)])
    client.stop_stream(cancel_requests=True)


async def in_asyncio(place):
    """The client for asyncio."""
    async with triton_aio.InferenceServerClient(place) as client:
        found = await asyncio.gather(
            *[client.infer("sort", [tensor(triton_aio.InferInput, ROWS)]) for _ in range(50)]
        )
        for result in found:
            right(result)

        async def requests():
            for n in range(20):
                inputs = [tensor(triton_aio.InferInput, np.ones((1, n + 1), np.float32))]
                yield {"model_name": "sort", "inputs": inputs, "request_id": str(n)}

        ids = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            ids.append(result.get_response().id)
        assert [str(n) for n in range(20)] == ids, ids


place = sys.argv[1]
with triton.InferenceServerClient(place) as client:
    calls(client)
    pages(client)
    stream(client)
    asked = [threading.Thread(target=calls, args=(client,)) for _ in range(4)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()
asyncio.run(in_asyncio(place))
print("all right")

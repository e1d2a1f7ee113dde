"""Sorts rows, and finds what is not zero, by NVIDIA's client over gRPC: triton_grpc.py [HOST:PORT]."""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    """An input with the bytes of an array."""
    given = triton.InferInput(name, array.shape, "FP32")
    given.set_data_from_numpy(array)
    return given


with triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001") as client:
    print("ready:", client.is_server_ready(), client.is_model_ready("sort"))
    rows = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
    print(client.infer("sort", [tensor("a", rows)]).as_numpy("sorted"))
    picture = np.zeros((4, 5), np.float32)
    picture[1, 2] = picture[3, 4] = 1
    print(client.infer("nonzero", [tensor("a", picture)]).as_numpy("places"))

    # Many requests in one call, each of its own size. Answers come in order; a request that fails has an error.
    answers: "queue.Queue[tuple[triton.InferResult, object]]" = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for length in (1, 4, 2):
        client.async_stream_infer(
            "sort", [tensor("a", np.ones((1, length), np.float32))], request_id=str(length)
        )
    client.async_stream_infer("unknown", [tensor("a", rows)], request_id="none")
    for _ in range(4):
        result, error = answers.get(timeout=60)
        print("stream:", error or result.as_numpy("sorted").shape)
    client.stop_stream()

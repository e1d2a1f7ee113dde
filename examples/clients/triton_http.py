"""Sorts rows, and finds what is not zero, by NVIDIA's client over HTTP: triton_http.py [HOST:PORT]."""

import sys

import numpy as np
import tritonclient.http as triton


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    """An input with the bytes of an array, behind the JSON."""
    given = triton.InferInput(name, array.shape, "FP32")
    given.set_data_from_numpy(array)
    return given


with triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000") as client:
    print("ready:", client.is_server_ready(), client.is_model_ready("sort"))
    rows = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
    print(client.infer("sort", [tensor("a", rows)]).as_numpy("sorted"))
    picture = np.zeros((4, 5), np.float32)
    picture[1, 2] = picture[3, 4] = 1
    print(client.infer("nonzero", [tensor("a", picture)]).as_numpy("places"))

"""Versions by tritonclient, over HTTP and gRPC: triton_versions.py HTTP_HOST:PORT,GRPC_HOST:PORT.

Run by the Python of that client's environment; the last line says that all of it was right. Version 3 of `m` answers
`2a - b`, version 4 `3a - b`, with its inputs in the other order.
"""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

FACTORS = {"3": 2.0, "4": 3.0}


def given(module, name, array):
    """An input of 32-bit floats."""
    tensor = module.InferInput(name, array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


def check(module, client):
    """Named and drawn versions, and pages."""
    seen = set()
    for number in range(60):
        version = ("", "3", "4")[number % 3]
        a, b = np.full((1, 2), number, np.float32), np.array([[0.5, 7.0]], np.float32)
        inputs = [given(module, "a", a), given(module, "b", b)]
        result = client.infer("m", inputs, model_version=version)
        response = result.get_response()
        answered = response["model_version"] if isinstance(response, dict) else response.model_version
        seen.add(answered)
        assert version in ("", answered), (version, answered)
        assert (FACTORS[answered] * a - b == result.as_numpy("y")).all(), answered
    assert {"3", "4"} == seen, seen
    metadata = client.get_model_metadata("m", model_version="4")
    versions = metadata["versions"] if isinstance(metadata, dict) else metadata.versions
    assert ["3", "4"] == list(versions), versions
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", model_version="4")
    told = client.get_inference_statistics("m", model_version="4")
    rows = told["model_stats"] if isinstance(told, dict) else told.model_stats
    row = rows[0]
    assert "4" == (row["version"] if isinstance(row, dict) else row.version), rows
    refused = ""
    try:
        client.infer("m", inputs, model_version="5")
    except InferenceServerException as error:
        refused = error.message()
    assert "'m' has no version '5'; it has: 3, 4" in refused, refused


http, grpc = sys.argv[1].split(",")
with triton_http.InferenceServerClient(http) as client:
    check(triton_http, client)
with triton_grpc.InferenceServerClient(grpc) as client:
    check(triton_grpc, client)
print("all right")

"""BYTES by tritonclient, over HTTP and gRPC: triton_strings.py HTTP_HOST:PORT,GRPC_HOST:PORT.

Run by the Python of that client's environment; the last line says that all of it was right.
"""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

TEXTS = ["", "a sentence", "né", "😀 שלום", "nul\0inside"]
BLOBS = [b"\xff\xfe", b"", b"plain"]


def strings(module, name, elements, shape, **how):
    """An input of BYTES."""
    given = module.InferInput(name, shape, "BYTES")
    given.set_data_from_numpy(np.array(elements, np.object_).reshape(shape), **how)
    return given


def check(module, client):
    """Text and bytes, in binary data; over HTTP as JSON, too."""
    metadata = client.get_model_metadata("shout")
    inputs = metadata["inputs"] if isinstance(metadata, dict) else metadata.inputs
    assert "BYTES" in str(inputs[0]), metadata
    result = client.infer("shout", [strings(module, "text", TEXTS, [5])])
    assert [each.upper().encode() for each in TEXTS] == result.as_numpy("loud").tolist()
    assert [each[::-1].encode() for each in TEXTS] == result.as_numpy("back").tolist()
    result = client.infer("reverse", [strings(module, "blob", BLOBS, [1, 3])])
    assert [[each[::-1] for each in BLOBS]] == result.as_numpy("reversed").tolist()
    refused = ""
    try:
        client.infer("shout", [strings(module, "text", BLOBS, [3])])
    except InferenceServerException as error:
        refused = error.message()
    assert "'text', element 0: no UTF-8" in refused, refused


over_http, over_grpc = sys.argv[1].split(",")
with triton_http.InferenceServerClient(over_http) as client:
    check(triton_http, client)
    asked = [triton_http.InferRequestedOutput("loud", binary_data=False)]
    result = client.infer(
        "shout", [strings(triton_http, "text", TEXTS, [5], binary_data=False)], outputs=asked
    )
    assert [each.upper() for each in TEXTS] == [
        each.decode() if isinstance(each, bytes) else each for each in result.as_numpy("loud").tolist()
    ]
with triton_grpc.InferenceServerClient(over_grpc) as client:
    check(triton_grpc, client)
print("all right")

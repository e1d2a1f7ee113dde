"""One input of float32 in binary, as the Open Inference Protocol has it: what stands before the row in a body."""

from __future__ import annotations

import json

HEAD_LENGTH = "Inference-Header-Content-Length"
PATH = "/v2/models/{}/infer"


def head_of(width: int) -> bytes:
    """The JSON of a request for one row of so many elements, `x`, whose answer is binary too."""
    told = {"name": "x", "datatype": "FP32", "shape": [1, width]}
    inputs = [{**told, "parameters": {"binary_data_size": 4 * width}}]
    return json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()


def headers_of(head: bytes) -> str:
    """The header that goes with it."""
    return f"{HEAD_LENGTH}: {len(head)}\r\n"

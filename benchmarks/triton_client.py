"""Requests by tritonclient for `reloads.py`, one after the other: `triton_client.py http|grpc HOST:PORT DEADLINE_S`.

It runs in that client's own environment (`make test-clients`), so it imports nothing of ours. Each line of stdin is a JSON
array of a model and a row of numbers; it prints a JSON object for each.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np

LATE = {"504", "StatusCode.DEADLINE_EXCEEDED"}


def main(kind: str, address: str, deadline_s: str) -> None:
    """Ask until stdin ends."""
    triton: Any = importlib.import_module(f"tritonclient.{kind}")
    utils: Any = importlib.import_module("tritonclient.utils")
    with triton.InferenceServerClient(address) as client:
        for line in sys.stdin:
            model, row = json.loads(line)
            given = triton.InferInput("x", [1, len(row)], "FP32")
            given.set_data_from_numpy(np.array([row], np.float32))
            try:
                result = client.infer(model, [given], timeout=int(1e6 * float(deadline_s)))
            except utils.InferenceServerException as error:
                told = {"late": error.status() in LATE, "error": str(error)}
            else:
                response = result.get_response()
                version = response["model_version"] if isinstance(response, dict) else response.model_version
                told = {"values": result.as_numpy("y")[0].tolist(), "version": version}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

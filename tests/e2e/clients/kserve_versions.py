"""A version by KServe's client, over HTTP and gRPC: kserve_versions.py HTTP_HOST:PORT,GRPC_HOST:PORT.

Run by the Python of that client's environment; the last line says that all of it was right. Version 4 of `m` answers
`3a - b`. Over HTTP the client has no argument for a version: the name has it.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

A, B = np.full((1, 2), 5, np.float32), np.array([[0.5, 7.0]], np.float32)


def request(name, **more):
    """Both inputs."""
    inputs = []
    for port, array in (("a", A), ("b", B)):
        tensor = InferInput(port, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return InferRequest(name, inputs, **more)


async def main(http, grpc):
    """Asks for version 4."""
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    answer = await rest.infer(f"http://{http}", request("m"), model_name="m/versions/4")
    assert (3 * A - B == answer.outputs[0].as_numpy()).all(), answer
    await rest.close()
    client = InferenceGRPCClient(grpc)
    answer = await client.infer(request("m", model_version="4"))
    assert (3 * A - B == answer.outputs[0].as_numpy()).all(), answer
    await client.close()


asyncio.run(main(*sys.argv[1].split(",")))
print("all right")

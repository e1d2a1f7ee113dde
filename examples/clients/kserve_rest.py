"""Sorts rows, by KServe's client over HTTP: kserve_rest.py [HOST:PORT]."""

import asyncio
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def main(server: str) -> None:
    """Asks once."""
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    rows = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
    given = InferInput("a", list(rows.shape), "FP32")
    given.set_data_from_numpy(rows)
    request = InferRequest("sort", [given])
    print("ready:", await client.is_server_ready(server), await client.is_model_ready(server, "sort"))
    answer = await client.infer(server, request, model_name="sort")
    print(answer.outputs[0].as_numpy())
    await client.close()


asyncio.run(main(f"http://{sys.argv[1] if len(sys.argv) > 1 else '127.0.0.1:8000'}"))

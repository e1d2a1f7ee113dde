"""Sorts rows, by KServe's client over gRPC: kserve_grpc.py [HOST:PORT]."""

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest


async def main(server: str) -> None:
    """Asks once."""
    client = InferenceGRPCClient(server)
    rows = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
    given = InferInput("a", list(rows.shape), "FP32")
    given.set_data_from_numpy(rows)
    request = InferRequest("sort", [given])
    print("ready:", await client.is_server_ready(), await client.is_model_ready("sort"))
    answer = await client.infer(request)
    print(answer.outputs[0].as_numpy())
    await client.close()


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"))

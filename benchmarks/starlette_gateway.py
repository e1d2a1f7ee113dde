"""A gateway as frameworks make it, to compare with: `python -m benchmarks.starlette_gateway ADDRESS READY`.

hypercorn on trio, starlette, and the SDK's client of the server, in one event loop. It takes what the benchmark sends, one
input in binary, and answers in the same form; it checks next to nothing. The port is written into the file READY.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import hypercorn.trio
import numpy as np
import trio
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import shapestream
from benchmarks.binary_infer import HEAD_LENGTH
from benchmarks.http_client import HOST
from benchmarks.http_echoes import write_port


def _application(client: shapestream.Client) -> Any:
    async def infer(request: Request) -> Response:
        body = await request.body()
        length = int(request.headers[HEAD_LENGTH])
        (told,) = json.loads(body[:length])["inputs"]
        array = np.frombuffer(body, np.float32, offset=length).reshape(told["shape"])
        model = request.path_params["model"]
        result = await client.infer(model, {told["name"]: array})
        outputs = [
            {
                "name": name,
                "datatype": "FP32",
                "shape": list(output.shape),
                "parameters": {"binary_data_size": output.nbytes},
            }
            for name, output in result.items()
        ]
        head = json.dumps({"model_name": model, "model_version": "1", "outputs": outputs}).encode()
        content = b"".join([head, *(output.tobytes() for output in result.values())])
        return Response(content, media_type="application/octet-stream", headers={HEAD_LENGTH: str(len(head))})

    return Starlette(routes=[Route("/v2/models/{model}/infer", infer, methods=["POST"])])


async def _serve(address: str, path: str) -> None:
    listener = socket.create_server((HOST, 0), backlog=1024)
    config = Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.accesslog = None
    async with shapestream.connect(address) as client, trio.open_nursery() as nursery:
        await nursery.start(hypercorn.trio.serve, _application(client), config)
        write_port(path, listener.getsockname()[1])


if __name__ == "__main__":
    trio.run(_serve, sys.argv[1], sys.argv[2])

"""The whole gateway: real sockets on both sides, and a real server with the engine's function backend."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from tests.pipeline.client.real_server import real_server
from tests.pipeline.gateway.http_site import PATIENCE_S, Answer, Peer

from shapestream.gateway.gateway import GatewayOptions, run_gateway
from shapestream.gateway.json_text import MOST_JSON_BYTES
from shapestream.transport.http_listener import listen_at, place_of
from shapestream.web.messages import HttpLimits


@asynccontextmanager
async def gateway(server: str, **options: Any) -> AsyncIterator[Peer]:
    """A connection to a gateway."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            listener = listen_at("127.0.0.1:0")
            host, _, port = place_of(listener).rpartition(":")
            asked = GatewayOptions(server=server, **options)
            nursery.start_soon(partial(run_gateway, asked, listener, ready=ready.set))
            await ready.wait()
            peer = Peer(await trio.open_tcp_stream(host, int(port)))
            yield peer
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def post(peer: Peer, path: str, body: bytes, headers: str = "") -> Answer:
    """The answer to a request on an open connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return await peer.ask(head.encode() + body)


def test_inference_through_all_parts(tmp_path: Path) -> None:
    """JSON, binary data, both content codings both ways, a failure, and the counts of all that, on one connection."""
    x = np.arange(2000, dtype=np.float32).reshape(2, 1000)
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": [2, 1000],
        "parameters": {"binary_data_size": x.nbytes},
    }
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    path = "/v2/models/double/infer"

    async def play(server: str) -> None:
        async with gateway(server) as peer:
            plain = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}
            answer = await post(peer, path, json.dumps(plain).encode())
            assert [2.0, 5.0] == json.loads(answer.body)["outputs"][0]["data"]
            length = f"Inference-Header-Content-Length: {len(text)}\r\n"
            for encode, decode, coding in (
                (gzip.compress, gzip.decompress, "gzip"),
                (zlib.compress, zlib.decompress, "deflate"),
            ):
                coded = f"{length}Content-Encoding: {coding}\r\nAccept-Encoding: {coding}\r\n"
                answer = await post(peer, path, encode(text + x.tobytes()), coded)
                assert coding == answer.headers["content-encoding"]
                body = decode(answer.body)
                head = int(answer.headers["inference-header-content-length"])
                assert (x * 2).tobytes() == body[head:]
                assert x.nbytes == json.loads(body[:head])["outputs"][0]["parameters"]["binary_data_size"]
            plain["inputs"][0]["data"] = [1, -1]
            answer = await post(peer, path, json.dumps(plain).encode())
            assert 500 == answer.status
            assert "overwhelm" in answer.error
            for page in ("health/ready", "models/double/ready"):
                answer = await peer.ask(f"GET /v2/{page} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert 200 == answer.status

    with real_server(f"ipc://{tmp_path}/server/s") as address:
        trio.run(play, address)


def test_a_body_beyond_the_limit(tmp_path: Path) -> None:
    """It is refused by its length, in the protocol's form."""

    async def play(server: str) -> None:
        async with gateway(server, limits=HttpLimits(max_body_bytes=100)) as peer:
            answer = await post(peer, "/v2/models/double/infer", b" " * 101)
            assert 413 == answer.status
            assert "101" in answer.error

    with real_server(f"ipc://{tmp_path}/server/s") as address:
        trio.run(play, address)


def test_no_more_json_is_decompressed_than_is_read(tmp_path: Path) -> None:
    """A bomb for a page of JSON ends at the bound of JSON, not at that of bodies; with binary data it may have more."""

    async def play(server: str) -> None:
        packed = gzip.compress(bytes(MOST_JSON_BYTES + 1))
        for length, status, words in (
            ("Inference-Header-Content-Length: 9\r\n", 400, "no JSON"),
            ("", 413, "after gzip"),
        ):
            async with gateway(server) as peer:
                coded = f"{length}Content-Encoding: gzip\r\n"
                answer = await post(peer, "/v2/models/double/infer", packed, coded)
            assert (status, True) == (answer.status, words in answer.error), answer.error

    with real_server(f"ipc://{tmp_path}/server/s") as address:
        trio.run(play, address)

"""One HTTP request over a raw socket, and its answer in a form in which two servers' answers can be compared."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TIMEOUT_S = 60.0
HEAD_LENGTH = "Inference-Header-Content-Length"
DTYPES = {
    "BOOL": np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, the headers, and the body without its content coding."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    @property
    def content(self) -> Any:
        """The body's JSON object; None for an empty body."""
        length = self.headers.get(HEAD_LENGTH.lower())
        text = self.body if length is None else self.body[: int(length)]
        return json.loads(text) if text else None

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """The outputs of an inference; `data` is a flat list of numbers, however it was sent, and `binary` says how."""
        content, found = self.content, []
        offset = int(self.headers.get(HEAD_LENGTH.lower(), len(self.body)))
        for output in content["outputs"]:
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                data = output["data"]
            else:
                data = np.frombuffer(self.body[offset : offset + size], DTYPES[output["datatype"]]).tolist()
                offset += size
            told = {key: output[key] for key in ("name", "datatype", "shape")}
            found.append({**told, "binary": size is not None, "data": data})
        assert len(self.body) == offset
        return found


def request_bytes(
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    length: bool = True,
) -> bytes:
    """The bytes of a request on a connection that ends with it; `length`: with the header of the body's length."""
    stated = {"Host": "localhost", "Connection": "close", **(headers or {})}
    if length and (body or method == "POST"):
        stated["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in stated.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def exchange(port: int, request: bytes) -> Answer:
    """Send a request over a connection of its own, and read the answer."""
    method = request.split(b" ", 1)[0].decode()
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        body = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    match headers.get("content-encoding"):
        case "gzip":
            body = gzip.decompress(body)
        case "deflate":
            body = zlib.decompress(body)
    return Answer(response.status, headers, body)

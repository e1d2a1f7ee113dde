"""The table of a gateway's limits in docs/security.md: its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the extra [grpc] is not installed")

from shapestream.gateway.grpc_calls import LOOK_S, MESSAGE_S, MOST_MESSAGES, OPEN_CALLS, TRANSFER_S
from shapestream.gateway.grpc_gateway import GrpcLimits
from shapestream.web.connection import READ_BYTES
from shapestream.web.messages import HttpLimits
from shapestream.web.server import LOOK_S as HTTP_LOOK_S

HTTP, GRPC = HttpLimits(), GrpcLimits()
DOCUMENTS = Path(__file__).parents[3] / "docs"
EXPECTED = {
    "HTTP: connections": [HTTP.max_connections],
    "HTTP: connections that wait for the rest of a body": [HTTP.max_connections],
    "HTTP: seconds of a head, of the next 64 KiB of a body, of an answer that is not read": [
        HTTP.head_s,
        HTTP.body_s,
        HTTP.write_s,
    ],
    "HTTP: bytes of bodies and answers": [HTTP.most_bodies],
    "gRPC: calls of one connection": [],
    "gRPC: calls and streams": [],
    "gRPC: calls without a token that wait for their message": [OPEN_CALLS],
    "gRPC: calls without a token that ask the server": [OPEN_CALLS],
    "gRPC: seconds from headers to the message, of a page and of `ModelInfer`": [MESSAGE_S, TRANSFER_S],
    "gRPC: bytes of messages and answers": [MOST_MESSAGES],
    "gRPC: seconds of an answer that is not read": [TRANSFER_S],
    "requests at the server": [],
}


def test_the_table_has_the_numbers_of_the_code() -> None:
    """Each row, in its order; half of the calls are a connection's, and looks are as often as it says."""
    text = (
        (DOCUMENTS / "security.md").read_text().partition("### Limits of a gateway")[2].partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line
    ]
    told = {row[0]: [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", row[1])] for row in rows[2:]}
    assert EXPECTED == told
    assert (64 << 10, 1.0, 0.25) == (READ_BYTES, HTTP_LOOK_S, LOOK_S)
    assert ("grpc.max_concurrent_streams", GRPC.max_calls // 2) in GRPC.options()

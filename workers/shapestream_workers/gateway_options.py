"""Options of `shapestream gateway`, as typer reads them from the command line.

This file is read for each command, also for those that start no gateway: it imports nothing of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shapestream_workers.target import Key, ServerKey, Timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCommand:
    """Options of `shapestream gateway`, unread."""

    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="The server's address, tcp://... or ipc://....", show_default=False
        ),
    ]
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Speak HTTP there. Default: 127.0.0.1:8000.")
    ] = None
    grpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Speak gRPC there, instead of HTTP.")
    ] = None
    max_body: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Largest body or message.")] = 64 << 20
    max_calls: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="gRPC: calls and streams at a time.")
    ] = 128
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The callers: a line NAME TOKEN for each.")
    ] = None
    opened: Annotated[
        bool, typer.Option("--open", help="Without tokens beyond loopback: the network keeps strangers away.")
    ] = False
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate for TLS.")] = None
    certificate_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Secret key of the certificate.")
    ] = None
    default_priority_level: Annotated[
        int, typer.Option(min=1, metavar="LEVEL", help="Triton's level of requests without a priority.")
    ] = 1
    texts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=JSON]",
            help="HTTP: a model or chain of texts; JSON has encoder, tokenizer, largest_token, labels.",
        ),
    ] = None
    key: Key = None
    server_key: ServerKey = None
    timeout: Timeout = 60.0
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time that requests have after SIGTERM.")
    ] = 25.0
    lame_duck: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Before: time for which requests are still taken."),
    ] = None
    max_connection: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Age of a connection with a last answer.")
    ] = 300.0
    listener: Annotated[int | None, typer.Option(hidden=True)] = None
    """The number of a socket that listens, which a server has opened."""
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False
    """A server started it. It ends with its server: nobody waits for another one."""

"""shapestream: serve models whose tensor shapes change with every request.

The client for trio is here; `shapestream.aio` has the one for asyncio, `shapestream.blocking` the one that needs
no async code. The server and the workers are run by the command `shapestream` (see docs/); `shapestream.local` has a server
inside the program.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from shapestream import aio, blocking
from shapestream.client.async_face import Client, Stream
from shapestream.client.model_list import ListedModel
from shapestream.client.opened_models import Failed, Result
from shapestream.client.trio_client import connect
from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    ConfigurationError,
    Conflict,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelError,
    Overloaded,
    Poisoned,
    ProtocolError,
    RequestError,
    ShapestreamError,
    TooLarge,
    TransportError,
    Unavailable,
    WorkerLost,
)
from shapestream.wire.messages import Timings

__version__ = version("shapestream")

__all__ = [
    "AlreadyAnswered",
    "Cancelled",
    "Client",
    "ConfigurationError",
    "Conflict",
    "DeadlineExceeded",
    "Draining",
    "Failed",
    "Forbidden",
    "InternalError",
    "InvalidRequest",
    "ListedModel",
    "ModelError",
    "Overloaded",
    "Poisoned",
    "ProtocolError",
    "RequestError",
    "Result",
    "ShapestreamError",
    "Stream",
    "Timings",
    "TooLarge",
    "TransportError",
    "Unavailable",
    "WorkerLost",
    "__version__",
    "aio",
    "blocking",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Import `shapestream.local` where it is first used: a client needs no server."""
    if name == "local":
        return import_module("shapestream.local")
    raise AttributeError(f"module 'shapestream' has no attribute {name!r}")

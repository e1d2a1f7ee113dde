"""A server in a process of its own, for the tests of hostile input: `python hostile_server.py FOLDER`.

Its memory is its own, so that it can be measured, and its log is a file, so that lines can be counted. For that the
limits on the rate of lines are off here; they have tests of their own. Says where it listens, as JSON on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import trio

from shapestream.serving import client_port, port_traffic
from shapestream.serving.allocator import keep_freed_memory
from shapestream.serving.server import Server, serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ServerSettings
from shapestream.telemetry import logging
from shapestream.telemetry.logging import LineBudget, RateLimit, configure
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model

WINDOW_REQUESTS = 64
WINDOW_BYTES = 1 << 20


def scaled(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of x, each times its scale."""
    product: np.ndarray[Any, Any] = x * scale[:, None]
    return product


def inverted(flags: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The opposite of each flag."""
    opposite: np.ndarray[Any, Any] = ~flags
    return opposite


def scaled_model(function: Callable[..., Any] = scaled) -> CompiledModel:
    """Two inputs that share the batch dimension, one of them two-dimensional."""
    return compile_model(
        ModelSpec(
            name="scaled",
            model=function,
            inputs={
                "x": InputSpec(shape="batch:1..8, n:1..1000", element_type="f32"),
                "scale": InputSpec(shape="batch", element_type="f32"),
            },
            outputs={"y": OutputSpec(shape="batch, n", element_type="f32")},
        )
    )


def models() -> dict[str, CompiledModel]:
    """That one, and one of truth values, of which there may be none."""
    return {
        "scaled": scaled_model(),
        "inverted": compile_model(
            ModelSpec(
                name="inverted",
                model=inverted,
                inputs={"flags": InputSpec(shape="batch:0..8, n:0..4000000", element_type="boolean")},
                outputs={"y": OutputSpec(shape="batch, n", element_type="boolean")},
            )
        ),
    }


async def main(folder: str) -> None:
    """Serves until killed."""

    async def start(*, task_status: trio.TaskStatus[Server]) -> None:
        settings = ServerSettings(
            listen=(f"ipc://{folder}/c", "tcp://127.0.0.1:*"),
            worker_listen=f"ipc://{folder}/w",
            window_requests=WINDOW_REQUESTS,
            window_bytes=WINDOW_BYTES,
            heartbeat_s=0.1,  # with which failed handshakes are counted
            # A busy machine must not be taken for a silent peer.
            client_silence_s=120.0,
            worker_silence_s=120.0,
        )
        await serve(settings, local=SlotThreads(models=models(), slots=1), task_status=task_status)

    async with trio.open_nursery() as nursery:
        server = await nursery.start(start)
        print(json.dumps({"clients": server.addresses, "workers": server.worker_addresses}), flush=True)


if __name__ == "__main__":
    for module in (client_port, port_traffic):
        module.RateLimit = partial(RateLimit, 0.0)  # type: ignore[attr-defined] # see above
    logging.PRESENT.budgets.default_factory = partial(LineBudget, 10**9)  # the same
    keep_freed_memory()  # as `shapestream serve` does
    configure("info", "json")
    trio.run(main, sys.argv[1])

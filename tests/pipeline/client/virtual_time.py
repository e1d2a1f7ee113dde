"""Our client and a scripted server over memory endpoints, under a clock that jumps: times that no test could wait for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio

from shapestream.testing import MemoryEndpoint, ScriptedModel, ScriptedServer, identity_signature

ROW = {"x": np.zeros((1, 16), np.float32)}


@asynccontextmanager
async def serving(
    *models: ScriptedModel, **options: Any
) -> AsyncIterator[tuple[ScriptedServer, MemoryEndpoint]]:
    """A scripted server at a memory endpoint."""
    server = ScriptedServer(*(models or [ScriptedModel(identity_signature())]), **options)
    endpoint = MemoryEndpoint()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, endpoint.bind())
        yield server, endpoint
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], Any]) -> None:
    """Let the others run until it holds."""
    with trio.fail_after(1000):
        while not condition():  # noqa: ASYNC110 - the clock jumps, and the condition is anything
            await trio.sleep(0.001)

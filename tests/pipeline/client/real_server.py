"""A real server with one model, for the time of a block: the engine's function backend, over ZeroMQ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import trio

from shapestream.serving.server import serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ServerSettings
from shapestream.transport.curve import ServerSecurity
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model


def double(x: Any) -> Any:
    """The model."""
    if x.min(initial=0) < 0:
        raise ValueError("negative numbers overwhelm this model")
    return x * np.float32(2)


def compiled(function: Callable[..., Any], element_type: str = "f32") -> CompiledModel:
    """The engine's model of a function."""
    return compile_model(
        ModelSpec(
            name="double",
            model=function,
            engine="function",
            inputs={"x": InputSpec(shape="batch:1..64, n:1..1000", element_type=element_type)},
            outputs={"y": OutputSpec(rule={"rule": "rows"}, shape="batch, n", element_type=element_type)},
        )
    )


@contextmanager
def real_server(
    address: str, *, keys: ServerSecurity | None = None, element_type: str = "f32"
) -> Iterator[str]:
    """The product's server in a thread, for the time of the block; gives the address with its port."""
    model = compiled(double, element_type)
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    addresses: list[str] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            token = trio.lowlevel.current_trio_token()
            stop.append(lambda: token.run_sync_soon(nursery.cancel_scope.cancel))
            local = SlotThreads(models={"double": model}, slots=2)

            async def run(*, task_status: trio.TaskStatus[Any]) -> None:
                settings = ServerSettings(listen=(address,))
                await serve(settings, local=local, keys=keys, task_status=task_status)

            addresses.extend((await nursery.start(run)).addresses)
            started.set()

    thread = threading.Thread(target=trio.run, args=(main,), name="real-server")
    thread.start()
    try:
        assert started.wait(10)
        yield addresses[0]
    finally:
        stop[0]()
        thread.join()
        model.close()

"""Servers under measurement: the real command, a client of it, and when all of its slots are there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import trio

from shapestream.client.trio_client import Client, connect
from shapestream.errors import RequestError, Unavailable
from shapestream_workers.lab.tune_children import Child, ChildEnded, running

__all__ = ["Served", "serving"]

LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that is ready, and a client of it."""

    child: Child
    client: Client
    startup_s: float
    """From its start until the last slot was there."""


@asynccontextmanager
async def serving(config: Path, model: str, slots: int, timeout_s: float) -> AsyncIterator[Served]:
    """`shapestream serve CONFIG` until the block ends. Raises `ChildEnded` if it is not ready in time."""
    began = monotonic()
    address = f"ipc://{config.parent}/s.sock"
    with running(["shapestream_workers.lab.tune_served", str(config)], config.with_suffix(".log")) as child:
        await _listening(child, trio.Path(config.parent / "s.sock"), timeout_s)
        try:
            async with connect(address, connect_timeout=timeout_s) as client:
                with trio.move_on_after(timeout_s - (monotonic() - began)) as scope:
                    await _complete(child, client, model, slots)
                if scope.cancelled_caught:
                    raise ChildEnded(f"not ready within {timeout_s:.0f} s: {child.last_words()}")
                yield Served(child=child, client=client, startup_s=monotonic() - began)
        except Unavailable as error:
            raise ChildEnded(f"{error}: {child.last_words()}") from error


async def _listening(child: Child, socket: trio.Path, timeout_s: float) -> None:
    with trio.move_on_after(timeout_s) as scope:
        while not await socket.exists():
            _check_alive(child)
            await trio.sleep(LOOK_EVERY_S)
    if scope.cancelled_caught:
        raise ChildEnded(f"not listening within {timeout_s:.0f} s: {child.last_words()}")


async def _complete(child: Child, client: Client, model: str, slots: int) -> None:
    """Returns when all slots are there and the model can be asked for."""
    while True:
        _check_alive(child)
        try:
            if len((await client.statistics())["slots"]) >= slots:
                await client.signature(model)
                return
        except RequestError:
            pass  # not yet
        await trio.sleep(LOOK_EVERY_S)


def _check_alive(child: Child) -> None:
    if child.process.poll() is not None:
        raise ChildEnded(child.last_words())

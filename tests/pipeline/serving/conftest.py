"""Fixtures of the serving tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.eager import EagerScheduler
from tests.pipeline.serving.hostile import Hostile, client, hostile_server
from tests.pipeline.serving.raw_messages import assert_served

import shapestream.serving.server


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> EagerScheduler:
    """The one that the next server uses."""
    made = EagerScheduler()
    monkeypatch.setattr(shapestream.serving.server, "Scheduler", lambda **_: made)
    return made


@pytest.fixture
def sends_ahead(scheduler: EagerScheduler) -> EagerScheduler:
    """One that asks nothing back of its own accord."""
    scheduler.recall_share = 0.0
    return scheduler


@pytest.fixture
def address() -> Iterator[str]:
    """An ipc address in a folder of its own, short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp") as folder:
        yield f"ipc://{Path(folder) / 'run' / 's'}"


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    """A server in a process of its own, for all the hostile cases of a file."""
    with hostile_server() as running:
        yield running


@pytest.fixture(scope="module")
def resident_at_first(server: Hostile) -> int:
    """What it holds after its first requests, in bytes."""

    @real_time
    async def warm_up() -> None:
        async with client(server.ipc) as honest:
            for sequence in range(200):
                await assert_served(honest, sequence)

    warm_up()
    return server.resident_bytes

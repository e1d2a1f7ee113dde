"""Workers at the hostile server's other port: the model `remote`, and reports packed by hand, any field replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from tests.entries import Execute, Goodbye, ModelOpened, OpenModel, ResultEntry, Role
from tests.pipeline.serving.hostile import Hostile
from tests.pipeline.serving.raw_messages import honest_request, message, packed
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.real_sockets import dialled

from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

_workers = count(1)
REMOTE = ModelSignature(
    name="remote",
    inputs=(
        InputPort("x", "f32", NamedShape.parse("batch:1..8, n:1..1000")),
        InputPort("scale", "f32", NamedShape.parse("batch:1..8")),
    ),
    outputs=(OutputPort("y", "f32", NamedShape.parse("batch, n"), Rows()),),
)
ANSWER = bytes(range(24))
OUTPUT = [packed([[0, "f32", [2, 3]]]), [ANSWER]]


def worker_name() -> str:
    """One that no other worker of these tests has."""
    return f"worker-{next(_workers)}"


def remote_report(
    order: Execute, *, batch: Any = None, session: Any = None, run_us: Any = 5, busy_us: Any = 6, reallocations: Any = 0,
    preparations: Any = 0, calls: Any = (), outputs: Any = (OUTPUT,), gather_us: Any = 1, frames: int = 0,
) -> list[Any]:  # fmt: skip
    """A good report, any field replaced."""
    number = order.batch if batch is None else batch
    session = order.session if session is None else session
    return [
        41,
        frames,
        number,
        session,
        run_us,
        busy_us,
        reallocations,
        preparations,
        calls,
        outputs,
        gather_us,
    ]


def output(*rows: tuple[Any, ...], inline: tuple[Any, ...] = (ANSWER,)) -> tuple[Any, ...]:
    """The outputs of the batch's one request."""
    return ([packed(rows), inline],)


async def gone(honest: RawPeer, name: str) -> None:
    """Returns when the server has no such worker any more."""
    while f"{name}/0" in (await honest.statistics())["slots"]:
        pass


@asynccontextmanager
async def remote_worker(server: Hostile, honest: RawPeer) -> AsyncIterator[RawPeer]:
    """A worker with the model `remote`, which leaves behind nothing that the next test could meet."""
    async with dialled(server.workers, Role.WORKER) as joined:
        name = worker_name()
        await joined.join_as_worker(name, signature=REMOTE)
        yield joined
        joined.say(Goodbye())
        await gone(honest, name)


async def ask_remote(honest: RawPeer, sequence: int) -> None:
    """The honest client's request for what workers run."""
    honest.say(OpenModel(name="remote"))
    honest.say(honest_request(sequence, (await honest.hear(ModelOpened)).number))


async def answer_remote(good: RawPeer, honest: RawPeer, sequence: int) -> None:
    """A good worker runs it."""
    order = await good.hear(Execute)
    good.slots[0].send_nowait(message(remote_report(order)))
    result = await honest.hear(ResultEntry)
    assert (sequence, ANSWER) == (result.sequence, bytes(result.tensors.buffers[0]))

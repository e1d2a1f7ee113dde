"""A server records what it serves: with a real server, real sockets' twin and a client that speaks the protocol."""

from __future__ import annotations

import math
from pathlib import Path

import trio
from tests.entries import ResultEntry
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import MockClock

from shapestream.telemetry.trace import TraceReader, TraceRequest


def test_a_server_records_sizes_and_times_and_no_data(tmp_path: Path) -> None:
    """Own sizes, relative deadlines, client numbers; whole when the server has ended."""
    path = tmp_path / "t.jsonl"

    async def main() -> None:
        slots = ScriptedSlots()
        async with memory_serving(slots, record_trace=str(path)) as running:
            client = running.client()
            await client.open_session()
            client.say(request(41, echo_tensors(rows=2, n=5, value=1234.5)))
            slots.finish(await slots.next_batch())
            await client.hear(ResultEntry)
            await trio.sleep(1.0)
            client.say(request(42, remaining_ms=500, priority=3))
            slots.finish(await slots.next_batch())
            await client.hear(ResultEntry)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    reader = TraceReader(path)
    first, second = reader
    assert {"echo": ("batch", "n")} == reader.models
    assert TraceRequest(0.0, 0, 0, (2, 5)) == first
    assert ((1, 4), 0.5, 3) == (second.sizes, second.deadline_s, second.priority)
    assert math.isclose(1.0, second.at_s, abs_tol=0.1)
    assert "1234" not in path.read_text()

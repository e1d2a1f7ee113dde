"""When a server hands freed memory back to the kernel, which stops its event loop for up to 30 ms."""

from __future__ import annotations

import pytest
import trio
from tests.entries import ResultEntry
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.harness import scripted_client


@virtual_time
async def test_freed_memory_goes_back_after_a_beat_without_requests_and_not_before() -> None:
    """One request per second, each answered at once, is work; the first second without one is none."""
    given_back: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shapestream.serving.server.give_back_freed_memory",
            lambda above_bytes: given_back.append(trio.current_time()),
        )
        async with scripted_client(heartbeat_s=1.0) as (client, slots):
            for number in range(5):
                client.say(request(number))
                slots.finish(await slots.next_batch())
                await client.hear(ResultEntry)
                await trio.sleep(1.0)
            last = trio.current_time()
            assert [] == given_back
            await trio.sleep(1.5)
            assert 1 == sum(time > last for time in given_back)

"""What one client of a server can take from another: two clients, and slots that are scripted."""

from __future__ import annotations

from tests.entries import Failure
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots

BAD = echo_tensors(value=13.0)


@virtual_time
async def test_a_failing_request_disturbs_one_batch_of_another_client() -> None:
    """Each time the other client's requests leave its company with the first call that runs again."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        good, bad = await running.greeted(b"g" * 16), await running.greeted(b"b" * 16)
        disturbed = []
        for turn in range(3):
            good.say(request(10 * turn))
            busy = await slots.next_batch()
            good.say(*[request(10 * turn + n) for n in range(1, 5)])
            bad.say(request(turn, BAD))
            await good.statistics()
            await bad.statistics()
            slots.finish(busy)
            answered = failed = 0
            while answered < 4 or not failed:
                batch = await slots.next_batch()
                values = [member.buffers[0] for member in batch.members]
                if BAD.buffers[0] in values:
                    if len(values) > 1:
                        disturbed.append(turn)
                    failed += len(values) == 1
                    slots.fail(batch, message="thirteen")
                else:
                    answered += len(values)
                    slots.finish(batch)
            assert (turn, "model_error") == ending(await bad.hear(Failure))
            await good.sequences(5)
        assert [0, 1, 2] == disturbed

"""The last minute and the scheduler's numbers, as a client gets them."""

from __future__ import annotations

import dataclasses
from typing import Any

import trio
from tests.entries import Failure, ResultEntry, StatisticsRequest
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots


async def answer(client: RawPeer, slots: ScriptedSlots, *sequences: int) -> None:
    """Requests that arrive together, and their results."""
    client.say(*[request(sequence) for sequence in sequences])
    slots.finish(await slots.next_batch())
    await client.hear_each(ResultEntry, len(sequences))


def numbers_in(plain: Any) -> bool:
    """Whether plain data hold nothing but numbers."""
    if isinstance(plain, dict):
        return all(map(numbers_in, plain.values()))
    return isinstance(plain, int | float)


@virtual_time
async def test_the_last_minute_is_told_and_forgotten() -> None:
    """Its seconds say the truth: less than a minute at first, then up to a snapshot and a heartbeat more."""
    slots = ScriptedSlots()
    async with memory_serving(slots, client_silence_s=1000.0) as running:
        client = await running.greeted()
        client.say(dataclasses.replace(request(9), model=99))
        await client.hear(Failure)
        first = (await client.statistics())["last_minute"]
        assert (0, 0, {"invalid": 1}) == (
            first["models"]["echo"]["arrived"],
            first["models"]["echo"]["total_us"]["count"],
            first["refused"],
        )
        await trio.sleep(20)
        await answer(client, slots, 1, 2)
        await trio.sleep(10)
        told = await client.statistics()
        minute, echo = told["last_minute"], told["last_minute"]["models"]["echo"]
        assert told["uptime_s"] == minute["seconds"] >= 30
        assert (2, 2, {}, 1, 2, 1) == tuple(
            echo[name] for name in ("arrived", "results", "failures", "batches", "rows", "calls")
        )
        assert (1, 2, ((2, 1),)) == tuple(
            echo["batch_requests"][name] for name in ("count", "p50", "buckets")
        )
        assert (0, 1) == tuple(told["scheduler"]["models"]["echo"][name] for name in ("queued", "slots"))
        assert numbers_in(told["scheduler"])
        await trio.sleep(45)
        minute = (await client.statistics())["last_minute"]
        assert (2, {}) == (minute["models"]["echo"]["arrived"], minute["refused"])
        assert 60 <= minute["seconds"] <= 67
        await trio.sleep(20)
        assert 0 == (await client.statistics())["last_minute"]["models"]["echo"]["arrived"]


@virtual_time
async def test_the_statistics_of_very_many_models_fit_a_message() -> None:
    """As many as a server may have, and slots with long names; how many models are left out is told."""
    async with memory_serving() as running:
        names = [f"{number}-{'x' * 60}" for number in range(1023)]  # and `echo`
        for part in range(0, len(names), 256):
            own = names[part : part + 256]
            models = {name: dataclasses.replace(SIGNATURE, name=name).to_dict() for name in own}
            await running.joined(f"w{part}", models=models, digests=dict.fromkeys(own, "0" * 64))
        for worker in range(4):
            await running.joined(f"{worker}{'w' * 190}", slots=256)
        client = await running.greeted(model=names[0])
        client.say(request(1), StatisticsRequest())
        told = await client.statistics()
        told_of = told["last_minute"]["models"].keys()
        assert 256 < len(told_of) == 1024 - told["last_minute"]["models_left_out"] < 1024
        assert told_of == told["scheduler"]["models"].keys()
        assert names[0] == next(iter(told_of)), "the busiest stays"

"""Two producers, each with a connection of its own, that stream their share of the pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trio

import shapestream
from examples.detector.answers import Answer
from examples.detector.pictures import Picture, Pixels

PRODUCERS = 2
MAX_IN_FLIGHT = 48


async def stream_pictures(
    address: str, pictures: Sequence[Picture], on_answer: Callable[[int], None]
) -> tuple[list[Answer], dict[str, Any]]:
    """All answers, in the order in which they came, and the server's counters.

    `on_answer` is called with the producer's number whenever one of its pictures was answered.
    """
    answers: list[Answer] = []
    async with trio.open_nursery() as nursery:
        for number in range(PRODUCERS):
            share = pictures[number::PRODUCERS]
            nursery.start_soon(_produce, address, number, share, answers, on_answer)
    async with shapestream.connect(address) as client:
        return answers, await client.statistics()


async def _produce(
    address: str,
    number: int,
    pictures: Sequence[Picture],
    answers: list[Answer],
    on_answer: Callable[[int], None],
) -> None:
    def requests() -> Iterator[tuple[Picture, dict[str, Pixels]]]:
        for picture in pictures:
            yield picture, {"image": picture.image}

    async with shapestream.connect(address) as client:
        async with client.stream(
            "detector", requests(), max_in_flight=MAX_IN_FLIGHT, ordered=False
        ) as results:
            async for result in results:
                assert isinstance(result, shapestream.Result)  # a failed one was raised
                # Copied, since a result's arrays keep the message alive in which it came.
                peaks, scores = result["peaks"].copy(), result["scores"].copy()
                answers.append(Answer(picture=result.key, peaks=peaks, scores=scores, timings=result.timings))
                on_answer(number)

"""A server inside this program: one spelling under trio, under asyncio, and without an event loop.

    python -m examples.embedded.run [--quick]

Streams crops of photographs to a model that runs in this process, three times. Each answer is compared with OpenVINO's for
that crop alone. The exit status says whether all was right.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import trio

import shapestream.local
from examples.embedded.crops import CONFIG, Crop, Edges, alone, make_crops, wrong


async def stream(crops: list[Crop]) -> list[Edges]:
    """The answers, under whichever event loop runs this."""
    async with shapestream.local.connect(CONFIG) as client:
        items = ({"crop": crop[None]} for crop in crops)
        async with client.stream("recogniser", items) as results:
            return [result["edges"][0] async for result in results]


def stream_blocking(crops: list[Crop]) -> list[Edges]:
    """The answers, without an event loop."""
    with shapestream.local.connect(CONFIG) as client:
        items = ({"crop": crop[None]} for crop in crops)
        with client.stream("recogniser", items) as results:
            return [result["edges"][0] for result in results]


def main() -> int:
    """Runs the example; 0 if every answer was right."""
    crops = make_crops(per_size=2 if "--quick" in sys.argv[1:] else 20)
    expected = alone(crops)
    ways: dict[str, Callable[[], list[Edges]]] = {
        "trio": lambda: trio.run(stream, crops),
        "asyncio": lambda: asyncio.run(stream(crops)),
        "blocking": lambda: stream_blocking(crops),
    }
    mistakes = 0
    for name, run in ways.items():
        began = time.perf_counter()
        differ = wrong(run(), expected)
        took_s = time.perf_counter() - began
        print(f"{name:<9} {len(crops)} crops in {took_s:.2f} s with the start of the server, {differ} wrong")
        mistakes += differ
    print("FAILED" if mistakes else "OK: every answer is the one of the crop alone")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())

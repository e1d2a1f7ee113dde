"""Two servers of one model, one after the other drained and killed under a stream: every answer comes, and is right."""

from __future__ import annotations

import signal
from itertools import count
from typing import Any

import numpy as np
import pytest
import trio
from tests.e2e.conftest import PATIENCE_S

import shapestream
from shapestream import blocking

pytestmark = pytest.mark.e2e

SORT = """\
    server: {listen: [ipc://ADDRESS.sock]}
    models:
      - name: sort
        function: numpy:sort
        inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
        outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
    in_process: true
"""


def serve(workplace: Any, name: str) -> Any:
    """A server of this name."""
    return workplace.serve(workplace.write(SORT.replace("ADDRESS", name), f"{name}.yaml"))


def addresses(workplace: Any) -> list[str]:
    """Of both, whether they are there or not."""
    return [f"ipc://{workplace.folder}/{name}.sock" for name in ("one", "two")]


def test_a_client_goes_on_with_the_next_server(workplace: Any) -> None:
    """The first drains, the second is killed while the first is back: 4,000 requests are answered, and none is forgotten."""
    first, second = serve(workplace, "one"), serve(workplace, "two")
    rng = np.random.default_rng(3)

    async def main() -> tuple[int, int]:
        nonlocal first
        wrong = slow = 0
        inputs = ((number, {"a": rng.random((1, number % 60), np.float32)}) for number in count())
        asked: dict[int, Any] = {}

        def remembered() -> Any:
            for number, each in inputs:
                if number == 4000:
                    return
                asked[number] = each["a"]
                yield number, each

        async with shapestream.connect(addresses(workplace)) as client:
            answered = 0
            begun = trio.current_time()
            async with client.stream("sort", remembered(), max_in_flight=16) as results:
                async for result in results:
                    answered += 1
                    wrong += not np.array_equal(np.sort(asked.pop(result.key)), result["sorted"])
                    slow += trio.current_time() - begun > PATIENCE_S
                    begun = trio.current_time()
                    if answered == 1000:
                        first.send(signal.SIGTERM)
                    if answered == 2000:
                        assert 0 == await trio.to_thread.run_sync(first.wait)
                        first = await trio.to_thread.run_sync(serve, workplace, "one")
                    if answered == 3000:
                        second.kill()
            assert 4000 == answered
        return wrong, slow

    assert (0, 0) == trio.run(main)


def test_the_blocking_face_takes_several_addresses(workplace: Any) -> None:
    """The first has no server yet."""
    serve(workplace, "two")
    with blocking.connect(addresses(workplace)) as client:
        assert [[1.0, 2.0]] == client.infer("sort", {"a": [[2, 1]]})["sorted"].tolist()

"""The three faces against the real server, with the engine's function backend, over ZeroMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pipeline.client.real_server import real_server

from shapestream.errors import InvalidRequest, ModelError

ITEMS = [np.full((1 + index % 3, 1 + index % 5), index, np.float32) for index in range(300)]


@pytest.fixture
def real(sourced: Any, tmp_path: Path) -> Iterator[Any]:
    """A face, and the real server at its address."""
    sourced.address = f"ipc://{tmp_path}/real/s"
    with real_server(sourced.address):
        yield sourced


async def test_every_item_of_a_stream_gets_its_own_answer(real: Any) -> None:
    """Fifteen shapes in shuffled order share batches; each result belongs to its item, and has its shape."""
    async with real.connect() as client:
        source = real.as_source([{"x": item} for item in ITEMS])
        async with client.stream("double", source) as results:
            async for result in results:
                np.testing.assert_array_equal(ITEMS[result.key] * 2, result["y"])
        assert len(ITEMS) == (await client.statistics())["results"]


async def test_errors_of_the_server_and_the_model_reach_their_caller_alone(real: Any) -> None:
    """An unknown model, and an input that the model cannot bear among others that it can."""
    async with real.connect() as client:
        with pytest.raises(InvalidRequest, match="double"):
            await client.infer("dubble", {"x": [[1.0]]})
        source = real.as_source([{"x": [[value]]} for value in (1.0, 2.0, -3.0, 4.0)])
        async with client.stream("double", source, on_error="yield") as results:
            items = [item async for item in results]
        assert [True, True, False, True] == [item.ok for item in items]
        assert isinstance(items[2].error, ModelError)
        assert "overwhelm" in str(items[2].error)


async def test_a_server_that_is_replaced_in_the_middle_of_a_stream_is_not_noticed(
    sourced: Any, tmp_path: Path
) -> None:
    """The server ends without a word to its clients; another one starts at the same address."""
    sourced.address = f"ipc://{tmp_path}/real/s"
    first, second = real_server(sourced.address), real_server(sourced.address)
    first.__enter__()
    async with sourced.connect() as client:
        source = sourced.as_source([{"x": item} for item in ITEMS])
        async with client.stream("double", source, max_in_flight=8) as results:
            for position in range(len(ITEMS)):
                if position == 100:
                    await sourced.in_thread(first.__exit__, None, None, None)
                    await sourced.in_thread(second.__enter__)
                result = await anext(results)
                assert position == result.key
                np.testing.assert_array_equal(ITEMS[position] * 2, result["y"])
    second.__exit__(None, None, None)


async def test_a_server_that_is_replaced_by_one_with_another_signature_answers_what_was_in_flight(
    sourced: Any, tmp_path: Path
) -> None:
    """256 items are under way, sent or waiting; the next server takes doubles, and answers the rest with them."""
    sourced.address = f"ipc://{tmp_path}/real/s"
    first, second = real_server(sourced.address), real_server(sourced.address, element_type="f64")
    first.__enter__()
    async with sourced.connect() as client:
        source = sourced.as_source([{"x": item} for item in 2 * ITEMS])
        types = set()
        async with client.stream("double", source, max_in_flight=256) as results:
            for position in range(2 * len(ITEMS)):
                if position == 100:
                    await sourced.in_thread(first.__exit__, None, None, None)
                    await sourced.in_thread(second.__enter__)
                result = await anext(results)
                assert position == result.key
                np.testing.assert_array_equal(ITEMS[position % len(ITEMS)] * 2, result["y"])
                types.add(str(result["y"].dtype))
        assert {"float32", "float64"} == types
    second.__exit__(None, None, None)

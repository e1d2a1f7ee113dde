"""The id of a request, by which its server tells its story: on results, errors and stream items of each face."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from shapestream.errors import Cancelled, InvalidRequest, ModelError

ROW = {"x": np.ones((1, 3), np.float32)}
FAILS = {"x": -ROW["x"]}
"""The model takes no negative number."""


async def test_results_and_errors_have_the_id_of_their_request(face: Any) -> None:
    """The client's id and the request's number; the caller's own id where it gave one."""
    async with face.connect() as client:
        first = await client.infer("double", ROW)
        match = re.fullmatch("([0-9a-f]{32})-1", first.request_id)
        assert match
        with pytest.raises(ModelError) as failed:
            await client.infer("double", FAILS)
        assert f"{match[1]}-2" == failed.value.request_id
        assert "mine" == (await client.infer("double", ROW, request_id="mine")).request_id
        with pytest.raises(ModelError) as failed:
            await client.infer("double", FAILS, request_id="mine too")
        assert "mine too" == failed.value.request_id
        async with client.stream("double", [ROW, FAILS], on_error="yield") as results:
            items = [item async for item in results]
        ids = [items[0].request_id, items[1].error.request_id]
        assert [f"{match[1]}-5", f"{match[1]}-6"] == ids


async def test_a_request_that_never_had_a_number_has_no_id(face: Any) -> None:
    """It was refused before it was sent, so the server knows nothing of it."""
    async with face.connect() as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.infer("double", {"z": np.ones((1, 3), np.float32)})
        assert refused.value.request_id is None


async def test_a_request_that_is_unanswered_at_the_clients_end_keeps_its_id(face: Any) -> None:
    """So that its caller can ask about it later."""
    face.server.hold()
    async with face.connect() as client:
        await client.signature("double")
        with pytest.raises(Exception) as late:  # noqa: PT011 - the deadline's error, or that of the end
            await client.infer("double", ROW, deadline=0.05)
        assert re.fullmatch("[0-9a-f]{32}-1", late.value.request_id)  # type: ignore[attr-defined]
        assert not isinstance(late.value, Cancelled)


async def test_stories_are_asked_for_by_id_or_as_the_slowest(face: Any) -> None:
    """An unknown id is the caller's mistake; wrong arguments are found here."""
    async with face.connect() as client:
        with pytest.raises(InvalidRequest, match="keeps no stories"):
            await client.stories("a" * 32 + "-1")
        for wrong in ("", "x" * 513):
            with pytest.raises(ValueError, match="characters"):
                await client.stories(wrong)
        with pytest.raises(TypeError):
            await client.stories(7)
        for number in (0, True, 1.5):
            with pytest.raises(ValueError, match="above 0"):
                await client.stories(slowest=number)

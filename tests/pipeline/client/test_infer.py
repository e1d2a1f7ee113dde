"""One request at a time, through each of the three faces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shapestream
from shapestream.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    RequestError,
    Unavailable,
)


def rows(value: float, count: int = 1, width: int = 3) -> dict[str, Any]:
    """Inputs for the model `double`."""
    return {"x": np.full((count, width), value, np.float32)}


async def test_gives_named_arrays_that_cannot_be_written_to(face: Any) -> None:
    """A result maps the outputs' names to read-only arrays, and says where the time went."""
    async with face.connect() as client:
        result = await client.infer("double", rows(3.0, 2))
        assert ["y"] == list(result)
        np.testing.assert_array_equal(np.full((2, 3), 6, np.float32), result["y"])
        assert not result["y"].flags.writeable
        assert 1 == result.timings.batch_requests
        with pytest.raises(AttributeError):
            result.timings.batch_requests = 2  # a user's mistake
        assert 1 == result.sequence
        assert result.ok


async def test_what_goes_in_comes_out(face: Any) -> None:
    """Arrays of every kind, and plain numbers, arrive as they are."""
    async with face.connect() as client:
        for model, value in (
            ("any", np.arange(300_000).reshape(3, -1)),
            ("any", np.arange(12).reshape(3, 4)[:, ::2]),
            ("any", np.empty((0, 7), np.int64)),
            ("any", [[1, 2], [3, 4]]),
            ("any", np.arange(6, dtype=">i8").reshape(2, 3)),
            ("scalar", 2.5),
        ):
            result = await client.infer(model, {"x": value})
            np.testing.assert_array_equal(np.asarray(value), result["y"])


async def test_what_the_signature_forbids_is_refused_before_it_is_sent(face: Any) -> None:
    """Wrong names, types, ranks and sizes raise `InvalidRequest`; the server never sees them."""
    one = np.ones((1, 3), np.float32)
    async with face.connect() as client:
        for inputs, message in (
            ({"z": one}, "'z'"),
            ({}, "'x'"),
            ({"x": one, "z": 1}, "'z'"),
            ({"x": np.ones((1, 3))}, "f32"),
            ({"x": np.ones(3, np.float32)}, "'x'"),
            ({"x": np.ones((65, 3), np.float32)}, "batch"),
            ({"x": None}, "None"),
            ([1, 2], "mapping"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await client.infer("double", inputs)
        await client.infer("double", rows(1))
    assert 1 == len(face.server.requests)


async def test_an_unknown_model_is_refused_with_the_known_ones(face: Any) -> None:
    """The server's words reach the caller, from `infer` and from entering a stream."""
    async with face.connect() as client:
        with pytest.raises(InvalidRequest, match="known: identity, double"):
            await client.infer("dubble", rows(1))
        with pytest.raises(InvalidRequest, match="known: identity, double"):
            async with client.stream("dubble", []):
                pytest.fail("the stream was entered")


async def test_the_models_own_error_is_raised_with_its_words(face: Any) -> None:
    """A request that the model cannot bear fails alone."""
    async with face.connect() as client:
        with pytest.raises(ModelError, match="overwhelm"):
            await client.infer("double", rows(-1))
        await client.infer("double", rows(1))


async def test_a_deadline_passes_although_the_server_does_not_answer(face: Any) -> None:
    """The caller is let go at its deadline, and the client goes on working."""
    async with face.connect() as client:
        await client.signature("double")
        face.server.hold()
        with pytest.raises(DeadlineExceeded):
            await client.infer("double", rows(1), deadline=0.02)
        face.server.release()
        await client.infer("double", rows(1), deadline=30)


async def test_signature_and_statistics(face: Any) -> None:
    """What a model takes, and what the server counts, can be asked for."""
    async with face.connect() as client:
        signature = await client.signature("double")
        assert ["x"] == [port.name for port in signature.inputs]
        assert {"requests": 0} == await client.statistics()


async def test_an_exception_in_the_block_comes_out_as_it_is(face: Any) -> None:
    """No exception group around it, and the server hears goodbye."""
    error = LookupError("mine")
    with pytest.raises(LookupError, match="mine") as caught:
        async with face.connect():
            raise error
    assert error is caught.value
    await face.until(lambda server: server.goodbyes == 1)


async def test_a_closed_client_refuses(face: Any) -> None:
    """After the block every call raises `Cancelled` at once."""
    async with face.connect() as client:
        await client.signature("double")
    with pytest.raises(Cancelled, match="closed"):
        await client.infer("double", rows(1))
    with pytest.raises(Cancelled, match="closed"):
        await client.statistics()


async def test_connecting_to_nobody_raises_unavailable(face: Any, tmp_path: Any) -> None:
    """After `connect_timeout` seconds the caller learns that no server answers, and where."""
    face.address = f"ipc://{tmp_path}/nobody"
    with pytest.raises(Unavailable, match=r"no server answered at ipc://.*/nobody"):
        async with face.connect(connect_timeout=0.02):
            pytest.fail("connected to nobody")


def test_the_package_says_what_is_public() -> None:
    """The names that callers may rely on."""
    errors = {error.__name__ for error in RequestError.__subclasses__()}
    errors |= {"ConfigurationError", "ProtocolError", "RequestError", "ShapestreamError", "TransportError"}
    values = {
        "Client",
        "Failed",
        "ListedModel",
        "Result",
        "Stream",
        "Timings",
        "__version__",
        "aio",
        "blocking",
        "connect",
    }
    assert errors | values == set(shapestream.__all__)

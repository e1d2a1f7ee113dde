"""The whole way with the real engine: real sockets, real threads, the real OpenVINO; shapes that vary."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import trio
from tests.entries import Failure, RequestEntry, ResultEntry, request_of
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.real_sockets import dialled, socket_serving

from shapestream.serving.slot_threads import SlotThreads
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, compile_model

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def centred() -> ov.Model:
    """Each row less its mean: an answer that depends on the whole row, and would show any mix-up or padding."""
    x = ops.parameter([-1, -1], ov.Type.f32, name="x")
    mean = ops.reduce_mean(x, ops.constant(np.array([1], np.int64)), keep_dims=True)
    result = ops.subtract(x, mean)
    result.output(0).set_names({"y"})
    x.output(0).set_names({"x"})
    return ov.Model([result], [x], "centred")


@real_time
async def test_rows_of_random_shapes_come_back_to_their_senders(address: str) -> None:
    """Two clients, two slots, many lengths in one stream; each answer is that of its own rows, and no input grows."""
    spec = ModelSpec(name="centred", model=centred(), inputs={"x": InputSpec(shape="batch:1..16, n:1..64")})
    local = SlotThreads(models={"centred": compile_model(spec, slots=2, threads=1)}, slots=2)
    arrays = random_rows(200)
    async with socket_serving(address, local) as server:
        async with trio.open_nursery() as clients:
            clients.start_soon(stream, address, b"1" * 16, arrays)
            clients.start_soon(stream, address, b"2" * 16, arrays)
        statistics = server.statistics()
        assert 400 == statistics["results"]
        assert statistics["batches"] < 400
        assert 0 == statistics["reallocations"]
        assert {} == statistics["failures"]


def random_rows(times: int) -> list[Array]:
    """A few rows each, of few lengths."""
    generator = np.random.default_rng(7)
    rows = generator.integers(1, 4, times).tolist()
    lengths = generator.choice([1, 7, 33, 64], times).tolist()
    return [generator.standard_normal(shape, np.float32) for shape in zip(rows, lengths, strict=True)]


async def stream(address: str, client: bytes, arrays: list[Array]) -> None:
    """Sends all of them at once, and checks what comes back for each."""
    async with dialled(address) as peer:
        await peer.open_session(client, "centred")
        peer.say(*[_request(number, array) for number, array in enumerate(arrays)])
        for _ in arrays:
            result = await peer.hear(ResultEntry)
            assert not peer.has_heard(Failure)
            array = arrays[result.sequence]
            got = np.frombuffer(result.tensors.buffers[0], np.float32)
            expected = array - array.mean(axis=1, keepdims=True)
            np.testing.assert_allclose(got.reshape(array.shape), expected, atol=1e-5)


def _request(sequence: int, array: Array) -> RequestEntry:
    shape = tuple(int(size) for size in array.shape)
    tensors = Tensors(layout=((0, "f32", shape),), buffers=(array.tobytes(),))
    return request_of(sequence, tensors)

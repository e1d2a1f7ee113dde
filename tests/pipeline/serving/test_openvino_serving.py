"""The whole way with the real engine: real sockets, real threads, the real OpenVINO; shapes that vary."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import trio
from tests.pipeline.serving.harness import RawPeer

from shapestream.serving.local_executor import LocalSlots
from shapestream.serving.options import ServerOptions
from shapestream.serving.server import Server, serve
from shapestream.transport.zeromq import DealerSocket
from shapestream.wire.messages import Failure, Request, Result
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, compile_model


def centred() -> ov.Model:
    """Each row less its mean: an answer that depends on the whole row, and would show any mix-up or padding."""
    x = ops.parameter([-1, -1], ov.Type.f32, name="x")
    mean = ops.reduce_mean(x, ops.constant(np.array([1], np.int64)), keep_dims=True)
    result = ops.subtract(x, mean)
    result.output(0).set_names({"y"})
    x.output(0).set_names({"x"})
    return ov.Model([result], [x], "centred")


def test_rows_of_random_shapes_come_back_to_their_senders() -> None:
    """Two clients, two slots, many lengths in one stream; each answer is that of its own rows, and no input grows."""
    spec = ModelSpec(name="centred", model=centred(), inputs={"x": InputSpec(shape="batch:1..16, n:1..64")})
    model = compile_model(spec, slots=2, threads=1)
    generator = np.random.default_rng(7)
    arrays = [
        generator.standard_normal((rows, length), np.float32)
        for rows, length in zip(
            generator.integers(1, 4, 200).tolist(),
            generator.choice([1, 7, 33, 64], 200).tolist(),
            strict=True,
        )
    ]

    async def stream(address: str, client: bytes) -> None:
        async with trio.open_nursery() as nursery, DealerSocket() as socket:
            socket.connect(address)
            await nursery.start(socket.run)
            peer = RawPeer(socket)
            await peer.open_session(client, "centred")
            peer.say(*[_request(number, array) for number, array in enumerate(arrays)])
            for _ in arrays:
                result = await peer.hear(Result)
                assert [] == [entry for entry in peer.heard if isinstance(entry, Failure)]
                array = arrays[result.sequence]
                got = np.frombuffer(result.tensors.buffers[0], np.float32)
                expected = array - array.mean(axis=1, keepdims=True)
                np.testing.assert_allclose(got.reshape(array.shape), expected, atol=1e-5)
            nursery.cancel_scope.cancel()

    async def main(address: str) -> None:
        async def start(*, task_status: trio.TaskStatus[Server]) -> None:
            options = ServerOptions(listen=(address,))
            local = LocalSlots(models={"centred": model}, slots=2)
            await serve(options, local=local, task_status=task_status)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                server = await nursery.start(start)
                async with trio.open_nursery() as clients:
                    clients.start_soon(stream, address, b"1" * 16)
                    clients.start_soon(stream, address, b"2" * 16)
                statistics = server.statistics()
                assert 400 == statistics["results"]
                assert statistics["batches"] < 400
                assert 0 == statistics["reallocations"]
                assert {} == statistics["failures"]
                server.drain()

    with tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp") as folder:
        trio.run(main, f"ipc://{Path(folder) / 'run' / 's'}")


def _request(sequence: int, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Request:
    shape = tuple(int(size) for size in array.shape)
    tensors = Tensors(layout=((0, "f32", shape),), buffers=(array.tobytes(),))
    return Request(sequence=sequence, model=0, remaining_ms=None, priority=0, tensors=tensors)

"""Calls of a gateway over gRPC by grpcio's own channels, with messages that are the test's own bytes."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from shapestream.gateway import open_inference_pb2 as protocol

SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 120.0
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def request(data: Any = ((1, 2),), *, model: str = "gated", **more: Any) -> protocol.ModelInferRequest:
    """A request with the input `x` of 32-bit floats, raw."""
    array = np.array(data, np.float32)
    entry = protocol.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=array.shape)
    return protocol.ModelInferRequest(
        model_name=model, inputs=[entry], raw_input_contents=[array.tobytes()], **more
    )


def output_of(answer: protocol.ModelInferResponse) -> list[float]:
    """The numbers of the only output."""
    (output,), (raw,) = answer.outputs, answer.raw_output_contents
    assert "FP32" == output.datatype
    return [float(number) for number in np.frombuffer(raw, np.float32).reshape(*output.shape).ravel()]


class Caller:
    """A channel to a gateway."""

    def __init__(
        self, place: str, *, token: str = "", roots: bytes | None = None, options: Sequence[Any] = ()
    ) -> None:
        options = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1), *options)
        self.channel = (
            grpc.insecure_channel(place, options)
            if roots is None
            else grpc.secure_channel(place, grpc.ssl_channel_credentials(roots), options)
        )
        self.metadata = [("authorization", f"Bearer {token}")] if token else []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()

    def call(self, name: str, message: Any = b"", **options: Any) -> bytes:
        """The bytes of an answer."""
        options = {"timeout": TIMEOUT_S, "wait_for_ready": True, "metadata": self.metadata, **options}
        return bytes(self.channel.unary_unary(SERVICE + name)(_bytes(message), **options))

    def begin(self, message: Any, **options: Any) -> Any:
        """The future of an inference."""
        options = {"timeout": TIMEOUT_S, "wait_for_ready": True, "metadata": self.metadata, **options}
        return self.channel.unary_unary(SERVICE + "ModelInfer").future(_bytes(message), **options)

    def infer(self, message: Any = None, **options: Any) -> list[float]:
        """The numbers of an answer."""
        found = self.call("ModelInfer", request() if message is None else message, **options)
        return output_of(protocol.ModelInferResponse.FromString(found))

    def refusal(self, message: Any, name: str = "ModelInfer", **options: Any) -> tuple[str, str]:
        """The status and the words by which a message is refused."""
        try:
            self.call(name, message, **options)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""

    def stream(self, messages: Iterator[Any], **options: Any) -> Any:
        """The answers to several messages in one call."""
        options = {"timeout": TIMEOUT_S, "wait_for_ready": True, "metadata": self.metadata, **options}
        return self.channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=_bytes,
            response_deserializer=protocol.ModelStreamInferResponse.FromString,
        )(messages, **options)


class Written:
    """Messages of a stream that a test writes one by one; None ends them."""

    def __init__(self, *messages: Any) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in messages:
            self.put(message)

    def put(self, message: Any) -> None:
        """Write one."""
        self._messages.put(message)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._messages.get, None)


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())

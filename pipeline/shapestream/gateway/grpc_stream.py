"""`ModelStreamInfer`: requests of one call, answered in their order. Each such call is one stream of the client.

    gRPC's reader ── messages ──▶ _items ── OwnItem ──▶ the stream ── results in order ──▶ answers ──▶ gRPC's writer
                                  (the stream's producer, a thread of its own)            (the thread of the call)

A request that fails is answered by a message with the error, in its place, and the stream goes on. At most `MAX_IN_FLIGHT`
requests are read and not answered yet: then the gateway reads no further, and the sender waits.

A call that ends (its caller cancels it, its deadline passes, its connection breaks) closes the stream. That withdraws what
is unfinished, here and at the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from shapestream.client.blocking_client import Stream
from shapestream.client.results import Failed, Result
from shapestream.client.streaming import OwnItem, StreamOptions
from shapestream.errors import RequestError, Unavailable
from shapestream.gateway.grpc_call import deadline_of, metadata_of
from shapestream.gateway.grpc_request import read_inputs, read_outputs
from shapestream.gateway.grpc_response import stream_error, stream_response
from shapestream.gateway.infer_options import OWN_ID, own_id

if TYPE_CHECKING:
    from shapestream.gateway.grpc_service import InferenceService

MAX_IN_FLIGHT = 64
"""Requests of one stream that are under way, as by default in the SDK."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Facts of a request that its answer needs."""

    began: float
    id: str = ""
    model_name: str = ""
    outputs: Any = ()


class OpenStreams:
    """The streams of one gateway."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._open: set[_OpenStream] = set()
        self._changing = threading.Lock()
        self._ending = False

    def answers(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the answers to the messages of one call. Raises `Unavailable` where the gateway ends before them."""
        stream = _OpenStream(self._service, messages, context)
        with self._changing:
            self._open.add(stream)
            if self._ending:
                stream.end()
        try:
            yield from stream.answers()
        finally:
            with self._changing:
                self._open.discard(stream)

    def end(self) -> None:
        """End each stream as soon as all that was read of it is answered; new ones at once."""
        with self._changing:
            self._ending = True
            for stream in self._open:
                stream.end()


class _OpenStream:
    """One call of `ModelStreamInfer`."""

    def __init__(
        self, service: InferenceService, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self._service = service
        self._messages = messages
        self._context = context
        self._metadata = metadata_of(context)
        self._read = 0
        self._answered = 0
        self._ending = False
        options = StreamOptions(
            max_in_flight=MAX_IN_FLIGHT,
            ordered=True,
            on_error="yield",
            deadline=None,
            priority=0,
            caller=service.caller_of(context, self._metadata),
        )
        self._stream: Stream[Result | Failed] = Stream(service.client, None, self._items(), options)

    def answers(self) -> Iterator[bytes]:
        with self._stream:
            if not self._context.add_callback(self._stream.close):
                return
            self._close_if_ended()
            for item in self._stream:
                yield self._answer(item)
                self._answered += 1
                self._close_if_ended()
        if self._ending and self._context.is_active():
            raise Unavailable("the gateway ends, and takes nothing new")

    def end(self) -> None:
        """Close the stream as soon as all that was read is answered."""
        self._ending = True
        self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._ending and self._answered >= self._read:
            self._stream.close()

    # ------------------------------------------------------------ the producer's thread

    def _items(self) -> Iterator[OwnItem]:
        while (message := self._next()) is not None:
            self._read += 1
            asked = _Asked(time.monotonic())
            try:
                yield self._item(message, asked)
            except RequestError as error:
                yield OwnItem(key=asked, error=error)

    def _next(self) -> bytes | None:
        """Return the next message, or None at the end of the call."""
        try:
            return next(self._messages, None)
        except grpc.RpcError:  # cancelled
            return None

    def _item(self, message: bytes, asked: _Asked) -> OwnItem:
        read = self._service.read(message)
        request = read.request
        asked.id, asked.model_name = request.id, request.model_name
        deadline_s = deadline_of(self._context, read.options.deadline_s)
        model = self._service.opened(request.model_name, deadline_s)
        inputs = read_inputs(read, model.signature)
        asked.outputs = read_outputs(read, model.signature)
        return OwnItem(
            key=asked,
            model=model,
            inputs=inputs,
            deadline=None if deadline_s is None else asked.began + deadline_s - time.monotonic(),
            priority=read.options.priority,
            request_id=own_id(request.id, self._metadata.get(OWN_ID)),
            trace=self._metadata,
        )

    # ------------------------------------------------------------ the thread of the call

    def _answer(self, item: Result | Failed) -> bytes:
        asked: _Asked = item.key
        if item.ok is True:
            return stream_response(asked.model_name, asked.id, asked.outputs, item)
        return stream_error(asked.model_name, asked.id, item.error.message)

"""A client that does nothing but the protocol: one request per message, so many outstanding, every answer compared.

It is the yardstick's own loop with the codec put in, so that what differs is the server.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import zmq

from benchmarks.bare_echo import COPY_BELOW_BYTES
from shapestream.transport.curve_keys import CallerKeys
from shapestream.wire.codec import decode, encode
from shapestream.wire.messages import (
    Entry,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    OpenModel,
    RequestEntry,
    ResultEntry,
    Role,
    Welcome,
)
from shapestream_engine.layout import Tensors

TIMEOUT_MS = 60_000


def connect_dealer(address: str, keys: CallerKeys | None = None) -> zmq.Socket[bytes]:
    """A DEALER connected to `address` that fails loudly instead of waiting for ever."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if keys is not None:
        socket.set(zmq.CURVE_PUBLICKEY, keys.key.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, keys.key.secret.encode())
        socket.set(zmq.CURVE_SERVERKEY, keys.server_key.encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
    socket.connect(address)
    return socket


def echo_round(socket: zmq.Socket[bytes], payloads: Sequence[bytes], outstanding: int) -> None:
    """Sends each payload to a bare echo, with a header-sized frame before it; compares every answer."""
    sent = received = 0
    copy = len(payloads[0]) < COPY_BELOW_BYTES
    header = bytes(48)
    while received < len(payloads):
        while sent < len(payloads) and sent - received < outstanding:
            socket.send_multipart([header, payloads[sent]], copy=copy)
            sent += 1
        answer = socket.recv_multipart()[-1] if copy else socket.recv_multipart(copy=False)[-1].buffer
        if answer != payloads[received]:
            raise AssertionError("the echo's answer differs")
        received += 1


class RawClient:
    """A session on a shapestream server, over the codec and a plain pyzmq socket.

    It sends no heartbeats by itself: open one for each round, or call `beat` once per heartbeat interval.
    """

    def __init__(self, address: str, model: str, keys: CallerKeys | None = None) -> None:
        self.socket = connect_dealer(address, keys)
        self._sequence = 0
        self._send(Hello(client=uuid.uuid4().bytes, software="benchmark"))
        self._await(Welcome)
        self._send(OpenModel(name=model))
        opened = self._await(ModelOpened)
        assert isinstance(opened, ModelOpened)
        self._model = opened.number

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(Goodbye())
        self.socket.close(linger=TIMEOUT_MS)

    def fileno(self) -> int:
        """The socket's descriptor; it is readable where something has arrived since the last `take`."""
        return int(self.socket.get(zmq.FD))

    def _send(self, entry: Entry) -> None:
        frames = encode([entry])
        # One frame alone is a header with small tensors inline.
        self.socket.send_multipart(frames, copy=len(frames) == 1)

    def _entries(self) -> list[Entry]:
        frames = self.socket.recv_multipart(copy=False)
        envelope = decode([frames[0].bytes, *(frame.buffer for frame in frames[1:])], role=Role.CLIENT)
        if envelope.bad:
            raise AssertionError(f"the server sent {envelope.bad}")
        return envelope.entries

    def _await(self, kind: type[Entry]) -> Entry:
        while True:
            for entry in self._entries():
                if isinstance(entry, kind):
                    return entry

    def ask(self, tensors: Tensors, *, remaining_ms: int | None = None) -> int:
        """Send one request in a message of its own; returns its sequence number."""
        sequence = self._sequence
        self._sequence += 1
        self._send(
            RequestEntry(
                sequence=sequence, model=self._model, remaining_ms=remaining_ms, priority=0, tensors=tensors
            )
        )
        return sequence

    def take(self) -> list[Entry]:
        """The entries that have arrived, perhaps none."""
        entries: list[Entry] = []
        while self.socket.poll(0):
            entries += self._entries()
        return entries

    def beat(self) -> None:
        """Tell the server that this session is alive."""
        self._send(Heartbeat())

    def round(self, payloads: Sequence[bytes], shape: tuple[int, ...], outstanding: int) -> None:
        """Sends each payload as one request in one message; compares every answer."""
        layout = ((0, "f32", shape),)
        requests = [Tensors(layout=layout, buffers=(payload,)) for payload in payloads]
        for number, tensors in self.stream(requests, outstanding):
            if tensors.buffers[0] != payloads[number]:
                raise AssertionError(f"the answer to request {number} differs")

    def stream(self, requests: Sequence[Tensors], outstanding: int) -> Iterator[tuple[int, Tensors]]:
        """Sends one request in one message; yields the place of each with its answer, as they come."""
        first = self._sequence
        sent = received = 0
        while received < len(requests):
            while sent < len(requests) and sent - received < outstanding:
                self.ask(requests[sent])
                sent += 1
            for entry in self._entries():
                if type(entry) is ResultEntry:
                    received += 1
                    yield entry.sequence - first, entry.tensors
                elif type(entry) is Failure:
                    raise AssertionError(f"the server refused: {entry}")

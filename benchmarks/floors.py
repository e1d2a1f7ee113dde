"""The least that a small request costs, by the kind of its way: sockets, msgpack and hand-overs, without any product.

    python -m benchmarks.floors echo ADDRESS [KEY]
    python -m benchmarks.floors loop ADDRESS
    python -m benchmarks.floors inproc ADDRESS [KEY]
    python -m benchmarks.floors relay ADDRESS BACK_ADDRESS [KEY]
    python -m benchmarks.floors slot BACK_ADDRESS

`echo` is a blocking socket that sends back each message. `loop` is an event loop that copies an array: msgpack for its
shape, a frame for its bytes. `inproc` is an event loop that relays to a slot: a thread of the
same process with a socket of its own. `relay` is an event loop that relays to a `slot` in a process of its own. A slot
unpacks and packs each message. KEY is the file of the server's secret key, for CURVE; clients need no listed key.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgpack
import numpy as np
import trio
import zmq

from shapestream.transport.curve_keys import read_key_pair

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"
INPROC = "inproc://slot"
GREETING = b"hello"
"""The first message of a slot, by which the relay learns its routing id."""


def _listen(context: Context, address: str, key: str | None = None) -> Socket:
    socket = context.socket(zmq.ROUTER)
    if key is not None:
        pair = read_key_pair(Path(key))
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.bind(address)
    return socket


def _echo(address: str, key: str | None = None) -> None:
    """Send each message back, in a blocking socket."""
    socket = _listen(zmq.Context(), address, key)
    while True:
        socket.send_multipart(socket.recv_multipart())


async def _serve_loop(address: str) -> None:
    """Answer each array with a copy, in an event loop."""
    socket = _listen(zmq.Context(), address)
    descriptor: Any = socket.get(zmq.FD)
    while True:
        while _has_message(socket):
            peer, packed, row = socket.recv_multipart(zmq.NOBLOCK)
            header = msgpack.unpackb(packed)
            array = np.frombuffer(row, np.float32).reshape(header["shape"]).copy()
            answer = msgpack.packb({"id": header["id"], "shape": list(array.shape)})
            socket.send_multipart([peer, answer, array.tobytes()])
        await trio.lowlevel.wait_readable(descriptor)


def _run_slot(context: Context, address: str) -> None:
    """Answer each message with the same message, unpacked and packed again."""
    socket: Socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send(GREETING)
    while True:
        frames = socket.recv_multipart()
        frames[-1] = msgpack.packb(msgpack.unpackb(frames[-1]))
        socket.send_multipart(frames)


async def _relay(front: Socket, back: Socket) -> None:
    """Relay between clients and one slot, in an event loop that waits for both sockets."""
    slot: list[bytes] = []

    def drain() -> None:
        """Relay until neither socket has a message: libzmq announces a later message only after such a look."""
        while True:
            if slot and _has_message(front):
                back.send_multipart([*slot, *front.recv_multipart(zmq.NOBLOCK)])
            elif _has_message(back):
                identity, *frames = back.recv_multipart(zmq.NOBLOCK)
                if slot:
                    front.send_multipart(frames)
                else:
                    slot.append(identity)
            else:
                return

    async def watch(socket: Socket) -> None:
        descriptor: Any = socket.get(zmq.FD)
        while True:
            drain()
            await trio.lowlevel.wait_readable(descriptor)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, front)
        nursery.start_soon(watch, back)


def _has_message(socket: Socket) -> bool:
    events: Any = socket.get(zmq.EVENTS)
    return bool(events & zmq.POLLIN)


def _serve_inproc(address: str, key: str | None = None) -> None:
    context: Context = zmq.Context()
    front, back = _listen(context, address, key), _listen(context, INPROC)
    threading.Thread(target=_run_slot, args=(context, INPROC), daemon=True).start()
    trio.run(_relay, front, back)


def _serve_relay(address: str, back_address: str, key: str | None = None) -> None:
    context: Context = zmq.Context()
    trio.run(_relay, _listen(context, address, key), _listen(context, back_address))


def ask_alone(socket: Socket, messages: Sequence[bytes]) -> list[float]:
    """The seconds that each message takes to come back; a blocking client, one message at a time."""
    times: list[float] = []
    for message in messages:
        sent_at = time.perf_counter()
        socket.send(message)
        _check(socket.recv(), message)
        times.append(time.perf_counter() - sent_at)
    return times


async def ask_in_loop(socket: Socket, messages: Sequence[bytes]) -> list[float]:
    """Ask in an event loop that waits for the socket; each message is packed and unpacked, as a client must."""
    descriptor: Any = socket.get(zmq.FD)
    times: list[float] = []
    for message in messages:
        document = msgpack.unpackb(message)
        sent_at = time.perf_counter()
        socket.send(msgpack.packb(document), zmq.NOBLOCK)
        while not _has_message(socket):
            await trio.lowlevel.wait_readable(descriptor)
        answer = socket.recv(zmq.NOBLOCK)
        msgpack.unpackb(answer)
        times.append(time.perf_counter() - sent_at)
        _check(answer, message)
    return times


def ask_in_stream(socket: Socket, entries: Sequence[bytes], *, per_message: int, outstanding: int) -> None:
    """Entries in messages of `per_message`, so many entries outstanding; each message is packed and unpacked."""
    sent = received = 0
    while received < len(entries):
        while sent < len(entries) and sent - received + per_message <= max(outstanding, per_message):
            socket.send(msgpack.packb(entries[sent : sent + per_message]))
            sent += per_message
        for entry in msgpack.unpackb(socket.recv()):
            _check(entry, entries[received])
            received += 1


def _check(answer: bytes, message: bytes) -> None:
    if answer != message:
        raise AssertionError("the answer of a floor differs")


def main(arguments: list[str]) -> None:
    """Run one floor until it is ended."""
    match arguments:
        case ["echo", *addresses]:
            _echo(*addresses)
        case ["loop", address]:
            trio.run(_serve_loop, address)
        case ["inproc", *addresses]:
            _serve_inproc(*addresses)
        case ["relay", *addresses]:
            _serve_relay(*addresses)
        case ["slot", address]:
            _run_slot(zmq.Context(), address)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

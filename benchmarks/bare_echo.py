"""What bare pyzmq can do: a ROUTER that sends back what it gets, and one that relays to a second one.

These are the yardsticks. They decode nothing, check nothing and decide nothing.

    python -m benchmarks.bare_echo echo ADDRESS
    python -m benchmarks.bare_echo relay ADDRESS ECHO_ADDRESS
"""

from __future__ import annotations

import sys

import zmq

# Frames from this size up are neither copied in nor out; below it pyzmq is faster with copies (zmq guide: about 64 KiB).
COPY_BELOW_BYTES = 64 * 1024


def _serve_echo(address: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    while True:
        frames = socket.recv_multipart(copy=False)
        large = sum(len(frame) for frame in frames) >= COPY_BELOW_BYTES
        socket.send_multipart(frames if large else [frame.bytes for frame in frames], copy=not large)


def _serve_relay(address: str, echo_address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    front.bind(address)
    back.connect(echo_address)
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        for source, _ in poller.poll():
            target = back if source is front else front
            target.send_multipart(source.recv_multipart(copy=False), copy=False)


def main(arguments: list[str]) -> None:
    """Runs one of the two until it is ended."""
    match arguments:
        case ["echo", address]:
            _serve_echo(address)
        case ["relay", address, echo_address]:
            _serve_relay(address, echo_address)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

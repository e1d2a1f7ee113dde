"""A message of more frames than any may have costs little memory, and ends where it ends."""

from __future__ import annotations

import zmq

from shapestream.transport.watched_socket import MOST_FRAMES, receive_frames
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS


def test_of_an_endless_message_only_the_beginning_is_kept() -> None:
    """More than any decoder accepts, so that it is refused; the next message is whole."""
    assert MOST_FRAMES > 1 + max(WORKER_LIMITS.max_frames, CLIENT_LIMITS.max_frames)
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        receiver.bind("inproc://endless")
        sender.connect("inproc://endless")
        sender.send_multipart([b"x"] * (MOST_FRAMES + 1_000))
        sender.send_multipart([b"next", b"message"])
        assert MOST_FRAMES == len(receive_frames(receiver.recv))
        assert [b"next", b"message"] == receive_frames(receiver.recv)

"""Frames in, frames out: the trio-native ZeroMQ socket, and its stand-in within one process."""

from __future__ import annotations

from shapestream.transport.interface import Addressed, Connection, Message, PeerSocket

__all__ = ["Addressed", "Connection", "Message", "PeerSocket"]

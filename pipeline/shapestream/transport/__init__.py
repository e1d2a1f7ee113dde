"""Sockets that send and receive frames: ZeroMQ's under trio, and a stand-in within one process."""

from __future__ import annotations

from shapestream.transport.interface import Addressed, Connection, Message, PeerSocket

__all__ = ["Addressed", "Connection", "Message", "PeerSocket"]

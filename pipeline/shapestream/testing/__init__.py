"""Helpers for tests of what is built on shapestream: scripted models, a scripted server, endpoints in memory.

Documented in docs/client.md, and used by our own tests.
"""

from __future__ import annotations

from shapestream.testing.scripted_model import Arrays, ScriptedModel, identity_signature, tensors_of
from shapestream.testing.scripted_server import ScriptedServer, serve_in_thread
from shapestream.transport.memory import MemoryConnection, MemoryEndpoint, MemoryServer, memory_server

__all__ = [
    "Arrays",
    "MemoryConnection",
    "MemoryEndpoint",
    "MemoryServer",
    "ScriptedModel",
    "ScriptedServer",
    "identity_signature",
    "memory_server",
    "serve_in_thread",
    "tensors_of",
]

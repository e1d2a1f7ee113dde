"""Tensors as they travel: a description in plain tuples beside the bytes, so that nothing is parsed twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# One row per tensor: (port number in the signature, element type such as "f32", shape).
Layout: TypeAlias = tuple[tuple[int, str, tuple[int, ...]], ...]
# Anything that holds contiguous bytes: bytes, memoryview, a ZeroMQ frame, a contiguous numpy array.
Buffer: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tensors of one request, or of one result.

    `buffers` are parallel to `layout`: the bytes of each tensor, C-contiguous, little-endian.
    """

    layout: Layout
    buffers: Sequence[Buffer]

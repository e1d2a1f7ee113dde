"""Tensors as they travel: a description in plain tuples beside the bytes, so that nothing is parsed twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform

# One row per tensor: (port number in the signature, element type such as "f32", shape).
Layout: TypeAlias = tuple[tuple[int, str, tuple[int, ...]], ...]
# Anything that holds contiguous bytes: bytes, memoryview, a ZeroMQ frame, a contiguous numpy array.
Buffer: TypeAlias = Any


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a slotted, keyword-only dataclass that is frozen for type checkers only.

    Each request makes several such values, and one that is frozen at run time takes three times as long to make.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


@value
class Tensors:
    """The tensors of one request, or of one result.

    `buffers` are parallel to `layout`: the bytes of each tensor, C-contiguous, little-endian.
    """

    layout: Layout
    buffers: Sequence[Buffer]

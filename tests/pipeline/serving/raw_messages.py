"""Messages packed by hand, since our own codec would refuse to: requests for the model `scaled`, any field replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from tests.entries import RequestEntry, ResultEntry, request_of
from tests.pipeline.serving.raw_peer import RawPeer

from shapestream_engine.layout import Buffer, Tensors

Frames = list[Buffer]

SCALED = 0
"""The model's number: it is the first of its server."""
X = np.arange(6, dtype=np.float32).reshape(2, 3)
SCALE = np.array([2.0, 3.0], np.float32)
LAYOUT = ((0, "f32", (2, 3)), (1, "f32", (2,)))
INLINE: tuple[Any, ...] = (X.tobytes(), SCALE.tobytes())
PRODUCT = (X * SCALE[:, None]).tobytes()
"""The honest answer."""


def packed(value: Any) -> bytes:
    """msgpack."""
    data: bytes = msgpack.packb(value)
    return data


def entry(
    *, frames: Any = 0, sequence: Any = 7, model: Any = SCALED, remaining: Any = None, priority: Any = 0,
    layout: Any = LAYOUT, inline: Any = INLINE, tags: Any = ...,
) -> list[Any]:  # fmt: skip
    """A request as it is on the wire, any field replaced; a good one as it stands. `...`: without tags."""
    layout = packed(layout) if isinstance(layout, tuple) else layout
    more = [] if tags is ... else [tags]
    return [RequestEntry.KIND, frames, sequence, model, remaining, priority, layout, inline, *more]


def message(*entries: Any, frames: tuple[bytes, ...] = (), version: Any = 1) -> Frames:
    """One message."""
    return [packed([version, entries]), *frames]


def layout_of(*shapes: tuple[Any, ...], element_type: Any = "f32") -> tuple[tuple[Any, ...], ...]:
    """A layout of these shapes on the ports in order."""
    return tuple((port, element_type, shape) for port, shape in enumerate(shapes))


GOOD = message(entry())
HEADER = GOOD[0]


@dataclass(frozen=True, slots=True)
class Refused:
    """What is sent, a word of the answer to request 7, and its code."""

    frames: Frames
    word: str
    code: str = "invalid"


def honest_request(sequence: int, model: int = SCALED) -> RequestEntry:
    """The same request, for a peer that packs it itself."""
    tensors = Tensors(layout=LAYOUT, buffers=INLINE)
    return request_of(sequence, tensors, model=model)


async def assert_served(peer: RawPeer, sequence: int) -> None:
    """An honest request gets its honest answer."""
    peer.say(honest_request(sequence))
    result = await peer.hear(ResultEntry)
    assert sequence == result.sequence
    assert PRODUCT == bytes(result.tensors.buffers[0])

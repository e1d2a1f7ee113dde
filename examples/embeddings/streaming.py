"""Texts of all lengths, streamed to the server, tokenised there, and embedded in batches padded under the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import shapestream
from shapestream import Timings

MODEL = "sentences"
"""The chain of a tokenizer and the encoder."""
TEXTS_PER_REQUEST = 16
MAX_IN_FLIGHT = 16

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The server's result for one text."""

    vector: Vector
    tokens: int
    timings: Timings


async def embed_stream(
    address: str, texts: Sequence[str], on_answer: Callable[[], None]
) -> tuple[list[Embedded], dict[str, Any]]:
    """The embedding of each text, in their order, and the server's counters."""

    def requests() -> Iterator[dict[str, list[str]]]:
        for first in range(0, len(texts), TEXTS_PER_REQUEST):
            yield {"text": list(texts[first : first + TEXTS_PER_REQUEST])}

    embedded = []
    async with shapestream.connect(address) as client:
        async with client.stream(MODEL, requests(), max_in_flight=MAX_IN_FLIGHT) as results:
            async for result in results:
                assert isinstance(result, shapestream.Result)  # a failed one was raised
                for vector, tokens in zip(result["embedding"], result["tokens"].tolist(), strict=True):
                    embedded.append(Embedded(vector=vector.copy(), tokens=tokens, timings=result.timings))
                    on_answer()
        return embedded, await client.statistics()


async def embed_texts(address: str, texts: Sequence[str]) -> list[Vector]:
    """The embedding of each text, in one request: the server embeds each by its own length."""
    async with shapestream.connect(address) as client:
        return [*(await client.infer(MODEL, {"text": list(texts)}))["embedding"]]

"""Sentences of all lengths, streamed to the server and embedded there in batches padded under the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import shapestream
from shapestream import Timings

MODEL = "embeddings"
CHAIN = "sentences"
MAX_IN_FLIGHT = 256

Ids = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The server's result for one sentence."""

    vector: Vector
    timings: Timings


async def embed_stream(
    address: str, sentences: Sequence[Ids], on_answer: Callable[[], None]
) -> tuple[list[Embedded], dict[str, Any]]:
    """The embedding of each sentence, in their order, and the server's counters."""

    def requests() -> Iterator[dict[str, Ids]]:
        for ids in sentences:
            yield {"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None]}

    embedded = []
    async with shapestream.connect(address) as client:
        async with client.stream(MODEL, requests(), max_in_flight=MAX_IN_FLIGHT) as results:
            async for result in results:
                assert isinstance(result, shapestream.Result)  # a failed one was raised
                embedded.append(Embedded(vector=result["embedding"][0].copy(), timings=result.timings))
                on_answer()
        return embedded, await client.statistics()


async def embed_texts(address: str, texts: Sequence[str]) -> list[Vector]:
    """The embedding of each text, one request after the other: the server's chain tokenises it, and makes the mask."""
    async with shapestream.connect(address) as client:
        inputs = [{"text": np.frombuffer(text.encode(), np.uint8)} for text in texts]
        results = [await client.infer(CHAIN, each) for each in inputs]
        return [result["embedding"][0].copy() for result in results]

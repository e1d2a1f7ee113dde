"""What the embeddings are checked with, and what they are good for: cosines of unit vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One of the nearest; `number` is its place among those that were searched."""

    number: int
    cosine: float


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two vectors of any length but 0, in double precision."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def nearest(query: Vector, vectors: Sequence[Vector], count: int) -> list[Neighbour]:
    """The `count` vectors nearest to the query, the nearest first; all are unit vectors."""
    cosines = np.stack(vectors) @ query
    best = np.argsort(-cosines, kind="stable")[:count]
    return [Neighbour(number=int(number), cosine=float(cosines[number])) for number in best]

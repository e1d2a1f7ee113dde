"""A kind of slots: the workers whose cost tables of one model have the same key, and what is known of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

from shapestream.scheduling.cost_base import CostBase
from shapestream.scheduling.cost_line import FIRST_CLIP, Line
from shapestream.scheduling.cost_surface import Surface
from shapestream.scheduling.elements import elements_of
from shapestream.scheduling.events import ModelProfile
from shapestream_engine.cost_table import MAX_ELEMENTS, MAX_POINTS, CostTable
from shapestream_engine.learned_costs import LearnedCosts

__all__ = ["NOTHING_LEARNED", "Kind", "new_kind"]

Sizes: TypeAlias = tuple[int, ...]

NOTHING_LEARNED: Mapping[str, LearnedCosts] = MappingProxyType({})
NOISE = 1.1
"""What a batch may take beyond what is expected, as a factor, before that counts as preparation."""


@dataclass(slots=True)
class Kind:
    """One kind. Its workers share a surface's values; each has a speed, and shapes that its devices know, of its own."""

    base: CostBase
    new: Line
    """What a shape that is new costs extra, by elements."""
    surfaces: dict[str, Surface]
    """By worker."""
    slots: Counter[str] = field(default_factory=Counter)
    """By worker."""
    paid: Line = field(default_factory=Line)
    """What requests took while nothing was measured, by elements, preparation included: see `CostModel.rough_s`."""
    points: int = 0
    """Measured, in the table that it began with."""
    table: str = ""
    """The digest of that table; "" without points."""
    batches: int = 0
    """That it learned from, those of earlier servers included."""

    def prepared(self, elements: float, steady_s: float, busy_s: float, calls: int = 1) -> None:
        """Learns what it costs extra that calls are new, of a batch that would have taken `steady_s` without."""
        extra_s = max(0.0, busy_s - NOISE * steady_s) / calls
        self.new.observe(1.0, elements, extra_s, request_elements=elements)

    def learned(self, profile: ModelProfile, saved_at: float) -> LearnedCosts | None:
        """What traffic made of the table; None where there is none, or nothing ran yet."""
        if not self.table or not self.batches:
            return None
        alone = 0 if profile.has_batch else 1
        # Nodes that nobody measured, and lines, may reach further than anything that may be kept.
        kept = (item for item in self.base.corrections().items() if elements_of(item[0]) <= MAX_ELEMENTS)
        corrections = islice(kept, MAX_POINTS)
        ends = self.new.ends()
        return LearnedCosts(
            table=self.table,
            batches=self.batches,
            saved_at=saved_at,
            seconds={sizes[alone:]: seconds for sizes, seconds in corrections},
            preparation=ends if max(ends, default=0.0) <= MAX_ELEMENTS else {},
        )


def new_kind(
    profile: ModelProfile,
    table: CostTable | None,
    versions: Iterator[int],
    known: Mapping[str, LearnedCosts] = NOTHING_LEARNED,
) -> Kind:
    """What a table says, corrected by what an earlier server learned; without a table, what has to be learned.

    `versions`: see `CostBase`. `known`: what was learned, by the digests of the tables.
    """
    steady: dict[Sizes, float] = {}
    firsts: list[tuple[float, float, float]] = []
    alone = () if profile.has_batch else (1,)
    for point in sorted(() if table is None else table.points, key=lambda point: elements_of(point.sizes)):
        sizes = (*alone, *point.sizes)
        steady[sizes] = point.seconds
        if point.first_seconds is not None:
            firsts.append((elements_of(sizes), point.seconds, point.first_seconds))
    static = [(*alone, *sizes) for sizes in profile.static_shapes]
    digest = "" if table is None or not steady else table.digest
    kind = Kind(
        CostBase(steady, static, versions), Line(clip=FIRST_CLIP), {}, points=len(steady), table=digest
    )
    learned = known.get(digest) if digest else None
    if learned is not None:
        corrected = {(*alone, *sizes): seconds for sizes, seconds in learned.seconds.items()}
        kind.batches = learned.batches
        kind.base.recall(corrected)
        kind.new.recall(learned.preparation)
    else:
        for elements, seconds, first_seconds in firsts:
            kind.prepared(elements, seconds, first_seconds)
    return kind

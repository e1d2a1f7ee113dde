"""What the referee plays with and writes down: bounds, models, requests, and batches that run."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from tests.pipeline.scheduling.seen import Started

from shapestream.scheduling.events import Arrival, ModelProfile

MAX_QUEUED_REQUESTS = 14
MAX_QUEUED_BYTES = 200
MAX_ATTEMPTS = 3
# A slot rests for at least 0.1 s, and for two mean calls, of which none here takes longer than a second.
HANG_MIN_S, HANG_GRACE_S = 2.0, 0.5
MIN_ASIDE_S, LONGEST_FIRST_PAUSE_S, MAX_ASIDE_S = 0.1, 2.0, 30.0


def _profile(
    name: str, dimensions: tuple[str, ...], paddable: tuple[bool, ...], **options: float
) -> ModelProfile:
    has_batch = dimensions[0] == "batch"
    options.setdefault("max_batch", 6)
    return ModelProfile(name=name, dimensions=dimensions, has_batch=has_batch, paddable=paddable, **options)


PROFILES = {
    profile.name: profile
    for profile in (
        _profile("text", ("batch", "seq"), (False, True), max_padding_ratio=0.25),
        _profile(
            "image",
            ("batch", "height", "width"),
            (False, False, True),
            max_padding_ratio=0.5,
            hang_after_s=inf,
        ),
        _profile("exact", ("batch", "seq"), (False, False), hang_after_s=HANG_MIN_S),
        _profile("once", ("batch", "seq"), (False, True), max_batch=1, idempotent=False),
        _profile("alone", ("height", "width"), (True, True)),
        _profile("patient", ("batch", "seq"), (False, True), max_padding_ratio=0.25, max_delay_s=0.5),
    )
}
LATE = "exact"  # the model that is added, if at all, by a rule
MODELS = (*PROFILES, "unknown")


@dataclass
class Known:
    """What the machine knows of one request."""

    arrival: Arrival
    order: int
    arrived: float
    batch: int | None = None
    lost: int = 0
    starts: int = 0
    deaths: int = 0
    """Processes that died while they ran it, or may have."""
    suspect: bool = False
    """It must run alone in its worker."""
    accused: bool = False
    """A process that may have run it died, or hung."""
    blamed: bool = False
    """It did, and that died, or it hung there."""
    group: frozenset[int] | None = None  # the ids that it must run again with, if it must

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes without the batch axis."""
        return self.arrival.sizes[1:] if PROFILES[self.arrival.model].has_batch else self.arrival.sizes

    @property
    def rows(self) -> int:
        """Its rows; 1 where there is no batch axis."""
        return self.arrival.sizes[0] if PROFILES[self.arrival.model].has_batch else 1

    def equals(self, other: Known) -> bool:
        """Whether the two are first come, first served."""
        mine, its = self.arrival, other.arrival
        return (mine.sizes, mine.client, mine.priority, mine.submitted) == (
            its.sizes,
            its.client,
            its.priority,
            its.submitted,
        )

    @property
    def empty(self) -> bool:
        """Whether it has no elements, so that it runs alone."""
        return 0 in self.arrival.sizes

    @property
    def lane(self) -> tuple[object, ...]:
        """What must be equal to share a batch."""
        profile = PROFILES[self.arrival.model]
        sizes = zip(profile.dimensions, self.arrival.sizes, profile.paddable, strict=True)
        fixed = tuple(size for name, size, padded in sizes if name != "batch" and not padded)
        return self.arrival.model, fixed


@dataclass
class Running:
    """What the machine knows of one batch."""

    start: Started
    behind: int | None = None  # the batch that it waits for, until that is over
    began: float = 0.0
    alone: bool = False
    hung: bool = False
    killed_at: float | None = None
    given_up: bool = False
    cancelled: bool = False
    recalled: bool = False
    over: bool = False
    wanted: set[int] = field(default_factory=set)

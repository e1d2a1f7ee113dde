"""What is tried: where inference runs, and which call shapes a model is given; and the settings that say so.

A candidate is a placement and a choice of shapes. Its settings are edits of the user's file, by key, so that what is
measured and what is written in the end are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shapestream.settings import Location

__all__ = ["Candidate", "Placement", "ShapeChoice", "placements", "shape_settings"]

MOST_PLACEMENTS = 12
"""Tried at most, on machines with many CPUs: nearest to one slot for two CPUs first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many inference calls run at a time, and on how many CPU threads."""

    processes: int | None
    """Worker processes; None: slots in the server itself."""
    slots: int
    """In each process."""
    threads: int
    """Of each process, divided among its slots."""

    @property
    def all_slots(self) -> int:
        """Calls at a time."""
        return self.slots * (self.processes or 1)

    @property
    def all_threads(self) -> int:
        """CPU threads that infer."""
        return self.threads * (self.processes or 1)

    def __str__(self) -> str:
        inside = f"{self.slots} x {self.threads}"
        return f"in process, {inside}" if self.processes is None else f"{self.processes} x ({inside})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeChoice:
    """Which call shapes a model is given: the content of `shapes` in the YAML."""

    strategy: str = "native"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    max_prepared: int | None = None
    static: tuple[tuple[int, ...], ...] = ()
    """Call shapes with a static model beside the dynamic one, by the model's dimensions."""
    others: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of the user's file that are kept as they are, such as warm_up."""

    def __str__(self) -> str:
        words = [self.strategy]
        words += [f"{name} [{', '.join(map(str, sizes))}]" for name, sizes in self.sizes.items()]
        if self.max_prepared is not None:
            words.append(f"max_prepared {self.max_prepared}")
        if self.static:
            words.append(f"{len(self.static)} static")
        return ", ".join(words)

    @property
    def settings_count(self) -> int:
        """What somebody who reads the file has to understand: of equals the one with less is better."""
        return (
            (self.strategy != "native")
            + sum(len(sizes) for sizes in self.sizes.values())
            + (self.max_prepared is not None)
            + len(self.static)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration that may turn out best."""

    placement: Placement
    shapes: ShapeChoice
    is_baseline: bool = False
    """The user's file as it is: nothing is edited."""

    @property
    def label(self) -> str:
        """For tables and plots."""
        return f"{self.placement}; {self.shapes}" + (" (as it is)" if self.is_baseline else "")

    @property
    def calls_key(self) -> tuple[object, ...]:
        """Equal for candidates whose calls cost the same: a cap on shapes changes which calls are made, not their cost."""
        place, shapes = self.placement, self.shapes
        sizes = tuple(sorted((name, tuple(allowed)) for name, allowed in shapes.sizes.items()))
        return (place.all_slots, place.all_threads, shapes.strategy, sizes, shapes.static)

    def with_shapes(self, shapes: ShapeChoice) -> Candidate:
        """Elsewhere the same."""
        return replace(self, shapes=shapes, is_baseline=False)


def placements(cpus: int, *, workers: bool, max_slots: int | None = None) -> list[Placement]:
    """Ways to divide the CPUs: all of them, and where that makes a difference one less, left to the server.

    With 2 CPUs in process: 1 x 1, 1 x 2 and 2 x 2 (slots x threads); with worker processes 2 x (1 x 1) too.
    """
    found = dict.fromkeys(_placements(cpus, workers=workers))
    fitting = [place for place in found if max_slots is None or place.all_slots <= max_slots]
    return sorted(fitting, key=lambda place: (_distance(place.all_slots, cpus), place.processes or 0))[
        :MOST_PLACEMENTS
    ]


def _placements(cpus: int, *, workers: bool) -> Iterator[Placement]:
    for processes in _counts(cpus) if workers else [None]:
        share = max(1, cpus // (processes or 1))
        for slots in _counts(share):
            yield Placement(processes=processes, slots=slots, threads=share)
    if cpus > 1:
        least = 1 if workers else None
        yield Placement(processes=least, slots=cpus - 1, threads=cpus - 1)
        if cpus > 2:
            yield Placement(processes=least, slots=1, threads=cpus - 1)


def _counts(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def _distance(slots: int, cpus: int) -> float:
    """How far from one slot for two CPUs, as a factor: where a search with little time should start."""
    usual = max(1.0, cpus / 2)
    return max(slots / usual, usual / slots)


def shape_settings(shapes: ShapeChoice, dimensions: tuple[str, ...]) -> dict[str, Any] | None:
    """`shapes` as the YAML says it; None where everything is default."""
    said: dict[str, Any] = {}
    if shapes.strategy != "native":
        said["strategy"] = shapes.strategy
    said |= {name: list(sizes) for name, sizes in shapes.sizes.items()}
    if shapes.max_prepared is not None:
        said["max_prepared"] = shapes.max_prepared
    if shapes.static:
        said["static"] = _grouped(shapes.static, dimensions)
    return {**said, **shapes.others} or None


def _grouped(static: tuple[tuple[int, ...], ...], dimensions: tuple[str, ...]) -> list[dict[str, Any]]:
    """Shapes that differ in the last dimension alone in one entry: {batch: 1, seq: [8, 16]}."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for sizes in sorted(static):
        groups.setdefault(sizes[:-1], []).append(sizes[-1])
    return [
        dict(zip(dimensions, [*first, last if len(last) > 1 else last[0]], strict=True))
        for first, last in groups.items()
    ]


def edits_of(
    candidate: Candidate, *, model: int, group: int | None, dimensions: tuple[str, ...]
) -> dict[Location, Any]:
    """What the user's file has to say for this candidate, by key; None: nothing, so that a key there goes.

    `group` is the entry of `workers` that serves the model; None where it has none (one worker by default).
    """
    if candidate.is_baseline:
        return {}
    edits: dict[Location, Any] = {("models", model, "shapes"): shape_settings(candidate.shapes, dimensions)}
    place = candidate.placement
    counts = {"slots": place.slots, "threads": place.threads}
    if place.processes is None:
        edits |= {("in_process", key): count for key, count in counts.items()}
    else:
        where = ("workers", group or 0)
        edits |= {(*where, key): count for key, count in {"count": place.processes, **counts}.items()}
    return edits

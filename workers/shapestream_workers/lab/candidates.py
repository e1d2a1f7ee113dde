"""Candidates of `shapestream tune`: placements and choices of shapes.

Padding is proposed only where the file allows it. The start of each candidate proves it, as serving would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shapestream.scheduling.boundaries import BoundaryChoices, columns_of
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.signature import ModelSignature

MOST_PLACEMENTS = 12
"""Placements tried on machines with many CPUs: those nearest to one slot for two CPUs."""
CAPS = (64, 16)
"""Values that `max_prepared` is tried with."""
BUCKETS = (4, 8)
"""Numbers of sizes per dimension that buckets are tried with."""
MOST_STATIC = 8
"""Shapes that get a static model."""
HOT_SHARE = 0.02
"""Least share of the requests that a shape with a static model has; that of a rarer one would stand idle."""
PRECISIONS = {"openvino": "INFERENCE_PRECISION_HINT", "torch": "float32_matmul_precision"}
"""Engine -> the property that says in which precision it computes."""
MAX_DISTINCT = 512
"""Sizes that boundaries are chosen among, to bound the memory of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Number of inference calls that run at a time, and of CPU threads for them."""

    processes: int | None
    """Worker processes; None: slots in the server itself."""
    slots: int
    """Slots of each process."""
    threads: int
    """Threads of each process, divided among its slots."""

    @property
    def all_slots(self) -> int:
        """Slots of all processes."""
        return self.slots * (self.processes or 1)

    def __str__(self) -> str:
        inside = f"{self.slots} x {self.threads}"
        return f"in process, {inside}" if self.processes is None else f"{self.processes} x ({inside})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration that may turn out best."""

    placement: Placement
    shapes: Mapping[str, Any]
    """`shapes` of the YAML."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """`properties` of the YAML that differ from the file's: the precision."""
    is_baseline: bool = False
    """True for the user's file without edits."""

    @property
    def shapes_label(self) -> str:
        """The shapes and the precision in a few words, for tables."""
        words = [str(self.shapes.get("strategy", "native"))]
        for key, said in self.shapes.items():
            if key == "static":
                words.append(f"{len(said)} static")
            elif key != "strategy":
                words.append(f"{key} {said}")
        words += self.properties.values()
        return ", ".join(words) + (" (as it is)" if self.is_baseline else "")

    @property
    def label(self) -> str:
        """Placement and shapes, for lines of progress."""
        return f"{self.placement}; {self.shapes_label}"


# ---------------------------------------------------------------- placements


def placements(cpus: int, *, workers: bool) -> list[Placement]:
    """Return the divisions of the CPUs: all of them, and one less, which is left to the server.

    With 2 CPUs in process: 1 x 1, 1 x 2 and 2 x 2 (slots x threads); with worker processes 2 x (1 x 1) too.
    """
    found: list[Placement] = []
    for processes in powers_of_two(cpus) if workers else [None]:
        share = max(1, cpus // (processes or 1))
        found += [
            Placement(processes=processes, slots=slots, threads=share) for slots in powers_of_two(share)
        ]
    if cpus > 1:
        least = 1 if workers else None
        found += [Placement(processes=least, slots=slots, threads=cpus - 1) for slots in {1, cpus - 1}]
    usual = max(1.0, cpus / 2)

    def distance(place: Placement) -> tuple[float, int]:
        return max(place.all_slots / usual, usual / place.all_slots), place.processes or 0

    return sorted(found, key=distance)[:MOST_PLACEMENTS]


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to `most`, which ends them."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


# ---------------------------------------------------------------- choices of shapes


def propose(
    requests: Sequence[TraceRequest],
    signature: ModelSignature,
    baseline: Mapping[str, Any],
    *,
    max_batch: int,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the values of `shapes` to try besides the baseline's, and the reasons for what is not tried.

    Keys of the baseline that are not tuned, such as `warm_up`, are kept.
    """
    counts = Counter(request.sizes for request in requests)
    tuned = {"strategy", "max_prepared", "static", *signature.dimensions}
    others = {key: said for key, said in baseline.items() if key not in tuned}
    left_out: list[str] = []
    choices: list[dict[str, Any]] = [{}]
    if _takes_strings(signature):
        left_out.append("static shapes: strings may have any length")
    elif signature.dimensions and (hot := hot_shapes(counts)):
        choices.append({"static": [dict(zip(signature.dimensions, sizes, strict=True)) for sizes in hot]})
    else:
        left_out.append(f"static shapes: none has {HOT_SHARE:.0%} of the requests")
    choices += [{"max_prepared": cap} for cap in _caps(len(counts), signature, left_out)]
    buckets = _buckets(requests, signature, left_out)
    choices += [{"strategy": "bucketed", **sizes} for sizes in buckets]
    if signature.has_batch and max_batch > 1:
        rows = {"strategy": "partitioned", "batch": list(powers_of_two(max_batch))}
        choices += [rows, *({**rows, **sizes} for sizes in buckets[-1:])]
    mine = {key: said for key, said in baseline.items() if (key, said) != ("strategy", "native")}
    return [choice for shapes in choices if (choice := {**shapes, **others}) != mine], left_out


def hot_shapes(counts: Counter[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the `MOST_STATIC` most frequent sizes, each of at least `HOT_SHARE`; small ones first among equals."""
    least = HOT_SHARE * counts.total()
    hot = sorted((-count, sizes) for sizes, count in counts.items() if count >= least)
    return [sizes for _, sizes in hot[:MOST_STATIC]]


def _takes_strings(signature: ModelSignature) -> bool:
    return any(port.is_string for port in signature.inputs)


def _caps(shapes: int, signature: ModelSignature, left_out: list[str]) -> list[int]:
    rounded = [
        bounds.maximum is None
        for number, bounds in enumerate(signature.bounds)
        if signature.paddable[number]
        or (signature.has_batch and number == 0 and not signature.strategy.alone)
    ]
    if _takes_strings(signature):
        left_out.append("max_prepared: strings may have any length")
        return []
    if not rounded or any(rounded):
        why = "nothing may be padded" if not rounded else "a dimension to round has no upper bound"
        left_out.append(f"max_prepared: {why}")
        return []
    # Calls have more shapes than requests: each length times each number of rows.
    return [cap for cap in CAPS if shapes * 2 >= cap]


def _buckets(
    requests: Sequence[TraceRequest], signature: ModelSignature, left_out: list[str]
) -> list[dict[str, list[int]]]:
    """Return the sizes for each dimension that may be padded, learned from the trace, up to the model's bound.

    A dimension without a bound has no last bucket, so that requests that are served today would be refused.
    """
    names = {
        number: name
        for number, name in enumerate(signature.dimensions)
        if signature.paddable[number]
        and number not in signature.table.strings
        and not (signature.has_batch and number == 0)
    }
    if not names:
        left_out.append("bucketed: `pad` allows no dimension to be padded")
        return []
    tried: list[dict[str, list[int]]] = []
    for most in BUCKETS:
        sizes: dict[str, list[int]] = {}
        for number, name in names.items():
            largest = signature.bounds[number].maximum
            if largest is None:
                left_out.append(f"bucketed: {name} has no upper bound (state it in the input's shape)")
                return []
            counts = Counter(request.sizes[number] for request in requests)
            sizes[name] = list(best_boundaries(counts, most, largest))
        if sizes not in tried:
            tried.append(sizes)
    return tried


def best_boundaries(counts: Mapping[int, int], most: int, largest: int) -> tuple[int, ...]:
    """Return at most `most` sizes, ascending and ending with `largest`, that pad these observed sizes least.

    `counts` maps each size to its number of requests; padding is counted in elements of this dimension. Boundaries are
    observed sizes, or `largest`: another one would only pad more. Fewer are returned where fewer are as good.
    """
    seen = {size: count for size, count in counts.items() if count > 0 and size > 0}
    sizes, weights = columns_of(seen, MAX_DISTINCT, (largest,))
    # A request costs its padded size.
    most_new = min(most, len(sizes)) - 1
    choices = BoundaryChoices.of(sizes, weights, sizes.astype(np.float64), [largest], most_new)
    return choices.boundaries[int(np.argmin(choices.costs))]

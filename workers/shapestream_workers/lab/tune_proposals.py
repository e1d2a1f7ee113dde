"""What is worth trying for a workload: choices of shapes. Pure.

The proof of padding is not judged here: whatever pads is proposed only where the file allows padding, and each
candidate's own start puts it to the proof, as serving it would.
"""

from __future__ import annotations

from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.tune_candidates import ShapeChoice
from shapestream_workers.lab.tune_sizes import best_boundaries, powers_of_two
from shapestream_workers.lab.tune_workload import Workload, hot_shapes

__all__ = ["Proposals", "propose"]

CAPS = (64, 16)
"""Numbers of prepared shapes that `max_prepared` is tried with."""
BUCKETS = (4, 8)
"""Numbers of sizes per dimension that buckets are tried with."""
MOST_STATIC = 8
HOT_SHARE = 0.02
"""A shape that fewer of the requests have is not hot: its static model would stand idle."""


class Proposals:
    """Choices of shapes in the order of their promise, and what was left out, with why."""

    def __init__(self) -> None:
        self.choices: list[ShapeChoice] = []
        self.left_out: list[str] = []

    def add(self, choice: ShapeChoice) -> None:
        """Once, however often it is proposed."""
        if choice not in self.choices:
            self.choices.append(choice)


def propose(
    workload: Workload, signature: ModelSignature, baseline: ShapeChoice, *, max_batch: int
) -> Proposals:
    """What to try besides the baseline; keys of its own such as warm_up are kept."""
    found = Proposals()
    others = baseline.others
    found.add(ShapeChoice(others=others))
    _static(found, workload, baseline)
    _capped(found, workload, signature, baseline)
    buckets = _buckets(found, workload, signature)
    for sizes in buckets:
        found.add(ShapeChoice(strategy="bucketed", sizes=sizes, others=others))
    if signature.has_batch and max_batch > 1:
        rows = {"batch": powers_of_two(max_batch)}
        found.add(ShapeChoice(strategy="partitioned", sizes=rows, others=others))
        if buckets:
            found.add(ShapeChoice(strategy="partitioned", sizes={**rows, **buckets[-1]}, others=others))
    found.choices = [choice for choice in found.choices if choice != baseline]
    return found


def _static(found: Proposals, workload: Workload, baseline: ShapeChoice) -> None:
    if not workload.dimensions:
        return
    hot = hot_shapes(workload, most=MOST_STATIC, least_share=HOT_SHARE)
    if not hot:
        found.left_out.append(f"static shapes: none has {HOT_SHARE:.0%} of the requests")
        return
    found.add(ShapeChoice(static=hot, others=baseline.others))


def _capped(found: Proposals, workload: Workload, signature: ModelSignature, baseline: ShapeChoice) -> None:
    rounded = [
        bounds.maximum is None
        for number, bounds in enumerate(signature.bounds)
        if signature.paddable[number]
        or (signature.has_batch and number == 0 and not signature.strategy.alone)
    ]
    if not rounded or any(rounded):
        why = "nothing may be padded" if not rounded else "a dimension to round has no upper bound"
        found.left_out.append(f"max_prepared: {why}")
        return
    # Calls have more shapes than requests: each length times each number of rows.
    distinct = len(workload.counts())
    for cap in CAPS:
        if distinct * 2 >= cap:
            found.add(ShapeChoice(max_prepared=cap, others=baseline.others))


def _buckets(
    found: Proposals, workload: Workload, signature: ModelSignature
) -> list[dict[str, tuple[int, ...]]]:
    """Sizes for every dimension that may be padded, learned from the trace, up to what the model takes."""
    first = 1 if signature.has_batch else 0
    names = [
        (number, signature.dimensions[number])
        for number in range(first, len(signature.dimensions))
        if signature.paddable[number]
    ]
    if not names:
        found.left_out.append("bucketed: `pad` allows no dimension to be padded")
        return []
    endless = [name for number, name in names if signature.bounds[number].maximum is None]
    if endless:
        # Its last bucket would refuse requests that are served today.
        found.left_out.append(f"bucketed: {endless[0]} has no upper bound (state it in the input's shape)")
        return []
    tried: list[dict[str, tuple[int, ...]]] = []
    for most in BUCKETS:
        sizes: dict[str, tuple[int, ...]] = {}
        for number, name in names:
            largest = signature.bounds[number].maximum
            assert largest is not None  # endless ones were left out
            sizes[name] = best_boundaries(workload.counts_along(number), most, largest)
        if sizes not in tried:
            tried.append(sizes)
    return tried

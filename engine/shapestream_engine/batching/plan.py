"""What goes into one inference call: the call's sizes, and those of each request in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shapestream_engine.errors import ShapeError
from shapestream_engine.signature import ModelSignature

__all__ = ["Call", "merge_sizes", "padding_ratio"]


@dataclass(frozen=True, slots=True)
class Call:
    """One inference call. All sizes are parallel to the signature's `dimensions`."""

    sizes: tuple[int, ...]
    """Of the call, padding included."""
    members: tuple[tuple[int, ...], ...]
    """Of each request, in the order of their rows in the call."""

    @classmethod
    def of(cls, signature: ModelSignature, members: Sequence[tuple[int, ...]]) -> Call:
        """The smallest call that holds these requests; raises `ShapeError` where they cannot share one."""
        return cls(merge_sizes(signature, members), tuple(members))


def merge_sizes(signature: ModelSignature, member_sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The sizes of the smallest call that holds these requests.

    Rows add up, paddable dimensions take the largest. Raises `ShapeError` for no request at all, for several
    on a model without a batch axis, and where a dimension that may not be padded differs.
    """
    if not member_sizes:
        raise ShapeError("a call needs at least one request")
    if len(member_sizes) == 1:
        return member_sizes[0]
    if not signature.has_batch:
        raise ShapeError(f"model {signature.name!r} has no batch axis; it runs one request per call")
    merged = [sum(sizes[0] for sizes in member_sizes)]
    for number in range(1, len(signature.dimensions)):
        found = {sizes[number] for sizes in member_sizes}
        if len(found) > 1 and not signature.paddable[number]:
            raise ShapeError(
                f"requests whose {signature.dimensions[number]!r} differs cannot share a call, since it may "
                f"not be padded: {sorted(found)}"
            )
        merged.append(max(found))
    return tuple(merged)


def padding_ratio(call: Call, signature: ModelSignature) -> float:
    """Input elements of the call that are only padding / all of them; 0 for a call without elements."""
    computed = _elements(signature, call.sizes)
    if computed == 0:
        return 0.0
    return 1.0 - sum(_elements(signature, sizes) for sizes in call.members) / computed


def _elements(signature: ModelSignature, sizes: tuple[int, ...]) -> int:
    # An input without padding has the same elements in the call as in its requests and counts on both sides.
    return sum(math.prod(shape) for shape in signature.input_shapes(sizes))

"""From requests to one inference call and back."""

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.plan import Call, merge_sizes, padding_ratio

__all__ = ["Assembly", "Call", "merge_sizes", "padding_ratio"]

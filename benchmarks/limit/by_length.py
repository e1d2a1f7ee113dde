"""Thirty-two at a time of the sorted trace, padded to the longest: what scripts do that have all sentences at hand."""

from __future__ import annotations

from benchmarks.limit.cuts import by_rows
from benchmarks.limit.oracle import Plan

ROWS = 32


def plan(like: Plan) -> Plan:
    """On the same engine as another plan."""
    return Plan(
        title=f"sorted by length, {ROWS} rows", model=like.model, cut=lambda lengths: by_rows(lengths, ROWS)
    )

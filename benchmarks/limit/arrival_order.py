"""Sixteen at a time in order of arrival, padded to the longest: what servers commonly do with what waits."""

from __future__ import annotations

from benchmarks.limit.cuts import in_order
from benchmarks.limit.oracle import Plan

ROWS = 16


def plan(like: Plan) -> Plan:
    """On the same engine as another plan."""
    return Plan(
        title=f"arrival order, {ROWS} rows", model=like.model, cut=lambda lengths: in_order(lengths, ROWS)
    )

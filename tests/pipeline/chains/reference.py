"""Chains run one stage after the other, and one row after the other, by NumPy: it shares nothing with the product."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.pipeline.chains.models import FUNCTIONS, Array

LISTS = {"norm": {"a"}, "split": {"parts"}, "blocks": {"tables"}, "pick": {"rows"}, "flat": set()}
"""Outputs whose rows may differ in shape."""
WIDTHS = {"b": 3, "o": 3}


class Failed(Exception):
    """The chain has no result."""


def evaluate(stages: list[dict[str, Any]], x: Array, *, skips: bool) -> dict[str, Any]:
    """The value of every output of every stage; `stages`: name, model, source, how."""
    values: dict[str, Any] = {"x": x}
    for stage in stages:
        given, model = values[stage["source"]], stage["model"]
        how = stage["how"]
        if how in ("whole", "batch"):
            if how == "batch" and isinstance(given, list):
                if len({array.shape for array in given}) > 1:
                    raise Failed
                if not given:
                    values |= _nothing(stage)
                    continue
                given = np.stack(given)
            elif how == "batch" and not len(given):
                values |= _nothing(stage)
                continue
            values |= {f"{stage['name']}.{name}": value for name, value in _call(model, given).items()}
            continue
        rows = []
        for row in given:
            try:
                rows.append(_row(model, row))
            except Failed:
                if not skips:
                    raise
                rows.append(None)
        values |= _gathered(stage, rows)
        if skips:
            values[f"{stage['name']}.ok"] = np.array([row is not None for row in rows], bool)
    return values


def _call(model: str, given: Array) -> dict[str, Any]:
    if given.ndim == 2 and not 1 <= given.shape[1] <= 9:
        raise Failed
    (argument,) = ["v" if model == "flat" else "x"]
    try:
        return FUNCTIONS[model](**{argument: given})
    except ValueError:
        raise Failed from None


def _row(model: str, row: Array) -> dict[str, Any]:
    if model == "norm" and row.ndim == 1:
        return {name: value[0] for name, value in _call(model, row[None]).items()}
    return _call(model, row)


def _gathered(stage: dict[str, Any], rows: list[dict[str, Any] | None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, name = stage["model"], stage["name"]
    for output in ("a", "b") if model == "norm" else ("rows",) if model == "pick" else ("o",):
        # An item that brings rows of its own has results of several rows.
        listed = output in LISTS[model] or stage["rank"] == 2
        values = [None if row is None else row[output] for row in rows]
        if listed:
            empty = np.zeros((0,) * stage["rank"], np.float32)
            found[f"{name}.{output}"] = [empty if value is None else value for value in values]
        else:
            width = WIDTHS[output]
            table = [np.zeros(width, np.float32) if value is None else value for value in values]
            found[f"{name}.{output}"] = np.array(table, np.float32).reshape(len(rows), width)
    return found


def _nothing(stage: dict[str, Any]) -> dict[str, Any]:
    name = stage["name"]
    return {f"{name}.a": np.zeros((0, 0), np.float32), f"{name}.b": np.zeros((0, 3), np.float32)}

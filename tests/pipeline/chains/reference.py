"""Chains run one stage after the other, and one row after the other, by NumPy: it shares nothing with the product."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.pipeline.chains.models import FUNCTIONS, Array

WIDE = {
    "norm": ("x",),
    "split": ("x",),
    "blocks": ("x",),
    "pick": ("x",),
    "mix": ("x",),
    "weigh": ("t",),
    "both": ("x", "y"),
}
"""Inputs that have one to nine columns."""
BY_ROW = ("norm", "mix")
"""Models whose requests are rows: what has one dimension less is one row."""
EMPTY = {"a": (0, 0), "b": (0, 3), "rows": (0, 0)}
"""The shapes of what has no rows. Other outputs are never empty."""
LISTS = {"split": "parts", "blocks": "tables"}
FIXED = {"o": (3,), "total": ()}
"""The shapes of outputs that have only one."""


class Failed(Exception):
    """The chain has no result."""


@dataclass(frozen=True)
class Fed:
    """One input of a stage: where it comes from, and how: whole, batch, row or item."""

    port: str
    source: str
    how: str


@dataclass(frozen=True)
class Step:
    """One stage."""

    name: str
    model: str
    fed: tuple[Fed, ...]
    one_row: bool
    """True if each of its requests is one row of its model's batch."""
    outputs: Mapping[str, str]
    """The kinds of its outputs."""

    @property
    def is_several(self) -> bool:
        """It has a request for each row or item."""
        return any(fed.how in ("row", "item") for fed in self.fed)


def evaluate(
    steps: Sequence[Step], inputs: Mapping[str, Array], used: Container[str], *, skips: bool
) -> dict[str, Any]:
    """The value of every output of every stage; `used` are those that something takes."""
    values: dict[str, Any] = {**inputs}
    for step in steps:
        given = {fed.port: values[fed.source] for fed in step.fed}
        if step.is_several:
            found = _several(step, given, skips=skips)
        elif _has_rows(step, given):
            found = _call(step.model, given)
        elif step.model in LISTS:
            found = {LISTS[step.model]: []}
        else:
            if any(f"{step.name}.{output}" in used for output in step.outputs if output not in EMPTY):
                raise Failed
            found = {output: np.zeros(EMPTY.get(output, 0), np.float32) for output in step.outputs}
        values |= {f"{step.name}.{output}": value for output, value in found.items()}
    return values


def _has_rows(step: Step, given: dict[str, Any]) -> bool:
    """Make arrays of the lists that go as one batch; tell whether the batches, if there are any, have rows."""
    batches = [fed.port for fed in step.fed if fed.how == "batch"]
    if len({len(given[port]) for port in batches}) > 1:
        raise Failed
    if batches and not len(given[batches[0]]):
        return False
    for port in batches:
        if isinstance(given[port], list):
            if len({array.shape for array in given[port]}) > 1:
                raise Failed
            given[port] = np.stack(given[port])
    return True


def _several(step: Step, given: dict[str, Any], *, skips: bool) -> dict[str, Any]:
    spread = [fed.port for fed in step.fed if fed.how in ("row", "item")]
    counts = {len(given[port]) for port in spread}
    if len(counts) > 1:
        raise Failed
    rows: list[dict[str, Any] | None] = []
    for index in range(counts.pop()):
        mine = {port: value[index] if port in spread else value for port, value in given.items()}
        try:
            rows.append(_row(step, mine))
        except Failed:
            if not skips:
                raise
            rows.append(None)
    found = {output: _gathered(step, output, rows) for output in step.outputs if output != "ok"}
    return found | {"ok": np.array([row is not None for row in rows], bool)}


def _row(step: Step, given: dict[str, Any]) -> dict[str, Any]:
    if step.model not in BY_ROW:
        return _call(step.model, given)
    answer = _call(step.model, {port: each if each.ndim == 2 else each[None] for port, each in given.items()})
    return {name: value[0] for name, value in answer.items()} if step.one_row else answer


def _call(model: str, given: dict[str, Any]) -> dict[str, Any]:
    if not all(1 <= given[port].shape[1] <= 9 for port in WIDE.get(model, ())):
        raise Failed
    if model == "mix" and (given["y"].shape[1] != 3 or len(given["x"]) != len(given["y"])):
        raise Failed
    try:
        return FUNCTIONS[model](**given)
    except ValueError:
        raise Failed from None


def _gathered(step: Step, output: str, rows: list[dict[str, Any] | None]) -> Any:
    """A table, or a list where shapes may differ; zeros of the smallest shape for rows without a result."""
    shape = FIXED.get(output, EMPTY.get(output, ()))
    if step.one_row:
        shape = shape[1:]
    nothing = np.zeros(shape, np.float32)
    found = [nothing if row is None else row[output] for row in rows]
    if output in FIXED or (step.one_row and output == "b"):
        return np.array(found, np.float32).reshape(len(rows), *shape)
    return found

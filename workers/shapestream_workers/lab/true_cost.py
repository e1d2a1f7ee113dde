"""True costs of calls in a simulation, which the scheduler's cost model must learn.

They share no code with `shapestream.scheduling`: a planner that is measured by its own predictions is always right. Costs
come from a file, a measurement of the configuration's models, or a formula.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import ceil, exp, isfinite, prod
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from shapestream.errors import ConfigurationError
from shapestream.scheduling.events import ModelProfile
from shapestream.settings import LoadedSettings
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.errors import EngineError

_FORMULA_WORDS = {
    "fixed_ms": ("fixed_s", 1e-3),
    "ms_per_row": ("per_row_s", 1e-3),
    "ms_per_element": ("per_element_s", 1e-3),
    "ms_per_pair": ("per_pair_s", 1e-3),
    "prepare_ms": ("prepare_s", 1e-3),
    "full_rows": ("full_rows", 1.0),
    "step_rows": ("step_rows", 1.0),
}
"""Words of a formula, with the fields of `FormulaCost` and their units."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrueCost(ABC):
    """Seconds of a slot's time for one call of one model."""

    has_batch: bool = True
    prepare_s: float = 0.0
    """Extra seconds of the first call of a shape, once per worker."""
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, init=False)

    def seconds(self, sizes: tuple[int, ...]) -> float:
        """Return the seconds of a call of these sizes with a prepared shape; the same every time."""
        seconds = self._known.get(sizes)
        if seconds is None:
            seconds = self._known[sizes] = self._seconds(sizes)
        return seconds

    @abstractmethod
    def _seconds(self, sizes: tuple[int, ...]) -> float: ...

    @abstractmethod
    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """Return the table that a calibration would have measured."""


@dataclass(slots=True, kw_only=True, eq=False)
class FormulaCost(TrueCost):
    """Cost by formula: fixed + rows x (per row + per element x elements of a row + per pair x their square)."""

    fixed_s: float = 0.0
    per_row_s: float = 0.0
    per_element_s: float = 0.0
    per_pair_s: float = 0.0
    """Of two elements of one row, as in attention."""
    full_rows: float = 0
    """Rows that fill the device: fewer take as long."""
    step_rows: float = 1
    """Rows that are computed together: their number is rounded up to a multiple of it."""
    largest: tuple[int, ...] = ()
    """Largest sizes of a calibration."""

    def _seconds(self, sizes: tuple[int, ...]) -> float:
        rows, shape = (sizes[0], sizes[1:]) if self.has_batch else (1, sizes)
        row = float(prod(shape))
        each_s = self.per_row_s + self.per_element_s * row + self.per_pair_s * row * row
        computed = max(self.full_rows, ceil(rows / self.step_rows) * self.step_rows)
        return self.fixed_s + computed * each_s

    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """Return a small grid of powers of two; every other one with three or more dimensions."""
        axes = []
        for number in range(len(dimensions)):
            is_rows = number == 0 and self.has_batch
            largest = max_batch if is_rows else (self.largest or (256,) * len(dimensions))[number]
            step = 2 if len(dimensions) < 3 else 4
            axis = [1]
            while axis[-1] * step < largest:
                axis.append(axis[-1] * step)
            axes.append([*axis, largest] if largest > 1 else axis)
        points = tuple(
            CostPoint(
                sizes=shape,
                seconds=self.seconds(shape),
                first_seconds=self.seconds(shape) + self.prepare_s if self.prepare_s else None,
            )
            for shape in product(*axes)
        )
        return CostTable(key=profile_key, dimensions=dimensions, points=points)


class TableCost(TrueCost):
    """Cost by a measured table, interpolated; at its points exactly the measured seconds.

    A fit of fixed + per row + per element, with relative errors, gives the rough height anywhere, beyond the table
    too. The factors by which the points differ from it are spread to their surroundings, weighted by the inverse third
    power of the distance between logarithms of sizes (Shepard, 1968).
    """

    def __init__(self, table: CostTable, *, has_batch: bool = True) -> None:
        """Raise `ConfigurationError` for a table without points."""
        if not table.points:
            raise ConfigurationError(["the cost table is empty: nothing to simulate with"])
        extra = [
            point.first_seconds - point.seconds for point in table.points if point.first_seconds is not None
        ]
        # The median over the table's first calls.
        prepare_s = max(0.0, float(np.median(extra))) if extra else 0.0
        super().__init__(has_batch=has_batch, prepare_s=prepare_s)
        self._table = table
        self._exact = {point.sizes: point.seconds for point in table.points}
        sizes = np.array([point.sizes for point in table.points], np.float64)
        seconds = np.maximum(np.array([point.seconds for point in table.points]), 1e-9)
        self._weights = _fit(self._features(sizes), seconds)
        self._logs = np.log(np.maximum(sizes, 1.0))
        self._off = np.log(seconds / (self._features(sizes) @ self._weights))

    def _features(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        rows = sizes[:, 0] if self.has_batch and sizes.shape[1] else np.ones(len(sizes))
        return np.stack([np.ones(len(sizes)), rows, sizes.prod(axis=1)], axis=1)

    def _seconds(self, sizes: tuple[int, ...]) -> float:
        if (exact := self._exact.get(sizes)) is not None:
            return exact
        at = np.array([sizes], np.float64)
        rough = float((self._features(at) @ self._weights)[0])
        distance = np.sqrt(((self._logs - np.log(np.maximum(at, 1.0))) ** 2).sum(axis=1))
        near = 1.0 / np.maximum(distance, 1e-6) ** 3
        return rough * exp(float(near @ self._off / near.sum()))

    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """Return the table itself."""
        return self._table


def _fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least squares of relative errors without negative coefficients: the most negative one is dropped in
    turn."""
    used = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, used] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(used) == 1:
            weights = np.zeros(features.shape[1])
            weights[used] = np.maximum(found, 1e-12)
            return weights
        del used[worst]


def parse_formula(text: str, *, has_batch: bool = True, largest: Sequence[int] = ()) -> FormulaCost:
    """Read `fixed_ms=3,ms_per_element=0.13[,ms_per_row=0.1][,prepare_ms=0]`; raises `BadParameter`."""
    values: dict[str, float] = {}
    for part in text.split(","):
        word, equals, number = part.partition("=")
        word = word.strip()
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        field_of, unit = _FORMULA_WORDS.get(word, ("", 1.0))
        least = 1.0 if field_of.endswith("rows") else 0.0
        if not field_of or not equals or not isfinite(value) or value < least or field_of in values:
            expected = ", ".join(
                f"{known}={'N' if known.endswith('rows') else 'MS'}" for known in _FORMULA_WORDS
            )
            raise typer.BadParameter(f"cost {text!r}: {part!r} is none of {expected}")
        values[field_of] = value * unit
    if not any(values.get(name) for name in ("fixed_s", "per_row_s", "per_element_s", "per_pair_s")):
        raise typer.BadParameter(f"cost {text!r}: calls that take no time cannot be simulated")
    return FormulaCost(**values, has_batch=has_batch, largest=tuple(largest))


def true_costs(
    formulae: Sequence[str],
    path: Path | None,
    loaded: LoadedSettings | None,
    profiles: Sequence[ModelProfile],
    largest: Mapping[str, tuple[int, ...]],
) -> dict[str, TrueCost]:
    """Return the true costs of each model: from a file, else measured for a configuration, else by formula.

    `largest` are the largest sizes of each model's requests. Raises `ConfigurationError` for a model without costs.
    """
    tables: dict[str, CostTable] = {}
    if path is not None:
        tables = _read_tables(path)
    elif loaded is not None and not formulae:
        from shapestream_workers.costs import costs_of

        tables = {report.model: report.calibration.table for report in costs_of(loaded)}
    # One table is for the only model, whatever it is called.
    only = next(iter(tables.values())) if len(tables) == len(profiles) == 1 else None
    by_name = {name: formula for name, _, formula in (text.rpartition("/") for text in formulae)}
    costs: dict[str, TrueCost] = {}
    for profile in profiles:
        if (table := tables.get(profile.name, only)) is not None:
            if table.dimensions != profile.dimensions:
                raise ConfigurationError(
                    [
                        f"{path}: costs of {', '.join(table.dimensions)}; "
                        f"model {profile.name!r} has {', '.join(profile.dimensions)}"
                    ]
                )
            costs[profile.name] = TableCost(table, has_batch=profile.has_batch)
        elif (formula := by_name.get(profile.name, by_name.get(""))) is not None:
            costs[profile.name] = parse_formula(
                formula, has_batch=profile.has_batch, largest=largest[profile.name]
            )
        else:
            raise typer.BadParameter(
                f"no costs of model {profile.name!r}: --costs FILE (a measured table), or a formula such as "
                f"--cost fixed_ms=3,ms_per_element=0.13"
            )
    return costs


def _read_tables(path: Path) -> dict[str, CostTable]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(table["model"]): CostTable.from_dict(table) for table in found}
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigurationError([f"{path}: {reason}"]) from error
    except (ValueError, RecursionError, EngineError, TypeError, KeyError) as error:
        message = f"{path}: {error} (expected what `models CONFIG --costs --json` prints)"
        raise ConfigurationError([message]) from error

"""Where a simulation's costs come from: a file, a measurement of the configuration's models, or a formula."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shapestream.errors import ConfigurationError
from shapestream.scheduling.events import ModelProfile
from shapestream.settings import LoadedSettings
from shapestream.simulation.distributions import BadText
from shapestream.simulation.true_cost import TableCost, TrueCost, parse_formula
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError

__all__ = ["true_costs"]


def true_costs(
    formulae: Sequence[str],
    path: Path | None,
    loaded: LoadedSettings | None,
    profiles: Sequence[ModelProfile],
    largest: Mapping[str, tuple[int, ...]],
) -> dict[str, TrueCost]:
    """What calls of each model cost: from a file, else measured for a configuration, else by formula.

    `largest` are the largest sizes of each model's requests. Raises `ConfigurationError` for a model without costs.
    """
    tables: dict[str, CostTable] = {}
    if path is not None:
        tables = _read_tables(path)
    elif loaded is not None and not formulae:
        tables = _measured_tables(loaded)
    costs: dict[str, TrueCost] = {}
    for profile in profiles:
        formula = _formula(formulae, profile, largest[profile.name])
        table = tables.get(profile.name) or (tables.get("") if len(tables) == 1 else None)
        if table is None and len(tables) == 1 and len(profiles) == 1:
            table = next(iter(tables.values()))
        if table is not None:
            if table.dimensions != profile.dimensions:
                raise ConfigurationError(
                    [
                        f"{path}: costs of {', '.join(table.dimensions)}; "
                        f"model {profile.name!r} has {', '.join(profile.dimensions)}"
                    ]
                )
            costs[profile.name] = TableCost(table, has_batch=profile.has_batch)
        elif formula is not None:
            costs[profile.name] = formula
        else:
            raise BadText(
                [
                    f"no costs of model {profile.name!r}: --costs FILE (a measured table), or a formula such as "
                    f"--cost fixed_ms=3,ms_per_element=0.13"
                ]
            )
    return costs


def _formula(texts: Sequence[str], profile: ModelProfile, largest: tuple[int, ...]) -> TrueCost | None:
    """The formula of this model, `NAME/...`, else the one for all."""
    for named in (True, False):
        for text in texts:
            name, slash, rest = text.partition("/")
            if named and slash and name == profile.name:
                return parse_formula(rest, has_batch=profile.has_batch, largest=largest)
            if not named and not slash:
                return parse_formula(text, has_batch=profile.has_batch, largest=largest)
    return None


def _read_tables(path: Path) -> dict[str, CostTable]:
    """One table, or several by model; a table without a name is for the only model."""
    try:
        plain: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigurationError([f"{path}: {reason}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError([f"{path}: not JSON: {error}"]) from error
    try:
        return _tables(plain)
    except (EngineError, TypeError, KeyError) as error:
        message = f"{path}: {error} (expected what `models CONFIG --costs --json` prints, or one cost table)"
        raise ConfigurationError([message]) from error


def _tables(plain: Any) -> dict[str, CostTable]:
    """By model: of a list of tables that name theirs, of a mapping, or of one table without a name."""
    match plain:
        case {"points": _}:
            return {str(plain.get("model", "")): CostTable.from_dict(plain)}
        case {}:
            return {str(name): CostTable.from_dict(table) for name, table in plain.items()}
        case [*tables]:
            return {str(table["model"]): CostTable.from_dict(table) for table in tables}
        case _:
            raise TypeError("neither a list nor a mapping")


def _measured_tables(loaded: LoadedSettings) -> dict[str, CostTable]:
    """As the workers of this file measured them here, or measured now."""
    from shapestream_workers.costs_report import costs_of

    return _tables(json.loads("\n".join(costs_of(loaded, as_json=True))))

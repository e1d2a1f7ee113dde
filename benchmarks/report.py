"""Tables of figures with their aims, for people and as JSON."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, and its aim where it has one."""

    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the aim was reached; None without an aim."""
        if self.at_most is not None:
            return self.value <= self.at_most
        if self.at_least is not None:
            return self.value >= self.at_least
        return None

    def __str__(self) -> str:
        if self.unit == "/s":
            return f"{self.value:,.0f}"
        if self.unit in ("s", "ms", "x"):
            return f"{self.value:.2f} {self.unit}"
        return f"{self.value:.0f} MB" if self.unit == "MB" else f"{self.value:.0f}"

    @property
    def aim(self) -> str | None:
        """The aim in words."""
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}".strip()
        if self.at_least is not None:
            return f">= {self.at_least:g} {self.unit}".strip()
        return None

    def styled(self) -> str:
        """With a mark and a colour that tell whether the aim was reached."""
        match self.reached:
            case True:
                return f"[green]{self} ✓[/green]"
            case False:
                return f"[yellow]{self} ✗[/yellow]"
            case _:
                return str(self)


@dataclass(slots=True, kw_only=True)
class Report:
    """One table."""

    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str | Figure, ...]] = field(default_factory=list)

    def table(self) -> Table:
        """For a terminal."""
        table = Table(
            title=self.title,
            title_justify="left",
            title_style="bold",
            caption=self._aims() or None,
            caption_justify="left",
        )
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(*(cell.styled() if isinstance(cell, Figure) else cell for cell in row))
        return table

    def _aims(self) -> str:
        """Once for a column where all of its aims are the same."""
        by_column: dict[str, dict[str, str]] = {}
        for row in self.rows:
            for column, cell in zip(self.columns, row, strict=True):
                if isinstance(cell, Figure) and cell.aim is not None:
                    by_column.setdefault(column, {})[str(row[0])] = cell.aim
        aims: list[str] = []
        for column, of_rows in by_column.items():
            if len(of_rows) > 1 and len(set(of_rows.values())) == 1:
                aims.append(f"{column}: {next(iter(of_rows.values()))}")
            else:
                aims += [f"{row}, {column}: {aim}" for row, aim in of_rows.items()]
        return "aims: " + "; ".join(aims) if aims else ""

    def plain(self) -> dict[str, Any]:
        """For a script."""
        return {
            "title": self.title,
            "rows": [
                {
                    column: cell.value if isinstance(cell, Figure) else cell
                    for column, cell in zip(self.columns, row, strict=True)
                }
                for row in self.rows
            ],
        }


def median_us(figures: Sequence[float], at_most: float | None = None) -> Figure:
    """The median of the rounds, in microseconds."""
    return Figure(statistics.median(figures), "us", at_most=at_most)


def median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios; infinity where the others took no time that a clock saw, as in a smoke run."""
    return statistics.median(
        one / other if other else math.inf for one, other in zip(mine, theirs, strict=True)
    )


def print_reports(measure: Callable[[Path], Iterable[Report]], *, as_json: bool) -> None:
    """Measure in a temporary folder and print the tables; as JSON, these go to stderr and the figures to stdout."""
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name:
        reports = list(measure(Path(name)))
    for report in reports:
        console.print(report.table())
    if as_json:
        print(json.dumps([report.plain() for report in reports], indent=2))

"""The table of limits in docs/security.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _rows() -> list[list[str]]:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _default(owner: Any, name: str) -> Any:
    """The value of a constant, or the default of a field."""
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return owner.model_fields[name].default
    if isinstance(owner, type) and is_dataclass(owner):
        return next(field.default for field in fields(owner) if field.name == name)
    return getattr(owner, name)


def test_the_table_is_not_empty() -> None:
    """A row for each limit, and each limit once."""
    names = [row[5] for row in _rows()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0])
def test_a_limit_is_what_the_table_says(row: list[str]) -> None:
    """Its number, with its unit."""
    what, number, of, checked, refused, where = row
    assert all((what, of, checked, refused))
    file, name = re.fullmatch(r"`(.+)\.py` `(.+)`", where).groups()  # type: ignore[union-attr] # or the test fails
    package = "shapestream_engine" if file.startswith("backends/") else "shapestream"
    owner: Any = import_module(f"{package}.{file.replace('/', '.')}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    amount, _, unit = number.partition(" ")
    assert int(amount) * UNITS[unit] == _default(owner, last)

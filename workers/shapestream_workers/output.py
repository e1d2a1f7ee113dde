"""Answers of commands on stdout: lines for people, or JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def print_answer(lines: Iterable[str], found: Any, *, as_json: bool) -> None:
    """Print `lines`, or `found` as JSON."""
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in lines:
            typer.echo(line)

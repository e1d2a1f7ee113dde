"""`python docs/log_events.py`: write the table of events in docs/logging.md anew, from the calls of the log in the code.

Event, level and keys come from the code; the last column is the page's own and is kept by event. An event below a table
gets a meaning by a row in it.
`tests/pipeline/telemetry/test_log_events.py` compares the page with the code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "logging.md"
BEGIN = "<!-- written by docs/log_events.py; the last column by hand -->\n"
END = "<!-- end of what docs/log_events.py writes -->\n"
HEAD = "| event, with keys of its own | meaning, and what to do |\n|---|---|\n"
LEVELS = ("error", "warning", "info", "debug")
"""The order of the rows."""
METHODS = dict(zip(LEVELS, LEVELS, strict=True), exception="error")
"""Levels by the log's methods."""
COMMON = {"like_it_before", "exc_info", "why", "advice", "what"} | {
    *("batch", "client", "code", "model", "path", "peer", "pid", "port", "request", "requests"),
    *("sequence", "sizes", "slot", "worker"),
}
"""Keys that the page explains once: reasons, and what a line is about."""
SUPERVISED = ("worker", "gateway")
"""Kinds of processes whose events `SupervisedProcesses._log` writes."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(slots=True)
class Event:
    """All calls that write one event."""

    levels: set[str] = field(default_factory=set)
    keys: dict[str, None] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """Its levels, the gravest first."""
        return ", ".join(level for level in LEVELS if level in self.levels)


@cache
def events() -> dict[str, Event]:
    """Every event that engine, pipeline and workers write, the gravest first, then by name."""
    found: dict[str, Event] = {}
    for package in ("engine", "pipeline", "workers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, level, keys in _calls(ast.parse(path.read_text(encoding="utf-8"))):
                event = found.setdefault(name, Event())
                event.levels.add(level)
                event.keys.update(dict.fromkeys(key for key in keys if key not in COMMON))
    return dict(sorted(found.items(), key=lambda item: (LEVELS.index(item[1].level.split(",")[0]), item[0])))


def _calls(module: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    """Event, level and keys of every `log.LEVEL(event, …)`, also by a name for it, in one module."""
    for function in (node for node in ast.walk(module) if isinstance(node, FUNCTIONS)):
        names = {
            target.id: _levels(node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            keys = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
            levels = names.get(call.func.id, []) if isinstance(call.func, ast.Name) else _levels(call.func)
            if levels and call.args and (text := _text(call.args[0])) is not None:
                yield from ((text, level, keys) for level in levels)
            elif ast.unparse(call.func) == "self._log" and (text := _text(call.args[1])) is not None:
                for kind in SUPERVISED:
                    yield from ((f"{kind} {text}", level, keys) for level in _levels(call.args[0]))


def _levels(value: ast.expr) -> list[str]:
    """Levels of the log's methods that an expression may be: `log.info`, or a choice of two."""
    if isinstance(value, ast.IfExp):
        return _levels(value.body) + _levels(value.orelse)
    if isinstance(value, ast.Attribute) and value.attr in METHODS and ast.unparse(value.value) == "log":
        return [METHODS[value.attr]]
    return []


def _text(value: ast.expr) -> str | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def meanings(page: str) -> dict[str, str]:
    """The last column of the page's tables, by event."""
    rows = re.findall(r"^\| `(.+?)`.*? \| (.*) \|$", page.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)
    return dict(rows)


def updated(page: str) -> str:
    """A page with the events of the present code: a table per level, and what needs no meaning in a line below it."""
    before, _, rest = page.partition(BEGIN)
    kept = meanings(page)
    rows, plain = dict.fromkeys(LEVELS, ""), {level: list[str]() for level in LEVELS}
    for name, event in events().items():
        level, *others = event.level.split(", ")
        facts = "; ".join(filter(None, ["".join(f"also {other}" for other in others), ", ".join(event.keys)]))
        cell = f"`{name}`{facts and f' ({facts})'}"
        if kept.get(name) or level in ("error", "warning"):
            rows[level] += f"| {cell} | {kept.get(name, '')} |\n"
        else:
            plain[level].append(cell)
    written = ""
    for level in LEVELS:
        also = f"Also: {', '.join(plain[level])}.".replace(" ", "\0").replace(
            ",\0`", ", `"
        )  # a name stays on one line
        also = textwrap.fill(also, 118, break_on_hyphens=False).replace("\0", " ")
        written += f"\n### {level}\n\n{HEAD}{rows[level]}" + (f"\n{also}\n" if plain[level] else "")
    return before + BEGIN + written + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

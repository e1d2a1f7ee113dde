"""The docstrings of Python's standard library, read with `ast`: nothing is imported, nothing runs."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Not for readers: tests, vendored packages, and names that start with an underscore.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "_vendor", "__pycache__"}
)
SEED = 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """What is documented, as a dotted name, and its text."""

    name: str
    text: str


def collect(library: Path | None = None) -> list[Docstring]:
    """Every distinct docstring of a public module, class or function, shuffled the same way each time."""
    root = library or Path(sysconfig.get_path("stdlib"))
    first_by_text: dict[str, Docstring] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts) and not any(
            part.startswith("_") for part in parts if part != "__init__"
        ):
            for found in _docstrings_of(path, ".".join(part for part in parts if part != "__init__")):
                first_by_text.setdefault(found.text, found)
    found_all = list(first_by_text.values())
    random.Random(SEED).shuffle(found_all)
    return found_all


def _docstrings_of(path: Path, module: str) -> Iterator[Docstring]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own sources
        tree = ast.parse(path.read_bytes(), filename=str(path))
    yield from _visit(tree, module)


def _visit(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Docstring]:
    text = ast.get_docstring(node)
    if text and text.strip():
        yield Docstring(name=name, text=text)
    for child in node.body:
        if isinstance(
            child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and not child.name.startswith("_"):
            yield from _visit(child, f"{name}.{child.name}")

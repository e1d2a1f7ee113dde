"""Tests outlive the inside of the product: few of them know a class of the wire, or a name that begins with `_`.

The numbers fall. A test that has to raise one of them shows what a user cannot see; look for what a user does see.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
OF_THE_WIRE = {
    "entries.py",
    "fuzz/targets.py",
    "pipeline/wire/strategies.py",
    "pipeline/wire/test_codec_bad_input.py",
    "pipeline/wire/test_codec_round_trip.py",
    "pipeline/wire/test_protocol_document.py",
}
"""The files that know the wire's classes: the helper of all others, and what tests the encoding itself."""
MOST_PRIVATE = 10
"""Uses of private names in all tests, at most."""
NOT_OURS = {"_exit", "_replace", "_fields"}
"""Public names of Python's that begin with `_`: `os._exit`, and those of a named tuple."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Each file of the tests, by its name, parsed."""
    for path in sorted(TESTS.rglob("*.py")):
        yield path.relative_to(TESTS).as_posix(), ast.parse(path.read_text())


def knows_the_wire(node: ast.AST) -> bool:
    """Whether it imports the module of the entries, or a class from there."""
    match node:
        case ast.ImportFrom(module="shapestream.wire.messages"):
            return True
        case ast.ImportFrom(module="shapestream.wire", names=names):
            return any(alias.name == "messages" for alias in names)
        case ast.Import(names=names):
            return any(alias.name == "shapestream.wire.messages" for alias in names)
    return False


def private(name: str) -> bool:
    """Whether it is a private name; of a dotted one, its last part counts."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__") and last not in NOT_OURS


def private_uses(node: ast.AST) -> list[str]:
    """Private names of other objects than `self` that it reads, imports, or replaces by name."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return []
        case ast.Attribute(attr=name):
            return [name] * private(name)
        case ast.ImportFrom(names=names):
            return [alias.name for alias in names if private(alias.name)]
        case ast.Call(
            func=ast.Attribute(attr="setattr" | "delattr") | ast.Name(id="setattr" | "getattr" | "delattr")
        ):
            words = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            return [word for word in words if isinstance(word, str) and private(word)]
    return []


def test_only_tests_of_the_wire_know_its_classes() -> None:
    """All others make and read entries by `tests/entries.py`, so that a class has a new name in one line."""
    assert OF_THE_WIRE == {name for name, tree in trees() if any(map(knows_the_wire, ast.walk(tree)))}


def test_few_tests_look_inside() -> None:
    """A private name stands in a test only where nothing public shows the same."""
    found = [
        f"{name}: {use}" for name, tree in trees() for node in ast.walk(tree) for use in private_uses(node)
    ]
    assert len(found) <= MOST_PRIVATE, "\n".join(found)

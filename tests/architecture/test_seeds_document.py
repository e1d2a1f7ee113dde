"""tests/engine/seeds.md and the tests of its claims say the same of each other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "tests" / "engine" / "seeds.md"
SEEDS = ("S000", "S001", "S002", "S003", "S004")

_ROW = re.compile(
    r"^\| (?P<claim>S\d{3}-\d{2}) \| (?P<text>.+?) \| (?P<verdict>.+?) \| (?P<note>.*?) \| (?P<tests>.*?) \|$"
)
_TEST = re.compile(r"`([\w/.]+::\w+)`")
_REFERENCE = re.compile(r"\bS\d{3}-\d{2}\b")


def rows() -> list[dict[str, str]]:
    """The document's claims."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    matches = [_ROW.match(line) for line in lines if line.startswith("| S")]
    assert None not in matches, "a row of tests/engine/seeds.md has not five columns"
    return [match.groupdict() for match in matches if match is not None]


def marked() -> set[tuple[str, str]]:
    """Claim and test, for every mark in the tests."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.seeds" in text else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.seeds":
                    test = f"{path.relative_to(ROOT / 'tests').as_posix()}::{node.name}"
                    found |= {(ast.literal_eval(argument), test) for argument in decorator.args}
    return found


def test_the_list_and_the_tests_agree_both_ways() -> None:
    """Every test that a claim names checks it, and every test that checks a claim is named there."""
    listed = {(row["claim"], test) for row in rows() for test in _TEST.findall(row["tests"])}
    marks = marked()
    assert set() == listed - marks, "named in tests/engine/seeds.md, and not marked, or not there"
    assert set() == marks - listed, "marked, and not named in tests/engine/seeds.md"


def test_every_claim_has_a_verdict_with_what_it_needs() -> None:
    """A test where it holds; a test and what happens instead where it differs; otherwise a reason and no test."""
    for row in rows():
        has_tests, has_note = bool(_TEST.findall(row["tests"])), bool(row["note"])
        match row["verdict"]:
            case "holds":
                assert has_tests, row
            case "differs":
                assert has_tests, row
                assert has_note, row
            case "not testable here":
                assert not has_tests, row
                assert has_note, row
            case other:
                raise AssertionError(f"{row['claim']}: there is no verdict {other!r}")


def test_claims_are_numbered_without_gaps() -> None:
    """From 01 in each of the five seeds, in order, each once; and what refers to another claim finds it."""
    claims = [row["claim"] for row in rows()]
    counts = Counter(claim[:4] for claim in claims)
    assert tuple(counts) == SEEDS
    assert claims == [f"{seed}-{number:02}" for seed in SEEDS for number in range(1, counts[seed] + 1)]
    referred = {name for row in rows() for name in _REFERENCE.findall(row["text"] + row["note"])}
    assert set() == referred - set(claims)

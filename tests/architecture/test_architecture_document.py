"""docs/architecture.md names the files of today's tree."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "pipeline" / "shapestream"
WORKERS = ROOT / "workers" / "shapestream_workers"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "package", ["chains", "gateway", "loading", "offline", "scheduling", "serving", "web"]
)
def test_each_file_is_in_one_row_of_its_package(package: str) -> None:
    """The table of a package names each of its files once, in the first column, and no other file."""
    _, _, table = PAGE.partition(f"## Files of `{package}/`\n")
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = Counter(name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1]))
    folder = WORKERS / package if package == "offline" else PACKAGES / package
    files = Counter(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
    assert files == named


def _words(title: str) -> list[str]:
    """The words of one of the tables of the glossary."""
    _, _, table = PAGE.partition(f"\n{title}")
    rows = [line for line in table.split("\n\n")[1].splitlines() if line.startswith("| ")][1:]
    return [word.strip() for row in rows for word in row.split("|")[1].split(",")]


def test_the_scheduler_is_explained_with_few_words_each_with_one_meaning() -> None:
    """A word of its glossary is a class of the scheduler, or of nothing."""
    words = _words("Of the scheduler.")
    assert 20 <= len(words) <= 32
    names = {"".join(part.capitalize() for part in re.split("[ -]", word)) for word in words}
    folders = [PACKAGES, ROOT / "engine" / "shapestream_engine", ROOT / "workers" / "shapestream_workers"]
    elsewhere = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in folders
        for path in folder.rglob("*.py")
        if path.parent != PACKAGES / "scheduling"
        for name in re.findall(r"^\s*class _?(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if name in names
    ]
    assert [] == elsewhere


def test_a_word_is_explained_once() -> None:
    """In one of the two tables of the glossary."""
    words = _words("Of the whole system:") + _words("Of the scheduler.")
    assert len(words) == len(set(words))

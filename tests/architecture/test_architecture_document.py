"""docs/architecture.md names the files of today's tree."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "pipeline" / "shapestream"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["chains", "gateway", "scheduling", "serving", "web"])
def test_each_file_is_in_one_row_of_its_package(package: str) -> None:
    """The table of a package names each of its files once, in the first column, and no other file."""
    _, _, table = PAGE.partition(f"## Files of `{package}/`\n")
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = Counter(name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1]))
    files = Counter(path.name for path in (PACKAGES / package).glob("*.py") if path.name != "__init__.py")
    assert files == named

"""docs/hosts.md says of each key of a YAML what it does in a program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from shapestream.local import IGNORED
from shapestream.settings import InProcessSettings, ServerSettings, Settings

PAGE = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """The meaning of each key in the page's table."""
    _, _, table = PAGE.partition("### Which key does what in a program\n")
    table = table.partition("\n## ")[0]
    found = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    return {key: meaning.strip() for keys, meaning in found for key in re.findall(r"`([^`]+)`", keys)}


def test_each_key_has_a_row() -> None:
    """Those of the whole file, and each of the server's."""
    whole = {key for key in Settings.file_keys() if key != "server"}
    server = {f"server.{key}" for key in ServerSettings.file_keys()}
    assert whole | server == {key for key in rows() if not key.startswith(("models[]", "in_process."))}


def test_those_that_are_ignored_are_named_by_the_log_and_no_others() -> None:
    """The table and the warning say the same."""
    assert sorted(IGNORED) == sorted(key for key, meaning in rows().items() if meaning.startswith("ignored"))
    assert {"slots", "threads", "memory_limit", "wide"} == set(InProcessSettings.file_keys())


RANK = """
def rank(x):
    return x.argsort(axis=1).astype("f4")
"""
ASKED = """
    import numpy
    found = client.infer("rank", {"x": numpy.array([[3, 1, 2]], "f4")})
    print(found["y"].tolist())
"""


def test_the_example_with_a_function_runs_as_it_stands(tmp_path: Path) -> None:
    """In a program of its own, beside the module with the function."""
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "my_models" in block
    ]
    (tmp_path / "my_models.py").write_text(RANK)
    (tmp_path / "program.py").write_text(
        "import shapestream.local\n" + example.replace("    ...\n", ASKED.strip("\n") + "\n")
    )
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "SHAPESTREAM_ANY_FUNCTION": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (0, "[[1.0, 2.0, 0.0]]\n") == (ran.returncode, ran.stdout), ran.stderr

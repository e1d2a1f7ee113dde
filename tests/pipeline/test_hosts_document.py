"""docs/hosts.md says of each key of a YAML what it does in a program."""

from __future__ import annotations

import re
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

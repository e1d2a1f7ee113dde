"""What a builder of the image gets: the files that .dockerignore lets through, and the Dockerfile's instructions."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_source(folder: Path) -> None:
    """Copies the files that the ignore file admits. It ignores all (`*`), and has exceptions (`!`) by name."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    assert "*" == lines[0]
    folder.mkdir(parents=True, exist_ok=True)
    for line in lines:
        source, target = ROOT / line[1:], folder / line[1:]
        if line.startswith("!") and source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif line.startswith("!"):
            shutil.copy(source, target)


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile with its words, in order."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(name, words) for name, _, words in (line.partition(" ") for line in text.splitlines() if line)]

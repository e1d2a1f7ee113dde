"""Files that hold secrets, with the rights that such files need."""

from __future__ import annotations

from pathlib import Path


def write_secret(path: Path, content: str) -> Path:
    """Writes a file that only this user may read; returns its path. One that is there keeps its rights."""
    path.touch(mode=0o600)
    path.write_text(content)
    return path

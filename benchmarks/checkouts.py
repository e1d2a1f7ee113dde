"""Checkouts of this repository to compare: their commands run with their own packages and this environment's libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "pipeline", "workers", "")
"""Folders that its processes import from; the benchmarks' own models stand in the root."""
MOST_S = 3600.0
"""Seconds that one command may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A working tree, and what its commands find in their environment besides."""

    name: str
    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, arguments: Sequence[str], given: str = "") -> Any:
        """The JSON that `python ARGUMENTS` prints, with `given` as its standard input.

        Raises RuntimeError with the end of its log when it fails.
        """
        path = os.pathsep.join([str(self.root / folder) for folder in FOLDERS])
        environment = dict(self.environment)
        path = os.pathsep.join([part for part in (environment.pop("PYTHONPATH", ""), path) if part])
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env={**os.environ, "SHAPESTREAM_ANY_FUNCTION": "1", **environment, "PYTHONPATH": path},
            input=given,
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
        if ended.returncode:
            log = f"{ended.stdout[-1000:]}{ended.stderr[-3000:]}"
            raise RuntimeError(f"{self.name}: {' '.join(arguments)} ended with {ended.returncode}:\n{log}")
        return json.loads(ended.stdout)


@contextmanager
def checked_out(commit: str) -> Iterator[Checkout]:
    """A commit in a temporary worktree, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="ss-checkout-") as folder:
        root = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(root), commit)
        try:
            yield Checkout(name=commit, root=root)
        finally:
            _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True)


def stolen_s() -> tuple[float, float]:
    """Seconds of all CPUs so far: in all, and stolen by other guests of the host (`st`); 0.0 where nobody counts them."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0.0, 0.0
    ticks = [int(word) for word in line.split()[1:9]]
    per_s = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / per_s, ticks[7] / per_s

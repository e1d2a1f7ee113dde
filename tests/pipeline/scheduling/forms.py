"""The two forms of the scheduler: Python, and the extensions that `make compiled` makes of it.

`python -m tests.pipeline.scheduling.forms` is a process of one form. It reads a drawn server per line, and writes what its
scheduler decided.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.pipeline.scheduling.any_server import AnyServer
from tests.pipeline.scheduling.seen import Seen

import shapestream
from shapestream.scheduling import scheduler
from shapestream.scheduling.events import Event, ModelProfile

ROOT = Path(__file__).parents[3]
COMPILED = not scheduler.__file__.endswith(".py")


def changed() -> list[str]:
    """Return the sources that are no longer those from which the imported package was made; none of the pure form."""
    imported, source = Path(shapestream.__file__).parent, ROOT / "pipeline" / "shapestream"
    return [
        str(path.relative_to(ROOT))
        for path in sorted(source.glob("scheduling/*.py"))
        if COMPILED and path.read_bytes() != (imported / path.relative_to(source)).read_bytes()
    ]


class Recorded(AnyServer):
    """A server that notes each event and what the scheduler decided about it."""

    def __init__(self, models: Sequence[ModelProfile], seed: int) -> None:
        self.story: list[str] = []
        super().__init__(list(models), seed)

    def play(self, event: Event) -> list[Seen]:
        """Handle an event."""
        actions = super().play(event)
        wakeup = self.scheduler.next_wakeup()
        self.story.append(f"{self.now!r} {type(event).__name__}: {actions!r}, {wakeup!r}")
        return actions


def decisions(models: Sequence[ModelProfile], seed: int) -> list[str]:
    """Return every event of a server's life, with the actions and the next wakeup, as text."""
    server = Recorded(models, seed)
    for _ in range(40):
        server.step()
    server.finish()
    return [*server.story, repr(server.scheduler.statistics())]


class PureProcess:
    """A process whose scheduler is that of the source tree, in Python."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert "pure\n" == process.stdout.readline()

    def decisions(self, models: Sequence[ModelProfile], seed: int) -> list[str]:
        """As the function of that name."""
        print(b64encode(pickle.dumps((models, seed))).decode(), file=self._process.stdin, flush=True)
        return pickle.loads(b64decode(self._process.stdout.readline()))


@contextmanager
def pure_process() -> Iterator[PureProcess]:
    """A process that ends with the block."""
    folders = [str(ROOT / folder) for folder in ("engine", "pipeline", "workers", "")]
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield PureProcess(process)
        process.stdin.close()


if __name__ == "__main__":
    print("compiled" if COMPILED else "pure", flush=True)
    for line in sys.stdin:
        print(b64encode(pickle.dumps(decisions(*pickle.loads(b64decode(line))))).decode(), flush=True)

"""Records a trace while a server serves: called by the journal for every request that arrives.

What is written are times, numbers and sizes; neither data nor anything that names a client. It is for finding out
how the server should be set up, so it gives way: whatever goes wrong ends the recording, never the server.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog

from shapestream.simulation.trace import TraceRequest, header_line, open_text, request_line

__all__ = ["MAX_REQUESTS", "TraceRecorder"]

log = structlog.get_logger()

MAX_REQUESTS = 5_000_000
"""Where a recording ends by itself: about 200 MB as text, 30 MB as .gz."""
FLUSH_S = 1.0
_MAX_NAMES = 1000


class TraceRecorder:
    """Writes one trace file. An existing file is kept: the new one gets a number in its name.

    Raises OSError when the file cannot be made; later troubles are logged once and end the recording.
    """

    def __init__(self, path: str | Path, *, max_requests: int = MAX_REQUESTS) -> None:
        self.path, file = _create(Path(path))
        self._file: IO[str] | None = file
        self._left = max_requests
        self._numbers: dict[str, int] = {}
        self._clients: dict[int, int] = {}
        self._began: float | None = None
        self._flush_at = 0.0
        self.recorded = 0
        if self.path != Path(path):
            log.warning(
                "trace file exists already, another is written", exists=str(path), path=str(self.path)
            )
        log.info("recording a trace of shapes", path=str(self.path), max_requests=max_requests)

    def record(
        self,
        now: float,
        client: int,
        model: str,
        dimensions: tuple[str, ...],
        sizes: tuple[int, ...],
        deadline: float | None,
        priority: int,
    ) -> None:
        """Notes one request; `now` and `deadline` are times of the server's clock. Does nothing once it has ended."""
        file = self._file
        if file is None:
            return
        if self._began is None:
            self._began, self._flush_at = now, now + FLUSH_S
        number = self._numbers.get(model)
        try:
            if number is None:
                number = self._add_model(file, model, dimensions)
            deadline_s = None if deadline is None else max(0.0, deadline - now)
            # Clients are numbered anew, so that a trace says nothing about what came before it.
            alias = self._clients.setdefault(client, len(self._clients))
            at_s = now - self._began
            file.write(request_line(TraceRequest(at_s, number, alias, sizes, deadline_s, priority)))
            self.recorded += 1
            if now >= self._flush_at:
                self._flush_at = now + FLUSH_S
                file.flush()
        except OSError as error:
            self._give_up(str(error))
            return
        self._left -= 1
        if self._left <= 0:
            self._give_up(f"{self.recorded} requests, which is the limit")

    def close(self) -> None:
        """Writes what is left and ends the file; may be called again."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if not self._numbers:
                file.write(header_line({}))
            file.close()
        except OSError as error:
            log.warning("the end of the trace is missing", path=str(self.path), why=str(error))
        log.info("trace recorded", path=str(self.path), requests=self.recorded)

    def _add_model(self, file: IO[str], model: str, dimensions: tuple[str, ...]) -> int:
        if not self._numbers:
            file.write(header_line({model: dimensions}))
        else:
            file.write(json.dumps({"models": {model: dimensions}}) + "\n")
        number = self._numbers[model] = len(self._numbers)
        return number

    def _give_up(self, why: str) -> None:
        log.warning("the recording of the trace ends", path=str(self.path), requests=self.recorded, why=why)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what could not be written before cannot be written now either
                file.close()


def _create(path: Path) -> tuple[Path, IO[str]]:
    """A new file of that name, or of the next one with a number: an earlier trace is never overwritten."""
    stem, dot, suffixes = path.name.partition(".")
    for number in range(1, _MAX_NAMES):
        candidate = path if number == 1 else path.with_name(f"{stem}-{number}{dot}{suffixes}")
        with suppress(FileExistsError):
            return candidate, open_text(candidate, "x")
    raise FileExistsError(f"{path}: there are {_MAX_NAMES} traces of that name")

"""The folder `OUTPUT.parts` of an unfinished run: what is done, what was begun, and for which input and model.

    manifest.json                the input, the model and the options; a run with others is refused
    journal                      what was begun (`attempts.py`)
    FIRST-COUNT-FAILED.parquet   results of COUNT rows from row FIRST on, so many of them failed; or .npz
    lock                         held by the process that runs

Results come in the order of the rows, so parts follow each other without a gap, and the first row to do is the end of the
last part. A part is written under another name, synced, renamed, and its folder synced: after a kill or a power cut it is
there as a whole, or not at all. A row is in a part or is run again: none is lost, and none is there twice. At the end the
parts are merged into OUTPUT in the same way, and the folder goes.

The journal is not synced for each row: it is for kills of the process, which the system's memory survives.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shapestream.errors import ConfigurationError
from shapestream_workers.offline.attempts import ATTEMPT, BEGUN, DONE, LEFT, Outlook, outlook
from shapestream_workers.offline.results import DoneRow, Results

_PART = re.compile(r"(\d{12})-(\d+)-(\d+)\.(?:parquet|npz)")
_UNFINISHED = "unfinished"
"""Beginning of the name of a file that is being written."""


class Parts:
    """The folder of one run, locked by this process until `close`."""

    def __init__(self, output: Path, *, resume: bool) -> None:
        """Lock the folder. Raises `ConfigurationError` where a run is not to go on, runs already, or has its output."""
        self._output = output
        self.folder = output.with_name(f"{output.name}.parts")
        if self.folder.exists() and not resume:
            raise ConfigurationError(
                [f"{self.folder}: an earlier run left it (--resume goes on with it; or remove it)"]
            )
        if output.exists() and not self.folder.exists():
            raise ConfigurationError(
                [f"{output} exists, and is not overwritten (name another file, or remove it)"]
            )
        self._is_new = not self.folder.exists()
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigurationError([f"{self.folder}: another process runs it"]) from None
        self._journal = -1
        for left in self.folder.glob(f"{_UNFINISHED}*"):
            left.unlink()

    def require(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, or hold the one of earlier attempts against it. Raises `ConfigurationError` for another."""
        path = self.folder / "manifest.json"
        if not path.exists():
            self._replace(path, lambda at: at.write_text(json.dumps(manifest, indent=1) + "\n"))
            return
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigurationError([f"{path} cannot be read: {error} (remove {self.folder})"]) from error
        if changed := sorted(
            key for key in manifest.keys() | before.keys() if manifest.get(key) != before.get(key)
        ):
            raise ConfigurationError(
                [
                    f"{self.folder}: it belongs to another run: {', '.join(changed)} changed "
                    "(run with what it was begun with, or remove it)"
                ]
            )

    def paths(self) -> list[Path]:
        """Return the parts in their order. Raises `ConfigurationError` where one is missing."""
        found, end = [], 0
        for path in sorted(self.folder.iterdir()):
            if (match := _PART.fullmatch(path.name)) is not None:
                if int(match[1]) != end:
                    raise ConfigurationError(
                        [f"{self.folder}: the part from row {end} is missing (remove the folder)"]
                    )
                end += int(match[2])
                found.append(path)
        return found

    @property
    def first(self) -> int:
        """The first row that is in no part."""
        paths = self.paths()
        match = _PART.fullmatch(paths[-1].name) if paths else None
        return 0 if match is None else int(match[1]) + int(match[2])

    @property
    def failed(self) -> int:
        """Failed rows of all parts."""
        return sum(int(match[3]) for path in self.paths() if (match := _PART.fullmatch(path.name)))

    def begin(self, *, idempotent: bool) -> Outlook:
        """Begin an attempt, and return what earlier ones mean for it."""
        path = self.folder / "journal"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        found = outlook(lines, first=self.first, idempotent=idempotent)
        # With a line break first: the last line of a killed attempt may lack it.
        self._journal = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._note(f"\n{ATTEMPT}")
        return found

    def begun(self, row: int) -> None:
        """Note that a row is sent now, from any thread."""
        self._note(f"{BEGUN} {row}")

    def done(self, row: int) -> None:
        """Note that the answer of a row is here."""
        self._note(f"{DONE} {row}")

    def keep(self, rows: Sequence[DoneRow], results: Results) -> None:
        """Write a part. Raises OSError, with the earlier parts unharmed."""
        failed = sum(row.outputs is None for row in rows)
        name = f"{rows[0].number:012}-{len(rows)}-{failed}{results.suffix}"
        self._replace(self.folder / name, lambda at: results.write(at, rows))

    def merge(self, results: Results) -> None:
        """Write the output from the parts, and remove the folder. Raises OSError."""
        paths = self.paths()
        self._replace(self._output, lambda at: results.merge(paths, at))
        # First under another name: a folder that is half removed would look like an unfinished run.
        merged = self._output.with_name(f".{self._output.name}.merged")
        shutil.rmtree(merged, ignore_errors=True)
        self.folder.rename(merged)
        shutil.rmtree(merged, ignore_errors=True)

    def close(self) -> None:
        """Say that this attempt ends by itself, and let another process go on. A folder in which nothing was begun goes."""
        if self._journal >= 0:
            with suppress(OSError):  # the disk is full: what is under way counts as one death
                self._note(LEFT)
            os.close(self._journal)
        elif self._is_new:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _note(self, line: str) -> None:
        raw = f"{line}\n".encode()
        with self._kept():
            while raw:  # a disk that becomes full takes a part, without an error
                raw = raw[os.write(self._journal, raw) :]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Say with an error of the disk what becomes of the run."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self.folder}: {error.strerror or error} (parts that are done are kept: --resume goes on)"
            ) from error

    def _replace(self, path: Path, write: Callable[[Path], object]) -> None:
        """Let a file be written beside `path`, and rename it when all of it is on disk."""
        unfinished = self.folder / f"{_UNFINISHED}-{path.name}"
        try:
            with self._kept():
                write(unfinished)
                with open(unfinished, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        for folder in {path.parent, self.folder}:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

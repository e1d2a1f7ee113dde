"""Files: those that another party names, opened only if they are regular, and folders of results for the next start.

A FIFO waits for a writer, and a device may be endless: both would block a reader for ever. Links are followed.

Results, verdicts of proofs and costs of calls, are small JSON files.

The folder is named by an environment variable (`SHAPESTREAM_PROBE_CACHE`, `SHAPESTREAM_COST_CACHE`; `off` disables it),
else it is `$XDG_CACHE_HOME/shapestream/NAME` (`~/.cache/shapestream/NAME`). Unreadable entries are made again. A full or
read-only disk only costs time at the next start.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

_MOST_BYTES = 16 << 20
"""Largest size of an entry in bytes: a hundred times the largest table of corrected costs."""


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """A folder of entries; with the folder None, nothing is kept."""

    VARIABLE: ClassVar[str]
    """Environment variable with the folder; `off` disables it."""
    NAME: ClassVar[str]
    """Name of the folder in the user's cache folder."""
    BELOW: ClassVar[str] = "shapestream"
    """The part of the user's cache folder that holds all of them."""

    folder: Path | None

    @classmethod
    def of_environment(cls) -> Self:
        """Return the folder named by the environment, else the user's."""
        chosen = os.environ.get(cls.VARIABLE, "")
        if chosen == "off":
            return cls(None)
        if chosen:
            return cls(Path(chosen))
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return cls(Path(home).expanduser() / cls.BELOW / cls.NAME)
        except RuntimeError:
            return cls(None)  # the user has no home, as in many containers

    @contextmanager
    def locked(self, key: str) -> Iterator[Path | None]:
        """Yield the path of an entry, locked against other processes inside the block; None if there is no folder.

        An entry of a folder that cannot be written, as that of an image, is read without a lock: nothing replaces it.
        """
        if self.folder is None:
            yield None
            return
        path = self.folder / f"{key}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            lock = os.open(path.with_suffix(".lock"), flags, 0o600)
        except OSError:
            yield path
            return
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                yield None
                return
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(lock)


def read_plain(path: Path | None) -> Any:
    """Read the plain data of a file; None without a readable file."""
    if path is None:
        return None
    try:
        return json.loads(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # missing, no regular file, truncated, or nested too deeply


def write_plain(path: Path | None, plain: Any) -> None:
    """Replace the file as a whole, or leave it unchanged."""
    if path is None:
        return
    try:
        # The temporary file has the entry's name, so that leftovers of killed processes can be found.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f"{path.stem}.", delete=False, encoding="utf-8"
        ) as file:
            try:
                json.dump(plain, file)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(file.name)
    except OSError:
        return


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raises `OSError`, without waiting, for a FIFO, a device or a socket."""
    return open(path, "rb", opener=_opened)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a whole file; raises `OSError` as `open_regular` does, and for a file beyond `most_bytes`."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is longer than {most_bytes} bytes", str(path))
    return data


def _opened(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    # The check concerns the opened file, even if the path changes now.
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", path)

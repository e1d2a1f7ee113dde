"""Folders of small JSON files in which results are kept from one start to the next: proofs, and what calls cost.

Nothing here is needed: what cannot be read is worked out again, and a disk that is full or read-only costs time at
the next start, and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from shapestream_engine.regular_files import read_regular

_MOST_BYTES = 16 << 20
"""Bytes of an entry that is read: a hundred times the largest, of costs that traffic corrected."""


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """A folder of entries; None: nothing is kept."""

    VARIABLE: ClassVar[str]
    """The variable of the environment that names the folder; `off`: none."""
    NAME: ClassVar[str]
    """The folder's name in the user's cache folder, where no variable names it."""

    folder: Path | None

    @classmethod
    def of_environment(cls) -> Self:
        """The folder that the environment names, else the user's own."""
        chosen = os.environ.get(cls.VARIABLE, "")
        if chosen == "off":
            return cls(None)
        if chosen:
            return cls(Path(chosen))
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return cls(Path(home).expanduser() / "shapestream" / cls.NAME)
        except RuntimeError:
            return cls(None)  # a user without a home, as in many containers

    @contextmanager
    def locked(self, key: str) -> Iterator[Path | None]:
        """The path of an entry, locked against other processes meanwhile; None where nothing can be kept."""
        if self.folder is None:
            yield None
            return
        path = self.folder / f"{key}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            lock = os.open(path.with_suffix(".lock"), flags, 0o600)
        except OSError:
            yield None
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
    """The plain data of a file; None if there is none, or none that can be read."""
    if path is None:
        return None
    try:
        return json.loads(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # none yet, no regular file, cut short, or nested without end


def write_plain(path: Path | None, plain: Any) -> None:
    """Replaces the file as a whole, or leaves it as it was."""
    if path is None:
        return
    try:
        # Named after it, so that what a killed process leaves behind can be told.
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

"""Rows that processes have died of, in a folder that all processes of a job share.

A row that crashes its model ends the process. Ray starts another one, which gets the same rows again, without end. So a call
writes down the rows that it has under way, and a later one finds those of processes that were killed:

    NAME.rows     the rows of one call, a digest a line. Its process holds a lock on the file, and removes it at the end.
                  Without the lock its process was killed, and each of the rows has a *death*
    -DIGEST       a line that is added there: the row has run alone since, and nothing died. It was another's death

    deaths 0      the row runs with others
    deaths 1      it may have killed the process: it runs alone
    deaths 2      it is not run again

A digest covers the inputs of a row, so equal rows are one. Nothing is synced: this is for the deaths of processes, which the
system's memory survives. Locks hold on one machine; on others they follow the file system.

A kill by a user counts like one by a row: nobody can tell them apart. It makes rows run alone, and costs a row its answer
only if the same row was under way alone at a second kill.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

MOST_DEATHS = 2
"""Deaths after which a row is not tried again."""
_DIGEST_BYTES = 16
_SUFFIX = ".rows"


def digest_of(model: str, inputs: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the digest of a row by its model's name, and the types, shapes and contents of its inputs.

    SHA-256, since processors have instructions for it: 26 us for a row of 44 kB, where BLAKE2 took 86.
    """
    digest = hashlib.sha256(model.encode())
    for name, array in sorted(inputs.items()):
        digest.update(f"\0{name}\0{array.dtype}\0{array.shape}\0".encode())
        if array.dtype == object:  # strings
            for each in array.ravel().tolist():
                raw = each.encode(errors="surrogatepass") if isinstance(each, str) else each
                digest.update(len(raw).to_bytes(8, "little") + raw)
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()[:_DIGEST_BYTES].hex()


def deaths_of(left: Iterable[Iterable[str]]) -> Counter[str]:
    """Return the deaths of each row, from the lines of each file that a killed process has left.

    PURE. A line that was cut off, as by a full disk, says nothing.
    """
    deaths: Counter[str] = Counter()
    for lines in left:
        deaths.update(_accused(lines))
    return deaths


def _accused(lines: Iterable[str]) -> set[str]:
    """Return the rows of a file that have not run alone since."""
    begun: set[str] = set()
    cleared: set[str] = set()
    for line in lines:
        if len(line) == 2 * _DIGEST_BYTES:
            begun.add(line)
        elif len(line) == 2 * _DIGEST_BYTES + 1 and line[0] == "-":
            cleared.add(line[1:])
    return begun - cleared


class Deaths:
    """The folder of a job. Its methods are for any thread."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, if it is not there. Raises OSError."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def known(self) -> Counter[str]:
        """Return the deaths of each row that has any."""
        return deaths_of(lines for _, lines in self._left())

    @contextmanager
    def under_way(self, rows: Collection[str]) -> Iterator[None]:
        """Have these rows under way inside the block: they get a death each if the process is killed there."""
        name = uuid.uuid4().hex
        unfinished, path = self.folder / name, self.folder / f"{name}{_SUFFIX}"
        file = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            # Under its own name it is there as a whole, and locked: no other process takes it for one that was left.
            fcntl.flock(file, fcntl.LOCK_EX)
            with open(file, "w", encoding="ascii", closefd=False) as text:
                text.writelines(f"{row}\n" for row in rows)
            unfinished.rename(path)
            yield
        finally:
            unfinished.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            os.close(file)

    def clear(self, row: str) -> None:
        """Clear a row that ran alone, and ended, of the deaths that are known. Files without an accused row go."""
        for path, lines in self._left():
            accused = _accused(lines)
            if row not in accused:
                continue
            with suppress(OSError):  # cleared by another process, and gone
                if accused == {row}:
                    path.unlink()
                    continue
                # No lock: a reader would take it for one whose process lives. Short additions do not mix.
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                try:
                    os.write(file, f"-{row}\n".encode())
                finally:
                    os.close(file)

    def forget(self) -> None:
        """Forget all deaths, as before a new job."""
        for path, _ in self._left():
            path.unlink(missing_ok=True)

    def _left(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield the files whose process was killed, with their lines."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # its call has ended
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not os.fstat(file).st_nlink:
                    continue  # its call has ended since the file was opened
                with open(file, encoding="ascii", errors="replace", closefd=False) as text:
                    lines = text.read().splitlines()
            except BlockingIOError:
                continue  # its process lives
            finally:
                os.close(file)
            yield path, lines

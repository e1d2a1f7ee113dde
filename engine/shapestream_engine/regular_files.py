"""Files that another party names, opened only where they are regular files.

A FIFO waits for a writer, and a device may have no end: either would hold its reader for ever. Links are followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file to be read. Raises `OSError`, also for a FIFO, a device or a socket, and never waits for one."""
    return open(path, "rb", opener=_opened)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a whole file. Raises `OSError` as `open_regular` does, and for a file that is longer."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is longer than {most_bytes} bytes", str(path))
    return data


def _opened(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    # Of the file that is read, whatever the path means a moment later.
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", path)

"""Opens files that another party names, if they are regular files.

A FIFO waits for a writer, and a device may be endless: both would block the reader for ever. Links are followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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

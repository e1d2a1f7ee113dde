"""Files that hold a secret: keys of CURVE, keys of TLS, and tokens. One rule says who else may have rights to them.

The file belongs to the process's user or to root, and gives group and others nothing. There is one exception, which
PostgreSQL has too: a group of the process may read a file of root's. So Kubernetes mounts a Secret with `defaultMode: 0440`
for a process that is not root: the pod's `fsGroup` is the file's group, and a supplementary one of the process.

The rule concerns accidents, not attackers: a secret that other users of the machine could read, or replace, is found at the
start and at each reload, before it is used. It does not look at the folders above, nor at access control lists beyond
the group's bits, which hold the mask of these lists.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shapestream.errors import ConfigurationError
from shapestream_engine.files import open_regular


def read_secret(path: Path, most_bytes: int, *, holds: str, advice: str = "") -> bytes:
    """Return the bytes of a file that holds a secret.

    `holds`: the secret as errors name it, with its article ("a token"). `advice`: words in brackets behind the error of a
    file that cannot be opened. The secret itself is in no error.

    Raises `ConfigurationError` for a file that is no regular one, that others may read or change, and that is longer than
    `most_bytes`.
    """
    try:
        with open_regular(path) as file:
            # Of the file that is read, whatever the path means a moment later.
            status = os.fstat(file.fileno())
            if (problem := _problem_of(status, path, holds)) is not None:
                raise ConfigurationError([f"{path}: {problem}"])
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError([f"{path}: {reason}{f' ({advice})' if advice else ''}"]) from error
    if len(data) > most_bytes:
        raise ConfigurationError([f"{path}: is longer than {most_bytes} bytes"])
    return data


def _problem_of(status: os.stat_result, path: Path, holds: str) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({holds} belongs to the user that it is for, or to root)"
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o077 or _is_of_own_group(status):
        return None
    return (
        f"mode {mode:04o} lets others at {holds} (chmod 600 {path}; in Kubernetes, a Secret with defaultMode 0440, and "
        f"fsGroup of the pod)"
    )


def _is_of_own_group(status: os.stat_result) -> bool:
    """Tell whether a file is root's, and a group of this process only reads it."""
    groups = {os.getegid(), *os.getgroups()}
    return status.st_uid == 0 and status.st_gid in groups and not status.st_mode & 0o037

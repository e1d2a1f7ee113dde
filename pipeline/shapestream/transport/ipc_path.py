"""The file behind an `ipc://` address: a private folder, one owner at a time.

libzmq lets a second process bind a path that is in use: it takes over silently, and the first server hears no
new client. Here the owner holds a lock on `PATH.lock` for as long as it listens; the kernel drops it when the
process dies, however it dies, so that a stale socket file can be told from a live one. The lock file itself
stays: were it removed, two processes could each hold a lock on a different file of that name.

libzmq also removes the file that it has bound, from a thread of its own, some time after the socket was
closed: by then it may be the successor's. So it binds `PATH.new`, which is renamed at once, and the final name
is removed here, under the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from shapestream.errors import AddressInUse, TransportError

_SUFFIX = ".new"
GROUP_MODE = 0o660
"""Mode of a socket in a folder that others may not enter, so that the folder's group may connect. That needs the right to
write, which a umask of 022 would take from the group."""
# sun_path of Linux's sockaddr_un, less the final zero and the suffix.
MAX_PATH_BYTES = 107 - len(_SUFFIX)


class IpcPath:
    """Owns the file of one `ipc://` address from construction until `release`.

    A missing folder is created with mode 0700; an existing one is left as it is.
    Raises `AddressInUse`, or `TransportError` when the path cannot be used.
    """

    def __init__(self, address: str) -> None:
        self.path = Path(address.removeprefix("ipc://"))
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            raise TransportError(
                f"{address}: the path is longer than {MAX_PATH_BYTES} bytes; use a shorter one"
            )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: int | None = self._take_lock(address)
        except OSError as error:
            raise TransportError(f"{address}: {error.strerror}: {error.filename}") from error
        with contextlib.ExitStack() as unless_stale_is_gone:
            unless_stale_is_gone.callback(self._drop_lock)
            self._remove_stale(address)
            self._new = Path(f"{self.path}{_SUFFIX}")
            try:
                self._new.unlink(missing_ok=True)
            except OSError as error:
                raise TransportError(
                    f"{address}: {error.strerror}: {self._new} is in the way of the socket"
                ) from error
            unless_stale_is_gone.pop_all()
        self.bind_address = f"ipc://{self._new}"
        """The address for libzmq to bind; `publish` then makes it reachable under the wanted one."""

    def publish(self) -> None:
        """Give the bound socket file its final name, and its mode where the folder keeps others out."""
        if not self.path.parent.stat().st_mode & stat.S_IXOTH:
            self._new.chmod(GROUP_MODE)
        self._new.rename(self.path)

    def hide(self) -> None:
        """Take the final name away until the next `publish`; connections stay, and so does the lock."""
        if self._lock is not None:
            self.path.rename(self._new)

    def release(self) -> None:
        """Remove the socket file and let others bind; a second call does nothing."""
        if self._lock is not None:
            self.path.unlink(missing_ok=True)
            self._new.unlink(missing_ok=True)
            self._drop_lock()

    def _take_lock(self, address: str) -> int:
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AddressInUse(f"{address}: another process listens there") from None
        return lock

    def _drop_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_stale(self, address: str) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise TransportError(
                f"{address}: {self.path} is a file, and no socket; remove it, or listen elsewhere"
            )
        # A process that takes no lock may listen there.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.path))
            except BlockingIOError:
                pass  # its backlog is full: it lives
            except OSError:
                self.path.unlink()
                return
        raise AddressInUse(f"{address}: another process listens there")
